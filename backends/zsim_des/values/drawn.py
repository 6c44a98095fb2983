"""Random numbers in a run with exact values: the mask that each generator state draws."""

from zsim.model.generator import Draws
from zsim.model.model import Model
from zsim.schedule.mesh import Coordinates
from zsim.schedule.operation import Compute
from zsim.schedule.schedule import Schedule
from zsim_des.values.plain import TENSOR
from zsim_des.values.truth import mask, replica_of

Segments = frozenset[tuple[str, int]]
"""Segments by unit name and number."""


def independent_draws(model: Model) -> Segments:
    """Return the segments in which ranks of the tensor axis draw different masks."""
    return frozenset(
        (unit.name, place)
        for unit in model.units
        for place, segment in enumerate(unit.segments)
        if segment.draws is Draws.APART
    )


class Masks:
    """Masks by the generator states that draw them.

    A state that draws for the first time draws the mask of plain training at that place, unless
    another state already drew it. Later draws of the same state repeat its first mask, wherever
    they occur. No other state draws that mask.
    """

    def __init__(self, schedule: Schedule, apart: Segments) -> None:
        self._schedule = schedule
        self._apart = apart
        self._by_state: dict[object, str] = {}
        self._drawn: dict[str, object] = {}

    def draw(self, compute: Compute, coordinates: Coordinates, step: int, number: float) -> str:
        """Return the mask that state `number` of a rank's generator draws; "" if none is drawn."""
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
