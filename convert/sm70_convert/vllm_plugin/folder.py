"""A prepared folder as a runtime reads it: which bank is whose, every check, and the copy from file to parameter."""

from __future__ import annotations

import mmap
import os
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from sm70_convert import names
from sm70_convert.bank import FORMAT_VERSION, HASHES, BankSpec, FileRecord, bank_spec
from sm70_convert.checkpoint import CONFIG, INDEX, parse_index, read_small
from sm70_convert.errors import CheckpointError, IntegrityError, Problem, Sm70Error, UnsupportedError
from sm70_convert.layout import Layout, MoeShape, bank_tensors
from sm70_convert.manifest import MANIFEST, Manifest, read_manifest
from sm70_convert.passthrough import SENTINEL_TENSOR
from sm70_convert.safetensors_header import Header, read_file_header
from sm70_convert.strict_json import load_object
from sm70_convert.verify import manifest_moe

MARKER = "sm70_prepared"
DTYPES = {"I32": torch.int32, "F32": torch.float32, "F16": torch.float16, "U8": torch.uint8}
# Bytes of a bank that are mapped in at once: all the host memory that a copy takes.
WINDOW = 8 << 20


@dataclass
class LoadReport:
    """What was copied from bank files so far, and in which time."""

    bytes: int = 0
    seconds: float = 0.0
    layers: set[int] = field(default_factory=set)
    rank: int = 0

    @property
    def gigabytes_per_second(self) -> float:
        """1e9 bytes a second."""
        return self.bytes / 1e9 / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, slots=True)
class Bank:
    """One checked bank file: its path, what the manifest says of it, and its header."""

    path: Path
    record: FileRecord
    header: Header


