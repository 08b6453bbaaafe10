"""LayerFindings: what the scales of one layer show, refused where not finite and noted where legal but telling."""

from __future__ import annotations

from array import array

from sm70_convert import names
from sm70_convert.errors import CheckpointError, Problem
from sm70_convert.expert_tensors import LayerPlan
from sm70_convert.plan import Finding, Plan
from sm70_kernels.spec import Projection

FAR_LARGER = 64


class LayerFindings:
    """Collects expert by expert, in any order; the findings are the same for any order.

    An expert whose largest scale is more than FAR_LARGER times the median of its layer is noted, for each projection alone. The
    median is that of the experts' largest scales, the upper of the two middle ones, without those that are zero or not finite: so
    a few are noted, never half of them.
    """

    def __init__(self, plan: Plan, layer: LayerPlan, *, allow_nonfinite: bool = False) -> None:
        self._format, self._layer, self._allow_nonfinite = plan.format, layer.layer, allow_nonfinite
        self._sources = {(s.projection, s.part): s for s in layer.sources}
        self._largest = {p: array("d", bytes(8 * plan.moe.experts)) for p in names.PROJECTIONS}
        # message -> how often, and the first (expert, projection, part)
        self._notes: dict[str, tuple[int, tuple[int, int, str]]] = {}

    def check(self, expert: int, projections: dict[str, Projection]) -> None:
        """Notes what one expert's scales show. Raises CheckpointError for scales not finite in fp16, unless they are allowed."""
        refused = []
        for projection, p in projections.items():
            report = self._format.check_scales(p)
            self._largest[projection][expert] = report.largest
            for message, part in report.notes:
                self._note(message, expert, projection, part)
            if report.nonfinite and self._allow_nonfinite:
                message = "scales that are not finite in fp16 were kept"
                self._note(message, expert, projection, self._format.scale_part)
            elif report.nonfinite:
                source = self._sources[projection, self._format.scale_part]
                hint = "export the checkpoint again, or keep such values as the runtime would with --allow-nonfinite"
                file = source.files[expert]
                refused.append(Problem(report.nonfinite, source.name(expert), file, self._layer, hint=hint))
        if refused:
            raise CheckpointError(*refused)
        if self._format.global_part and projections["gate"].global_scale != projections["up"].global_scale:
            self._note("gate and up have different global scales", expert, "gate", self._format.global_part)

    def findings(self) -> tuple[Finding, ...]:
        """One finding for each thing noted, when all experts were checked: how often, and the first tensor that shows it."""
        for projection, largest in self._largest.items():
            ordinary = sorted(value for value in largest if 0 < value < float("inf"))
            limit = FAR_LARGER * ordinary[len(ordinary) // 2] if ordinary else float("inf")
            for expert, value in enumerate(largest):
                if limit < value < float("inf"):
                    message = f"largest scale is over {FAR_LARGER} times the median of its layer's experts"
                    self._note(message, expert, projection, self._format.scale_part)
        found = []
        for message, (count, (expert, index, part)) in sorted(self._notes.items()):
            example = self._sources[names.PROJECTIONS[index], part].name(expert)
            found.append(Finding(message, example, count, self._layer))
        return tuple(found)

    def _note(self, message: str, expert: int, projection: str, part: str) -> None:
        place = (expert, names.PROJECTIONS.index(projection), part)
        count, first = self._notes.get(message, (0, place))
        self._notes[message] = count + 1, min(first, place)
