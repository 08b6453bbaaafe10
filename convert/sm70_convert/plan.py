"""build_plan(): everything about a conversion decided from headers alone, with every problem found at once."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from sm70_convert import names
from sm70_convert.checkpoint import CONFIG, INDEX, Checkpoint, TensorRef
from sm70_convert.errors import CheckpointError, Problem, Problems, Sm70Error, UnsupportedError, UsageError
from sm70_convert.expert_tensors import FLOATS, FoundExperts, LayerPlan, LayerPlanner, experts_by_layer
from sm70_convert.formats import SourceFormat, contradiction, is_excluded, source_format
from sm70_convert.layout import (
    AWQ,
    LAYOUTS,
    NVFP4,
    Layout,
    MoeShape,
    QuantizationSpec,
    asked_layout,
    bank_tensors,
    runtime_takes,
)
from sm70_convert.tensor_parallel import legal_sizes, why_not

MAX_EXPERTS = 500_000  # of all layers: what a small config.json claims must not take hours to look for
_METHODS = {"awq": AWQ, "modelopt": NVFP4, "modelopt_fp4": NVFP4, "modelopt_mixed": NVFP4, "nvfp4": NVFP4}
# Spellings of one number, the commonest first.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_TOP_K = ("num_experts_per_tok", "moe_topk", "num_experts_per_token")
MAX_EXTRAS = 10_000
MAX_RECORDS = 12_000_000  # bytes of what passes through in a manifest, whose own limit is 16 MB
MAX_COUNT = 65_536  # experts of a layer, layers of a model
_OUR_TENSORS = "sm70_prepared_checkpoint."  # the sentinel's: the output's index would give such a tensor to its file
_OURS = ("sm70", "SHA256SUMS", "sm70-sentinel.safetensors")


@dataclass(frozen=True, slots=True)
class Options:
    """What a user chose. tp_sizes may be empty for `plan`, which shows all sizes."""

    tp_sizes: tuple[int, ...] = ()
    runtime: str = "revolta"
    layout: str = "auto"
    interleave: str = "auto"
    layers: tuple[int, ...] | None = None
    hash: str = "blake3"


@dataclass(frozen=True, slots=True)
class Finding:
    """Something legal but telling, counted over one layer (None: the whole checkpoint)."""

    message: str
    example: str
    count: int
    layer: int | None = None


def in_order(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Findings as they are always listed: of the whole checkpoint, then layer by layer."""
    return tuple(sorted(findings, key=lambda f: (-1 if f.layer is None else f.layer, f.message)))


@dataclass(frozen=True, slots=True)
class PassthroughShard:
    """A source shard of which something passes through. whole: byte for byte; else rewritten with `tensors` alone."""

    name: str
    whole: bool
    tensors: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """A conversion, decided. `layers` are all MoE layers; `selected` those that this run prepares."""

    checkpoint: Checkpoint = field(repr=False)
    options: Options
    format: SourceFormat = field(repr=False)
    quantization: QuantizationSpec
    moe: MoeShape
    layout: Layout
    tp_sizes: tuple[int, ...]
    layers: tuple[LayerPlan, ...] = field(repr=False)
    selected: tuple[int, ...]
    passthrough: tuple[PassthroughShard, ...] = field(repr=False)
    findings: tuple[Finding, ...]
    warnings: tuple[str, ...]

    def bank_bytes(self, tp_size: int) -> int:
        """Bytes of one layer's bank of one rank."""
        return self.moe.experts * sum(t.nbytes for t in bank_tensors(self.layout, self.moe, tp_size))


