"""One bank file: its header, an atomic digested write expert by expert, and what a finished one must look like."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from blake3 import blake3

from sm70_convert.errors import RESUMES, IntegrityError, OutputError, Problem
from sm70_convert.layout import Layout, MoeShape, bank_tensors, leading_dimensions
from sm70_convert.regular import forget, open_regular
from sm70_convert.safetensors_header import Header, build_header, read_at, read_header
from sm70_convert.strict_json import canonical

FORMAT_VERSION = 1
METADATA_KEY = "sm70_bank"
TEMPORARY = ".sm70-tmp"
MEND = f"free some space (or mend the disk), then {RESUMES}"
MENDABLE = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
_BANK_PATH = re.compile(r"sm70/tp([1-9][0-9]*)/rank(0|[1-9][0-9]*)/layer-([0-9]{5,})\.safetensors")


class Digest(Protocol):
    """A running digest, as hashlib and blake3 both have it."""

    def update(self, data: Any, /) -> object:
        """Takes more bytes."""

    def digest(self) -> bytes:
        """The digest so far."""

    def hexdigest(self) -> str:
        """The same as text."""


HASHES: Mapping[str, Callable[[], Digest]] = {"blake3": blake3, "sha256": hashlib.sha256}


def digests_of(data: bytes | Iterable[bytes]) -> dict[str, str]:
    """The digest of `data`, whole or in pieces, by every hash that a manifest can use."""
    digests = {name: new() for name, new in HASHES.items()}
    for piece in [data] if isinstance(data, bytes) else data:
        for digest in digests.values():
            digest.update(piece)
    return {name: digest.hexdigest() for name, digest in digests.items()}


@dataclass(frozen=True, slots=True)
class FileRecord:
    """What the manifest says of one file: its path in DIR, its size, its digest, and those of its tensors.

    The digest of a safetensors file is that of its header's digest followed by its tensors' digests in header order; of any
    other file, that of its bytes.
    """

    path: str
    bytes: int
    digest: str
    tensors: dict[str, str]

    def as_json(self) -> dict[str, Any]:
        """For the manifest and the journal."""
        return asdict(self)


def check_relative(path: object) -> str:
    """`path` if it is a plain relative path inside the folder. Raises ValueError otherwise."""
    if not isinstance(path, str) or "\0" in path or not all(map(_is_plain_part, path.split("/"))):
        raise ValueError(f"{str(path)[:100]!r} is no plain relative path")
    return path


def _is_plain_part(part: str) -> bool:
    return part not in ("", ".", "..") and len(part.encode()) <= 255


@dataclass(frozen=True, slots=True)
class BankSpec:
    """One bank: the layer and rank it is for, its path in DIR, and its complete header."""

    layer: int
    rank: int
    tp_size: int
    path: str
    header: Header


def bank_path(tp_size: int, rank: int, layer: int) -> str:
    """Where a bank lies in DIR. In a subfolder, since loaders glob DIR/*.safetensors."""
    return f"sm70/tp{tp_size}/rank{rank}/layer-{layer:05d}.safetensors"


def bank_of(path: str) -> tuple[int, int, int] | None:
    """The TP size, rank and layer whose bank has this path; None for other files."""
    match = _BANK_PATH.fullmatch(path)
    if match is None:
        return None
    tp_size, rank, layer = map(int, match.groups())
    return (tp_size, rank, layer) if bank_path(tp_size, rank, layer) == path else None


def layer_bank_paths(layer: int, tp_sizes: Iterable[int]) -> set[str]:
    """The bank files of one layer, for all ranks of some TP sizes."""
    return {bank_path(tp_size, rank, layer) for tp_size in tp_sizes for rank in range(tp_size)}


def bank_spec(
    layout: Layout, moe: MoeShape, checkpoint_group_size: int, layer: int, rank: int, tp_size: int
) -> BankSpec:
    """The bank of one layer and rank. Its metadata is one key (several would come in no fixed order in other writers)."""
    about = {
        "format_version": FORMAT_VERSION,
        "layer": layer,
        "rank": rank,
        "tp_size": tp_size,
        "layout": layout.name,
        "interleave_gate_up": layout.interleave_gate_up,
        "num_experts": moe.experts,
        "hidden_size": moe.hidden,
        "intermediate_size": moe.intermediate,
        "intermediate_size_per_rank": moe.intermediate // tp_size,
        "group_size": layout.group_size,
        "checkpoint_group_size": checkpoint_group_size,
        **leading_dimensions(layout, moe, tp_size),
    }
    tensors = [(t.name, t.dtype, (moe.experts, *t.shape)) for t in bank_tensors(layout, moe, tp_size)]
    header = build_header(tensors, {METADATA_KEY: canonical(about).decode("ascii")})
    return BankSpec(layer, rank, tp_size, bank_path(tp_size, rank, layer), header)


def combined_digest(new: Callable[[], Digest], header: bytes, tensors: Iterable[bytes]) -> str:
    """The digest of a safetensors file from its header's digest and its tensors' in header order."""
    whole = new()
    whole.update(header)
    for tensor in tensors:
        whole.update(tensor)
    return whole.hexdigest()


def make_folder(root: Path, folder: Path) -> None:
    """Creates `root` and what is missing from there to `folder`, durably; refuses to go through a symlink inside `root`."""
    parts = [p for p in (*reversed(folder.parents), folder) if root in p.parents]
    try:
        if not root.exists():
            parts = [*(p for p in reversed(root.parents) if not p.exists()), root, *parts]
        for part in parts:
            try:
                part.mkdir()
            except FileExistsError:  # noqa: PERF203 - a few folders, mostly there
                if root in part.parents and not stat.S_ISDIR(part.lstat().st_mode):
                    hint = "give an --out without symlinks in it"
                    raise OutputError(Problem("is not a real folder", file=str(part), hint=hint)) from None
            else:
                sync_folder(part.parent)
    except OSError as exc:
        hint = MEND if exc.errno in MENDABLE else "give another --out"
        raise OutputError(Problem(f"cannot be created: {exc.strerror}", file=str(folder), hint=hint)) from exc


class AtomicFile:
    """A file that appears under its name only when whole: temporary file, fsync, rename, fsync of the folder.

    As a context it removes the temporary file unless commit() was reached.
    """

    def __init__(self, root: Path, path: str) -> None:
        self.path = path
        self.final = root / path
        self.temporary = self.final.with_name(f".{self.final.name}{TEMPORARY}")
        self._size = 0
        make_folder(root, self.final.parent)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with writing(path):
            # What a killed run left is never written into: it may be a hard link to the checkpoint's own shard.
            self.temporary.unlink(missing_ok=True)
            self._fd = os.open(self.temporary, flags, 0o666)

    def write_at(self, offset: int, data: Any) -> None:
        """Writes all of a contiguous buffer at `offset`."""
        view = memoryview(data).cast("B")
        self._size = max(self._size, offset + len(view))
        with writing(self.path):
            while len(view):
                count = os.pwrite(self._fd, view, offset)
                view, offset = view[count:], offset + count

    def commit(self) -> int:
        """Makes the file durable under its name; returns its size."""
        with writing(self.path):
            os.fsync(self._fd)
            forget(self._fd)
            self.temporary.rename(self.final)
            sync_folder(self.final.parent)
            self._close()
        return self._size

    def discard(self) -> None:
        """Removes the temporary file; does nothing after commit."""
        if self._fd >= 0:
            with suppress(OSError):
                self._close()
            with suppress(OSError):
                self.temporary.unlink()

    def _close(self) -> None:
        fd, self._fd = self._fd, -1
        os.close(fd)

    def __enter__(self) -> AtomicFile:  # noqa: PYI034 - typing.Self is younger than Python 3.10
        return self

    def __exit__(self, *_: object) -> None:
        self.discard()


class BankWriter:
    """Writes one safetensors file tensor by tensor, digesting on the way. Each tensor's bytes must come in order.

    As a context it removes the unfinished file unless commit() was reached.
    """

    def __init__(self, root: Path, path: str, header: Header, new_digest: Callable[[], Digest]) -> None:
        self._header = header
        self._new = new_digest
        self._running: dict[str, Digest] = {}
        self._digests: dict[str, bytes] = {}
        self._written = dict.fromkeys(header.tensors, 0)
        self._file = AtomicFile(root, path)
        try:
            self._file.write_at(0, header.raw)
        except BaseException:
            self._file.discard()
            raise

    def append(self, tensor: str, data: Any) -> None:
        """Adds the next bytes of `tensor` (any contiguous buffer)."""
        view = memoryview(data).cast("B")
        entry = self._header.tensors[tensor]
        self._file.write_at(entry.offset + self._written[tensor], view)
        self._written[tensor] += len(view)
        # A running digest takes 2 kB, and what passes through may be many small tensors.
        digest = self._running.pop(tensor, None) or self._new()
        digest.update(view)
        if self._written[tensor] == entry.nbytes:
            self._digests[tensor] = digest.digest()
        else:
            self._running[tensor] = digest

    def commit(self) -> FileRecord:
        """Makes the file durable under its name. Every tensor must be complete."""
        empty = self._new().digest()
        digests: dict[str, bytes] = {}
        for name, entry in self._header.tensors.items():
            assert self._written[name] == entry.nbytes, name  # noqa: S101 - a bug here would seal a bad bank
            digests[name] = self._digests[name] if entry.nbytes else empty
        size = self._file.commit()
        start = self._new()
        start.update(self._header.raw)
        digest = combined_digest(self._new, start.digest(), digests.values())
        return FileRecord(self._file.path, size, digest, {name: value.hex() for name, value in digests.items()})

    def discard(self) -> None:
        """Removes the unfinished file; does nothing after commit."""
        self._file.discard()

    def __enter__(self) -> BankWriter:  # noqa: PYI034 - typing.Self is younger than Python 3.10
        return self

    def __exit__(self, *_: object) -> None:
        self.discard()


def write_small(root: Path, path: str, data: bytes, new_digest: Callable[[], Digest]) -> FileRecord:
    """Writes one small file atomically."""
    with AtomicFile(root, path) as file:
        file.write_at(0, data)
        file.commit()
    digest = new_digest()
    digest.update(data)
    return FileRecord(path, len(data), digest.hexdigest(), {})


CHUNK = 4 << 20


def measure(
    path: Path,
    shown: str,
    new_digest: Callable[[], Digest],
    *,
    then: Callable[[int], object] | None = None,
    plain: bool = False,
) -> FileRecord:
    """Reads a finished file and gives the record that it should have; then(n) is called for every n bytes read.

    plain: the digest of the bytes as they lie, also for a .safetensors file.

    Raises IntegrityError if it cannot be read, or if a .safetensors file has a bad header.
    """
    try:
        with os.fdopen(open_regular(path, shown, error=IntegrityError), "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            with suppress(OSError):  # a hint that some file systems do not take
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
            buffer = memoryview(bytearray(min(CHUNK, max(size, 1))))

            def digest_of(start: int, count: int) -> Digest:
                digest = new_digest()
                end = start + count
                while start < end:
                    got = os.preadv(file.fileno(), [buffer[: min(len(buffer), end - start)]], start)
                    if got == 0:
                        raise IntegrityError(Problem("became shorter while it was read", file=shown))
                    digest.update(buffer[:got])
                    forget(file.fileno(), start, got)
                    start += got
                    if then:
                        then(got)
                return digest

            if plain or not shown.endswith(".safetensors"):
                return FileRecord(shown, size, digest_of(0, size).hexdigest(), {})
            header = read_header(
                partial(read_at, file.fileno()),
                size,
                shown,
                error=IntegrityError,
            )
            start = digest_of(0, header.data_start).digest()
            # Not the running digests: each takes 2 kB.
            digests = {name: digest_of(e.offset, e.nbytes).hexdigest() for name, e in header.tensors.items()}
            whole = combined_digest(new_digest, start, map(bytes.fromhex, digests.values()))
            return FileRecord(shown, size, whole, digests)
    except OSError as exc:
        raise IntegrityError(Problem(f"cannot be read: {exc.strerror}", file=shown)) from exc


def read_back(
    root: Path,
    path: str,
    new_digest: Callable[[], Digest],
    *,
    then: Callable[[int], object] | None = None,
    plain: bool = False,
) -> FileRecord:
    """measure() of a file that this run has made. Raises OutputError if it cannot be read."""
    try:
        return measure(root / path, path, new_digest, then=then, plain=plain)
    except IntegrityError as exc:
        raise OutputError(*(replace(problem, hint=MEND) for problem in exc.problems)) from exc


def remove(root: Path, path: str) -> None:
    """Removes one file of the output, if it is there."""
    with writing(path):
        (root / path).unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Makes renames in `folder` durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def writing(path: str) -> Iterator[None]:
    """Turns an OSError of writing `path` into an OutputError that says what to do."""
    try:
        yield
    except OSError as exc:
        raise OutputError(Problem(f"cannot be written: {exc.strerror}", file=path, hint=MEND)) from exc
