"""The reference kernel for all experts of a layer, its tensors on any device: slow, and the measure of faster ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from sm70_kernels import reference
from sm70_kernels.spec import LayerProjection, Projection, RawScaleError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

_BITS: dict[torch.dtype, Any] = {torch.int32: np.uint32, torch.float16: np.uint16, torch.uint8: np.uint8}


def prepare_layer(
    gate: LayerProjection,
    up: LayerProjection,
    down: LayerProjection,
    *,
    layout: str,
    interleave: bool,
    outs: Sequence[Mapping[str, torch.Tensor]],
) -> None:
    """Fill the bank tensors of all experts of a layer, for each TP size of `outs`; the arithmetic is done on the host.

    outs: one mapping a TP size T, of contiguous tensors [T, E, ...] on the projections' device, with the names of
    NumpyKernel.prepare: int32 for 32-bit words, float16 for nvfp4-fp16 scales, uint8 for bytes, float32 for raw globals.
    Raises RawScaleError, with `expert`, if nvfp4-raw cannot hold the scales exactly.
    """
    for expert in range(len(gate.weight)):
        projections = [_expert(p, expert) for p in (gate, up, down)]
        for out in outs:
            tp_size = len(out["w13_tm_weight"])
            for rank in range(tp_size):
                try:
                    tensors = reference.prepare_rank(
                        *projections, layout=layout, interleave=interleave, rank=rank, tp_size=tp_size
                    )
                except RawScaleError as exc:
                    exc.expert = expert
                    raise
                for name, tensor in tensors.items():
                    out[name][rank, expert].copy_(tensor)


def _expert(projection: LayerProjection, expert: int) -> Projection:
    def bits(tensor: torch.Tensor) -> NDArray[Any]:
        return tensor[expert].cpu().numpy().view(_BITS[tensor.dtype])

    zeros, factor = projection.zeros, projection.global_scale
    return Projection(
        bits(projection.weight),
        bits(projection.scales),
        None if zeros is None else bits(zeros),
        None if factor is None else np.float32(factor[expert].item()),
    )
