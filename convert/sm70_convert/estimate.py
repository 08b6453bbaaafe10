"""What a plan will cost: room on disk, time from a short probe, and GPU memory with and without preparation."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sm70_convert import names
from sm70_convert.bank import HASHES, bank_path
from sm70_convert.convert import expert_arrays
from sm70_convert.errors import CheckpointError, OutputError, Problem, Problems, Sm70Error, UnsupportedError
from sm70_convert.experts import ExpertReader
from sm70_convert.layer_findings import LayerFindings
from sm70_convert.layout import RUNTIMES, Layout, asked_layout, bank_tensors, runtime_takes
from sm70_convert.passthrough import output_names, passthrough_bytes
from sm70_convert.plan import Finding, Plan
from sm70_convert.tensor_parallel import SHOWN_TP_SIZES, why_not
from sm70_kernels.host import best_kernel
from sm70_kernels.spec import RawScaleError

_PROBE_BYTES = 32 << 20
_PROBE_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class TpEstimate:
    """One TP size: why it does not work, or bytes of one rank and the layout that each runtime asks for.

    GPU bytes are for the experts of one rank, from formulas (not measured): prepared banks need `ready` and no more; a runtime
    that converts holds all sources first, so that its last layer peaks at ready + that layer's source and result.
    """

    tp_size: int
    why_not: str | None
    bytes_in: int
    bytes_out: int
    asked: dict[str, str]
    gpu_ready: int
    gpu_peak_runtime: int
    gpu_peak_prepared: int


def tp_estimates(plan: Plan) -> tuple[TpEstimate, ...]:
    """The usual TP sizes and those asked for."""
    layers = len(plan.moe.layers)
    layer_in = max((layer.source_bytes for layer in plan.layers), default=0)
    result = []
    for tp_size in sorted({*SHOWN_TP_SIZES, *plan.tp_sizes}):
        reason = why_not(plan.quantization, plan.moe, tp_size, plan.layout if tp_size in plan.tp_sizes else None)
        if reason:
            result.append(TpEstimate(tp_size, reason, 0, 0, {}, 0, 0, 0))
            continue
        source = layer_in // tp_size
        layout = (
            plan.layout
            if tp_size in plan.tp_sizes
            else asked_layout(plan.options.runtime, plan.quantization, plan.moe, tp_size)
        )
        ready = plan.moe.experts * sum(t.nbytes for t in bank_tensors(layout, plan.moe, tp_size))
        result.append(
            TpEstimate(
                tp_size=tp_size,
                why_not=None,
                bytes_in=source * layers,
                bytes_out=ready * layers,
                asked={runtime: _asked(plan, runtime, tp_size) for runtime in RUNTIMES},
                gpu_ready=ready * layers,
                gpu_peak_runtime=ready * layers + source + ready,
                gpu_peak_prepared=ready * layers,
            )
        )
    return tuple(result)


def _asked(plan: Plan, runtime: str, tp_size: int) -> str:
    if runtime_takes(runtime, plan.quantization, plan.moe, tp_size):
        return "none: takes no such banks"
    return describe(asked_layout(runtime, plan.quantization, plan.moe, tp_size))


def describe(layout: Layout) -> str:
    """A layout in a few words."""
    return f"{layout.name}, gate/up {'interleaved' if layout.interleave_gate_up else 'not interleaved'}"


def output_bytes(plan: Plan, passthrough: str) -> int:
    """Bytes of everything that a run of this plan puts into DIR: banks of the selected layers, and what passes through."""
    banks = sum(size * plan.bank_bytes(size) for size in plan.tp_sizes) * len(plan.selected)
    return banks + (passthrough_bytes(plan, passthrough) if plan.options.layers is None else 0)


def nearest_folder(path: Path) -> Path:
    """`path`, or the nearest folder above it that exists."""
    path = Path(os.path.realpath(path))
    while not path.is_dir():
        path = path.parent
    return path


def check_room(plan: Plan, out: Path, passthrough: str) -> None:
    """Raises OutputError if the file system of `out` has no room for what is still missing there, or cannot be written."""
    folder = nearest_folder(out)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise OutputError(Problem("is not writable", file=str(folder), hint="give an --out that you may write to"))
    banks = [bank_path(t, r, layer) for t in plan.tp_sizes for r in range(t) for layer in plan.selected]
    ours = [out / p for p in (*banks, *output_names(plan))]
    there = sum(p.lstat().st_size for p in ours if p.is_file())
    needed = output_bytes(plan, passthrough) - there
    state = os.statvfs(folder)
    free = state.f_bavail * state.f_frsize
    if needed > free:
        raise OutputError(
            Problem(
                "has not enough free space",
                file=str(folder),
                expected=f"{needed} bytes free",
                actual=str(free),
                hint="free some space, or use another disk",
            )
        )


def estimate_seconds(plan: Plan, folder: Path, passthrough: str) -> float | None:
    """A rough time for the whole run on one CPU and this disk, from a probe of about a second; None if it cannot be taken."""
    if not plan.tp_sizes or not plan.layers:
        return None
    reader, kernel = ExpertReader(plan, plan.layers[0]), best_kernel()
    outs = [expert_arrays(plan, t) for t in plan.tp_sizes]
    start, prepared = time.perf_counter(), 0
    try:
        while prepared < plan.moe.experts and time.perf_counter() - start < _PROBE_SECONDS:
            projections = reader.read(prepared)
            kernel.prepare(
                *(projections[p] for p in names.PROJECTIONS),
                layout=plan.layout.name,
                interleave=plan.layout.interleave_gate_up,
                outs=outs,
            )
            prepared += 1
        per_expert = (time.perf_counter() - start) / prepared
        write = _write_speed(folder)
    except (RawScaleError, OSError, Sm70Error):
        return None
    return per_expert * plan.moe.experts * len(plan.selected) + output_bytes(plan, passthrough) / write


def _write_speed(folder: Path) -> float:
    """Bytes a second of digested, synced writing to a nameless file in `folder`, which is gone when it is closed."""
    data = os.urandom(1 << 20)
    fd = os.open(folder, os.O_TMPFILE | os.O_WRONLY, 0o600)
    try:
        start, digest = time.perf_counter(), HASHES["blake3"]()
        for _ in range(_PROBE_BYTES // len(data)):
            os.write(fd, data)
            digest.update(data)
        os.fsync(fd)
        return _PROBE_BYTES / (time.perf_counter() - start)
    finally:
        os.close(fd)


def check_all_scales(plan: Plan, progress: Any = lambda _: None) -> tuple[Finding, ...]:
    """Reads every scale (`plan --scales`): what the pass which prepares would find.

    Raises one error with all of the refusals that it would come to.
    """
    problems = Problems()
    findings: list[Finding] = []
    kernel = best_kernel()
    outs = [expert_arrays(plan, t) for t in plan.tp_sizes or (1,)]
    for layer in plan.layers:
        if layer.layer not in plan.selected:
            continue
        reader, found = ExpertReader(plan, layer), LayerFindings(plan, layer)
        for expert in range(plan.moe.experts):
            projections = reader.read(expert)
            try:
                found.check(expert, projections)
                if plan.layout.name == "nvfp4-raw":
                    kernel.prepare(
                        *(projections[p] for p in names.PROJECTIONS),
                        layout=plan.layout.name,
                        interleave=plan.layout.interleave_gate_up,
                        outs=outs,
                    )
            except CheckpointError as exc:
                for problem in exc.problems:
                    problems.add(CheckpointError, problem)
            except RawScaleError as exc:
                for problem in reader.raw_layout_failed(expert, exc.projection, exc.reason).problems:
                    problems.add(UnsupportedError, problem)
            progress(sum(s.nbytes for s in layer.sources))
        findings += found.findings()
    problems.raise_if_any()
    return tuple(findings)
