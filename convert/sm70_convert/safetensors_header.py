"""The header of a safetensors file: read with limits and every check, or built byte for byte as the safetensors library does.

File: 8 bytes little-endian header size, the header (JSON, padded with spaces to 8), then the data. The library itself maps the
whole file; here headers are read alone, so that a checkpoint of any size opens in its headers' size.
"""

from __future__ import annotations

import json
import operator
import os
from array import array
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from sm70_convert.errors import CheckpointError, Problem, Sm70Error
from sm70_convert.strict_json import ObjectReader

MAX_HEADER = 100_000_000
MAX_DIMENSIONS = 32
MAX_NAME = 4096
MAX_METADATA = 1_000_000
MAX_KINDS = 16_384  # tensors that differ in dtype or shape
METADATA = "__metadata__"
PIECE = 1 << 16
# Bits of one element, every dtype of the format.
BITS = {
    "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip
_FIELDS = {"dtype", "shape", "data_offsets"}
_KINDS = 1 << 24  # more than there can be records that differ in more than the offset
_LFS_POINTER = b"version https://git-lfs"

T = TypeVar("T")


class Entry(NamedTuple):
    """One tensor of a header; `offset` counts from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class Packed(MutableMapping[str, T]):
    """Name -> a record, packed: there may be hundreds of thousands, which differ in little but the offset."""

    def __init__(self) -> None:
        self._packed: dict[str, int] = {}
        self.kinds: list[tuple[Any, ...]] = []
        self._numbers: dict[tuple[Any, ...], int] = {}

    def _split(self, record: T) -> tuple[int, tuple[Any, ...]]:
        """The offset of a record, and all else that it holds besides the name."""
        raise NotImplementedError

    def _join(self, name: str, offset: int, kind: tuple[Any, ...]) -> T:
        """The record again."""
        raise NotImplementedError

    def __getitem__(self, name: str) -> T:
        offset, number = divmod(self._packed[name], _KINDS)
        return self._join(name, offset, self.kinds[number])

    def __setitem__(self, name: str, record: T) -> None:
        offset, kind = self._split(record)
        number = self._numbers.setdefault(kind, len(self.kinds))
        if number == len(self.kinds):
            self.kinds.append(kind)
        self._packed[name] = offset * _KINDS + number

    def __delitem__(self, name: str) -> None:
        del self._packed[name]

    def __contains__(self, name: object) -> bool:
        return name in self._packed

    def __iter__(self) -> Iterator[str]:
        return iter(self._packed)

    def __len__(self) -> int:
        return len(self._packed)


class Tensors(Packed[Entry]):
    """The entries of a header by name."""

    def _split(self, record: Entry) -> tuple[int, tuple[Any, ...]]:
        return record.offset, (record.dtype, record.shape, record.nbytes)

    def _join(self, name: str, offset: int, kind: tuple[Any, ...]) -> Entry:  # noqa: ARG002
        dtype, shape, nbytes = kind
        return Entry(dtype, shape, offset, nbytes)

    def sort(self) -> None:
        """Puts the entries in the order of their bytes, empty ones first."""
        offsets = array("q", (packed // _KINDS for packed in self._packed.values()))
        if any(map(operator.gt, offsets, offsets[1:])):
            order = sorted(self._packed, key=lambda name: (self[name].offset << 60) + self[name].nbytes)
            self._packed = {name: self._packed[name] for name in order}


class Header(NamedTuple):
    """A checked header: its tensors in file order, its metadata, and where the data starts.

    raw: its bytes, of one that was built; one that was read does not keep them.
    """

    tensors: MutableMapping[str, Entry]
    metadata: dict[str, str]
    data_start: int
    raw: bytes = b""


def read_header(
    read: Callable[[int, int], bytes], size: int, file: str, *, error: type[Sm70Error] = CheckpointError
) -> Header:
    """The header of a file of `size` bytes, where read(offset, count) gives its bytes.

    Raises `error` unless tensors lie back to back, without overlap or gap, from the header's end to the file's.
    """

    def wrong(
        message: str,
        *,
        tensor: str | None = None,
        expected: str | None = None,
        actual: str | None = None,
        hint: str | None = None,
    ) -> Sm70Error:
        return error(Problem(message, tensor, file, expected=expected, actual=actual, hint=hint))

    start = read(0, min(size, 128))
    if start.startswith(_LFS_POINTER):
        raise wrong(
            "is a git-lfs pointer, not the file itself",
            hint="fetch the real file (git lfs pull), then run again",
        )
    if size < 8:
        raise wrong("is too short for a safetensors file", expected="at least 8 bytes", actual=f"{size}")
    length = int.from_bytes(start[:8], "little")
    if length > MAX_HEADER:
        raise wrong("header is over the limit", expected=f"at most {MAX_HEADER} bytes", actual=f"{length}")
    data_start = 8 + length
    if data_start > size:
        raise wrong(
            "is truncated inside its header",
            expected=f"{data_start} bytes or more",
            actual=f"{size}",
            hint="fetch the file again",
        )
    if start[8:data_start][:1] != b"{":
        raise wrong("is not a safetensors file: its header does not start with '{'")

    def pieces() -> Iterator[bytes]:
        for offset in range(8, data_start, PIECE):
            count = min(PIECE, data_start - offset)
            piece = read(offset, count)
            if len(piece) != count:
                raise wrong("became shorter while it was read")
            yield piece

    reader = ObjectReader(pieces(), file, error=error)
    metadata: dict[str, str] | None = None
    tensors = Tensors()
    for name in reader.members():
        if name in tensors or (name == METADATA and metadata is not None):
            raise reader.duplicate(name)
        if name == METADATA:
            metadata = reader.value("header's __metadata__", limit=MAX_METADATA)
            if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
                raise wrong("header's __metadata__ is not a map of strings")
            continue
        if not name or len(name) > MAX_NAME:
            raise wrong(f"a tensor name has {len(name)} characters, not 1 to {MAX_NAME}")
        entry = _entry(reader.value("header entry", tensor=name), data_start)
        if isinstance(entry, str):
            raise wrong(entry, tensor=name)
        tensors[name] = entry
        if len(tensors.kinds) > MAX_KINDS:
            raise wrong("has too many different dtypes and shapes", expected=f"at most {MAX_KINDS}", actual="more")
    reader.end()
    tensors.sort()
    end = data_start
    for name, entry in tensors.items():
        if entry.offset != end:
            raise wrong(
                "data overlaps another tensor's or leaves a gap",
                tensor=name,
                expected=f"offset {end - data_start}",
                actual=f"{entry.offset - data_start}",
            )
        end += entry.nbytes
    if end != size:
        state = "is truncated" if size < end else "has bytes after its last tensor"
        raise wrong(state, expected=f"{end} bytes", actual=f"{size}", hint="fetch the file again")
    return Header(tensors, metadata or {}, data_start)


def read_file_header(path: Path, shown: str, *, error: type[Sm70Error] = CheckpointError) -> Header:
    """The header of the file at `path`. Raises `error`, naming it as `shown`, if it cannot be read or is wrong."""
    try:
        with open(path, "rb", buffering=0) as file:
            return read_header(partial(read_at, file.fileno()), os.fstat(file.fileno()).st_size, shown, error=error)
    except OSError as exc:
        raise error(Problem(f"cannot be read: {exc.strerror}", file=shown)) from exc


def read_at(fd: int, offset: int, count: int) -> bytes:
    """`count` bytes from `offset`: fewer only where the file ends, however little one call gives."""
    data = os.pread(fd, count, offset)
    while len(data) < count and (more := os.pread(fd, count - len(data), offset + len(data))):
        data += more
    return data


def _entry(fields: Any, data_start: int) -> Entry | str:
    """The Entry of a header's fields, or what is wrong with them."""
    wrong_form = "header entry is not exactly a dtype, a shape of sizes and a pair of data_offsets"
    if not isinstance(fields, dict) or fields.keys() != _FIELDS:
        return wrong_form
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str) or not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS:
        return wrong_form
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_size, shape + offsets)):
        return wrong_form
    nbytes = offsets[1] - offsets[0]
    if dtype not in BITS:
        return f"unknown dtype {dtype[:40]!r}"
    if prod(d or 1 for d in shape) >> 60:
        return f"{dtype} {shape} is too large for any file"
    bits = prod(shape) * BITS[dtype]
    if bits % 8 or bits // 8 != nbytes:
        return f"data_offsets span {nbytes} bytes, but {dtype} {shape} takes {bits / 8:g}"
    return Entry(dtype, tuple(shape), data_start + offsets[0], nbytes)


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 60


def build_header(tensors: Sequence[tuple[str, str, Sequence[int]]], metadata: Mapping[str, str]) -> Header:
    """The header of a file that holds `tensors` (name, dtype, shape) back to back in this order."""
    document: dict[str, Any] = {"__metadata__": dict(metadata)}
    entries: list[tuple[str, Entry]] = []
    end = 0
    for name, dtype, shape in tensors:
        nbytes = prod(shape) * BITS[dtype] // 8
        document[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + nbytes]}
        entries.append((name, Entry(dtype, tuple(shape), end, nbytes)))
        end += nbytes
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogatepass")
    text += b" " * (-len(text) % 8)
    raw = len(text).to_bytes(8, "little") + text
    placed = {name: e._replace(offset=e.offset + len(raw)) for name, e in entries}
    return Header(placed, dict(metadata), len(raw), raw)
