"""Checkpoint: a folder or hub snapshot opened by its headers and index alone, with lazy positioned reads."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from sm70_convert.bank import CHUNK, TEMPORARY, digests_of
from sm70_convert.errors import CheckpointError, Problem, Problems, Sm70Error, UnsupportedError
from sm70_convert.regular import UNREADABLE, open_regular
from sm70_convert.safetensors_header import MAX_NAME, PIECE, Header, Packed, read_at, read_header
from sm70_convert.strict_json import MAX_MEMBERS, ObjectReader, load_object

INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
# Where older exporters put what config.json lacks, with the quant_method that such a file stands for.
QUANTIZATION_FILES = {
    "quant_config.json": "awq",
    "quantize_config.json": "gptq",
    "hf_quant_config.json": "modelopt",
}
# A list of every expert's modules takes a few MB in a configuration, 300,000 tensors take 35 MB in an index.
MAX_JSON = 16_000_000
MAX_INDEX = 50_000_000
MAX_DEPTH = 64
_FETCH = "fetch the missing file, then run again"
_REST = "let the checkpoint rest, then start over with --overwrite"
# Weights in other forms are no part of what is served from safetensors, and pickles are never touched.
_OTHER_WEIGHTS = (
    ".bin",
    ".pt",
    ".pth",
    ".ckpt",
    ".gguf",
    ".h5",
    ".msgpack",
    ".onnx",
    ".ot",
    ".npz",
    ".pkl",
    ".pickle",
)


@dataclass(frozen=True, slots=True)
class TensorRef:
    """Where one tensor's bytes lie: its shard, its dtype and shape, and its offset from the start of the shard."""

    name: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class Refs(Packed[TensorRef]):
    """The tensors of a checkpoint by name."""

    def _split(self, record: TensorRef) -> tuple[int, tuple[Any, ...]]:
        return record.offset, (record.file, record.dtype, record.shape, record.nbytes)

    def _join(self, name: str, offset: int, kind: tuple[Any, ...]) -> TensorRef:
        file, dtype, shape, nbytes = kind
        return TensorRef(name, file, dtype, shape, offset, nbytes)


@dataclass(frozen=True, slots=True)
class Shard:
    """One source file as it was when it was opened."""

    name: str
    fd: int
    size: int
    mtime_ns: int
    tensors: int
    header_digests: dict[str, str]

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fills `buffer` (bytes) from `offset`. Raises CheckpointError if the shard has become shorter or cannot be read."""
        done = 0
        while done < len(buffer):
            with reading(self.name):
                count = os.preadv(self.fd, [buffer[done:]], offset + done)
            if count == 0:
                raise CheckpointError(
                    Problem(f"became shorter while it was read (no byte at {offset + done})", file=self.name)
                )
            done += count

    def pieces(self, offset: int, count: int) -> Iterator[memoryview]:
        """`count` bytes from `offset` in pieces of up to 4 MiB, each overwriting the one before. Raises as read_into()."""
        buffer = memoryview(bytearray(min(CHUNK, count)))
        for start in range(0, count, CHUNK):
            piece = buffer[: min(CHUNK, count - start)]
            self.read_into(offset + start, piece)
            yield piece

    def check_unchanged(self, folder: Path) -> None:
        """Raises CheckpointError if the file, or what lies in `folder` under its name, is no longer what was planned."""
        with reading(self.name):
            now = os.fstat(self.fd)
            there = (folder / self.name).stat()
        if (now.st_size, now.st_mtime_ns) != (self.size, self.mtime_ns):
            raise CheckpointError(
                Problem(
                    "changed while it was converted",
                    file=self.name,
                    expected=f"{self.size} bytes of mtime {self.mtime_ns}",
                    actual=f"{now.st_size} bytes of mtime {now.st_mtime_ns}",
                    hint=_REST,
                )
            )
        if not os.path.samestat(now, there):
            raise CheckpointError(Problem("was replaced while it was converted", file=self.name, hint=_REST))


@dataclass(frozen=True, slots=True)
class StaleTensor:
    """A tensor that lies in a shard but does not exist, since the index does not give it to that shard."""

    name: str
    file: str


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint. `refs` holds exactly the tensors that the index lists, `extras` the other files to hand on."""

    folder: Path
    config: dict[str, Any]
    quantization: dict[str, Any]
    raw_config: bytes
    index_digests: dict[str, str] | None
    repo: str | None
    commit: str | None
    refs: Refs
    shards: dict[str, Shard]
    stale: tuple[StaleTensor, ...]
    unindexed: tuple[str, ...]
    extras: tuple[str, ...]
    unfollowed: tuple[str, ...]

    def check_unchanged(self) -> None:
        """Raises CheckpointError if a shard is no longer the one that was planned."""
        for shard in self.shards.values():
            shard.check_unchanged(self.folder)

    def close(self) -> None:
        """Closes all shards."""
        for shard in self.shards.values():
            with suppress(OSError):  # all that was read has been read
                os.close(shard.fd)

    def __enter__(self) -> Checkpoint:  # noqa: PYI034 - typing.Self is younger than Python 3.10
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def reading(shown: str, *, error: type[Sm70Error] = CheckpointError, hint: str = UNREADABLE) -> Iterator[None]:
    """Turns an OSError of reading `shown` into `error`."""
    try:
        yield
    except OSError as exc:
        raise error(Problem(f"cannot be read: {exc.strerror}", file=shown, hint=hint)) from exc


