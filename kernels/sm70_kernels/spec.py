"""The types that every kernel shares: what one expert's projection looks like, and why a raw NVFP4 bank can fail."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import numpy as np
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


class RawScaleError(ValueError):
    """A projection whose scales the raw NVFP4 layout cannot hold exactly.

    projection: "gate", "up" or "down". reason: one sentence with the failing code, global and values.
    """

    def __init__(self, projection: str, reason: str) -> None:
        super().__init__(f"{projection}: {reason}")
        self.projection = projection
        self.reason = reason
