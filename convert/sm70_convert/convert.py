"""run_plan(): read an expert, cut and prepare it for all ranks, write it, layer by layer; then seal."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sm70_convert import names
from sm70_convert.bank import HASHES, BankWriter, Digest, bank_spec, layer_bank_paths, measure, write_small
from sm70_convert.checkpoint import open_checkpoint
from sm70_convert.errors import CheckpointError, IntegrityError, OutputError, Problem, Sm70Error, UnsupportedError
from sm70_convert.expert_tensors import LayerPlan
from sm70_convert.experts import ExpertReader
from sm70_convert.hub import resolve
from sm70_convert.journal import (
    OpenFolder,
    close_journals,
    is_own_state,
    journal_plan,
    open_folder,
    read_journals,
    sealing,
    temporary_files,
)
from sm70_convert.layout import bank_tensors
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
from sm70_convert.plan import Finding, Options, Plan, build_plan
from sm70_convert.verify import extra_files, verify_folder
from sm70_kernels.numpy_sm70 import NumpyKernel
from sm70_kernels.spec import RawScaleError

if TYPE_CHECKING:
    from numpy.typing import NDArray

_NUMPY: dict[str, Any] = {"I32": np.uint32, "F32": np.float32, "F16": np.uint16, "U8": np.uint8}
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


def run_plan(
    plan: Plan,
    out: Path,
    *,
    jobs: int,
    passthrough: str = "copy",
    allow_nonfinite: bool = False,
    overwrite: bool = False,
    progress: Progress = lambda _: None,
    layer_done: Progress = lambda _: None,
) -> Summary:
    """Carries out a plan into `out`, resuming what an earlier run left. Raises the errors of errors.py.

    progress(n) is called for every n source bytes done with, layer_done(layer) for every finished layer.
    """
    with open_folder(plan, out, overwrite=overwrite) as folder:
        if folder.sealed:
            # Before it is called done, or vouched for anew: what was sealed must still be there.
            verify_folder(folder.root, quick=True).raise_if_damaged()
        if not folder.todo:
            assert folder.sealed is not None  # noqa: S101 - nothing to do means sealed
            return Summary("complete", out, (), (), folder.sealed.tp_sizes, 0, 0, folder.sealed.findings)
        resumed = tuple(sorted(folder.done))
        for layer in resumed:
            layer_done(layer)
        planned = [layer for layer in plan.layers if layer.layer in plan.selected and layer.layer not in folder.done]
        _prepare_layers(plan, folder, planned, jobs, allow_nonfinite, progress, layer_done)
        prepared = tuple(layer.layer for layer in planned)
        read = sum(layer.source_bytes for layer in planned)
        written = sum(b.bytes for layer in prepared for b in folder.done[layer].banks)
        findings = tuple(f for layer in sorted(folder.done) for f in folder.done[layer].findings)
        if plan.options.layers is not None:
            return Summary("part", out, prepared, resumed, folder.todo, read, written, plan.findings + findings)
        assert folder.journal is not None  # noqa: S101 - a run with work to do has a journal
        with sealing(folder.root, [folder.journal]):
            manifest = _seal(plan, folder.root, folder.sealed, folder.todo, folder.done, passthrough, progress)
        status = "added" if folder.sealed else "sealed"
        written += sum(p.bytes for p in manifest.passthrough) if not folder.sealed else 0
        return Summary(status, out, prepared, resumed, manifest.tp_sizes, read, written, manifest.findings)


@contextmanager
def sealing_plan(out: Path, source: str | None) -> Iterator[Plan]:
    """The plan that the parts of an unfinished folder were made by, rebuilt from their journal and its checkpoint.

    source: where the checkpoint is now; else where the journal says it was. Raises OutputError without a journal.
    """
    journals = read_journals(out)
    if not journals:
        done = " (it is sealed already)" if (out / MANIFEST).exists() else ""
        raise OutputError(
            Problem(f"has no journal of parts to seal{done}", file=str(out), hint="make parts with --layers first")
        )
    made = journals[0].plan
    options = Options(
        tp_sizes=tuple(made["tp_sizes"]),
        layout=made["layout"]["name"],
        interleave="on" if made["layout"]["interleave_gate_up"] else "off",
        hash=made["hash"],
    )
    origin = made["source"]
    folder = Path(source) if source is not None and Path(source).exists() else Path(journals[0].source)
    opened = (
        resolve(source, origin.get("commit"))
        if source is not None and not Path(source).exists()
        else open_checkpoint(folder, repo=origin.get("repo"), commit=origin.get("commit"))
    )
    with opened as checkpoint:
        yield build_plan(checkpoint, options)


def seal(plan: Plan, out: Path, *, passthrough: str = "copy", progress: Progress = lambda _: None) -> Summary:
    """Seals a folder whose parts were made with --layers. Raises OutputError if a layer is missing."""
    root = Path(os.path.realpath(out))
    with sealing(root, []):
        journals = read_journals(root)
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
        missing = sorted(set(plan.moe.layers) - set(done))
        if missing:
            hint = f"make them with --layers {names.format_ranges(missing)}, then seal again"
            raise OutputError(
                Problem(f"layers {names.format_ranges(missing)} are not made yet", file=str(root), hint=hint)
            )
        for record in done.values():
            if {b.path for b in record.banks} != layer_bank_paths(record.layer, tp_sizes):
                message = "has a record in the journal that does not name its banks"
                raise IntegrityError(
                    Problem(message, layer=record.layer, hint=f"make it again with --layers {record.layer}")
                )
            for bank in record.banks:
                if measure(root / bank.path, bank.path, HASHES[plan.options.hash]) != bank:
                    raise IntegrityError(
                        Problem(
                            "is not what its part wrote",
                            file=bank.path,
                            layer=record.layer,
                            hint=f"make it again with --layers {record.layer}",
                        )
                    )
        manifest = _seal(plan, root, sealed, tp_sizes, done, passthrough, progress)
    written = sum(p.bytes for p in manifest.passthrough)
    return Summary("sealed", out, (), tuple(sorted(done)), manifest.tp_sizes, 0, written, manifest.findings)


def _prepare_layers(
    plan: Plan,
    folder: OpenFolder,
    layers: list[LayerPlan],
    jobs: int,
    allow_nonfinite: bool,
    progress: Progress,
    layer_done: Progress,
) -> None:
    """Prepares `layers` with one worker a layer; this thread syncs what they finish and writes the journal.

    What is wrong with the values of one layer stops the run, but layers that others are at are finished and kept.
    """
    stop = threading.Event()
    waiting = iter(layers)
    kernels: list[NumpyKernel] = []

    def work(layer: LayerPlan) -> _FinishedLayer | _RefusedLayer:
        try:
            kernel = kernels.pop()
        except IndexError:
            kernel = NumpyKernel()
        try:
            return _prepare_layer(plan, folder, layer, kernel, stop, allow_nonfinite, progress)
        except (CheckpointError, UnsupportedError) as exc:
            return _RefusedLayer(layer.layer, exc)
        finally:
            kernels.append(kernel)

    with ThreadPoolExecutor(max_workers=jobs, thread_name_prefix="layer") as pool:
        running: set[Future[_FinishedLayer | _RefusedLayer]] = set()
        try:
            # One more than the workers, so that none waits while this thread syncs.
            while len(running) <= jobs and (layer := next(waiting, None)):
                running.add(pool.submit(work, layer))
            refused: dict[int, Sm70Error] = {}
            while running:
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    result = future.result()
                    if isinstance(result, _RefusedLayer):
                        refused[result.layer] = result.error
                    else:
                        if folder.sealed:
                            _refuse_other_sources(folder.sealed.layers[result.layer].sources, result)
                        record = result.commit()
                        folder.record(record)
                        layer_done(record.layer)
                    running.discard(future)
                    if not refused and (layer := next(waiting, None)):
                        running.add(pool.submit(work, layer))
            if refused:
                raise refused[min(refused)]
        except BaseException:
            stop.set()
            pool.shutdown(wait=True, cancel_futures=True)
            for future in running:
                if (
                    not future.cancelled()
                    and future.exception() is None
                    and isinstance(done := future.result(), _FinishedLayer)
                ):
                    done.discard()
            raise


class _Stopped(Exception):  # noqa: N818 - not an error: another layer failed first
    """A worker gives up because the run has failed elsewhere."""


@dataclass(frozen=True)
class _RefusedLayer:
    """A layer whose values cannot be prepared."""

    layer: int
    error: Sm70Error


@dataclass(frozen=True)
class _FinishedLayer:
    """A layer whose banks are written but not yet durable."""

    layer: int
    writers: list[BankWriter]
    sources: tuple[SourceRecord, ...]
    findings: tuple[Finding, ...]

    def commit(self) -> LayerRecord:
        try:
            banks = tuple(writer.commit() for writer in self.writers)
        except BaseException:
            self.discard()
            raise
        return LayerRecord(self.layer, banks, self.sources, self.findings)

    def discard(self) -> None:
        for writer in self.writers:
            writer.discard()


def _prepare_layer(
    plan: Plan,
    folder: OpenFolder,
    layer: LayerPlan,
    kernel: NumpyKernel,
    stop: threading.Event,
    allow_nonfinite: bool,
    progress: Progress,
) -> _FinishedLayer:
    """Reads, prepares and writes one layer for every rank of every TP size, one expert at a time."""
    new = HASHES[plan.options.hash]
    reader = ExpertReader(plan, layer)
    source_digests: list[Digest] = [new() for _ in layer.sources]
    outs = {tp_size: expert_arrays(plan, tp_size) for tp_size in folder.todo}
    notes: dict[str, tuple[int, str]] = {}
    writers: dict[tuple[int, int], BankWriter] = {}
    expert_bytes = sum(s.nbytes for s in layer.sources)
    try:
        for tp_size in folder.todo:
            for rank in range(tp_size):
                spec = bank_spec(plan.layout, plan.moe, plan.quantization.group_size, layer.layer, rank, tp_size)
                writers[tp_size, rank] = BankWriter(folder.root, spec.path, spec.header, new)
        for expert in range(plan.moe.experts):
            if stop.is_set():
                raise _Stopped
            projections = reader.read(expert)
            for i, raw in reader.raw():
                source_digests[i].update(raw.data)
            for note, tensor in reader.check_scales(expert, projections, allow_nonfinite=allow_nonfinite):
                count, example = notes.get(note, (0, tensor))
                notes[note] = (count + 1, example)
            try:
                kernel.prepare(
                    *(projections[p] for p in names.PROJECTIONS),
                    layout=plan.layout.name,
                    interleave=plan.layout.interleave_gate_up,
                    outs=list(outs.values()),
                )
            except RawScaleError as exc:
                raise reader.raw_layout_failed(expert, exc.projection, exc.reason) from exc
            for (tp_size, rank), writer in writers.items():
                for name, array in outs[tp_size].items():
                    writer.append(name, array[rank])
            progress(expert_bytes)
        reader.forget()
    except BaseException:
        for writer in writers.values():
            writer.discard()
        raise
    sources = tuple(
        SourceRecord(s.template, names.format_ranges(range(plan.moe.experts)), digest.hexdigest())
        for s, digest in zip(layer.sources, source_digests, strict=True)
    )
    findings = tuple(Finding(note, example, count, layer.layer) for note, (count, example) in sorted(notes.items()))
    return _FinishedLayer(layer.layer, list(writers.values()), sources, findings)


def expert_arrays(plan: Plan, tp_size: int) -> dict[str, NDArray[Any]]:
    """Room for one prepared expert of all ranks: tensor name -> [tp_size, ...]."""
    return {
        t.name: np.zeros((tp_size, *t.shape), _NUMPY[t.dtype]) for t in bank_tensors(plan.layout, plan.moe, tp_size)
    }


def _refuse_other_sources(before: tuple[SourceRecord, ...], now: _FinishedLayer | LayerRecord) -> None:
    """One folder holds banks of one checkpoint, even where headers and index are alike."""
    for old, new in zip(before, now.sources, strict=True):
        if old != new:
            raise OutputError(
                Problem(
                    "differs from what this folder was made of",
                    new.name,
                    layer=now.layer,
                    expected=old.digest,
                    actual=new.digest,
                    hint="the checkpoint has changed: use another --out",
                )
            )


def _seal(
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
            _refuse_other_sources(before.sources, record)
            layers[layer] = replace(record, banks=before.banks + record.banks)
        files = sealed.passthrough
    else:
        files = tuple(write_passthrough(plan, root, passthrough, progress))
    for shard in plan.checkpoint.shards.values():
        shard.check_unchanged()
    for leftover in list(temporary_files(root)):
        leftover.unlink(missing_ok=True)
    manifest = Manifest(
        identity=plan_identity(plan),
        tp_sizes=tuple(sorted({*tp_sizes, *(sealed.tp_sizes if sealed else ())})),
        layers=layers,
        passthrough=files,
        dropped=dropped_records(plan.layers),
        findings=(*plan.findings, *(f for record in layers.values() for f in record.findings)),
    )
    stray = [path for path in extra_files(root, manifest) if not is_own_state(path)]
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
    lines = {path: measure(root / path, path, HASHES["sha256"], plain=True).digest for path in manifest.files}
    lines[MANIFEST] = hashlib.sha256(data).hexdigest()
    return "".join(_sum_line(path, digest) for path, digest in sorted(lines.items())).encode()


def _sum_line(path: str, digest: str) -> str:
    """One line; sha256sum marks a name that it had to escape by a backslash in front."""
    escaped = path.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")
    return f"{chr(92) if escaped != path else ''}{digest}  {escaped}\n"
