"""Generator states of segments: forward draws with a new state, recompute restores it."""

from zsim.model.generator import Draw
from zsim.model.model import Segment
from zsim.schedule.operation import Action
from zsim.zero.names import GENERATOR
from zsim.zero.visit_order import SegmentVisit


class Drawn:
    """Remembers the operation that drew for each micro-batch, unit and segment."""

    def __init__(self) -> None:
        self._forward: dict[tuple[int, int, int], str] = {}

    def draw(
        self, segment: Segment, part: SegmentVisit, which: tuple[int, int], path: str
    ) -> Draw | None:
        """Return the state that the operation `path` draws with; None if the segment draws nothing.

        `which` is the micro-batch and the unit. A recompute restores the state of its forward.
        """
        if segment.draws is None:
            return None
        key = (*which, part.segment)
        if part.action is Action.RECOMPUTE:
            return Draw(generator=GENERATOR[segment.draws], restores=self._forward[key])
        self._forward[key] = path
        return Draw(generator=GENERATOR[segment.draws])
