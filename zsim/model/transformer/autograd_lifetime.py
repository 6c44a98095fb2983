"""Lifetimes of a stretch's tensors in forward and backward, as autograd holds them.

Forward holds a tensor until its last read, and a saved tensor until backward has used it. Backward
holds a gradient until the operator before it has used it; gradients of outputs belong to the
caller and stay. Buffer numbers are those of `zsim.model.tensor_lifetime`: 1 is saved tensors, then
the gradients of each parameter and of each input. In a backward of two parts, 2 is the gradients
that the first part leaves for the second: of the outputs of operators with parameters. After it
come the gradients of inputs, or of parameters.
"""

from collections import Counter
from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass

from zsim.model.tensor_lifetime import OWN, AllocationEvent
from zsim.model.transformer.operator import Operator, Stretch, Tensor, parameters_of

SAVED = 1
INTERMEDIATE = 2


@dataclass(slots=True, kw_only=True)
class _Piece:
    """Memory of one tensor, or shared by several views; freed by its last holder."""

    buffer: int
    number: int
    size: int
    holders: int = 1


class _TraceBuilder:
    """Allocations and frees so far; workspace tensors are numbered as they appear."""

    def __init__(self) -> None:
        self.all: list[AllocationEvent] = []
        self._count = 0

    def take(self, buffer: int, size: int, number: int = 0) -> _Piece:
        self.all.append((buffer, number, size))
        return _Piece(buffer=buffer, number=number, size=size)

    def take_own(self, size: int) -> _Piece:
        self._count += 1
        return self.take(OWN, size, self._count)

    def give(self, piece: _Piece) -> None:
        piece.holders -= 1
        if not piece.holders and piece.size:
            self.all.append((piece.buffer, piece.number, -piece.size))


def _last_reads(operators: Sequence[Operator]) -> dict[str, int]:
    return {tensor.name: index for index, each in enumerate(operators) for tensor in each.reads}


def forward_course(stretch: Stretch, kept: Mapping[str, Tensor]) -> tuple[AllocationEvent, ...]:
    """Return the allocations of forward; at its end, outputs and `kept` tensors remain."""
    turns, numbers = _TraceBuilder(), {name: number for number, name in enumerate(kept)}
    last_read = _last_reads(stretch.operators)
    known = {*stretch.inputs, *(value.name for value in stretch.outputs)}
    known -= set(kept)  # a kept output exists twice: it is summed over ranks in place
    held: dict[str, _Piece] = {}
    for index, each in enumerate(stretch.operators):
        scratch = turns.take_own(each.forward_scratch) if each.forward_scratch else None
        for tensor in (each.makes, *each.saves):
            if tensor.name in known:
                continue
            known.add(tensor.name)
            if tensor.name in numbers:
                piece = turns.take(SAVED, tensor.size_bytes, numbers[tensor.name])
            else:
                piece = turns.take_own(tensor.size_bytes)
            held[tensor.name] = piece
        if scratch is not None:
            turns.give(scratch)
        for name in [name for name in held if last_read.get(name, -1) <= index]:
            piece = held.pop(name)
            if piece.buffer == SAVED:
                turns.all.append((SAVED, piece.number, 0))
            else:
                turns.give(piece)
    return tuple(turns.all)


def backward_course(
    stretch: Stretch,
    kept: Mapping[str, Tensor],
    needed: Container[str],
    *,
    again: Sequence[Operator] = (),
    chosen: Collection[Operator] = (),
) -> tuple[AllocationEvent, ...]:
    """Return the allocations of backward, which first recomputes `again` except `chosen`.

    It computes the gradients of the tensors in `needed`.
    """
    return _Backward(stretch, kept, needed).turns(again, chosen)


