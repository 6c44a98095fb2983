"""Places of the operands of a segment, by what each action reads and makes."""

from dataclasses import dataclass
from functools import lru_cache

from zsim.schedule.operation import Action, Compute, Role

READ = (Role.INPUT, Role.SAVED, Role.PARAMETER)
"""Roles of what backward reads, beside gradients of what forward made."""

FORWARD = ((Role.INPUT, Role.PARAMETER), (Role.OUTPUT, Role.SAVED))
ROLES = {
    Action.FORWARD: FORWARD,
    Action.RECOMPUTE: FORWARD,
    Action.BACKWARD: ((*READ, Role.OUTPUT_GRADIENT), (Role.GRADIENT, Role.INPUT_GRADIENT)),
    Action.BACKWARD_INPUT: (
        (*READ, Role.OUTPUT_GRADIENT),
        (Role.INTERMEDIATE_GRADIENT, Role.INPUT_GRADIENT),
    ),
    Action.BACKWARD_WEIGHT: ((*READ, Role.INTERMEDIATE_GRADIENT), (Role.GRADIENT,)),
}
"""Roles of what each action reads and makes, in order."""


@dataclass(frozen=True, slots=True)
class OperandPlaces:
    """Places of the operands of a segment: what it reads, saves and makes, in order of roles.

    `counts` is how many there are of each role that is read.
    """

    reads: tuple[int, ...]
    counts: tuple[int, ...]
    saved: tuple[int, ...]
    makes: tuple[int, ...]
    gradients: tuple[int, ...]
    intermediates: tuple[int, ...]
    workspaces: tuple[int, ...]

    @classmethod
    def of(cls, compute: Compute) -> "OperandPlaces":
        """Return those of a segment that runs forward or backward."""
        return _places(compute.action, tuple([each.role for each in compute.operands]))


@lru_cache(maxsize=1024)
def _places(action: Action, roles: tuple[Role, ...]) -> OperandPlaces:
    """Return the places of operands that have these roles, the same for all micro-batches."""
    of: dict[Role, list[int]] = {role: [] for role in Role}
    for place, role in enumerate(roles):
        of[role].append(place)
    reads, makes = ROLES[action]
    return OperandPlaces(
        reads=tuple(place for role in reads for place in of[role]),
        counts=tuple(len(of[role]) for role in reads),
        saved=tuple(of[Role.SAVED]),
        makes=tuple(place for role in makes for place in of[role]),
        gradients=tuple(of[Role.GRADIENT]),
        intermediates=tuple(of[Role.INTERMEDIATE_GRADIENT]),
        workspaces=tuple(of[Role.WORKSPACE]),
    )
