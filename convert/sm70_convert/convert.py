"""run_plan(): read an expert, cut and prepare it for all ranks, write it, layer by layer; then seal."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sm70_convert import names
from sm70_convert.bank import HASHES, BankWriter, bank_spec
from sm70_convert.errors import CheckpointError, Sm70Error, UnsupportedError
from sm70_convert.expert_tensors import LayerPlan
from sm70_convert.journal import OpenFolder, open_folder, sealing
from sm70_convert.layer_reader import LayerReader
from sm70_convert.layout import bank_tensors
from sm70_convert.manifest import LayerRecord, SourceRecord
from sm70_convert.plan import Finding, Plan, in_order
from sm70_convert.seal import Progress, Summary, close_folder, refuse_other_sources, refuse_other_weights
from sm70_convert.verify import verify_folder
from sm70_kernels.host import best_kernel
from sm70_kernels.spec import HostKernel, RawScaleError

if TYPE_CHECKING:
    from numpy.typing import NDArray

_NUMPY: dict[str, Any] = {"I32": np.uint32, "F32": np.float32, "F16": np.uint16, "U8": np.uint8}

# Prepares one layer: (plan, folder, layer, stop, allow_nonfinite, progress). Each worker has one of its own.
PrepareLayer = Callable[[Plan, OpenFolder, LayerPlan, threading.Event, bool, Progress], "FinishedLayer"]


def host_worker(new_kernel: Callable[[], HostKernel] = best_kernel) -> PrepareLayer:
    """A worker that prepares one expert at a time in host memory."""
    return functools.partial(_prepare_layer, new_kernel())


def run_plan(
    plan: Plan,
    out: Path,
    *,
    jobs: int,
    new_worker: Callable[[], PrepareLayer] = host_worker,
    passthrough: str = "copy",
    allow_nonfinite: bool = False,
    overwrite: bool = False,
    progress: Progress = lambda _: None,
    layer_done: Progress = lambda _: None,
) -> Summary:
    """Carries out a plan into `out`, resuming what an earlier run left. Raises the errors of errors.py.

    new_worker() makes what prepares layers; up to `jobs` of them work at once.
    progress(n) is called for every n source bytes done with, layer_done(layer) for every finished layer.
    """
    with open_folder(plan, out, overwrite=overwrite) as folder:
        if folder.sealed:
            # Before it is called done, or vouched for anew: what was sealed must still be there.
            verify_folder(folder.root, folder.sealed, quick=True).raise_if_damaged()
        if not folder.todo:
            assert folder.sealed is not None  # noqa: S101 - nothing to do means sealed
            refuse_other_weights(plan, folder.sealed)
            return Summary("complete", out, (), (), folder.sealed.tp_sizes, 0, 0, folder.sealed.findings)
        resumed = tuple(sorted(folder.done))
        for layer in resumed:
            layer_done(layer)
        planned = [layer for layer in plan.layers if layer.layer in plan.selected and layer.layer not in folder.done]
        _prepare_layers(plan, folder, planned, jobs, new_worker, allow_nonfinite, progress, layer_done)
        prepared = tuple(layer.layer for layer in planned)
        read = sum(layer.source_bytes for layer in planned)
        written = sum(b.bytes for layer in prepared for b in folder.done[layer].banks)
        if plan.options.layers is not None:
            findings = in_order((*plan.findings, *(f for record in folder.done.values() for f in record.findings)))
            return Summary("part", out, prepared, resumed, folder.todo, read, written, findings)
        assert folder.journal is not None  # noqa: S101 - a run with work to do has a journal
        with sealing(folder.root, [folder.journal]):
            manifest = close_folder(plan, folder.root, folder.sealed, folder.todo, folder.done, passthrough, progress)
        status = "added" if folder.sealed else "sealed"
        written += sum(p.bytes for p in manifest.passthrough) if not folder.sealed else 0
        return Summary(status, out, prepared, resumed, manifest.tp_sizes, read, written, manifest.findings)


def _prepare_layers(
    plan: Plan,
    folder: OpenFolder,
    layers: list[LayerPlan],
    jobs: int,
    new_worker: Callable[[], PrepareLayer],
    allow_nonfinite: bool,
    progress: Progress,
    layer_done: Progress,
) -> None:
    """Prepares `layers` with one worker a layer; this thread syncs what they finish and writes the journal.

    What is wrong with the values of one layer stops the run, but layers that others are at are finished and kept.
    """
    stop = threading.Event()
    waiting = iter(layers)
    workers: list[PrepareLayer] = []

    def work(layer: LayerPlan) -> FinishedLayer | _RefusedLayer:
        try:
            worker = workers.pop()
        except IndexError:
            worker = new_worker()
        try:
            return worker(plan, folder, layer, stop, allow_nonfinite, progress)
        except (CheckpointError, UnsupportedError) as exc:
            return _RefusedLayer(layer.layer, exc)
        finally:
            workers.append(worker)

    with ThreadPoolExecutor(max_workers=jobs, thread_name_prefix="layer") as pool:
        running: set[Future[FinishedLayer | _RefusedLayer]] = set()
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
                        plan.checkpoint.check_unchanged()
                        if folder.sealed:
                            refuse_other_sources(
                                folder.sealed.layers[result.layer].sources, result.sources, result.layer
                            )
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
                    and isinstance(done := future.result(), FinishedLayer)
                ):
                    done.discard()
            raise


class Stopped(Exception):  # noqa: N818 - not an error: another layer failed first
    """A worker gives up because the run has failed elsewhere."""


@dataclass(frozen=True)
class _RefusedLayer:
    """A layer whose values cannot be prepared."""

    layer: int
    error: Sm70Error


@dataclass(frozen=True)
class FinishedLayer:
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


@contextmanager
def bank_writers(plan: Plan, folder: OpenFolder, layer: LayerPlan) -> Iterator[dict[tuple[int, int], BankWriter]]:
    """The unfinished bank files of one layer, by (TP size, rank). An error removes them."""
    new = HASHES[plan.options.hash]
    writers: dict[tuple[int, int], BankWriter] = {}
    try:
        for tp_size in folder.todo:
            for rank in range(tp_size):
                spec = bank_spec(plan.layout, plan.moe, plan.quantization.group_size, layer.layer, rank, tp_size)
                writers[tp_size, rank] = BankWriter(folder.root, spec.path, spec.header, new)
        yield writers
    except BaseException:
        for writer in writers.values():
            writer.discard()
        raise


def _prepare_layer(
    kernel: HostKernel,
    plan: Plan,
    folder: OpenFolder,
    layer: LayerPlan,
    stop: threading.Event,
    allow_nonfinite: bool,
    progress: Progress,
) -> FinishedLayer:
    """Reads, prepares and writes one layer for every rank of every TP size, one expert at a time."""
    reader = LayerReader(plan, layer, allow_nonfinite=allow_nonfinite)
    outs = {tp_size: expert_arrays(plan, tp_size) for tp_size in folder.todo}
    expert_bytes = sum(s.nbytes for s in layer.sources)
    with bank_writers(plan, folder, layer) as writers:
        for expert in range(plan.moe.experts):
            if stop.is_set():
                raise Stopped
            projections = reader.read(expert)
            try:
                kernel.prepare(
                    *(projections[p] for p in names.PROJECTIONS),
                    layout=plan.layout.name,
                    interleave=plan.layout.interleave_gate_up,
                    outs=list(outs.values()),
                )
            except RawScaleError as exc:
                raise reader.experts.raw_layout_failed(expert, exc.projection, exc.reason) from exc
            for (tp_size, rank), writer in writers.items():
                for name, array in outs[tp_size].items():
                    writer.append(name, array[rank])
            progress(expert_bytes)
        reader.experts.forget()
    return FinishedLayer(layer.layer, list(writers.values()), reader.records(), reader.findings())


def expert_arrays(plan: Plan, tp_size: int) -> dict[str, NDArray[Any]]:
    """Room for one prepared expert of all ranks: tensor name -> [tp_size, ...]."""
    return {
        t.name: np.zeros((tp_size, *t.shape), _NUMPY[t.dtype]) for t in bank_tensors(plan.layout, plan.moe, tp_size)
    }
