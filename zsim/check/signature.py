"""What segments read and make, by name: as the model says or, without it, as they do first.

Without the model the first forward of a segment says what its inputs are, and outputs have the
segment's name: so micro-batches, recomputation and backward are held against that.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from zsim.check.contribution import UNCOUNTED
from zsim.check.subject import NumberedProgram, Subject
from zsim.model import BATCH, Model
from zsim.operation import Action, Compute, Role, View

TENSOR_AXIS = "tensor"
"""The axis over which hidden states are cut by tokens: a model has it in `Model.tensor`."""

Key = tuple[str, int]
"""A unit and the number of a segment."""


@dataclass(frozen=True, slots=True)
class Signature:
    """Names of what a segment reads and makes; `wanted` are the inputs that have gradients.

    An input without a name is one of which nothing is known.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    wanted: tuple[str, ...]


class Signatures:
    """The segments that one program runs, and how often each tensor is used by them."""

    def __init__(self, subject: Subject, each: NumberedProgram) -> None:
        self.program = each.program
        self.model = subject.model
        self.pieces = {
            layout.name: {(piece.start, piece.size): piece.parameter for piece in layout.pieces}
            for layout in subject.schedule.layouts
        }
        computes = map(each.step.operations.__getitem__, each.step.computes)
        runs = [run for run in computes if isinstance(run, Compute) and run.unit]
        self.batches = {run.micro_batch for run in runs if run.action is Action.BACKWARD}
        self.known: dict[Key, Signature] = {}
        self.uses: dict[str, list[Key]] = {}
        self.readers: dict[str, list[Key]] = {}
        self.cut: dict[str, int] = {}
        """Values of which ranks of the tensor axis have different tokens, and elements of each."""
        self.loss = ""
        if subject.model is not None:
            self._from_model(subject.model, {run.unit for run in runs})
        for run in runs:
            if run.action is Action.BACKWARD and (run.unit, run.segment) not in self.known:
                for name in self.parameters(run):
                    users = self.uses.setdefault(name, [])
                    if (run.unit, run.segment) not in users:
                        users.append((run.unit, run.segment))

    @property
    def batch(self) -> str:
        """The name of a micro-batch of data."""
        return self.model.batch.name if self.model is not None else BATCH

    def _from_model(self, model: Model, units: set[str]) -> None:
        self.loss = model.loss.name
        cut = [value for value in model.values.values() if value.tensor_sharded]
        self.cut = {value.name: value.elements for value in cut}
        for unit in model.units:
            for number, segment in enumerate(unit.segments):
                key = (unit.name, number)
                names = segment.inputs
                wanted = tuple(each for each in names if model.values[each].requires_gradient)
                for name in dict.fromkeys(wanted):  # on another stage of a pipeline, perhaps
                    self.readers.setdefault(name, []).append(key)
                if unit.name not in units:
                    continue
                outputs = tuple(value.name for value in segment.outputs)
                self.known[key] = Signature(segment.inputs, outputs, wanted)
                for name in dict.fromkeys(segment.parameters):
                    self.uses.setdefault(name, []).append(key)

    def learn(self, run: Compute, inputs: tuple[str, ...], outputs: int) -> Signature:
        """The signature of a segment that is run for the first time, and is not the model's."""
        names = tuple(f"{run.unit}/{run.segment}.{number}" for number in range(outputs))
        self.known[run.unit, run.segment] = made = Signature(inputs, names, ())
        return made

    def parameters(self, run: Compute) -> Iterator[str]:
        """The parameters of which a segment makes gradients, in the order of these."""
        gradients = [each.view for each in run.operands if each.role is Role.GRADIENT]
        read = [each.view for each in run.operands if each.role is Role.PARAMETER]
        for number, view in enumerate(gradients):
            name = self._name(read[number]) if len(read) == len(gradients) else self._name(view)
            yield name or f"{run.unit}/{run.segment} parameter {number}"

    def _name(self, view: View) -> str | None:
        layout = self.program.by_name[view.buffer].layout
        if layout is None or view.axis is not None or view.layout is not None:
            return None
        return self.pieces[layout].get((view.start, view.size))

    def use(self, parameter: str, key: Key) -> tuple[int, int]:
        """The number of the use of a parameter by a segment, and how many uses there are."""
        return _numbered(self.uses.get(parameter, [key]), key)

    def reading(self, value: str, key: Key) -> tuple[int, int]:
        """The number of the segment among those that read an activation, and how many they are."""
        if value not in self.readers:
            return 0, UNCOUNTED
        return _numbered(self.readers[value], key)


def _numbered(users: list[Key], key: Key) -> tuple[int, int]:
    return (users.index(key), len(users)) if key in users else (0, UNCOUNTED)