def build_plan(checkpoint: Checkpoint, options: Options) -> Plan:
    """Decides a conversion from headers. Raises one error with every problem found; reads no tensor.

    The plan takes the expert tensors over from `checkpoint.refs`, in a compact form: only what passes through stays there.
    """
    problems = Problems()
    found = experts_by_layer(checkpoint, _size(checkpoint, "num_hidden_layers", limit=MAX_COUNT), problems)
    spec = _quantization(checkpoint, found, problems)
    moe = _moe_shape(checkpoint, problems)
    if spec is None or moe is None:
        problems.raise_if_any()
        raise AssertionError("unreachable")
    source = source_format(spec.format)
    _check_layers_present(checkpoint, found, moe, problems)
    if len(found) * moe.experts > MAX_EXPERTS:
        what, claimed = "has too many experts in all its layers", f"{len(found)} layers of {moe.experts}"
        problems.add(UnsupportedError, Problem(what, file=CONFIG, expected=f"at most {MAX_EXPERTS}", actual=claimed))
        problems.raise_if_any()
    findings = list(_checkpoint_findings(checkpoint))
    layers: list[LayerPlan] = []
    if drafts := _draft_experts(checkpoint):
        findings.append(
            Finding("expert tensors of layers beyond num_hidden_layers pass through", drafts[0], len(drafts))
        )
    for layer in sorted(found):
        experts = found.pop(layer)
        if experts.unsupported:
            continue
        if _is_plain(checkpoint, experts, source, problems):
            findings.append(Finding("layer is not quantised and passes through", experts.module, 1, layer))
        elif planned := LayerPlanner(experts, checkpoint.refs, source, spec, moe, problems).plan():
            layers.append(planned)
            if problems:
                continue
            if dropped := dropped_names([planned]):
                message = "tensors that the banks do not need are left out"
                findings.append(Finding(message, min(dropped), len(dropped), layer))
            for name in banked_names([planned]) | dropped:
                del checkpoint.refs[name]
    moe = MoeShape(tuple(p.layer for p in layers), moe.experts, moe.hidden, moe.intermediate, moe.top_k)
    if not layers and not problems:
        problems.add(UnsupportedError, Problem("no quantised MoE experts in it", file=str(checkpoint.folder)))
    layout, warnings = _layout(options, spec, moe, problems)
    for tp_size in options.tp_sizes:
        if reason := why_not(spec, moe, tp_size, layout):
            legal = ", ".join(map(str, legal_sizes(spec, moe, layout))) or "none"
            first = layers[0].sources[0].name(0) if layers else None
            problems.add(
                UnsupportedError,
                Problem(
                    f"TP size {tp_size} is not possible: {reason}",
                    tensor=first,
                    hint=f"TP sizes that work for this checkpoint: {legal}",
                ),
            )
    unknown = sorted(set(options.layers or ()) - set(moe.layers))
    if unknown and layers:
        problems.add(
            UsageError,
            Problem(
                f"--layers names {names.format_ranges(unknown)}, but the MoE layers are {names.format_ranges(moe.layers)}"
            ),
        )
    _check_names(checkpoint, problems)
    _check_records(checkpoint, problems)
    _check_extras(checkpoint, problems)
    problems.raise_if_any()
    return Plan(
        checkpoint=checkpoint,
        options=options,
        format=source,
        quantization=spec,
        moe=moe,
        layout=layout,
        tp_sizes=options.tp_sizes,
        layers=tuple(layers),
        selected=options.layers if options.layers is not None else moe.layers,
        passthrough=tuple(_passthrough(checkpoint)),
        findings=tuple(findings),
        warnings=tuple(warnings),
    )


def _text_config(checkpoint: Checkpoint) -> Mapping[str, Any]:
    nested = checkpoint.config.get("text_config")
    return nested if isinstance(nested, dict) else {}


def _size(checkpoint: Checkpoint, *keys: str, limit: int = 1 << 31) -> int | None:
    """The first of `keys` that config.json (or its text_config) has, if it is a whole number from 1 to `limit`."""
    for holder in (_text_config(checkpoint), checkpoint.config):
        for key in keys:
            value = holder.get(key)
            if value is not None:
                return value if type(value) is int and 0 < value <= limit else None
    return None


def _moe_shape(checkpoint: Checkpoint, problems: Problems) -> MoeShape | None:
    experts = _size(checkpoint, *_EXPERTS, limit=MAX_COUNT)
    hidden = _size(checkpoint, "hidden_size")
    intermediate = _size(checkpoint, "moe_intermediate_size", "intermediate_size")
    top_k = _size(checkpoint, *_TOP_K)
    depth = _size(checkpoint, "num_hidden_layers", limit=MAX_COUNT)
    for what, value in (("num_experts", experts), ("hidden_size", hidden), ("moe_intermediate_size", intermediate),
                        ("num_experts_per_tok", top_k), ("num_hidden_layers", depth)):  # fmt: skip
        if value is None:
            kind = UnsupportedError if what == "num_experts" else CheckpointError
            problems.add(
                kind,
                Problem(
                    f"{what} is missing, or no whole number in range",
                    file=CONFIG,
                    hint="only MoE checkpoints with a complete config.json can be prepared",
                ),
            )
    for holder, keys in product((_text_config(checkpoint), checkpoint.config), (_EXPERTS, _TOP_K)):
        if problem := contradiction(holder, keys):
            problems.add(CheckpointError, problem)
    if experts is None or hidden is None or intermediate is None or top_k is None or depth is None:
        return None
    if top_k > experts:
        problems.add(
            CheckpointError,
            Problem(
                "num_experts_per_tok is more than there are experts",
                file=CONFIG,
                expected=f"at most {experts}",
                actual=str(top_k),
                hint="mend config.json after the model's own",
            ),
        )
    return MoeShape((), experts, hidden, intermediate, top_k)


