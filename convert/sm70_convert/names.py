"""Tensor name <-> (layer, expert, projection, part): one grammar for all exporters. Pure.

    <prefix>layers.{L}.mlp.experts.{e}.{gate_proj|up_proj|down_proj}.<part>      one tensor an expert
    <prefix>layers.{L}.mlp.experts.{gate_proj|up_proj|down_proj}.{e}.<part>      the same, index last
    <prefix>layers.{L}.mlp.experts.{gate_up_proj|down_proj}[<part>]              all experts in one 3-D tensor

`<prefix>` is `model.`, `model.language_model.`, `language_model.model.`, or a repetition of these; w1, w3, w2 stand for gate, up,
down, and `block_sparse_moe` for `mlp`. Everything else (router, shared experts, `mtp.*`, dense layers) is no expert.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

PROJECTIONS = ("gate", "up", "down")
GATE_UP = "gate_up"

_PROJECTION_OF = {
    "gate_proj": "gate", "w1": "gate", "up_proj": "up", "w3": "up", "down_proj": "down", "w2": "down", "gate_up_proj": GATE_UP,
}  # fmt: skip
_LAYER = r"(?P<prefix>(?:(?:model|language_model)\.)+)layers\.(?P<layer>0|[1-9][0-9]{0,5})\."
_PROJ = r"(?:gate_proj|up_proj|down_proj|w1|w2|w3)"
_INDEX = r"(?:0|[1-9][0-9]{0,5})"
_EXPERT = re.compile(
    rf"{_LAYER}(?:mlp|block_sparse_moe)\.experts\."
    rf"(?:(?P<e1>{_INDEX})\.(?P<p1>{_PROJ})|(?P<p2>{_PROJ})\.(?P<e2>{_INDEX}))\.(?P<part>[A-Za-z0-9_.]+)"
)
_FUSED = re.compile(
    rf"{_LAYER}(?:mlp|block_sparse_moe)\.experts\.(?P<p>gate_up_proj|down_proj)(?:[._](?P<part>[A-Za-z_][A-Za-z0-9_.]*))?"
)
_INSIDE = re.compile(rf"{_LAYER}(?P<module>(?:mlp|block_sparse_moe)\.experts)\.")
_ROUTER = re.compile(rf"{_LAYER}(?:mlp|block_sparse_moe)\.gate\.weight")
_ANY_LAYER = re.compile(_LAYER)
# Fused exporters shorten the part: `gate_up_proj` is the weight itself, `gate_up_proj_scale` its block scales.
_FUSED_PART = {"": "weight", "scale": "weight_scale", "scale_2": "weight_scale_2"}


class ExpertName(NamedTuple):
    """What an expert tensor's name says. `expert` is None for a tensor of all experts (3-D)."""

    prefix: str
    layer: int
    expert: int | None
    projection: str
    part: str
    template: str


def parse(name: str) -> ExpertName | None:
    """The parsed name, or None if `name` is not an expert tensor by the whole grammar."""
    if match := _EXPERT.fullmatch(name):
        which = "e1" if match["e1"] is not None else "e2"
        start, end = match.span(which)
        template = f"{name[:start]}{{expert}}{name[end:]}"
        projection = _PROJECTION_OF[match["p1"] or match["p2"]]
        return ExpertName(match["prefix"], int(match["layer"]), int(match[which]), projection, match["part"], template)
    if match := _FUSED.fullmatch(name):
        part = match["part"] or ""
        part = _FUSED_PART.get(part, part)
        return ExpertName(match["prefix"], int(match["layer"]), None, _PROJECTION_OF[match["p"]], part, name)
    return None


def layer_inside_experts(name: str) -> int | None:
    """The layer of a name that lies in an experts module, whether or not the rest of it is understood."""
    match = _INSIDE.match(name)
    return int(match["layer"]) if match else None


def experts_module(name: str) -> str:
    """The module that an expert tensor belongs to, such as `model.layers.3.mlp.experts`."""
    match = _INSIDE.match(name)
    if match is None:
        raise ValueError(f"{name!r} lies in no experts module")
    return name[: match.end("module")]


def router_layer(name: str) -> int | None:
    """The layer whose router weight `name` is, or None."""
    match = _ROUTER.fullmatch(name)
    return int(match["layer"]) if match else None


def layer_of(name: str) -> int | None:
    """The decoder layer that `name` belongs to, or None (embeddings, vision towers, `mtp.*`)."""
    match = _ANY_LAYER.match(name)
    return int(match["layer"]) if match else None


def format_ranges(numbers: Iterable[int]) -> str:
    """Sorted numbers as `0-3,7`."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def parse_ranges(text: str) -> tuple[int, ...]:
    """`0-3,7` as sorted numbers. Raises ValueError if `text` is not of that form, or names over a million numbers."""
    numbers: set[int] = set()
    for run in text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,6})\s*(?:-\s*([0-9]{1,6})\s*)?", run)
        if match is None:
            raise ValueError(f"{text!r} is not a list of numbers and ranges such as 0-3,7")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise ValueError(f"{run.strip()!r} runs backwards")
        numbers.update(range(first, last + 1))
    return tuple(sorted(numbers))
