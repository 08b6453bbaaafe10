"""LayerReader: the experts of one layer for a run, every byte digested and every scale checked on the way."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from sm70_convert import names
from sm70_convert.bank import HASHES, Digest
from sm70_convert.expert_tensors import LayerPlan
from sm70_convert.experts import ExpertReader, host_buffer
from sm70_convert.layer_findings import LayerFindings
from sm70_convert.manifest import SourceRecord
from sm70_convert.plan import Finding, Plan
from sm70_kernels.spec import Projection

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class LayerReader:
    """Reads experts in order, and knows in the end what the journal is to say of them. Its options are ExpertReader's."""

    def __init__(
        self,
        plan: Plan,
        layer: LayerPlan,
        *,
        allow_nonfinite: bool,
        depth: int = 1,
        new_buffer: Callable[[int], NDArray[np.uint8]] = host_buffer,
    ) -> None:
        self.experts = ExpertReader(plan, layer, depth=depth, new_buffer=new_buffer)
        self._plan, self._layer = plan, layer
        self._digests: list[Digest] = [HASHES[plan.options.hash]() for _ in layer.sources]
        self._found = LayerFindings(plan, layer, allow_nonfinite=allow_nonfinite)

    def read(self, expert: int) -> dict[str, Projection]:
        """The next expert, as ExpertReader.read; experts must come in order. Raises CheckpointError for a scale it refuses."""
        projections = self.experts.read(expert)
        for i, raw in self.experts.raw():
            self._digests[i].update(raw.data)
        self._found.check(expert, projections)
        return projections

    def records(self) -> tuple[SourceRecord, ...]:
        """What was read, with the digests of all experts."""
        experts = names.format_ranges(range(self._plan.moe.experts))
        return tuple(
            SourceRecord(s.template, experts, digest.hexdigest())
            for s, digest in zip(self._layer.sources, self._digests, strict=True)
        )

    def findings(self) -> tuple[Finding, ...]:
        """What was legal but telling, when all experts were read."""
        return self._found.findings()
