"""Operands of a `Compute`, cached from one step to the next."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from zsim.schedule.operation import Compute, Role, View
from zsim.schedule.schedule import Program
from zsim_torch.module.entered import Leaves
from zsim_torch.module.unit import TorchUnit
from zsim_torch.module.visit import LaterUses, Visit, views_of, visit_of

InputKey = tuple[str, int, int]
"""Unit, segment and position of an input."""


@dataclass(slots=True, eq=False)
class SteadyParameters:
    """Views of parameters whose memory stays the same in every step."""

    views: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    leaves: Leaves | None = None

    def clear(self) -> None:
        """Drop the views."""
        self.views, self.leaves = [], None


@dataclass(slots=True)
class Operands:
    """Views of an operation by role, and the order of its parameters in the module.

    Each entry of `inputs` has a key, except batches. `stored` are the positions and views of inputs
    in memory of the executor, and `differentiable` those of inputs that may have gradients.
    `steady` is set if parameters have the same memory in every forward and backward. `trained` are
    the positions in `order` of parameters with gradients, and `wanted` those of inputs with
    gradients.
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
        """Return the operands of an operation of `program`."""
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
