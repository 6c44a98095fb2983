"""Operands of a `Compute`: what is known of an operation from one step to the next."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from zsim.schedule.operation import Compute, Role, View
from zsim.schedule.schedule import Program
from zsim_torch.module.entered import Leaves
from zsim_torch.module.unit import TorchUnit
from zsim_torch.module.visit import LaterUses, Visit, views_of, visit_of

InputKey = tuple[str, int, int]
"""A unit, its segment, and the place of an input."""


@dataclass(slots=True, eq=False)
class SteadyParameters:
    """Parameters of an operation in memory that is the same in every step, once they are cut."""

    views: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    leaves: Leaves | None = None

    def clear(self) -> None:
        """Hold their memory no more."""
        self.views, self.leaves = [], None


@dataclass(slots=True)
class Operands:
    """Views of an operation by role, in order, and where in its module the parameters are.

    `inputs` have a key each, but for batches. Of those, by place, `stored` may be in memory of the
    executor, and `differentiable` may have gradients. `steady` is there where memory of parameters
    is the same in every forward and its backward. `trained` are places of the parameters that have
    gradients, in the order of `order`; `wanted` those of inputs that have; `visits` counts forwards
    in memory that stays.
    """

    compute: Compute
    visit: Visit
    views: Mapping[Role, tuple[View, ...]]
    inputs: tuple[tuple[View, InputKey | None], ...]
    stored: tuple[tuple[int, View], ...]
    differentiable: tuple[tuple[int, View], ...]
    steady: SteadyParameters | None
    unit: TorchUnit | None = None
    order: tuple[int, ...] = ()
    trained: tuple[int, ...] = ()
    wanted: Sequence[int] = ()

    @classmethod
    def of(cls, compute: Compute, forecast: LaterUses, program: Program) -> "Operands":
        """Read off an operation of `program`."""
        views = {role: tuple(views_of(compute, role)) for role in Role}
        batches, buffers = forecast.batches, program.by_name
        without = batches | forecast.without_gradient
        places = tuple(enumerate(views[Role.INPUT]))
        is_steady = all(view.buffer in forecast.steady for view in views[Role.PARAMETER])
        return cls(
            compute,
            visit_of(compute),
            views,
            tuple(
                (
                    view,
                    None if view.buffer in batches else (compute.unit, compute.segment, place),
                )
                for place, view in places
            ),
            tuple(each for each in places if not buffers[each[1].buffer].produced),
            tuple(each for each in places if each[1].buffer not in without),
            SteadyParameters() if is_steady else None,
        )
