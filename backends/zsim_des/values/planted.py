"""Possible origins of a gradient that is not finite: each one of a schedule separately.

An origin is a parameter's gradient, or one element of it, of one micro-batch on one rank. Ranks of
the tensor axis that compute the same gradient form one origin.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from zsim.model.model import Model
from zsim.schedule.operation import MAKES_GRADIENTS, Compute, Role, walk
from zsim.schedule.schedule import Schedule
from zsim_des.values.plain import TENSOR


@dataclass(frozen=True, slots=True)
class Planted:
    """In `step`, on every one of `ranks`, backward produces a gradient that is not finite.

    `gradient` is its index among the gradients of the segment, `element` the index in it; None
    means all of them.
    """

    step: int
    ranks: frozenset[int]
    micro_batch: int
    unit: str
    segment: int
    gradient: int | None = None
    element: int | None = None

    def meets(self, rank: int, step: int, compute: Compute) -> bool:
        """Return True if `compute` on `rank` in `step` produces this gradient."""
        return (
            step == self.step
            and rank in self.ranks
            and compute.action in MAKES_GRADIENTS
            and (compute.micro_batch, compute.unit, compute.segment)
            == (self.micro_batch, self.unit, self.segment)
        )


def plantable(schedule: Schedule, model: Model, step: int = 0) -> Iterator[Planted]:
    """Yield one origin for every element of every gradient that a backward produces."""
    copies = {each.name for each in model.parameters if not each.tensor_sharded}
    whole = copies - model.summed_copies
    for ranks in _tensor_groups(schedule):
        for operation in walk(schedule.program_of(min(ranks)).step):
            if not isinstance(operation, Compute) or operation.action not in MAKES_GRADIENTS:
                continue
            names = _parameters(model, operation)
            for number, size in enumerate(_gradients(operation)):
                same = number < len(names) and names[number] in whole
                for element in range(size):
                    for own in [ranks] if same else [frozenset({rank}) for rank in sorted(ranks)]:
                        yield Planted(
                            step,
                            own,
                            operation.micro_batch,
                            operation.unit,
                            operation.segment,
                            number,
                            element,
                        )


def _tensor_groups(schedule: Schedule) -> Iterator[frozenset[int]]:
    """Yield sets of ranks that differ only along the tensor axis."""
    found: dict[tuple[tuple[str, int], ...], list[int]] = {}
    for rank in range(schedule.mesh.size):
        at = schedule.mesh.coordinates(rank)
        others = tuple(each for each in at.items() if each[0] != TENSOR)
        found.setdefault(others, []).append(rank)
    yield from map(frozenset, found.values())


def _parameters(model: Model, backward: Compute) -> tuple[str, ...]:
    for unit in model.units:
        if unit.name == backward.unit and backward.segment < len(unit.segments):
            names = unit.segments[backward.segment].parameters
            return tuple(name for name in names if name not in model.frozen)
    return ()


def _gradients(backward: Compute) -> list[int]:
    return [each.view.size for each in backward.operands if each.role is Role.GRADIENT]
