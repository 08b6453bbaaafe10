"""Each command's outcome as a document for --json and rows for people."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sm70_convert.checkpoint import open_checkpoint, reading
from sm70_convert.console import Console, human_bytes, human_seconds
from sm70_convert.errors import CheckpointError, IntegrityError, Problem
from sm70_convert.estimate import describe, estimate_seconds, nearest_folder, output_bytes, tp_estimates
from sm70_convert.manifest import MANIFEST, read_manifest
from sm70_convert.names import format_ranges
from sm70_convert.plan import Finding, Options, Plan, banked_names, build_plan, dropped_names
from sm70_convert.safetensors_header import read_file_header
from sm70_convert.seal import Summary
from sm70_convert.tensor_parallel import legal_sizes
from sm70_convert.verify import Verification, manifest_moe

if TYPE_CHECKING:
    from sm70_convert.kernel_choice import Choice

Described = tuple[dict[str, Any], list[tuple[str, str]]]


def describe_path(path: Path) -> Described:
    """The document for --json and the rows for people, of a prepared folder, a checkpoint, or one .safetensors file."""
    with reading(str(path)):
        if (path / MANIFEST).exists():
            return _prepared(path)
        if path.is_dir():
            return _checkpoint(path)
        if path.is_file():
            return _file(path)
    raise CheckpointError(Problem("is neither a folder nor a file", file=str(path)))


def findings_rows(findings: Sequence[Finding]) -> list[tuple[str, str]]:
    """Findings for people: one row for each kind, counted over its layers, with the first example."""
    kinds: dict[str, list[Finding]] = {}
    for finding in findings:
        kinds.setdefault(finding.message, []).append(finding)
    rows = []
    for message, found in kinds.items():
        layers = [f.layer for f in found if f.layer is not None]
        where = f" in layer{'s' if len(layers) > 1 else ''} {format_ranges(layers)}" if layers else ""
        rows.append(("", f"{message}: {sum(f.count for f in found)}{where} (such as {found[0].example})"))
    return [("findings", rows[0][1] if rows else "none"), *rows[1:]]


def _prepared(path: Path) -> Described:
    manifest = read_manifest(path)
    moe, layout, _ = manifest_moe(manifest)
    per_rank = Counter[str]()
    for bank in manifest.banks.values():
        if not (path / bank.path).is_file():
            raise IntegrityError(Problem("is missing, or no regular file", file=bank.path))
        read_file_header(path / bank.path, bank.path, error=IntegrityError)
        per_rank[bank.path.rsplit("/", 1)[0].removeprefix("sm70/")] += bank.bytes
    document = {
        "command": "inspect",
        "kind": "prepared",
        "path": str(path),
        "tool_version": manifest.identity["tool_version"],
        "source": manifest.identity["source"],
        "quantization": manifest.identity["quantization"],
        "moe": {**manifest.identity["moe"]},
        "layout": manifest.identity["layout"],
        "tp_sizes": list(manifest.tp_sizes),
        "hash": manifest.hash,
        "bank_bytes": dict(sorted(per_rank.items())),
        "passthrough_bytes": sum(p.bytes for p in manifest.passthrough),
        "findings": [asdict(f) for f in manifest.findings],
    }
    rows = [
        ("prepared", str(path)),
        ("made by", f"sm70-convert {manifest.identity['tool_version']}, digests {manifest.hash}"),
        (
            "experts",
            f"{moe.experts} a layer (top {moe.top_k}), hidden {moe.hidden}, intermediate {moe.intermediate}",
        ),
        ("layers", f"{format_ranges(moe.layers)} ({len(moe.layers)})"),
        ("layout", describe(layout)),
        *((name, human_bytes(size)) for name, size in sorted(per_rank.items())),
        ("passthrough", human_bytes(document["passthrough_bytes"])),
        *findings_rows(manifest.findings),
    ]
    return document, rows


def _checkpoint(path: Path) -> Described:
    with open_checkpoint(path) as checkpoint:
        plan = build_plan(checkpoint, Options())
        banked, dropped = banked_names(plan.layers), dropped_names(plan.layers)
        source = sum(layer.source_bytes for layer in plan.layers)
        rest = sum(r.nbytes for r in checkpoint.refs.values())
        total = len(banked) + len(dropped) + len(checkpoint.refs)
        legal = legal_sizes(plan.quantization, plan.moe)
        spec, moe = plan.quantization, plan.moe
        document = {
            "command": "inspect",
            "kind": "checkpoint",
            "path": str(path),
            "shards": len(checkpoint.shards),
            "tensors": {"total": total, "banked": len(banked), "dropped": len(dropped)},
            "quantization": asdict(spec),
            "moe": {"layers": format_ranges(moe.layers), "experts": moe.experts, "hidden": moe.hidden,
                    "intermediate": moe.intermediate, "top_k": moe.top_k},
            "tp_sizes": list(legal),
            "expert_bytes": source,
            "other_bytes": rest,
            "findings": [asdict(f) for f in plan.findings],
        }  # fmt: skip
        rows = [
            ("checkpoint", str(path)),
            ("format", f"{spec.format}, {spec.bits}-bit, group size {spec.group_size}"),
            (
                "shards",
                f"{len(checkpoint.shards)}, {total} tensors ({len(banked)} of experts, {len(dropped)} not needed)",
            ),
            (
                "experts",
                f"{moe.experts} a layer (top {moe.top_k}), hidden {moe.hidden}, intermediate {moe.intermediate}",
            ),
            ("layers", f"{format_ranges(moe.layers)} ({len(moe.layers)})"),
            ("bytes", f"{human_bytes(source)} of experts, {human_bytes(rest)} of the rest"),
            ("TP sizes", ", ".join(map(str, legal)) or "none"),
            *findings_rows(plan.findings),
        ]
        return document, rows


def _file(path: Path) -> Described:
    header = read_file_header(path, path.name)
    tensors = {
        name: {"dtype": e.dtype, "shape": list(e.shape), "bytes": e.nbytes} for name, e in header.tensors.items()
    }
    document = {
        "command": "inspect",
        "kind": "file",
        "path": str(path),
        "metadata": header.metadata,
        "tensors": tensors,
    }
    rows = [("file", str(path)), *header.metadata.items()]
    rows += [(name, f"{e.dtype} {list(e.shape)}, {human_bytes(e.nbytes)}") for name, e in header.tensors.items()]
    return document, rows


def describe_summary(
    console: Console, command: str, summary: Summary, plan: Plan, choice: Choice | None = None
) -> Described:
    """What a run did, and the next commands. choice: what it prepared with, if it did."""
    seconds = time.monotonic() - console.started
    folder = str(summary.folder)
    if summary.status == "part":
        steps = [f"sm70-convert seal {folder}"]
    else:
        largest = max(summary.tp_sizes)
        steps = [
            f"sm70-convert verify {folder}",
            f"vllm serve {folder} --load-format sm70_prepared --tensor-parallel-size {largest}",
        ]
    layout = {
        "name": plan.layout.name,
        "interleave_gate_up": plan.layout.interleave_gate_up,
        "group_size": plan.layout.group_size,
    }
    document = {
        "command": command,
        "status": summary.status,
        "folder": folder,
        "layout": layout,
        **({"device": choice.device, "kernel": choice.kernel} if choice else {}),
        "tp_sizes": list(summary.tp_sizes),
        "layers_prepared": list(summary.layers_prepared),
        "layers_resumed": list(summary.layers_resumed),
        "bytes_read": summary.bytes_read,
        "bytes_written": summary.bytes_written,
        "seconds": round(seconds, 3),
        "warnings": list(plan.warnings),
        "findings": [asdict(f) for f in summary.findings],
        "next": steps,
    }
    rate = f" ({human_bytes(summary.bytes_written / seconds)}/s)" if summary.bytes_written else ""
    rows = [
        (summary.status, folder),
        (
            "layers",
            f"{len(summary.layers_prepared)} prepared, {len(summary.layers_resumed)} taken over from an earlier run",
        ),
        ("tp sizes", ", ".join(map(str, summary.tp_sizes))),
        ("layout", describe(plan.layout)),
        *([("kernel", f"{choice.kernel} on {choice.device}")] if choice else []),
        ("read", human_bytes(summary.bytes_read)),
        ("written", f"{human_bytes(summary.bytes_written)} in {human_seconds(seconds)}{rate}"),
        *findings_rows(summary.findings),
        *(("next", step) for step in steps),
    ]
    return document, rows


def describe_plan(decided: Plan, model: str, out: Path | None, passthrough: str) -> Described:
    """What a plan would do and cost."""
    seconds = estimate_seconds(decided, nearest_folder(out or Path()), passthrough)
    sizes = tp_estimates(decided)
    moe, spec = decided.moe, decided.quantization
    source = sum(layer.source_bytes for layer in decided.layers)
    document = {
        "command": "plan",
        "model": model,
        "out": None if out is None else str(out),
        "quantization": asdict(spec),
        "moe": {**asdict(moe), "layers": list(moe.layers)},
        "selected_layers": list(decided.selected),
        "layout": asdict(decided.layout),
        "tp_sizes": list(decided.tp_sizes),
        "expert_source_bytes": source,
        "output_bytes": output_bytes(decided, passthrough),
        "sizes": [asdict(s) for s in sizes],
        "estimated_seconds": None if seconds is None else round(seconds, 1),
        "warnings": list(decided.warnings),
        "findings": [asdict(f) for f in decided.findings],
    }
    zero = " with zero points" if spec.zero_point else ""
    rows = [
        ("checkpoint", model),
        ("format", f"{spec.format}, {spec.bits}-bit, group size {spec.group_size}{zero}"),
        (
            "experts",
            f"{moe.experts} a layer (top {moe.top_k}), hidden {moe.hidden}, intermediate {moe.intermediate}",
        ),
        ("layers", f"{format_ranges(moe.layers)} ({len(moe.layers)})"),
        ("source", f"{human_bytes(source)} of experts"),
    ]
    if decided.tp_sizes:
        wanted = f"TP {', '.join(map(str, decided.tp_sizes))}, layers {format_ranges(decided.selected)}"
        rows += [
            ("to make", f"{wanted}; {describe(decided.layout)}"),
            ("output", human_bytes(output_bytes(decided, passthrough))),
            (
                "time",
                "not estimated" if seconds is None else f"about {human_seconds(seconds)} (one CPU, from a short probe)",
            ),
        ]
    for size in sizes:
        if size.why_not:
            rows.append((f"TP {size.tp_size}", f"no: {size.why_not}"))
            continue
        memory = (
            f"a GPU holds {human_bytes(size.gpu_ready)}, peaks at {human_bytes(size.gpu_peak_prepared)} prepared, "
            f"{human_bytes(size.gpu_peak_runtime)} converting"
        )
        rows.append(
            (
                f"TP {size.tp_size}",
                f"yes: {human_bytes(size.bytes_in)} in, {human_bytes(size.bytes_out)} out a rank; {memory}",
            )
        )
        rows += [("", f"{runtime} asks for {asked}") for runtime, asked in size.asked.items()]
    return document, rows + findings_rows(decided.findings)


def describe_verification(folder: Path, outcome: Verification) -> Described:
    """What a verification compared."""
    what = {
        "quick": "presence and sizes",
        "digests": "headers and digests",
        "source": "digests, and bits made again from the source",
    }
    document: dict[str, Any] = {
        "command": "verify",
        "folder": str(folder),
        "checked": outcome.kind,
        "files": outcome.files,
        "tensors": outcome.tensors,
        "experts": outcome.experts,
        "bytes": outcome.bytes,
        "problems": 0,
    }
    counted = f"{outcome.files} files, {human_bytes(outcome.bytes)}"
    if outcome.kind == "source":
        counted += f"; {outcome.experts} experts, {outcome.tensors} tensors compared bit for bit"
    elif outcome.kind == "digests":
        counted += f", {outcome.tensors} tensors"
    if outcome.against is not None:
        document["against"] = outcome.against
        counted += f"; {outcome.against} recorded digests, all equal"
    return document, [("verified", str(folder)), ("checked", what[outcome.kind]), ("compared", counted)]