class PreparedFolder:
    """A sealed folder. Checks raise Sm70Error with what was expected, what was found and what to do."""

    def __init__(self, root: Path, manifest: Manifest, *, verify: bool = False) -> None:
        self.root = root
        self.manifest = manifest
        self.verify = verify
        self.moe: MoeShape
        self.layout: Layout
        self.moe, self.layout, self.checkpoint_group_size = manifest_moe(manifest)
        self.report = LoadReport()

    @classmethod
    def open(cls, model: str | Path, *, verify: bool = False) -> PreparedFolder | None:
        """The prepared folder at `model`, or None if it is something else. verify: check digests while filling.

        Raises IntegrityError if the folder is prepared but unfinished, altered, or of another format version.
        """
        root = Path(model)
        marker = read_marker(root)
        if marker is None:
            if (root / MANIFEST).exists():
                raise IntegrityError(
                    Problem(
                        f"has no {MARKER} in its quantization_config, although a manifest is there",
                        file=CONFIG,
                        hint="restore config.json from a good copy, or convert again",
                    )
                )
            return None
        check_marker(marker)
        return cls(root, read_manifest(root), verify=verify)

    def layer_of(self, module: str) -> int | None:
        """The prepared layer of a module such as `model.layers.3.mlp.experts`; None if it has no bank (an MTP drafter's)."""
        layer = names.layer_inside_experts(f"{module}.")
        return layer if layer in self.manifest.layers else None

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """The names of a bank's tensors."""
        return tuple(t.name for t in bank_tensors(self.layout, self.moe, self.manifest.tp_sizes[0]))

    def unlisted(self) -> set[str]:
        """Tensors of the shards that must not be loaded: the sentinel, and what the index does not list."""
        found = {SENTINEL_TENSOR}
        for shard, listed in parse_index(read_small(self.root / INDEX, INDEX)).items():
            if not (self.root / shard).is_file():
                raise IntegrityError(Problem("is missing, or no regular file", file=shard))
            header = read_file_header(self.root / shard, shard, error=IntegrityError)
            found.update(header.tensors.keys() - set(listed))
        return found

    def check_passthrough(self) -> None:
        """Raises IntegrityError unless every file besides the banks has the size that the manifest says."""
        for record in self.manifest.passthrough:
            path = self.root / record.path
            size = path.stat().st_size if path.is_file() else None
            if size != record.bytes:
                what = "is missing" if size is None else "is truncated" if size < record.bytes else "has the wrong size"
                raise IntegrityError(
                    Problem(
                        what,
                        file=record.path,
                        expected=f"{record.bytes} bytes",
                        actual="none" if size is None else str(size),
                        hint="copy it again from a good folder, or convert again",
                    )
                )

    def check_tp_size(self, tp_size: int) -> None:
        """Raises UnsupportedError unless banks for `tp_size` ranks are here."""
        if tp_size not in self.manifest.tp_sizes:
            have = ", ".join(map(str, self.manifest.tp_sizes))
            raise UnsupportedError(
                Problem(
                    f"has no banks for TP size {tp_size}",
                    file=str(self.root),
                    expected=f"TP size {have.replace(', ', ' or ')}",
                    actual=str(tp_size),
                    hint=f"start with --tensor-parallel-size {self.manifest.tp_sizes[0]}, or add banks: "
                    f"sm70-convert MODEL --out {self.root} --tp-size {tp_size}",
                )
            )

    def check_shape(self, layer: int, tp_size: int, *, experts: int, hidden: int, intermediate: int) -> None:
        """Raises UnsupportedError unless the runtime's layer has the folder's shape; `intermediate` is this rank's share."""
        ours = (self.moe.experts, self.moe.hidden, self.moe.intermediate // tp_size)
        theirs = (experts, hidden, intermediate)
        if ours != theirs:
            if hidden == self.moe.hidden and (experts < self.moe.experts or intermediate == self.moe.intermediate):
                hint = "expert parallelism is not supported: start without --enable-expert-parallel"
            else:
                hint = "config.json is not that of the checkpoint which was converted: restore it, or convert again"
            raise UnsupportedError(
                Problem(
                    "the runtime's experts have another shape than the banks (experts, hidden, intermediate of a rank)",
                    layer=layer,
                    expected=str(ours),
                    actual=str(theirs),
                    hint=hint,
                )
            )

    def bank(self, layer: int, rank: int, tp_size: int) -> Bank:
        """The bank of one layer and rank, with size and header checked.

        Raises UnsupportedError for a TP size that is not here, IntegrityError for a file that is missing or not as sealed.
        """
        self.check_tp_size(tp_size)
        spec = self._spec(layer, rank, tp_size)
        record = self.manifest.banks.get(spec.path)
        if record is None:
            raise IntegrityError(
                Problem(f"does not name {spec.path}", file=MANIFEST, layer=layer, rank=rank, hint="convert again")
            )
        path = self.root / spec.path
        try:
            info = path.stat()
        except OSError as exc:
            raise self._wrong(layer, rank, spec.path, f"bank is missing: {exc.strerror}") from exc
        if not stat.S_ISREG(info.st_mode):
            raise self._wrong(layer, rank, spec.path, "bank is not a regular file")
        if info.st_size != record.bytes:
            what = "bank is truncated" if info.st_size < record.bytes else "bank has the wrong size"
            raise self._wrong(layer, rank, spec.path, what, f"{record.bytes} bytes", str(info.st_size))
        header = read_file_header(path, spec.path, error=IntegrityError)
        with open(path, "rb") as file:
            as_said = file.read(len(spec.header.raw)) == spec.header.raw
        if not as_said:
            raise self._wrong(
                layer,
                rank,
                spec.path,
                "bank's header is not what the manifest says of it",
                *_differs(spec.header, header),
            )
        return Bank(path, record, header)

    def empty_parameters(self, layer: int, rank: int, tp_size: int) -> dict[str, torch.Tensor]:
        """Uninitialised tensors of the bank's names, shapes and dtypes, on the default device."""
        self.check_tp_size(tp_size)
        tensors = self._spec(layer, rank, tp_size).header.tensors
        return {name: torch.empty(e.shape, dtype=DTYPES[e.dtype]) for name, e in tensors.items()}

    def fill(self, parameters: Mapping[str, torch.Tensor], layer: int, rank: int, tp_size: int) -> int:
        """Copies a bank from its file into `parameters` (exactly its tensors) and returns the number of bytes.

        Host memory does not grow: a window of the file is mapped in, copied and let go; into host memory it is read.
        """
        start = time.perf_counter()
        bank = self.bank(layer, rank, tp_size)
        _check_parameters(parameters, bank.header, layer, rank)
        new = HASHES[self.manifest.hash] if self.verify else None
        try:
            with _opened(bank) as (file, mapped):
                for name, entry in bank.header.tensors.items():
                    target = parameters[name].detach().view(-1).view(torch.uint8)
                    digest = new() if new else None
                    if target.is_cpu:
                        _read(file, entry.offset, target, bank)
                        if digest:
                            digest.update(target.numpy())
                    else:
                        for begin, end in _windows(entry.offset, entry.nbytes):
                            with memoryview(mapped)[begin:end] as view:
                                if digest:
                                    digest.update(view)
                                _copy(target[begin - entry.offset : end - entry.offset], view)
                            _release(mapped, begin, end)
                    if digest and digest.hexdigest() != bank.record.tensors[name]:
                        raise IntegrityError(
                            Problem(
                                "has other bytes than the manifest says",
                                name,
                                bank.record.path,
                                layer,
                                rank,
                                expected=bank.record.tensors[name],
                                actual=digest.hexdigest(),
                                hint="restore the file from a good copy, or convert again",
                            )
                        )
        except OSError as exc:
            raise self._wrong(layer, rank, bank.record.path, f"bank cannot be read: {exc.strerror}") from exc
        count = sum(e.nbytes for e in bank.header.tensors.values())
        self.report.bytes += count
        self.report.layers.add(layer)
        self.report.rank = rank
        self.report.seconds += time.perf_counter() - start
        return count

    def _spec(self, layer: int, rank: int, tp_size: int) -> BankSpec:
        return bank_spec(self.layout, self.moe, self.checkpoint_group_size, layer, rank, tp_size)

    def _wrong(
        self, layer: int, rank: int, path: str, message: str, expected: str | None = None, actual: str | None = None
    ) -> Sm70Error:
        hint = f"copy it again from a good folder (sm70-convert verify {self.root} --rank {rank} names all such files)"
        return IntegrityError(Problem(message, None, path, layer, rank, expected, actual, hint))


def read_marker(root: Path) -> Any:
    """What config.json has for this tool in its quantization_config, or None if it has nothing (or is no local folder)."""
    try:
        config = load_object(read_small(root / CONFIG, CONFIG), CONFIG)
    except CheckpointError:
        return None
    text = config.get("text_config")
    for holder in (config, text if isinstance(text, dict) else {}):
        quantization = holder.get("quantization_config")
        if isinstance(quantization, dict) and quantization.get(MARKER) is not None:
            return quantization[MARKER]
    return None


def check_marker(marker: Any) -> None:
    """Raises IntegrityError if a folder's marker is of another format version than this tool reads."""
    version = marker.get("format_version") if isinstance(marker, dict) else marker
    if version != FORMAT_VERSION:
        raise IntegrityError(
            Problem(
                f"{MARKER} has another format version",
                file=CONFIG,
                expected=str(FORMAT_VERSION),
                actual=repr(version)[:100],
                hint="install the sm70-convert that wrote it, or convert again",
            )
        )


# None: no load by this plugin is going on. Else the folder being loaded, or None for another checkpoint.
_CURRENT: ContextVar[tuple[PreparedFolder | None] | None] = ContextVar("sm70_prepared_folder", default=None)


def current() -> PreparedFolder | None:
    """The folder that is being loaded, for code that a runtime calls with no path at hand."""
    return (_CURRENT.get() or (None,))[0]


def is_loading() -> bool:
    """Whether a load goes through this plugin, be it of a prepared folder or not."""
    return _CURRENT.get() is not None


@contextmanager
def loading(folder: PreparedFolder | None) -> Iterator[None]:
    """Makes `folder` the current one."""
    token = _CURRENT.set((folder,))
    try:
        yield
    finally:
        _CURRENT.reset(token)


def _check_parameters(parameters: Mapping[str, torch.Tensor], header: Header, layer: int, rank: int) -> None:
    expected = {name: (DTYPES[e.dtype], e.shape) for name, e in header.tensors.items()}
    actual = {name: (p.dtype, tuple(p.shape)) for name, p in parameters.items()}
    for name in sorted({*expected, *actual}):
        if expected.get(name) != actual.get(name):
            raise UnsupportedError(
                Problem(
                    "the layer's parameter is not what the bank holds",
                    name,
                    layer=layer,
                    rank=rank,
                    expected=str(expected.get(name)),
                    actual=str(actual.get(name)),
                )
            )


def _differs(expected: Header, actual: Header) -> tuple[str, str]:
    """The first tensor (else the metadata) in which two headers differ, for people."""
    for name in (*expected.tensors, *actual.tensors):
        ours, theirs = expected.tensors.get(name), actual.tensors.get(name)
        if ours != theirs:
            return f"{name} {ours and (ours.dtype, ours.shape)}", f"{theirs and (theirs.dtype, theirs.shape)}"
    return str(expected.metadata), str(actual.metadata)


@contextmanager
def _opened(bank: Bank) -> Iterator[tuple[int, mmap.mmap]]:
    """The file's descriptor, and the file mapped privately (torch wants writable memory; nothing is written)."""
    with open(bank.path, "rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        if os.fstat(file.fileno()).st_size != bank.record.bytes:
            raise IntegrityError(Problem("changed while it was read", file=bank.record.path))
        with mmap.mmap(file.fileno(), bank.record.bytes, flags=mmap.MAP_PRIVATE) as mapped:
            yield file.fileno(), mapped


def _windows(offset: int, nbytes: int) -> Iterator[tuple[int, int]]:
    for begin in range(offset, offset + nbytes, WINDOW):
        yield begin, min(begin + WINDOW, offset + nbytes)


def _read(file: int, offset: int, target: torch.Tensor, bank: Bank) -> None:
    """Reads straight into host memory: faster than a mapping, whose every page costs a fault."""
    left = memoryview(target.numpy().data)
    while left:
        count = os.preadv(file, [left], offset)
        if count == 0:
            raise IntegrityError(Problem("became shorter while it was read", file=bank.record.path))
        left, offset = left[count:], offset + count


def _copy(target: torch.Tensor, view: memoryview) -> None:
    target.copy_(torch.frombuffer(view, dtype=torch.uint8))


def _release(mapped: mmap.mmap, begin: int, end: int) -> None:
    """Gives the whole pages of [begin, end) back; the one that `end` lies in is still to be read."""
    first, last = begin // mmap.PAGESIZE * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
    if last > first:
        mapped.madvise(mmap.MADV_DONTNEED, first, last - first)
