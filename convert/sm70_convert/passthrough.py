"""What passes through: shards whole or without their experts, the other files, config.json, the index and the sentinel."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from sm70_convert.bank import (
    CHUNK,
    FORMAT_VERSION,
    HASHES,
    MEND,
    MENDABLE,
    TEMPORARY,
    AtomicFile,
    BankWriter,
    FileRecord,
    make_folder,
    read_back,
    sync_folder,
    write_small,
    writing,
)
from sm70_convert.checkpoint import CONFIG, INDEX, reading
from sm70_convert.errors import RESUMES, CheckpointError, OutputError, Problem
from sm70_convert.manifest import MANIFEST
from sm70_convert.plan import PassthroughShard, Plan
from sm70_convert.regular import open_regular
from sm70_convert.safetensors_header import Header, build_header
from sm70_convert.strict_json import pretty

SENTINEL = "sm70-sentinel.safetensors"
# A loader without the plugin stops on this unknown parameter, whose name says what to do.
SENTINEL_TENSOR = "sm70_prepared_checkpoint.load_with_load_format_sm70_prepared"


def output_names(plan: Plan) -> list[str]:
    """Every path in DIR that write_passthrough() writes."""
    return sorted({CONFIG, INDEX, SENTINEL, *(s.name for s in plan.passthrough), *plan.checkpoint.extras})


def passthrough_bytes(plan: Plan, mode: str) -> int:
    """Bytes that write_passthrough() will put on the disk, headers aside."""
    total = 0
    for name in plan.checkpoint.extras:
        with reading(name):
            total += (plan.checkpoint.folder / name).stat().st_size
    for shard in plan.passthrough:
        if shard.whole:
            total += plan.checkpoint.shards[shard.name].size if mode == "copy" else 0
        else:
            total += sum(plan.checkpoint.refs[t].nbytes for t in shard.tensors)
    return total


def write_passthrough(plan: Plan, root: Path, mode: str, on_bytes: Callable[[int], object]) -> Iterator[FileRecord]:
    """Writes everything of DIR besides banks and manifest, file by file. mode: copy, hardlink or symlink."""
    new = HASHES[plan.options.hash]
    for shard in plan.passthrough:
        if shard.whole and mode != "copy":
            _link(plan, root, shard.name, mode)
            yield read_back(root, shard.name, new, then=on_bytes)
        elif shard.whole:
            _copy(plan.checkpoint.folder / shard.name, root, shard.name, on_bytes)
            yield read_back(root, shard.name, new)
        else:
            yield _rewrite(plan, root, shard, on_bytes)
    for name in plan.checkpoint.extras:
        _copy(plan.checkpoint.folder / name, root, name, on_bytes)
        yield read_back(root, name, new)
    with BankWriter(root, SENTINEL, sentinel_header(), new) as writer:
        writer.append(SENTINEL_TENSOR, b"\0")
        record = writer.commit()
    yield record
    yield write_small(root, INDEX, index_bytes(plan), new)
    yield write_small(root, CONFIG, config_bytes(plan), new)


def sentinel_header() -> Header:
    """The header of the sentinel, whose one tensor is a zero byte."""
    return build_header([(SENTINEL_TENSOR, "U8", (1,))], {"format": "pt"})


def rewritten_header(plan: Plan, shard: PassthroughShard) -> Header:
    """The header of a shard with only what passes through, in the source's order."""
    refs = [plan.checkpoint.refs[t] for t in shard.tensors]
    return build_header([(r.name, r.dtype, r.shape) for r in refs], {"format": "pt"})


def index_bytes(plan: Plan) -> bytes:
    """The index of what passes through, and of the sentinel."""
    weight_map = {tensor: shard.name for shard in plan.passthrough for tensor in shard.tensors}
    total = sum(plan.checkpoint.refs[t].nbytes for t in weight_map) + 1
    weight_map[SENTINEL_TENSOR] = SENTINEL
    return pretty({"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}, sort_keys=False)


def config_bytes(plan: Plan) -> bytes:
    """config.json as the source's, with the marker in its quantization_config (made from an older exporter's file if need be)."""
    config = json.loads(plan.checkpoint.raw_config)
    text = config.get("text_config")
    holder = (
        text
        if isinstance(text, dict) and text.get("quantization_config") and not config.get("quantization_config")
        else config
    )
    marker = {"format_version": FORMAT_VERSION, "manifest": MANIFEST}
    holder["quantization_config"] = {**plan.checkpoint.quantization, "sm70_prepared": marker}
    return pretty(config, sort_keys=False)


def _rewrite(plan: Plan, root: Path, shard: PassthroughShard, on_bytes: Callable[[int], object]) -> FileRecord:
    source = plan.checkpoint.shards[shard.name]
    with BankWriter(root, shard.name, rewritten_header(plan, shard), HASHES[plan.options.hash]) as writer:
        for ref in (plan.checkpoint.refs[t] for t in shard.tensors):
            for piece in source.pieces(ref.offset, ref.nbytes):
                writer.append(ref.name, piece)
                on_bytes(len(piece))
        return writer.commit()


def _copy(source: Path, root: Path, name: str, on_bytes: Callable[[int], object]) -> None:
    """Copies the file behind `source`, as bytes. Raises CheckpointError if it changes meanwhile."""
    with (
        reading(name),
        os.fdopen(open_regular(source, name), "rb", buffering=0) as file,
        AtomicFile(root, name) as target,
    ):
        before = os.fstat(file.fileno())
        offset = 0
        while piece := file.read(CHUNK):
            target.write_at(offset, piece)
            offset += len(piece)
            on_bytes(len(piece))
        now = os.fstat(file.fileno())
        if (now.st_size, now.st_mtime_ns) != (offset, before.st_mtime_ns):
            raise CheckpointError(Problem("changed while it was copied", file=name, hint=RESUMES))
        target.commit()


def _link(plan: Plan, root: Path, name: str, mode: str) -> None:
    """Links a whole shard. A hard link is to the file behind a symlink, so it must lie on the same file system."""
    source = Path(os.path.realpath(plan.checkpoint.folder / name))
    make_folder(root, root)
    final, temporary = root / name, root / f".{name}{TEMPORARY}"
    with writing(name):
        temporary.unlink(missing_ok=True)
        # Renaming one hard link over another to the same file does nothing, so an earlier one goes first.
        final.unlink(missing_ok=True)
    try:
        if mode == "hardlink":
            os.link(source, temporary)
        else:
            temporary.symlink_to(source)
    except OSError as exc:
        instead = "use --passthrough copy (or symlink)" if mode == "hardlink" else "use --passthrough copy"
        hint = MEND if exc.errno in MENDABLE else instead
        raise OutputError(Problem(f"cannot be made as a {mode}: {exc.strerror}", file=name, hint=hint)) from exc
    try:
        with writing(name):
            temporary.rename(final)
            sync_folder(root)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
