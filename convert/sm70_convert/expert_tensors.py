"""The expert tensors of each layer: sorted by name, checked against their format, and where each one's bytes lie."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from sm70_convert import names
from sm70_convert.checkpoint import CONFIG, Checkpoint, Refs, TensorRef
from sm70_convert.errors import CheckpointError, Problem, Problems, UnsupportedError
from sm70_convert.formats import Part, SourceFormat
from sm70_convert.layout import NVFP4, MoeShape, QuantizationSpec

_FP4_LOCAL = (".nvfp4_csf_fixed", ".nvfp4_csf_exceptions")
MAX_LISTED = 100
FLOATS = ("BF16", "F16", "F32")


@dataclass(frozen=True, slots=True)
class SourcePart:
    """One part of one projection, for all experts of a layer: where each expert's bytes lie."""

    projection: str
    part: str
    template: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    files: list[str]
    offsets: array[int]

    def name(self, expert: int) -> str:
        """The tensor's name in the checkpoint."""
        return self.template.replace("{expert}", str(expert))


@dataclass(frozen=True, slots=True)
class DroppedPart:
    """Tensors of a layer's experts that the banks do not need."""

    template: str
    experts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """The exact sources of one layer's banks."""

    layer: int
    sources: tuple[SourcePart, ...]
    dropped: tuple[DroppedPart, ...]

    @property
    def source_bytes(self) -> int:
        """Bytes that are read to prepare this layer."""
        return sum(len(s.offsets) * s.nbytes for s in self.sources)


# (projection, part) -> expert -> tensor; a tensor of all experts stands under None.
Parts = dict[tuple[str, str], dict[int | None, TensorRef]]
Names = dict[tuple[str, str], dict[int | None, str]]


@dataclass(slots=True)
class FoundExperts:
    """The expert tensors of one layer as found, and how each kind of them is named."""

    layer: int
    module: str
    parts: Names = field(default_factory=dict)
    templates: dict[tuple[str, str], str] = field(default_factory=dict)
    unsupported: bool = False


def experts_by_layer(checkpoint: Checkpoint, depth: int | None, problems: Problems) -> dict[int, FoundExperts]:
    """Sorts the expert tensors of decoder layers. Layers from num_hidden_layers up are draft (MTP) layers and stay out."""
    found: dict[int, FoundExperts] = {}
    for name, ref in checkpoint.refs.items():
        layer = names.layer_inside_experts(name)
        if layer is None or (depth is not None and layer >= depth):
            continue
        experts = found.setdefault(layer, FoundExperts(layer, names.experts_module(name)))
        parsed = names.parse(name)
        if parsed is None or name.endswith(_FP4_LOCAL):
            if name.endswith(_FP4_LOCAL):
                what, hint = (
                    "holds block scales in NVIDIA's FP4-Local coding, which is not decoded here",
                    "use the plain NVFP4 export",
                )
            elif name.endswith(("experts.weight_scale_2", "experts.weight_scale")):
                what, hint = (
                    "is one global scale for all experts",
                    "use an export with scales for each expert",
                )
            else:
                what, hint = (
                    "lies in the experts, but its name is not understood",
                    "use an export with one tensor an expert",
                )
            problems.add(UnsupportedError, Problem(what, name, ref.file, hint=hint))
            experts.unsupported = True
            continue
        kind = (parsed.projection, parsed.part)
        at = experts.parts.setdefault(kind, {})
        if parsed.expert in at:
            problems.add(CheckpointError, Problem(f"is the same tensor as {at[parsed.expert]}", name, ref.file))
        elif experts.templates.setdefault(kind, parsed.template) != parsed.template:
            problems.add(CheckpointError, Problem(f"is named unlike {next(iter(at.values()))}", name, ref.file))
        at[parsed.expert] = name
    return found


