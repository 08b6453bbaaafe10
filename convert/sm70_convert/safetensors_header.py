"""The header of a safetensors file: read with limits and every check, or built byte for byte as the safetensors library does.

File: 8 bytes little-endian header size, the header (JSON, padded with spaces to 8), then the data. The library itself maps the
whole file; here headers are read alone, so that a checkpoint of any size opens in its headers' size.
"""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from sm70_convert.errors import CheckpointError, Problem, Sm70Error
from sm70_convert.strict_json import load_object

MAX_HEADER = 100_000_000
MAX_DIMENSIONS = 32
MAX_NAME = 4096
# Bits of one element, every dtype of the format.
BITS = {
    "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip
_LFS_POINTER = b"version https://git-lfs"


class Entry(NamedTuple):
    """One tensor of a header; `offset` counts from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class Header(NamedTuple):
    """A checked header: its tensors in file order, its metadata, and where the data starts."""

    tensors: dict[str, Entry]
    metadata: dict[str, str]
    data_start: int
    raw: bytes


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
    raw = read(0, data_start)
    if len(raw) != data_start:
        raise wrong("became shorter while it was read")
    if raw[8:9] != b"{":
        raise wrong("is not a safetensors file: its header does not start with '{'")
    shared: dict[Any, Any] = {}
    document = load_object(raw[8:], file, error=error, compact=lambda fields: _compact(fields, data_start, shared))
    metadata = document.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise wrong("header's __metadata__ is not a map of strings")
    for name, fields in document.items():
        if not name or len(name) > MAX_NAME:
            raise wrong(f"a tensor name has {len(name)} characters, not 1 to {MAX_NAME}")
        if reason := _wrong_entry(fields):
            raise wrong(reason, tensor=name)
    tensors: dict[str, Entry] = document
    offsets = array("q", (entry.offset for entry in tensors.values()))
    if any(offsets[i] > offsets[i + 1] for i in range(len(offsets) - 1)):
        tensors = dict(sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)))
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
    return Header(tensors, metadata, data_start, raw)


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


def _compact(fields: dict[str, Any], data_start: int, shared: dict[Any, Any]) -> Any:
    """A well-formed header entry as an Entry of shared parts; anything else as it is."""
    if set(fields) != {"dtype", "shape", "data_offsets"}:
        return fields
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str) or not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS:
        return fields
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_size(n) for n in (*shape, *offsets)):
        return fields
    nbytes = offsets[1] - offsets[0]
    key = (dtype, tuple(shape), nbytes)
    dtype, dimensions, nbytes = shared.setdefault(key, key)
    return Entry(dtype, dimensions, data_start + offsets[0], nbytes)


def _wrong_entry(entry: Any) -> str:
    """What is wrong with a header entry, or nothing."""
    if not isinstance(entry, Entry):
        return "header entry is not exactly a dtype, a shape of sizes and a pair of data_offsets"
    if entry.dtype not in BITS:
        return f"unknown dtype {entry.dtype[:40]!r}"
    if prod(d or 1 for d in entry.shape) >> 60:
        return f"{entry.dtype} {list(entry.shape)} is too large for any file"
    bits = prod(entry.shape) * BITS[entry.dtype]
    if bits % 8 or bits // 8 != entry.nbytes:
        return f"data_offsets span {entry.nbytes} bytes, but {entry.dtype} {list(entry.shape)} takes {bits / 8:g}"
    return ""


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
