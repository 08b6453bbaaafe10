"""ExpertReader: one expert at a time from the checkpoint, into buffers that are used again and again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from sm70_convert import names
from sm70_convert.errors import Problem, UnsupportedError
from sm70_convert.expert_tensors import LayerPlan, SourcePart
from sm70_convert.plan import Plan
from sm70_convert.regular import forget
from sm70_kernels.spec import Projection

if TYPE_CHECKING:
    from numpy.typing import NDArray

_RAW: dict[str, Any] = {
    "I32": np.uint32,
    "F32": np.float32,
    "F16": np.uint16,
    "BF16": np.uint16,
    "U8": np.uint8,
    "F8_E4M3": np.uint8,
}


def host_buffer(nbytes: int) -> NDArray[np.uint8]:
    """Ordinary memory."""
    return np.empty(nbytes, np.uint8)


class ExpertReader:
    """Reads the experts of one layer. The arrays it gives are overwritten `depth` experts later.

    new_buffer(n): memory of n bytes to read into.
    """

    def __init__(
        self,
        plan: Plan,
        layer: LayerPlan,
        *,
        depth: int = 1,
        new_buffer: Callable[[int], NDArray[np.uint8]] = host_buffer,
    ) -> None:
        self._plan = plan
        self._sources = layer.sources
        self._layer = layer.layer
        self._sets = [[new_buffer(s.nbytes) for s in layer.sources] for _ in range(depth)]
        self._buffers = self._sets[0]
        self._by_projection = {
            projection: [i for i, s in enumerate(layer.sources) if s.projection == projection]
            for projection in names.PROJECTIONS
        }

    def read(self, expert: int) -> dict[str, Projection]:
        """The gate, up and down of one expert. Raises CheckpointError if a shard cannot be read."""
        self._buffers = self._sets[expert % len(self._sets)]
        for source, buffer in zip(self._sources, self._buffers, strict=True):
            self._plan.checkpoint.shards[source.files[expert]].read_into(
                source.offsets[expert], memoryview(buffer.data)
            )
        result = {}
        for projection, indices in self._by_projection.items():
            arrays: dict[str, NDArray[Any]] = {}
            dtypes: dict[str, str] = {}
            for i in indices:
                source = self._sources[i]
                arrays[source.part] = self._buffers[i].view(_RAW[source.dtype]).reshape(source.shape)
                dtypes[source.part] = source.dtype
            result[projection] = self._plan.format.projection(arrays, dtypes)
        return result

    def raw(self) -> Iterator[tuple[int, NDArray[np.uint8]]]:
        """The bytes last read, in the order of the layer's sources."""
        return enumerate(self._buffers)

    def forget(self) -> None:
        """Gives the page cache of this layer's sources back."""
        for source in self._sources:
            for file, offset in zip(source.files, source.offsets, strict=True):
                forget(self._plan.checkpoint.shards[file].fd, offset, source.nbytes)

    def scale_source(self, projection: str) -> SourcePart:
        """The scale tensors of one projection, for messages."""
        return next(s for s in self._sources if s.projection == projection and s.part == self._plan.format.scale_part)

    def raw_layout_failed(self, expert: int, projection: str, reason: str) -> UnsupportedError:
        """The refusal of scales that the raw NVFP4 layout cannot hold exactly."""
        source = self.scale_source(projection)
        hint = "convert with --layout nvfp4-fp16, and serve with VLLM_SM70_NVFP4_QWEN38_MOE_RAW_SCALE=0"
        return UnsupportedError(
            Problem(
                f"nvfp4-raw would not be exact: {reason}",
                source.name(expert),
                source.files[expert],
                self._layer,
                hint=hint,
            )
        )
