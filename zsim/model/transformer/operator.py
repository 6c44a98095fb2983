"""Operators inside a segment, in order: their kernels, and the tensors that backward needs.

An operator saves tensors, as in autograd. A tensor that two operators save is kept once; inputs of
the segment and parameters live anyway and are not counted. A view is the tensor that it views.
"""

from collections.abc import Collection, Container, Iterable, Sequence
from dataclasses import dataclass

from zsim.dtype import DType
from zsim.model.experts import Drops, LoadScope
from zsim.model.generator import Draws
from zsim.model.kernel import Kernel
from zsim.model.model import Parameter, Value
from zsim.model.segment_exchange import ExchangeAxis, SegmentExchange, sums_gradients


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """One piece of memory inside a segment; names are unique in a model."""

    name: str
    elements: int
    dtype: DType

    @property
    def element_bytes(self) -> int:
        """Bytes of one element."""
        return self.dtype.size_bytes

    @property
    def size_bytes(self) -> int:
        """Bytes on one rank."""
        return self.elements * self.dtype.size_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """One step of a segment: its inputs and output, its saved tensors, and its cost.

    Attributes:
        reads: tensors that may have gradients, which backward computes.
        makes: the output tensor.
        saves: tensors that its backward reads, if it has one.
        shares_gradient: the gradient of its inputs is the gradient of its output.
        draws: how it draws random numbers, if it does.
        forward_scratch, backward_scratch: bytes of temporary memory while it runs.
        backward: kernels of the gradients of its inputs.
        trains: kernels of the gradients of its parameters, if they are separate.
        apart: kernels of input gradients, and of parameter gradients, if one is computed without
            the other; empty if they are `backward` and `trains` then, too.
    """

    reads: tuple[Tensor, ...]
    makes: Tensor
    parameters: tuple[Parameter, ...] = ()
    saves: tuple[Tensor, ...] = ()
    shares_gradient: bool = False
    draws: Draws | None = None
    forward_scratch: int = 0
    backward_scratch: int = 0
    forward: tuple[Kernel, ...] = ()
    backward: tuple[Kernel, ...] = ()
    trains: tuple[Kernel, ...] = ()
    apart: tuple[tuple[Kernel, ...], ...] = ()

    @property
    def trained(self) -> tuple[Parameter, ...]:
        """Parameters with gradients."""
        return tuple(each for each in self.parameters if not each.frozen)

    def kernels_back(self, needed: Container[str]) -> tuple[Kernel, ...]:
        """Return the kernels of backward if tensors in `needed` have gradients.

        Nothing before the first trained parameter has a gradient. Kernels of input gradients are
        omitted there, unless one kernel also computes those of parameters.
        """
        if self.makes.name not in needed:
            return ()
        if self.trains and not any(tensor.name in needed for tensor in self.reads):
            return self.trains
        return (*self.backward, *self.trains)

    def kernels_of_inputs(self, needed: Container[str]) -> tuple[Kernel, ...]:
        """Return the kernels of input gradients alone, if an input is in `needed`."""
        if not any(tensor.name in needed for tensor in self.reads):
            return ()
        return self.apart[0] if self.apart else self.backward

    @property
    def kernels_of_weights(self) -> tuple[Kernel, ...]:
        """Kernels of parameter gradients alone."""
        return self.apart[1] if self.apart else self.trains


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Operators between exchanges with other ranks, and the values that flow in and out.

    It `begins` with an exchange of its inputs and `ends` with one of its outputs, if any. If it
    `adds`, backward reads all inputs but the first. If it chooses experts, the output that it
    `routes` has the number of rows for each. If it is an auxiliary loss, it `loads` the rows of
    experts from this scope. Of copies that it sends, it `drops` some. It may run on a `side`
    stream. If it `reruns`, it keeps nothing for backward, and runs again before it.
    """

    inputs: tuple[str, ...]
    outputs: tuple[Value, ...]
    operators: tuple[Operator, ...]
    begins: SegmentExchange | None = None
    ends: SegmentExchange | None = None
    adds: bool = False
    routes: str = ""
    loads: LoadScope | None = None
    drops: Drops | None = None
    side: bool = False
    reruns: bool = False

    @property
    def exchanges(self) -> bool:
        """Return True if ranks that share a sequence exchange the last input before it."""
        return self.begins is not None and self.begins.axis is ExchangeAxis.CONTEXT

    @property
    def swaps(self) -> bool:
        """Return True if expert ranks exchange its outputs."""
        return self.ends is not None and self.ends.axis is ExchangeAxis.EXPERT

    @property
    def reads_all(self) -> bool:
        """Return True if its inputs are gathered from all expert ranks."""
        return self.begins is not None and self.begins.axis is ExchangeAxis.EXPERT

    @property
    def sums_gradients(self) -> bool:
        """Return True if its input gradients are partial sums over the tensor axis."""
        return sums_gradients(self.begins)


def tensor_of(value: Value) -> Tensor:
    """Return the memory of `value`."""
    return Tensor(name=value.name, elements=value.elements, dtype=value.dtype)


def parameters_of(stretches: Iterable[Stretch]) -> tuple[Parameter, ...]:
    """Return every parameter once, in the order of use."""
    found = [
        parameter
        for stretch in stretches
        for operator in stretch.operators
        for parameter in operator.parameters
    ]
    return tuple(dict.fromkeys(found))


def with_gradients(stretches: Iterable[Stretch], given: Iterable[Value]) -> frozenset[str]:
    """Return the names of all tensors with a gradient, as in autograd, given these values.

    An output has a gradient if an input has one, or if the operator has a trained parameter.
    """
    needed = {value.name for value in given if value.requires_gradient}
    for stretch in stretches:
        for each in stretch.operators:
            if each.trained or any(tensor.name in needed for tensor in each.reads):
                needed.add(each.makes.name)
    return frozenset(needed)


def joined(stretches: Sequence[Stretch], later: Collection[str] = ()) -> Stretch:
    """Join stretches without a collective between them; values between them become internal.

    Outputs are the values read `later`, or else the outputs of the last stretch. Loads of experts,
    which their biases need at the end of a step, are outputs as well. An input that the first
    stretch gathers stays the last input.
    """
    made = {value.name: value for stretch in stretches for value in stretch.outputs}
    read = dict.fromkeys(name for stretch in stretches for name in stretch.inputs)
    inputs = [name for name in read if name not in made]
    first = stretches[0]
    if first.exchanges:
        inputs.remove(first.inputs[-1])
        inputs.append(first.inputs[-1])
    if stretches[-1].swaps:
        later = {*later, *(value.name for value in stretches[-1].outputs)}
    loads = {each.load for each in parameters_of(stretches)}
    if not any(name in later for name in made):
        later = {value.name for value in stretches[-1].outputs}
    return Stretch(
        inputs=tuple(inputs),
        outputs=tuple(value for name, value in made.items() if name in later or name in loads),
        operators=tuple(operator for stretch in stretches for operator in stretch.operators),
        begins=first.begins if first.exchanges or first.reads_all else None,
        ends=stretches[-1].ends if stretches[-1].swaps else None,
        adds=first.adds,
        side=first.side,
        reruns=first.reruns,
        routes=next((each.routes for each in stretches if each.routes), ""),
        loads=first.loads,
        drops=stretches[-1].drops,
    )
