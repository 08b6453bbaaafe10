"""seal(): check that every layer is there, write what passes through, and the manifest last."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from sm70_convert import names
from sm70_convert.bank import HASHES, layer_bank_paths, measure, read_back, remove, write_small, writing
from sm70_convert.checkpoint import open_checkpoint, reading
from sm70_convert.errors import IntegrityError, OutputError, Problem
from sm70_convert.hub import resolve
from sm70_convert.journal import (
    close_journals,
    is_own_state,
    is_real,
    journal_plan,
    read_journals,
    sealing,
    temporary_files,
)
from sm70_convert.manifest import (
    MANIFEST,
    SUMS,
    LayerRecord,
    Manifest,
    SourceRecord,
    difference,
    dropped_records,
    other_plan,
    plan_identity,
    read_manifest,
)
from sm70_convert.passthrough import write_passthrough
from sm70_convert.plan import Finding, Options, Plan, build_plan, in_order
from sm70_convert.verify import extra_files

Progress = Callable[[int], object]


@dataclass(frozen=True, slots=True)
class Summary:
    """What a run did. status: sealed, added, part, or complete (nothing was left to do)."""

    status: str
    folder: Path
    layers_prepared: tuple[int, ...]
    layers_resumed: tuple[int, ...]
    tp_sizes: tuple[int, ...]
    bytes_read: int
    bytes_written: int
    findings: tuple[Finding, ...]


@contextmanager
def sealing_plan(out: Path, source: str | None) -> Iterator[Plan]:
    """The plan that the parts of an unfinished folder were made by, rebuilt from their journal and its checkpoint.

    source: where the checkpoint is now; else where the journal says it was. Raises OutputError without a journal.
    """
    journals = read_journals(out)
    if not journals:
        raise _nothing_to_seal(out)
    made = journals[0].plan
    options = Options(
        tp_sizes=tuple(made["tp_sizes"]),
        layout=made["layout"]["name"],
        interleave="on" if made["layout"]["interleave_gate_up"] else "off",
        hash=made["hash"],
    )
    origin = made["source"]
    folder = Path(journals[0].source if source is None else source)
    with reading(str(folder)):
        there = folder.exists()
    opened = (
        resolve(source, origin.get("commit"))
        if source is not None and not there
        else open_checkpoint(folder, repo=origin.get("repo"), commit=origin.get("commit"))
    )
    with opened as checkpoint:
        yield build_plan(checkpoint, options)


def _nothing_to_seal(out: Path) -> OutputError:
    done = " (it is sealed already)" if (out / MANIFEST).exists() else ""
    hint = "make parts with --layers first"
    return OutputError(Problem(f"has no journal of parts to seal{done}", file=str(out), hint=hint))


def seal(plan: Plan, out: Path, *, passthrough: str = "copy", progress: Progress = lambda _: None) -> Summary:
    """Seals a folder whose parts were made with --layers. Raises OutputError if a layer is missing."""
    root = Path(os.path.realpath(out))
    with sealing(root, []):
        journals = read_journals(root)
        if not journals:
            raise _nothing_to_seal(out)
        done = {r.layer: r for journal in journals for r in journal.records}
        tp_sizes = tuple(journals[0].plan["tp_sizes"])
        identity = plan_identity(plan)
        expected = journal_plan(plan, tp_sizes)
        for journal in journals:
            if field := difference(journal.plan, expected):
                raise other_plan(f"sm70/{journal.path.name}", field)
        sealed = None
        if (root / MANIFEST).exists():
            sealed = read_manifest(root, error=OutputError)
            if field := difference(sealed.identity, identity):
                raise other_plan(MANIFEST, field)
            if set(tp_sizes) <= set(sealed.tp_sizes):  # a run that was stopped between its seal and the end
                close_journals(root)
                return Summary("sealed", out, (), tuple(sealed.layers), sealed.tp_sizes, 0, 0, sealed.findings)
        missing = sorted(set(plan.moe.layers) - set(done))
        if missing:
            hint = f"make them with --layers {names.format_ranges(missing)}, then seal again"
            raise OutputError(
                Problem(f"layers {names.format_ranges(missing)} are not made yet", file=str(root), hint=hint)
            )
        new = HASHES[plan.options.hash]
        for record in done.values():
            if {b.path for b in record.banks} != layer_bank_paths(record.layer, tp_sizes):
                message = "has a record in the journal that does not name its banks"
                raise IntegrityError(
                    Problem(message, layer=record.layer, hint=f"make it again with --layers {record.layer}")
                )
            for bank in record.banks:
                if not is_real(root / bank.path) or measure(root / bank.path, bank.path, new) != bank:
                    raise IntegrityError(
                        Problem(
                            "is not what its part wrote",
                            file=bank.path,
                            layer=record.layer,
                            hint=f"make it again with --layers {record.layer}",
                        )
                    )
        manifest = close_folder(plan, root, sealed, tp_sizes, done, passthrough, progress)
    written = sum(p.bytes for p in manifest.passthrough)
    return Summary("sealed", out, (), tuple(sorted(done)), manifest.tp_sizes, 0, written, manifest.findings)


def refuse_other_weights(plan: Plan, sealed: Manifest) -> None:
    """Holds the smallest source of every layer, a percent of the bytes or less, against what the folder was made of.

    Headers and index may be alike where the weights are not. A hub commit says which weights they are.
    """
    if plan.checkpoint.repo is not None:
        return
    for layer in plan.layers:
        source = min(layer.sources, key=lambda s: s.nbytes)
        digest, buffer = HASHES[sealed.hash](), memoryview(bytearray(source.nbytes))
        for file, offset in zip(source.files, source.offsets, strict=True):
            plan.checkpoint.shards[file].read_into(offset, buffer)
            digest.update(buffer)
        plan.checkpoint.check_unchanged()
        experts = names.format_ranges(range(plan.moe.experts))
        now = SourceRecord(source.template, experts, digest.hexdigest())
        refuse_other_sources(sealed.layers[layer.layer].sources, (now,), layer.layer)


def refuse_other_sources(before: tuple[SourceRecord, ...], now: tuple[SourceRecord, ...], layer: int) -> None:
    """One folder holds banks of one checkpoint, even where headers and index are alike."""
    known = {source.name: source for source in before}
    for new in now:
        old = known.get(new.name)
        if old != new:
            raise OutputError(
                Problem(
                    "differs from what this folder was made of",
                    new.name,
                    layer=layer,
                    expected=old.digest if old else "none",
                    actual=new.digest,
                    hint="the checkpoint has changed: use another --out",
                )
            )


def close_folder(
    plan: Plan,
    root: Path,
    sealed: Manifest | None,
    tp_sizes: tuple[int, ...],
    done: dict[int, LayerRecord],
    passthrough: str,
    progress: Progress,
) -> Manifest:
    """Writes what passes through, then the manifest last; joins what was sealed before."""
    layers = {layer: done[layer] for layer in sorted(done)}
    if sealed:
        for layer, record in layers.items():
            before = sealed.layers[layer]
            refuse_other_sources(before.sources, record.sources, layer)
            layers[layer] = replace(record, banks=before.banks + record.banks)
        files = sealed.passthrough
    else:
        files = tuple(write_passthrough(plan, root, passthrough, progress))
    plan.checkpoint.check_unchanged()
    manifest = Manifest(
        identity=plan_identity(plan),
        tp_sizes=tuple(sorted({*tp_sizes, *(sealed.tp_sizes if sealed else ())})),
        layers=layers,
        passthrough=files,
        dropped=dropped_records(plan.layers),
        findings=in_order((*plan.findings, *(f for record in layers.values() for f in record.findings))),
    )
    journals = read_journals(root)
    with writing(str(root)):
        for path in list(temporary_files(root)):
            remove(root, path)
        stray = [path for path in extra_files(root, manifest) if not is_own_state(path)]
        # What a run that was stopped while it started over had still to remove.
        stale = [path for path in stray if any(journal.names(path) for journal in journals)]
        for path in stale:
            remove(root, path)
        stray = sorted(set(stray) - set(stale))
    if stray:
        message = f"holds files that are no part of it: {', '.join(stray[:5])}"
        raise OutputError(Problem(message, file=str(root), hint="move them away, then run the same command again"))
    data = manifest.encode()
    if plan.options.hash == "sha256":
        write_small(root, SUMS, _sums(root, manifest, data), HASHES["sha256"])
    write_small(root, MANIFEST, data, HASHES[plan.options.hash])
    close_journals(root)
    return manifest


def _sums(root: Path, manifest: Manifest, data: bytes) -> bytes:
    """SHA256SUMS: a plain digest of every file, as sha256sum -c reads it."""
    lines = {path: read_back(root, path, HASHES["sha256"], plain=True).digest for path in manifest.files}
    lines[MANIFEST] = hashlib.sha256(data).hexdigest()
    return "".join(_sum_line(path, digest) for path, digest in sorted(lines.items())).encode()


def _sum_line(path: str, digest: str) -> str:
    """One line; sha256sum marks a name that it had to escape by a backslash in front."""
    escaped = path.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")
    return f"{chr(92) if escaped != path else ''}{digest}  {escaped}\n"