def _quantization(
    checkpoint: Checkpoint, found: Mapping[int, FoundExperts], problems: Problems
) -> QuantizationSpec | None:
    config = checkpoint.quantization
    method = str(config.get("quant_method", "")).lower()
    if not config:
        problems.add(
            UnsupportedError,
            Problem("has no quantization_config", file=CONFIG, hint="only AWQ and NVFP4 checkpoints can be prepared"),
        )
        return None
    if method not in _METHODS:
        problems.add(
            UnsupportedError,
            Problem(
                f"quant_method {method!r} is not supported",
                file=CONFIG,
                hint="only awq and modelopt (NVFP4) can be prepared",
            ),
        )
        return None
    try:
        return source_format(_METHODS[method]).spec(config, tuple(e.module for e in found.values()))
    except Sm70Error as exc:
        for problem in exc.problems:
            problems.add(type(exc), problem)
        return None


def _draft_experts(checkpoint: Checkpoint) -> list[str]:
    """Expert tensors of draft (MTP) layers, which are numbered from num_hidden_layers up."""
    depth = _size(checkpoint, "num_hidden_layers", limit=MAX_COUNT) or 0
    return [name for name in checkpoint.refs if (names.layer_inside_experts(name) or 0) >= depth]


def _check_layers_present(
    checkpoint: Checkpoint, found: Mapping[int, FoundExperts], moe: MoeShape, problems: Problems
) -> None:
    """A decoder layer without any tensor, or with a router and no experts, is a hole in the checkpoint."""
    depth = _size(checkpoint, "num_hidden_layers", limit=MAX_COUNT) or 0
    present: set[int] = set()
    for name, ref in checkpoint.refs.items():
        layer = names.layer_of(name)
        if layer is not None:
            present.add(layer)
        router = names.router_layer(name)
        if router is not None and router < depth and router not in found:
            problems.add(
                CheckpointError,
                Problem(f"layer {router} has a router but none of its {moe.experts} experts", name, ref.file),
            )
    holes = sorted(set(range(depth)) - present)
    if holes:
        where = INDEX if checkpoint.index_digests is not None else None
        problems.add(
            CheckpointError,
            Problem(f"no tensor at all of decoder layers {names.format_ranges(holes)}", file=where),
        )


def _is_plain(checkpoint: Checkpoint, experts: FoundExperts, source: SourceFormat, problems: Problems) -> bool:
    """Whether this layer's experts are all unquantised and the config says so too; they pass through then."""
    tensors = [checkpoint.refs[name] for at in experts.parts.values() for name in at.values()]
    quantised = any(part != "weight" for _, part in experts.parts) or any(ref.dtype not in FLOATS for ref in tensors)
    excluded = is_excluded(checkpoint.quantization, experts.module)
    if not quantised and not excluded:
        # Some exporters list each linear layer instead of the module that holds them.
        excluded = all(is_excluded(checkpoint.quantization, ref.name.rpartition(".")[0]) for ref in tensors)
    if quantised != excluded:
        return excluded
    if excluded:
        what = "is quantised, but the exclude list of quantization_config says that its layer is not"
    else:
        dtype = tensors[0].dtype
        what = f"is not quantised ({dtype}), but quantization_config says {source.name} and does not exclude its layer"
    problems.add(CheckpointError, Problem(what, tensors[0].name, tensors[0].file))
    return True


