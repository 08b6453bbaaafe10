"""The types that the kernels share: what a projection looks like, and why a raw NVFP4 bank can fail."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np
    import torch
    from numpy.typing import NDArray


class Projection(NamedTuple):
    """One projection (gate, up or down) of one expert, uncut, as raw bits; K in-features, N out-features, G = K / group.

    weight: AWQ uint32 [K, N/8]; NVFP4 uint8 [N, K/2] (low nibble = even k).
    scales: AWQ uint16 [G, N] (fp16 bits); NVFP4 uint8 [N, K/16] (e4m3 codes).
    zeros: AWQ uint32 [G, N/8]; NVFP4 None.
    global_scale: NVFP4 fp32 factor of all scales; AWQ None.
    """

    weight: NDArray[Any]
    scales: NDArray[Any]
    zeros: NDArray[Any] | None
    global_scale: np.float32 | None


class LayerProjection(NamedTuple):
    """One projection (gate, up or down) of all E experts of a layer, uncut, as contiguous tensors on one device.

    weight: AWQ int32 [E, K, N/8]; NVFP4 uint8 [E, N, K/2] (low nibble = even k).
    scales: AWQ float16 [E, G, N]; NVFP4 uint8 [E, N, K/16] (e4m3 codes).
    zeros: AWQ int32 [E, G, N/8]; NVFP4 None.
    global_scale: NVFP4 float32 [E], the factor of all scales of an expert; AWQ None.
    """

    weight: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    global_scale: torch.Tensor | None


class HostKernel(Protocol):
    """A kernel that prepares one expert in host memory; NumpyKernel says how. One instance per thread."""

    def prepare(
        self,
        gate: Projection,
        up: Projection,
        down: Projection,
        *,
        layout: str,
        interleave: bool,
        outs: Sequence[Mapping[str, NDArray[Any]]],
    ) -> None:
        """Fills the bank tensors of one expert, for each TP size of `outs`."""


class RawScaleError(ValueError):
    """A projection whose scales the raw NVFP4 layout cannot hold exactly.

    projection: "gate", "up" or "down". reason: one sentence with the failing code, global and values. expert: which one
    of a layer, from a kernel that takes layers.
    """

    def __init__(self, projection: str, reason: str) -> None:
        super().__init__(f"{projection}: {reason}")
        self.projection = projection
        self.reason = reason
        self.expert: int | None = None