class _Backward:
    """Builds the allocations of the backward of a stretch."""

    def __init__(
        self, stretch: Stretch, kept: Mapping[str, Tensor], needed: Container[str]
    ) -> None:
        self._stretch = stretch
        self._needed = needed
        self._turns = _TraceBuilder()
        self._operators = [each for each in stretch.operators if each.makes.name in needed]
        self._users = Counter(tensor.name for each in self._operators for tensor in each.saves)
        self._saved = {
            name: _Piece(buffer=SAVED, number=number, size=tensor.size_bytes)
            for number, (name, tensor) in enumerate(kept.items())
        }
        parameters = [each for each in parameters_of([stretch]) if not each.frozen]
        self._parameter = {each.name: SAVED + 1 + n for n, each in enumerate(parameters)}
        first = SAVED + 1 + len(parameters)
        self._input = {name: first + n for n, name in enumerate(stretch.inputs)}
        lent = 2  # one more holder than here, so it is never freed here
        self._slopes = {
            value.name: _Piece(buffer=OWN, number=0, size=value.size_bytes, holders=lent)
            for value in stretch.outputs
            if value.name in needed
        }
        self._made: set[str] = set()

    def turns(
        self, again: Sequence[Operator], chosen: Collection[Operator]
    ) -> tuple[AllocationEvent, ...]:
        self._run_again(again, chosen)
        for each in reversed(self._operators):
            self._pass(each)
        for name, piece in self._slopes.items():
            if name not in self._made and name in self._input:
                # The outputs' gradient is also the input's, which has a separate buffer here.
                self._turns.take(self._input[name], piece.size)
            if name not in self._made:
                self._turns.give(piece)
        for piece in self._saved.values():
            self._turns.give(piece)
        return tuple(self._turns.all)

    def _run_again(self, again: Sequence[Operator], chosen: Collection[Operator]) -> None:
        last_read = _last_reads(again)
        for index, each in enumerate(again):
            for tensor in () if each in chosen else (each.makes, *each.saves):
                if tensor.name not in self._stretch.inputs and tensor.name not in self._saved:
                    self._saved[tensor.name] = self._turns.take_own(tensor.size_bytes)
            for name in list(self._saved):
                if not self._users[name] and last_read.get(name, -1) <= index:
                    self._turns.give(self._saved.pop(name))

    def _pass(self, each: Operator) -> None:
        """Compute the gradients of an operator's inputs from the gradient of its output."""
        turns, slope = self._turns, self._slopes.pop(each.makes.name, None)
        passing = [turns.take_own(each.backward_scratch)] if each.backward_scratch else []
        self._train(each)
        for tensor in each.reads:
            if tensor.name not in self._needed:
                continue
            if not each.shares_gradient:
                passing += self._add(tensor)
            elif slope is not None and tensor.name not in self._slopes:
                slope.holders += 1
                self._slopes[tensor.name] = slope
        if slope is not None:
            passing.append(slope)
        for piece in (*passing, *self._used_up(each)):
            turns.give(piece)

    def _train(self, each: Operator) -> None:
        """Allocate memory for the gradients of an operator's parameters."""
        for parameter in each.trained:
            size = parameter.elements * each.makes.element_bytes
            self._turns.take(self._parameter[parameter.name], size)

    def _used_up(self, each: Operator) -> list[_Piece]:
        """Return saved tensors that no later operator of backward reads."""
        found: list[_Piece] = []
        for tensor in each.saves:
            self._users[tensor.name] -= 1
            if not self._users[tensor.name] and tensor.name in self._saved:
                found.append(self._saved.pop(tensor.name))
        return found

    def _add(self, tensor: Tensor) -> list[_Piece]:
        """Add one more gradient of a tensor to the earlier ones; return pieces to free.

        A sum replaces the earlier gradient in place, unless that is also the gradient of other
        tensors.
        """
        turns, name = self._turns, tensor.name
        before = self._slopes.get(name)
        if name in self._input and name not in self._made:
            self._made.add(name)
            self._slopes[name] = turns.take(self._input[name], tensor.size_bytes)
            return [] if before is None else [before]
        new = turns.take_own(tensor.size_bytes)
        if before is None:
            self._slopes[name] = new
            return []
        if name in self._input or before.holders == 1:
            return [new]
        self._slopes[name] = turns.take_own(tensor.size_bytes)
        return [new, before]


def input_course(stretch: Stretch, needed: Container[str]) -> tuple[AllocationEvent, ...]:
    """Return the allocations of the part of backward that computes gradients of inputs."""
    return _InputPart(stretch, needed).turns((), ())


def weight_course(stretch: Stretch, needed: Container[str]) -> tuple[AllocationEvent, ...]:
    """Return the allocations while weight gradients are computed, after a split backward."""
    # stage_backward_weight of torch 2.13 visits `param_groups`, in the order of parameters
    turns = _TraceBuilder()
    numbers = _numbers(stretch)
    for place, each in enumerate(intermediates(stretch, needed)):
        for parameter in each.trained:
            size = parameter.elements * each.makes.element_bytes
            turns.take(numbers[parameter.name], size)
        turns.all.append((INTERMEDIATE, place, -each.makes.size_bytes))
    return tuple(turns.all)


def _numbers(stretch: Stretch) -> dict[str, int]:
    """Return the buffer of the gradient of each trained parameter in the second part."""
    trained = [each for each in parameters_of([stretch]) if not each.frozen]
    return {each.name: INTERMEDIATE + 1 + number for number, each in enumerate(trained)}


def intermediates(stretch: Stretch, needed: Container[str]) -> list[Operator]:
    """Return the operators with trained parameters whose output has a gradient."""
    return [each for each in stretch.operators if each.trained and each.makes.name in needed]


class _InputPart(_Backward):
    """The first part: output gradients of operators with parameters stay, and all saved tensors.

    A gradient that also belongs to another tensor is stored twice until the part has ended.
    """

    def __init__(self, stretch: Stretch, needed: Container[str]) -> None:
        super().__init__(stretch, {}, needed)
        self._input = {name: INTERMEDIATE + 1 + n for n, name in enumerate(stretch.inputs)}
        self._numbers = {
            each.makes.name: number for number, each in enumerate(intermediates(stretch, needed))
        }

    def _train(self, each: Operator) -> None:
        if each.trained:
            self._turns.take(INTERMEDIATE, each.makes.size_bytes, self._numbers[each.makes.name])

    def _used_up(self, each: Operator) -> list[_Piece]:
        del each
        return []
