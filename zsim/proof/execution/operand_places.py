"""Places of the operands of a segment, by the inputs and outputs of each action."""

from dataclasses import dataclass
from functools import lru_cache

from zsim.schedule.operation import Action, Compute, Role

READ = (Role.INPUT, Role.SAVED, Role.PARAMETER)
"""Roles that backward reads, besides gradients of forward's outputs."""

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
"""Roles that each action reads, and roles that it makes, in order."""


@dataclass(frozen=True, slots=True)
class OperandPlaces:
    """Places of the operands of a segment: inputs, saved tensors and outputs, in order of roles.

    `counts` is the number of operands of each role that is read.
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
        """Return the places of a segment that runs forward or backward."""
        return _places(compute.action, tuple([each.role for each in compute.operands]))


@lru_cache(maxsize=1024)
def _places(action: Action, roles: tuple[Role, ...]) -> OperandPlaces:
    """Return the places of operands with these roles, the same for all micro-batches."""
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
