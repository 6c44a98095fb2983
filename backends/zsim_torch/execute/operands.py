"""Operands of a `Compute`: what is known of an operation from one step to the next."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from zsim.schedule.operation import Compute, Role, View
from zsim_torch.module.entered import Leaves
from zsim_torch.module.unit import TorchUnit
from zsim_torch.module.visit import LaterUses, Visit, views_of, visit_of


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

    `steady` is there where memory of parameters is the same in every forward and its backward.
    `trained` are places of the parameters that have gradients, in the order of `order`;
    `differentiable` those of inputs that may have some.
    """

    compute: Compute
    visit: Visit
    views: Mapping[Role, tuple[View, ...]]
    differentiable: tuple[int, ...]
    steady: SteadyParameters | None
    unit: TorchUnit | None = None
    order: tuple[int, ...] = ()
    trained: tuple[int, ...] = ()

    @classmethod
    def of(cls, compute: Compute, forecast: LaterUses) -> "Operands":
        """Read off an operation."""
        views = {role: tuple(views_of(compute, role)) for role in Role}
        without = forecast.batches | forecast.without_gradient
        is_steady = all(view.buffer in forecast.steady for view in views[Role.PARAMETER])
        return cls(
            compute,
            visit_of(compute),
            views,
            tuple(
                place for place, view in enumerate(views[Role.INPUT]) if view.buffer not in without
            ),
            SteadyParameters() if is_steady else None,
        )
