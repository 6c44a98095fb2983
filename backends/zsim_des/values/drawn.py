"""Random numbers in a run with exact values: which mask each state of a generator draws."""

from zsim.model.generator import Draws
from zsim.model.model import Model
from zsim.schedule.mesh import Coordinates
from zsim.schedule.operation import Compute
from zsim.schedule.schedule import Schedule
from zsim_des.values.plain import TENSOR
from zsim_des.values.truth import mask, replica_of

Segments = frozenset[tuple[str, int]]
"""Unit and number of segments."""


def drawn_apart(model: Model) -> Segments:
    """Segments in which ranks of the tensor axis draw different masks."""
    return frozenset(
        (unit.name, place)
        for unit in model.units
        for place, segment in enumerate(unit.segments)
        if segment.draws is Draws.APART
    )


class Masks:
    """Masks by the states that draw them.

    A state that draws for the first time draws what plain training draws there, if nothing else
    has. A state that has drawn draws the same again, wherever it is; what has been drawn is not
    drawn by another state.
    """

    def __init__(self, schedule: Schedule, apart: Segments) -> None:
        self._schedule = schedule
        self._apart = apart
        self._by_state: dict[object, str] = {}
        self._drawn: dict[str, object] = {}

    def draw(self, compute: Compute, coordinates: Coordinates, step: int, number: float) -> str:
        """Return the mask that state `number` of a rank's generator draws; none without one."""
        if compute.draw is None:
            return ""
        generators = {each.name: each for each in self._schedule.generators}
        axes = generators[compute.draw.generator].axes
        state = (compute.draw.generator, number, *(coordinates[axis] for axis in axes))
        apart = (compute.unit, compute.segment) in self._apart
        wanted = mask(
            (replica_of(self._schedule, coordinates), step, compute.micro_batch),
            f"{compute.unit}/{compute.segment}",
            coordinates.get(TENSOR, 0) if apart else None,
        )
        drawn = self._by_state.setdefault(state, wanted)
        if drawn == wanted and self._drawn.setdefault(wanted, state) == state:
            return wanted
        return f"{drawn} by {state}"
