"""Compute the loss of a micro-batch without a step, by forwards on gathered parameters."""

from collections.abc import Mapping, Sequence

import torch
from torch import distributed
from torch.utils._pytree import tree_leaves

from zsim.backend.backend import RefusedError
from zsim.schedule.operation import Action, AllToAll, Communication, Compute, Role, View
from zsim.schedule.schedule import Buffer
from zsim_torch.execute.collectives import IssuedCollective
from zsim_torch.execute.executor import RankMachine
from zsim_torch.execute.forward_pass import ForwardPass
from zsim_torch.execute.full_parameters import StateMemory, full_parameters, holders
from zsim_torch.execute.read_counts import Blocks
from zsim_torch.ground.torch_dtype import TORCH_DTYPE, entering
from zsim_torch.module import autograd
from zsim_torch.module.module_state import evaluating
from zsim_torch.module.routed_rows import RowSegment
from zsim_torch.module.unit import SegmentKey, TorchUnit, UnitRunError
from zsim_torch.module.visit import LaterUses, views_of


class Evaluation:
    """Runs the forwards of a step in order; at most the buckets of one unit are gathered.

    Tensor parallel ranks exchange the same tensors as in a step, and pipeline stages send theirs.
    """

    def __init__(self, machine: RankMachine, units: Mapping[SegmentKey, TorchUnit]) -> None:
        self._machine = machine
        self._units = units
        self._memory = StateMemory(machine.memory)
        self._format = LaterUses.of(machine.program).parameters
        self._pass = ForwardPass.of(machine.program)
        self._holder: dict[str, Buffer] = {}
        for buffer in holders(machine):
            for piece in machine.schedule.layout_by_name[buffer.layout or ""].pieces:
                self._holder[piece.parameter] = buffer
        self._gathered: dict[str, dict[str, torch.Tensor]] = {}
        self._values: dict[str, object] = {}
        self._moved: set[str] = set()
        self._blocks: dict[int, Blocks] = {}

    @property
    def is_shared(self) -> bool:
        """Return True if ranks exchange outputs of units, which then have the sizes of a step."""
        return self._pass.is_shared

    def loss(self, batch: object) -> torch.Tensor | None:
        """Return the loss of this rank's micro-batch in evaluation mode; every rank calls it.

        Pipeline stages that compute no loss return None.

        Raises:
            RefusedError: ranks exchange tensors of other sizes than in a step.
            UnitRunError: a unit reads a buffer that no unit has written.
        """
        found: torch.Tensor | None = None
        with evaluating([unit.module for unit in self._units.values()]):
            for operation in self._pass.operations:
                if isinstance(operation, Communication):
                    self._move(operation)
                elif operation.action is Action.LOAD:
                    loaded = entering(batch, self._format)
                    self._made([loaded] * len(operation.operands), operation)
                else:
                    outputs = self._run(operation)
                    self._made(outputs, operation)
                    if (operation.unit, operation.segment) == self._machine.computer.work.last:
                        found = outputs[-1]
        self._gathered.clear()
        self._values.clear()
        self._blocks.clear()
        return found

    def _made(self, values: "list[object] | list[torch.Tensor]", compute: Compute) -> None:
        names = [view.buffer for view in views_of(compute, Role.OUTPUT)]
        self._values |= dict(zip(names, values, strict=False))
        self._moved.difference_update(names)

    def _run(self, compute: Compute) -> list[torch.Tensor]:
        unit = self._units[compute.unit, compute.segment]
        if isinstance(unit.module, RowSegment):
            unit.module.handle.micro_batch = 0
        inputs = [
            self._input(compute, place, view.buffer)
            for place, view in enumerate(views_of(compute, Role.INPUT))
        ]
        return autograd.evaluate(unit, self._parameters(unit), inputs)

    def _input(self, compute: Compute, place: int, name: str) -> object:
        """Return an input; received tensors get the shape that they have in a step."""
        if name not in self._values:
            raise UnitRunError(f"unit {compute.unit}: it reads {name}, which no forward makes")
        value = self._values[name]
        shape = (
            self._machine.computer.entered_shape(compute, place) if name in self._moved else None
        )
        return value.view(shape) if shape is not None and isinstance(value, torch.Tensor) else value

    def _move(self, communication: Communication) -> None:
        """Exchange values with other ranks, in newly allocated memory."""
        if isinstance(communication, AllToAll):
            communication = self._sized(communication)
        source = target = None
        if communication.reads is not None:
            source = self._brought(communication.reads)
        if (view := communication.writes) is not None:
            target = self._flat(view, counted=isinstance(communication, AllToAll))
        moved = IssuedCollective(communication, source, target)
        for work in self._machine.communicators.issue([moved]):
            work.wait()
        if view is not None:
            self._values[view.buffer] = target
            self._moved.add(view.buffer)

    def _sized(self, exchange: AllToAll) -> AllToAll:
        """Return an exchange of counted rows with the blocks of this micro-batch."""
        machine = self._machine
        rows = machine.program.by_name[exchange.source.buffer].rows
        handle = None if rows is None else machine.computer.row_handle(rows.layer)
        if rows is None or handle is None:
            return exchange
        member = machine.communicators.member(exchange.group)
        if rows.layer not in self._blocks:  # counts of all ranks, as the host reads them in a step
            sent = handle.sent(0)
            every = [torch.empty_like(sent) for _ in member.ranks]
            distributed.all_gather(every, sent, group=member.process_group)
            by_member = torch.stack(every).view(len(every), len(every), -1)
            received = by_member[:, member.place].cpu()
            handle.note_counts(0, received)
            self._blocks[rows.layer] = Blocks.of(sent.cpu(), received)
        return self._blocks[rows.layer].sized(exchange, rows, member.place)

    def _flat(self, view: View, *, counted: bool) -> torch.Tensor:
        """Allocate flat memory for the whole buffer of `view`, or for counted rows."""
        buffer = self._machine.program.by_name[view.buffer]
        device = self._machine.memory.setting.device
        elements = view.size if counted and buffer.rows is not None else buffer.elements
        return torch.empty(elements, dtype=TORCH_DTYPE[buffer.dtype], device=device)

    def _brought(self, view: View) -> torch.Tensor:
        """Return the tensor that this rank sends, flat.

        Raises:
            RefusedError: its size differs from that in a step.
        """
        value = self._values[view.buffer]
        assert isinstance(value, torch.Tensor)
        if value.numel() != view.size:
            raise RefusedError(
                f"batches: they make {value.numel()} elements of {view.buffer}, those of training "
                f"{view.size}; ranks that exchange it evaluate batches of the same shapes"
            )
        return value.contiguous().view(-1)

    def _parameters(self, unit: TorchUnit) -> list[torch.Tensor]:
        needed = {self._holder[name].name: self._holder[name] for name in unit.names}
        self._gathered = {name: found for name, found in self._gathered.items() if name in needed}
        for name, buffer in needed.items():
            if name not in self._gathered:
                self._gathered[name] = full_parameters(
                    self._machine, buffer, self._memory.flat(name)
                )
        found = [self._gathered[self._holder[name].name][name] for name in unit.names]
        if self._format is not None:
            found = [each.to(TORCH_DTYPE[self._format]) for each in found]
        return [each.view(shape) for each, shape in zip(found, unit.shapes, strict=True)]


Shapes = tuple[tuple[int, ...], ...]


def shapes_of(batch: object) -> Shapes:
    """Return the shapes of the tensors in a micro-batch."""
    return tuple(tuple(each.shape) for each in tree_leaves(batch) if isinstance(each, torch.Tensor))


def need_shapes(batches: Sequence[object], trained: Shapes | None) -> None:
    """Raise RefusedError unless every batch has the shapes of training.

    Every rank checks: if one rank raised alone, the others would wait for it forever.
    """
    for number, shapes in enumerate(map(shapes_of, batches)):
        if trained not in (None, shapes):
            raise RefusedError(
                f"batches: number {number} has tensors of shapes {shapes}, those of training "
                f"{trained}; ranks that exchange tensors evaluate the same shapes"
            )
