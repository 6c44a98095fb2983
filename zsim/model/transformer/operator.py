"""Operators inside a segment, one after the other: their kernels, and what backward needs.

An operator saves tensors, as autograd does: what two of them save is kept once, and what lives
anyway - inputs of the segment, parameters - is not counted. A view is the tensor that it views.
"""

from collections.abc import Collection, Container, Iterable, Sequence
from dataclasses import dataclass

from zsim.dtype import DType
from zsim.model.generator import Draws
from zsim.model.kernel import Kernel
from zsim.model.model import Parameter, Value


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
        """Its bytes on one rank."""
        return self.elements * self.dtype.size_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """One step of a segment: what it reads and makes, what its backward reads, what it costs.

    Attributes:
        reads: tensors that may have gradients, which backward makes.
        makes: the tensor that it makes.
        saves: tensors that its backward reads, where it has one.
        shares_gradient: gradients of what it reads are the gradient of what it makes.
        draws: how it draws random numbers, if it does.
        forward_scratch, backward_scratch: bytes that it holds while it runs, beyond these.
        backward: kernels of the gradients of what it reads.
        trains: those of the gradients of its parameters, where they are kernels of their own.
        apart: kernels of the gradients of what it reads, and of its parameters, where one is made
            without the other; empty if they are `backward` and `trains` then, too.
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
        """Parameters of which backward makes gradients."""
        return tuple(each for each in self.parameters if not each.frozen)

    def kernels_back(self, needed: Container[str]) -> tuple[Kernel, ...]:
        """Kernels of backward, where tensors called `needed` have gradients.

        Before the first trained parameter nothing has: what makes a gradient of what is read is
        left out there, unless one kernel makes those of the parameters as well.
        """
        if self.makes.name not in needed:
            return ()
        if self.trains and not any(tensor.name in needed for tensor in self.reads):
            return self.trains
        return (*self.backward, *self.trains)

    def kernels_of_inputs(self, needed: Container[str]) -> tuple[Kernel, ...]:
        """Kernels of the gradients of what it reads alone, where those called `needed` have one."""
        if not any(tensor.name in needed for tensor in self.reads):
            return ()
        return self.apart[0] if self.apart else self.backward

    @property
    def kernels_of_weights(self) -> tuple[Kernel, ...]:
        """Kernels of the gradients of its parameters alone."""
        return self.apart[1] if self.apart else self.trains


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Operators up to where a collective of the tensor axis stands, and what flows in and out.

    `reduces_output`, `reduces_input_gradient` and `gathers_input` say that it stands there if there
    is such an axis; `leaves_whole`, that the next stretch reads what was gathered, too, and
    `casts_tokens`, that what is gathered there is cast to 8-bit floats. With
    `gathers_context` the last input is gathered over ranks that share a sequence; with a
    `context_offset` it is that of the rank so many places before. If it `adds`, backward reads all
    inputs but the first.
    """

    inputs: tuple[str, ...]
    outputs: tuple[Value, ...]
    operators: tuple[Operator, ...]
    reduces_output: bool = False
    reduces_input_gradient: bool = False
    gathers_input: bool = False
    leaves_whole: bool = False
    casts_tokens: bool = False
    gathers_context: bool = False
    context_offset: int | None = None
    adds: bool = False

    @property
    def exchanges(self) -> bool:
        """Return whether ranks that share a sequence exchange the last input before it."""
        return self.gathers_context or self.context_offset is not None


def tensor_of(value: Value) -> Tensor:
    """Return the memory of `value`."""
    return Tensor(name=value.name, elements=value.elements, dtype=value.dtype)


def parameters_of(stretches: Iterable[Stretch]) -> tuple[Parameter, ...]:
    """Every parameter, in the order of use."""
    found = [
        parameter
        for stretch in stretches
        for operator in stretch.operators
        for parameter in operator.parameters
    ]
    return tuple(dict.fromkeys(found))


def with_gradients(stretches: Iterable[Stretch], given: Iterable[Value]) -> frozenset[str]:
    """Names of all that has a gradient, as autograd has it, after stretches that are `given` these.

    What an operator makes has one if something that it reads has, or if it has a parameter that is
    trained.
    """
    needed = {value.name for value in given if value.requires_gradient}
    for stretch in stretches:
        for each in stretch.operators:
            if each.trained or any(tensor.name in needed for tensor in each.reads):
                needed.add(each.makes.name)
    return frozenset(needed)


def joined(stretches: Sequence[Stretch], later: Collection[str] = ()) -> Stretch:
    """All of them in one, which needs no collective inside: what flowed between them is inside it.

    What is read `later` flows out of it, or if nothing is, what the last one makes. An input that
    the first one gathers stays the last.
    """
    made = {value.name: value for stretch in stretches for value in stretch.outputs}
    read = dict.fromkeys(name for stretch in stretches for name in stretch.inputs)
    inputs = [name for name in read if name not in made]
    first = stretches[0]
    if first.exchanges:
        inputs.remove(first.inputs[-1])
        inputs.append(first.inputs[-1])
    outputs = tuple(value for name, value in made.items() if name in later)
    return Stretch(
        inputs=tuple(inputs),
        outputs=outputs or stretches[-1].outputs,
        operators=tuple(operator for stretch in stretches for operator in stretch.operators),
        gathers_context=first.gathers_context,
        context_offset=first.context_offset,
        adds=first.adds,
    )