def read_small(path: Path, shown: str) -> bytes:
    """The bytes of a JSON file. Raises CheckpointError over MAX_JSON, or MAX_INDEX for an index."""
    limit = MAX_INDEX if shown == INDEX else MAX_JSON
    with reading(shown), os.fdopen(open_regular(path, shown, missing=_FETCH), "rb") as handle:
        size = os.fstat(handle.fileno()).st_size
        if size > limit:
            expected = f"at most {limit} bytes"
            raise CheckpointError(Problem("is over the limit", file=shown, expected=expected, actual=str(size)))
        return handle.read(size)


def open_checkpoint(folder: Path, *, repo: str | None = None, commit: str | None = None) -> Checkpoint:
    """Opens a local checkpoint folder. Raises CheckpointError with every problem of its files and index."""
    with reading(str(folder)):
        return _open_checkpoint(folder, repo, commit)


def _open_checkpoint(folder: Path, repo: str | None, commit: str | None) -> Checkpoint:
    if not folder.is_dir():
        raise CheckpointError(Problem("is not a folder", file=str(folder)))
    raw_config = read_small(folder / CONFIG, CONFIG)
    config = load_object(raw_config, CONFIG)
    quantization = _quantization(folder, config)
    if "sm70_prepared" in quantization:
        raise UnsupportedError(
            Problem("is a prepared folder already", file=str(folder), hint="convert from the source checkpoint")
        )
    present = sorted(p.name for p in folder.iterdir() if p.name.endswith(".safetensors"))
    index_digests, listed = None, None
    if (folder / INDEX).exists() or (folder / INDEX).is_symlink():
        raw_index = read_small(folder / INDEX, INDEX)
        index_digests, listed = digests_of(raw_index), parse_index(raw_index)
        del raw_index
    names = sorted(listed) if listed is not None else present
    if not names:
        raise CheckpointError(
            Problem("no .safetensors file in it", file=str(folder), hint="is this the model's folder?")
        )
    problems = Problems()
    shards: dict[str, Shard] = {}
    refs = Refs()
    stale: list[StaleTensor] = []
    total = 0
    try:
        for name in names:
            try:
                shard, header = _open_shard(folder, name)
            except CheckpointError as exc:
                for problem in exc.problems:
                    problems.add(CheckpointError, problem)
                continue
            shards[name] = shard
            total += len(header.tensors)
            if total > MAX_MEMBERS:
                raise CheckpointError(
                    Problem(
                        "its shards hold too many tensors",
                        file=str(folder),
                        expected=f"at most {MAX_MEMBERS}",
                        actual=str(total),
                    )
                )
            tensors = listed[name] if listed is not None else list(header.tensors)
            stale += _take_refs(name, tensors, header, refs, problems)
            del header
        extras, unfollowed = _extras(folder, problems)
        problems.raise_if_any()
    except BaseException:
        for shard in shards.values():
            os.close(shard.fd)
        raise
    return Checkpoint(
        folder=folder,
        config=config,
        quantization=quantization,
        raw_config=raw_config,
        index_digests=index_digests,
        repo=repo,
        commit=commit,
        refs=refs,
        shards=shards,
        stale=tuple(stale),
        unindexed=tuple(n for n in present if n not in shards),
        extras=tuple(extras),
        unfollowed=tuple(unfollowed),
    )


def _open_shard(folder: Path, name: str) -> tuple[Shard, Header]:
    fd = open_regular(folder / name, name, missing=_FETCH)
    try:
        with reading(name):
            info = os.fstat(fd)
            header = read_header(partial(read_at, fd), info.st_size, name)
            end = header.data_start
            digests = digests_of(read_at(fd, at, min(PIECE, end - at)) for at in range(0, end, PIECE))
    except BaseException:
        os.close(fd)
        raise
    return Shard(name, fd, info.st_size, info.st_mtime_ns, len(header.tensors), digests), header


