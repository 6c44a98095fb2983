"""The loss of a micro-batch without a step: units run forward, on parameters gathered for them."""

from collections.abc import Iterator, Mapping

import torch

from zsim.schedule.operation import Action, Compute, Role, walk
from zsim.schedule.schedule import Buffer, Program
from zsim_torch.execute.executor import RankMachine
from zsim_torch.execute.whole_parameters import StateMemory, holders, whole
from zsim_torch.module import autograd
from zsim_torch.module.autograd import UnitRunError
from zsim_torch.module.module_state import evaluating
from zsim_torch.module.unit import SegmentKey, TorchUnit
from zsim_torch.module.visit import LaterUses, views_of
from zsim_torch.torch_dtype import TORCH_DTYPE, entering


class Evaluation:
    """Runs the forwards of a step in their order; no more than a bucket is gathered for a unit."""

    def __init__(self, machine: RankMachine, units: Mapping[SegmentKey, TorchUnit]) -> None:
        self._machine = machine
        self._units = units
        self._memory = StateMemory(machine.memory)
        self._format = LaterUses.of(machine.program).parameters
        self._holder: dict[str, Buffer] = {}
        for buffer in holders(machine):
            for piece in machine.schedule.layout_by_name[buffer.layout or ""].pieces:
                self._holder[piece.parameter] = buffer
        self._gathered: dict[str, dict[str, torch.Tensor]] = {}

    def loss(self, batch: object) -> torch.Tensor:
        """Return the loss of this rank's micro-batch, in evaluation mode; every rank calls it.

        Raises:
            UnitRunError: a unit reads what no unit has made.
        """
        values: dict[str, object] = {}
        outputs: list[torch.Tensor] = []
        with evaluating([unit.module for unit in self._units.values()]):
            for compute in _forwards(self._machine.program):
                if compute.action is Action.LOAD:
                    loaded = entering(batch, self._format)
                    values |= {view.buffer: loaded for view in views_of(compute, Role.OUTPUT)}
                    continue
                outputs = self._run(compute, values)
                views = views_of(compute, Role.OUTPUT)
                values |= {view.buffer: made for view, made in zip(views, outputs, strict=False)}
        self._gathered.clear()
        return outputs[-1]

    def _run(self, compute: Compute, values: Mapping[str, object]) -> list[torch.Tensor]:
        unit = self._units[compute.unit, compute.segment]
        names = [view.buffer for view in views_of(compute, Role.INPUT)]
        if missing := [name for name in names if name not in values]:
            raise UnitRunError(f"unit {unit.name}: it reads {missing[0]}, which no forward makes")
        return autograd.evaluate(unit, self._parameters(unit), [values[name] for name in names])

    def _parameters(self, unit: TorchUnit) -> list[torch.Tensor]:
        needed = {self._holder[name].name: self._holder[name] for name in unit.names}
        self._gathered = {name: found for name, found in self._gathered.items() if name in needed}
        for name, buffer in needed.items():
            if name not in self._gathered:
                self._gathered[name] = whole(self._machine, buffer, self._memory.flat(name))
        found = [self._gathered[self._holder[name].name][name] for name in unit.names]
        if self._format is not None:
            found = [each.to(TORCH_DTYPE[self._format]) for each in found]
        return [each.view(shape) for each, shape in zip(found, unit.shapes, strict=True)]


def _forwards(program: Program) -> Iterator[Compute]:
    """Yield the load and the forwards of the first micro-batch, in order."""
    for operation in walk(program.step):
        if not isinstance(operation, Compute) or operation.micro_batch != 0:
            continue
        if operation.action in (Action.LOAD, Action.FORWARD):
            yield operation