def _layout(options: Options, spec: QuantizationSpec, moe: MoeShape, problems: Problems) -> tuple[Layout, list[str]]:
    """The one layout of the folder, and warnings where the runtime would not take it."""
    tp_sizes = options.tp_sizes or (1,)
    asked = {tp_size: asked_layout(options.runtime, spec, moe, tp_size) for tp_size in tp_sizes}
    if options.layout != "auto" and options.layout not in LAYOUTS[spec.format]:
        problems.add(
            UsageError,
            Problem(
                f"--layout {options.layout} is not for {spec.format} experts",
                hint=f"use one of: {', '.join(LAYOUTS[spec.format])}",
            ),
        )
    chosen = {
        tp_size: Layout(
            a.name if options.layout == "auto" else options.layout,
            a.interleave_gate_up if options.interleave == "auto" else options.interleave == "on",
            a.group_size,
        )
        for tp_size, a in asked.items()
    }
    layout = chosen[tp_sizes[0]]
    if len(set(chosen.values())) > 1:
        forms = "; ".join(
            f"TP {t}: {c.name}, interleave {'on' if c.interleave_gate_up else 'off'}" for t, c in chosen.items()
        )
        problems.add(
            UsageError,
            Problem(
                f"these TP sizes want different layouts, and a folder holds one ({forms})",
                hint="use one --out for each, or choose with --layout and --interleave",
            ),
        )
    warnings = []
    for tp_size in options.tp_sizes:
        if reason := runtime_takes(options.runtime, spec, moe, tp_size):
            warnings.append(reason)
        if chosen[tp_size] != asked[tp_size]:
            a = asked[tp_size]
            state = "on" if a.interleave_gate_up else "off"
            warnings.append(
                f"by default {options.runtime} asks for {a.name}, interleave {state}, at TP {tp_size}: set its flags to match"
            )
    return layout, list(dict.fromkeys(warnings))


def _checkpoint_findings(checkpoint: Checkpoint) -> Iterator[Finding]:
    if checkpoint.stale:
        example = checkpoint.stale[0]
        yield Finding(
            "tensors in shards that the index does not give them to; ignored",
            f"{example.name} ({example.file})",
            len(checkpoint.stale),
        )
    if checkpoint.unindexed:
        yield Finding("files that the index does not name; ignored", checkpoint.unindexed[0], len(checkpoint.unindexed))
    if checkpoint.unfollowed:
        message = "symlinks to folders, which are not followed; left out"
        yield Finding(message, checkpoint.unfollowed[0], len(checkpoint.unfollowed))


def _check_names(checkpoint: Checkpoint, problems: Problems) -> None:
    for name, ref in checkpoint.refs.items():
        if name.startswith(_OUR_TENSORS):
            hint = "convert from the source checkpoint, without that tensor"
            problems.add(
                CheckpointError,
                Problem("has a name that prepared folders use for themselves", name, ref.file, hint=hint),
            )


def _check_records(checkpoint: Checkpoint, problems: Problems) -> None:
    """A manifest names each tensor that passes through, with its digest; one that is too large could not be read again."""
    needed = sum(len(json.dumps(name)) + 80 for name in checkpoint.refs)
    if needed > MAX_RECORDS:
        message = f"the {len(checkpoint.refs)} tensors that would pass through are too many for a manifest"
        expected, actual = f"at most {MAX_RECORDS} bytes of names and digests", str(needed)
        problems.add(UnsupportedError, Problem(message, file=str(checkpoint.folder), expected=expected, actual=actual))


def _check_extras(checkpoint: Checkpoint, problems: Problems) -> None:
    if len(checkpoint.extras) > MAX_EXTRAS:
        problems.add(CheckpointError, Problem(f"holds more than {MAX_EXTRAS} other files", file=str(checkpoint.folder)))
    for name in checkpoint.extras:
        if any("\ud800" <= c <= "\udfff" for c in name):
            message = "has a name that is not UTF-8, which a manifest cannot hold"
            problems.add(CheckpointError, Problem(message, file=name, hint="rename or move the file, then run again"))
    for name in (*checkpoint.extras, *checkpoint.shards):
        if name.split("/")[0] in _OURS:
            problems.add(
                CheckpointError,
                Problem(
                    "has a name that prepared folders use for themselves",
                    file=name,
                    hint="convert from the source checkpoint, without that file",
                ),
            )


def banked_names(layers: Sequence[LayerPlan]) -> set[str]:
    """Every source tensor that goes into a bank."""
    return {s.name(e) for layer in layers for s in layer.sources for e in range(len(s.offsets))}


def dropped_names(layers: Sequence[LayerPlan]) -> set[str]:
    """Every source tensor that neither banks nor the passthrough keep."""
    return {d.template.replace("{expert}", str(e)) for layer in layers for d in layer.dropped for e in d.experts}


def _passthrough(checkpoint: Checkpoint) -> Iterator[PassthroughShard]:
    """What is left of each shard. A shard is handed on whole only if the index gives it every tensor it holds."""
    kept: dict[str, list[TensorRef]] = {}
    for ref in checkpoint.refs.values():
        kept.setdefault(ref.file, []).append(ref)
    for file, refs in sorted(kept.items()):
        tensors = tuple(r.name for r in sorted(refs, key=lambda r: r.offset))
        yield PassthroughShard(file, len(tensors) == checkpoint.shards[file].tensors, tensors)