def _take_refs(file: str, tensors: list[str], header: Header, refs: Refs, problems: Problems) -> list[StaleTensor]:
    """Adds the tensors of one shard that exist; returns those that do not, since the index does not give them to it."""
    for tensor in tensors:
        entry = header.tensors.pop(tensor, None)
        if entry is None:
            problems.add(CheckpointError, Problem("the index gives it to a shard that does not hold it", tensor, file))
        elif tensor in refs:
            problems.add(
                CheckpointError,
                Problem(
                    f"also lies in {refs[tensor].file}, and there is no index to say which one counts",
                    tensor,
                    file,
                    hint=f"add {INDEX}, or remove the file that does not belong",
                ),
            )
        else:
            refs[tensor] = TensorRef(tensor, file, *entry)
    return [StaleTensor(tensor, file) for tensor in header.tensors]


def parse_index(raw: bytes) -> dict[str, list[str]]:
    """Shard -> its tensors, of an index file. Raises CheckpointError unless every shard is a plain name in this folder."""
    reader = ObjectReader((raw[i : i + PIECE] for i in range(0, len(raw), PIECE)), INDEX)
    seen: set[str] = set()
    files: dict[str, str] = {}
    for key in reader.members():
        if key in seen:
            raise reader.duplicate(key)
        seen.add(key)
        if key == "weight_map" and reader.next() == "{":
            _read_weight_map(reader, files)
        else:
            reader.value(f"the value of {key[:100]!r}")
    reader.end()
    if not files:
        raise CheckpointError(Problem("has no weight_map", file=INDEX))
    listed: dict[str, list[str]] = {}
    for tensor, file in files.items():
        listed.setdefault(file, []).append(tensor)
    return listed


def _read_weight_map(reader: ObjectReader, files: dict[str, str]) -> None:
    """Adds tensor -> shard of the weight_map that begins here."""
    shards: dict[str, str] = {}  # each name once, not once a tensor
    for tensor in reader.members():
        if tensor in files:
            raise reader.duplicate(tensor)
        if len(tensor) > MAX_NAME:
            raise CheckpointError(
                Problem(f"names a tensor of {len(tensor)} characters, more than {MAX_NAME}", file=INDEX)
            )
        file = reader.value("the name of a shard", tensor=tensor)
        if not isinstance(file, str) or not _is_plain(file):
            raise CheckpointError(
                Problem(
                    "the index names a shard that is not a plain file name in this folder",
                    tensor,
                    INDEX,
                    expected="NAME.safetensors",
                    actual=repr(file)[:200],
                )
            )
        files[tensor] = shards.setdefault(file, file)


def _is_plain(file: str) -> bool:
    """A name without any folder, fit for a shard and for its temporary file."""
    plain = file.endswith(".safetensors") and not file.startswith(".") and not set(file) & set("/\\\0")
    return plain and len(file.encode()) <= 255 - len(f".{TEMPORARY}")


def _quantization(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """quantization_config of config.json (top level or text_config), else made from the file that an older exporter wrote."""
    text = config.get("text_config")
    for holder in (config, text if isinstance(text, dict) else {}):
        found = holder.get("quantization_config")
        if found is not None and not isinstance(found, dict):
            raise CheckpointError(Problem("quantization_config is not an object", file=CONFIG))
        if found:
            return found
    for file, method in QUANTIZATION_FILES.items():
        if (folder / file).exists():
            return {"quant_method": method, **load_object(read_small(folder / file, file), file)}
    return {}


def walk(folder: Path) -> Iterator[tuple[str, list[str], list[str]]]:
    """os.walk(), but a folder that cannot be listed is no empty one. Raises OSError, also for folders nested too deep."""

    def cannot(exc: OSError) -> None:
        raise exc

    for root, folders, files in os.walk(folder, onerror=cannot):
        yield root, folders, files
        if folders and len(Path(root).relative_to(folder).parts) >= MAX_DEPTH:
            raise OSError(errno.ELOOP, f"more than {MAX_DEPTH} folders in one another", root)


def _extras(folder: Path, problems: Problems) -> tuple[list[str], list[str]]:
    """Files to hand on as bytes (no hidden ones, no weights; symlinks to files are followed), and symlinks to folders."""
    extras, unfollowed = [], []
    for root, folders, files in walk(folder):
        folders[:] = sorted(f for f in folders if not f.startswith("."))
        relative = Path(root).relative_to(folder)
        unfollowed += [(relative / f).as_posix() for f in folders if (folder / relative / f).is_symlink()]
        for file in sorted(files):
            name = (relative / file).as_posix()
            if file.startswith(".") or file.endswith((".safetensors", *_OTHER_WEIGHTS)) or name in (CONFIG, INDEX):
                continue
            if (folder / name).is_file():
                extras.append(name)
            else:
                problems.add(CheckpointError, Problem("is no regular file, nor a link to one", file=name, hint=_FETCH))
    return extras, unfollowed
