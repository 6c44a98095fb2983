"""Weights that `torch.autocast` casts: once a forward, and again where a block is recomputed.

`cached_cast` (aten/src/ATen/autocast_mode.cpp, torch 2.13) keeps the cast of a trained fp32 weight
until the outermost autocast ends, after forward. Autograd keeps it until the backward of its
product. A recomputed block enters autocast again, which ends with the block. zsim casts all trained
parameters of a unit; autocast keeps norms and embeddings in fp32.
"""

from collections import Counter
from itertools import accumulate

from zsim.closed_form.checkpoint import recomputed
from zsim.model.model import Parameter
from zsim.schedule.layout import Layout, Piece
from zsim.schedule.operation import View
from zsim.schedule.schedule import Kind
from zsim.zero.step_skeleton import Step, StepPart


class CastParameters(StepPart):
    """The casts of a step's parameters: one buffer a unit, and one for each shared parameter."""

    def __init__(self, step: Step) -> None:
        super().__init__(step)
        self.model = step.model
        self._recomputed = recomputed(step.model, step.strategy)
        self.layouts: list[Layout] = []
        self._groups: list[list[str]] = [[] for _ in step.model.units]
        self._sources: dict[str, list[int]] = {}
        self._left: Counter[str] = Counter()
        self._users: Counter[str] = Counter()
        if step.strategy.train.precision.has_master:
            self._declare()

    def _declare(self) -> None:
        uses = Counter(each.name for unit in self.model.units for each in unit.parameters)
        bucket_of = {
            each.name: run.bucket
            for runs in self.buckets.runs
            for run in runs
            for each in run.parameters
        }
        for index, unit in enumerate(self.model.units):
            trained = [each for each in unit.parameters if not each.frozen]
            own = [each for each in trained if uses[each.name] == 1]
            shared = [each for each in trained if uses[each.name] > 1]
            named = [(unit.name, own), *((each.name, [each]) for each in shared)]
            for name, members in named:
                if members:
                    buffer = self._buffer(f"autocast/{name}", members)
                    self._groups[index].append(buffer)
                    self._users[buffer] += 1
                    sources = dict.fromkeys(bucket_of[each.name] for each in members)
                    self._sources[buffer] = list(sources)

    def _buffer(self, name: str, members: list[Parameter]) -> str:
        """Declare the buffer of the casts of `members`, and let the passes read it."""
        if name not in self.writer.buffers:
            starts = list(accumulate((each.elements for each in members), initial=0))
            pieces = tuple(
                Piece(parameter=each.name, start=start, size=each.elements)
                for each, start in zip(members, starts[:-1], strict=True)
            )
            self.layouts.append(Layout(name=name, pieces=pieces, elements=starts[-1]))
            self.writer.buffer(
                name, starts[-1], self.compute, Kind.COMMUNICATION, produced=False, layout=name
            )
            for piece in pieces:
                view = View(buffer=name, start=piece.start, size=piece.size)
                self.passes.elsewhere[piece.parameter] = view
        return name

    def need(self, unit: int) -> None:
        """Cast the weights of a unit unless their casts are still there."""
        for buffer in self._groups[unit]:
            if buffer in self.writer.alive:
                continue
            self.writer.allocate(buffer)
            self._left[buffer] = self._users[buffer]
            for number in self._sources[buffer]:
                source = self.states[number].parameter
                pieces = self.buckets.all[number].layout.pieces
                mine = {each.name for each in self.model.units[unit].parameters}
                launches = sum(piece.parameter in mine for piece in pieces)
                path = f"cast/{buffer}/{number}"
                self.writer.copy(path, source, buffer, by_parameter=True, launches=launches)

    def end_forward(self) -> None:
        """Free the casts of units that are recomputed: autograd keeps no reference to them."""
        again = [
            buffer
            for unit, buffers in zip(self.model.units, self._groups, strict=True)
            for buffer in buffers
            if unit.name in self._recomputed and self._users[buffer] == 1
        ]
        self.writer.free(*(each for each in again if each in self.writer.alive))

    def release(self, unit: int) -> None:
        """Free the casts of a unit after its backward; shared ones after the last."""
        for buffer in self._groups[unit]:
            self._left[buffer] -= 1
            if not self._left[buffer]:
                self.writer.free(buffer)

    def end(self) -> None:
        """Free the casts of units without a backward."""
        every = dict.fromkeys(buffer for buffers in self._groups for buffer in buffers)
        self.writer.free(*(each for each in every if each in self.writer.alive))