class LayerPlanner:
    """Checks the tensors of one quantised layer against what the format must have, and notes where each lies."""

    def __init__(
        self,
        experts: FoundExperts,
        refs: Refs,
        source: SourceFormat,
        spec: QuantizationSpec,
        moe: MoeShape,
        problems: Problems,
    ) -> None:
        self.experts, self.refs, self.source, self.spec = experts, refs, source, spec
        self.moe, self.problems = moe, problems

    def plan(self) -> LayerPlan | None:
        """The layer's sources, or None if too much is wrong. Everything wrong is noted in `problems`."""
        parts = {kind: {e: self.refs[name] for e, name in at.items()} for kind, at in self.experts.parts.items()}
        plain = self._reject_plain(parts)
        if not self._split_fused(parts):
            return None
        dropped = [
            DroppedPart(self.experts.templates[kind], tuple(sorted(e for e in at if e is not None)))
            for kind, at in sorted(parts.items())
            if kind[1] in self.source.ignored
        ]
        absent = self._reject_missing_experts(parts, plain) | plain
        sources = []
        for projection in names.PROJECTIONS:
            k, n = (self.moe.hidden, self.moe.intermediate)
            if projection == "down":
                k, n = n, k
            for part, wanted in self.source.parts(k, n, self.spec.group_size).items():
                planned = self._source_part(projection, part, wanted, k, parts.pop((projection, part), {}), absent)
                if planned:
                    sources.append(planned)
        self._reject_unknown(parts)
        return LayerPlan(self.experts.layer, tuple(sources), tuple(dropped)) if len(sources) else None

    def _reject_plain(self, parts: Parts) -> set[int]:
        """Unquantised experts beside quantised ones; returns their numbers."""
        plain: set[int] = set()
        for projection in names.PROJECTIONS:
            weights = parts.get((projection, "weight"), {})
            marked = parts.get((projection, self.source.marker), {})
            for expert, ref in list(weights.items()):
                if ref.dtype in FLOATS and expert not in marked:
                    self.problems.add(
                        UnsupportedError,
                        Problem(
                            f"is not quantised ({ref.dtype}), but other experts of its layer are",
                            ref.name,
                            ref.file,
                            hint="quantise all experts of a layer, or none and list the layer in the exclude list",
                        ),
                    )
                    if expert is not None:
                        plain.add(expert)
                    del weights[expert]
        return plain

    def _split_fused(self, parts: Parts) -> bool:
        """Turns 3-D tensors of all experts into one reference an expert: [E, ...], gate rows before up rows.

        False if one of them has a form that cannot be split.
        """
        count, good = self.moe.experts, True
        for (projection, part), at in list(parts.items()):
            if None not in at:
                continue
            ref = at.pop(None)
            inner: tuple[int, ...] = ()
            targets = ("gate", "up") if projection == names.GATE_UP else (projection,)
            if part in self.source.ignored:
                parts.setdefault((projection, part), {}).update(dict.fromkeys(range(count), ref))
                continue
            if part == "weight_scale_2":
                shapes: Sequence[tuple[int, ...]] = [(count,), (count, 1), (count, len(targets))]
                if ref.shape not in shapes:
                    self.problems.add(
                        UnsupportedError,
                        Problem(
                            "is one global scale for all experts",
                            ref.name,
                            ref.file,
                            expected=f"shape {list(shapes[0])}",
                            actual=f"{list(ref.shape)}",
                        ),
                    )
                    good = False
                    continue
                split = len(targets) if prod(ref.shape) > count else 1
            else:
                if (
                    len(ref.shape) != 3
                    or ref.shape[0] != count
                    or ref.shape[1] % len(targets)
                    or self.source.name != NVFP4
                ):
                    self.problems.add(
                        UnsupportedError,
                        Problem(
                            "holds all experts in a form that is not supported",
                            ref.name,
                            ref.file,
                            expected=f"[{count}, rows, columns] of NVFP4",
                            actual=f"{list(ref.shape)}",
                        ),
                    )
                    good = False
                    continue
                split, inner = len(targets), (ref.shape[1] // len(targets), ref.shape[2])
            size = ref.nbytes // (count * split)
            for i, target in enumerate(targets):
                experts = parts.setdefault((target, part), {})
                self.experts.templates[target, part] = self.experts.templates[projection, part]
                for e in range(count):
                    offset = ref.offset + (e * split + (i if split > 1 else 0)) * size
                    experts[e] = TensorRef(ref.name, ref.file, ref.dtype, inner, offset, size)
            if not at and projection == names.GATE_UP:
                del parts[projection, part]
        return good

    def _reject_missing_experts(self, parts: Parts, plain: set[int]) -> set[int]:
        """Experts without any tensor, and expert numbers beyond the config's; returns the missing ones."""
        present = {e for at in parts.values() for e in at if e is not None}
        missing = set(range(self.moe.experts)) - present - plain
        if len(missing) > MAX_LISTED:
            some = f"experts {names.format_ranges(missing)[:200]} of {self.moe.experts} have no tensors"
            self.problems.add(CheckpointError, Problem(some, self._name("gate", self.source.marker, min(missing))))
        for expert in sorted(missing) if len(missing) <= MAX_LISTED else ():
            self.problems.add(
                CheckpointError,
                Problem(
                    f"expert {expert} of {self.moe.experts} has no tensors",
                    self._name("gate", self.source.marker, expert),
                ),
            )
        for at in parts.values():
            for number, ref in at.items():
                if number is not None and number >= self.moe.experts:
                    self.problems.add(
                        CheckpointError,
                        Problem(f"expert number is beyond the {self.moe.experts} of {CONFIG}", ref.name, ref.file),
                    )
        return missing

    def _source_part(
        self,
        projection: str,
        part: str,
        wanted: Part,
        k: int,
        at: Mapping[int | None, TensorRef],
        absent: set[int],
    ) -> SourcePart | None:
        files: list[str] = []
        offsets: array[int] = array("q")
        good = True
        first: TensorRef | None = None
        for expert in range(self.moe.experts):
            if expert in absent:
                continue
            if expert not in at:
                self.problems.add(CheckpointError, Problem("is missing", self._name(projection, part, expert)))
                good = False
                continue
            ref = at[expert]
            if ref.dtype in wanted.dtypes:
                first = first or ref
            if first is None or ref.dtype != first.dtype:
                expected = first.dtype if first else " or ".join(wanted.dtypes)
                self.problems.add(
                    CheckpointError,
                    Problem("has the wrong dtype", ref.name, ref.file, expected=expected, actual=ref.dtype),
                )
                good = False
            elif ref.shape not in wanted.shapes:
                self.problems.add(CheckpointError, self._wrong_shape(ref, part, wanted, k))
                good = False
            files.append(ref.file)
            offsets.append(ref.offset)
        if not good or first is None:
            return None
        template = self.experts.templates[projection, part]
        return SourcePart(projection, part, template, first.dtype, first.shape, first.nbytes, files, offsets)

    def _wrong_shape(self, ref: TensorRef, part: str, wanted: Part, k: int) -> Problem:
        group = self.source.group_of(k, ref.shape) if part == self.source.scale_part else None
        if group not in (None, self.spec.group_size):
            message = f"its shape says group size {group}, {CONFIG} says {self.spec.group_size}"
        else:
            message = "has the wrong shape for this model"
        return Problem(message, ref.name, ref.file, expected=f"{list(wanted.shapes[0])}", actual=f"{list(ref.shape)}")

    def _name(self, projection: str, part: str, expert: int) -> str:
        """What the tensor would be called here, after one of its like that exists."""
        usual = f"{self.experts.module}.{{expert}}.{projection}_proj.{part}"
        return self.experts.templates.get((projection, part), usual).replace("{expert}", str(expert))

    def _reject_unknown(self, parts: Parts) -> None:
        for (_, part), at in parts.items():
            if part in self.source.ignored:
                continue
            for ref in at.values():
                hint = "act-order checkpoints cannot be prepared" if part == "g_idx" else None
                what = f"is no part of an expert in {self.source.name} that can be prepared"
                self.problems.add(UnsupportedError, Problem(what, ref.name, ref.file, hint=hint))
