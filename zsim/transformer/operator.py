"""What runs inside a segment, one operator after the other: kernels, and what backward needs.

An operator saves tensors, as autograd does: what two of them save is kept once, and what lives
anyway - inputs of the segment, parameters - is not counted. A view is the tensor that it views.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from zsim.dtype import DType
from zsim.execution import PLAIN, Execution
from zsim.kernel import Kernel, KernelKind
from zsim.model import Parameter, Segment, Value


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
        reads: tensors that have gradients, those that backward makes.
        makes: the tensor that it makes.
        saves: tensors that its backward reads.
        shares_gradient: gradients of what it reads are the gradient of what it makes.
        forward_scratch, backward_scratch: bytes that it holds while it runs, beyond these.
    """

    reads: tuple[Tensor, ...]
    makes: Tensor
    parameters: tuple[Parameter, ...] = ()
    saves: tuple[Tensor, ...] = ()
    shares_gradient: bool = False
    forward_scratch: int = 0
    backward_scratch: int = 0
    forward: tuple[Kernel, ...] = ()
    backward: tuple[Kernel, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Operators up to where a collective of the tensor axis stands, and what flows in and out.

    `reduces_output` and `reduces_input_gradient` say that it stands there if there is such an axis.
    """

    inputs: tuple[str, ...]
    outputs: tuple[Value, ...]
    operators: tuple[Operator, ...]
    reduces_output: bool = False
    reduces_input_gradient: bool = False


def tensor_of(value: Value) -> Tensor:
    """The memory of `value`."""
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


def segment(stretch: Stretch, execution: Execution = PLAIN) -> Segment:
    """The segment that runs `stretch` as `execution` says."""
    saved = {tensor.name: tensor for each in stretch.operators for tensor in each.saves}
    kept = {name: tensor for name, tensor in saved.items() if name not in stretch.inputs}
    backward = tuple(kernel for each in reversed(stretch.operators) for kernel in each.backward)
    backward_workspace = _backward_workspace(stretch, kept)
    again = _until_saved(stretch.operators)
    if execution.operations:
        chosen = _chosen(stretch.operators)
        backward = (*_forward(each for each in again if each not in chosen), *backward)
        results = {tensor.name: tensor for each in chosen for tensor in _results(each)}
        backward_workspace += sum(
            tensor.size_bytes for name, tensor in kept.items() if name not in results
        )
        kept = results
    return Segment(
        inputs=stretch.inputs,
        outputs=stretch.outputs,
        parameters=tuple(parameter.name for parameter in parameters_of([stretch])),
        saved_bytes=sum(tensor.size_bytes for tensor in kept.values()),
        saves_input=any(name in saved for name in stretch.inputs),
        forward_workspace_bytes=_forward_workspace(stretch, kept),
        backward_workspace_bytes=backward_workspace,
        reduces_output=stretch.reduces_output,
        reduces_input_gradient=stretch.reduces_input_gradient,
        forward=_forward(stretch.operators),
        backward=backward,
        again=_forward(again) if execution.early_stop else (),
    )


def _forward(operators: Iterable[Operator]) -> tuple[Kernel, ...]:
    return tuple(kernel for each in operators for kernel in each.forward)


def _until_saved(operators: Sequence[Operator]) -> Sequence[Operator]:
    """Operators up to the one that makes, or keeps of its own, the last tensor that is saved."""
    saved = {tensor.name for each in operators for tensor in each.saves}
    needed = [
        index
        for index, each in enumerate(operators)
        if each.makes.name in saved or any(tensor not in each.reads for tensor in each.saves)
    ]
    return operators[: needed[-1] + 1] if needed else operators


def _chosen(operators: Iterable[Operator]) -> list[Operator]:
    """Those whose results selective checkpointing by operations keeps."""
    chosen: list[Operator] = []
    products = 0
    for each in operators:
        kinds = [kernel.kind for kernel in each.forward]
        if KernelKind.ATTENTION in kinds:
            chosen.append(each)
        elif KernelKind.MATMUL in kinds:
            products += 1
            if products % 2:
                chosen.append(each)
    return chosen


def _results(operator: Operator) -> tuple[Tensor, ...]:
    """What it makes, and what it saves that it did not read."""
    own = (tensor for tensor in operator.saves if tensor not in operator.reads)
    return (operator.makes, *(tensor for tensor in own if tensor != operator.makes))


def _forward_workspace(stretch: Stretch, kept: Mapping[str, Tensor]) -> int:
    """Most that forward holds at once, less what it leaves: tensors live until they were read."""
    left = {value.name: value.size_bytes for value in stretch.outputs}
    left |= {
        each.makes.name: each.makes.size_bytes
        for each in stretch.operators
        if each.makes.name in left  # whole, where it will be scattered
    }
    left |= {name: tensor.size_bytes for name, tensor in kept.items()}
    last_read: dict[str, int] = {}
    for index, each in enumerate(stretch.operators):
        last_read |= dict.fromkeys((tensor.name for tensor in each.reads), index)
    held: dict[str, int] = {}
    most = 0
    for index, each in enumerate(stretch.operators):
        for tensor in (each.makes, *each.saves):
            if tensor.name not in stretch.inputs:
                held[tensor.name] = tensor.size_bytes
        most = max(most, sum(held.values()) + each.forward_scratch)
        held = {
            name: size
            for name, size in held.items()
            if name in left or last_read.get(name, -1) > index
        }
    return max(0, most - sum(left.values()))


def _backward_workspace(stretch: Stretch, kept: Mapping[str, Tensor]) -> int:
    """Most that gradients hold at once beside what has room anyway.

    Room there is for the gradients of all parameters and inputs, from the beginning, and for what
    is kept until the end, though autograd drops it as it goes.
    """
    ends = {value.name for value in stretch.outputs}
    users = Counter(tensor.name for each in stretch.operators for tensor in each.saves)
    gradients: dict[str, int] = {}
    parameters = dropped = most = room = 0
    for each in reversed(stretch.operators):
        own = sum(parameter.elements for parameter in each.parameters) * each.makes.element_bytes
        new = {
            tensor.name: 0 if each.shares_gradient else tensor.size_bytes for tensor in each.reads
        }
        parameters += own
        room += own + sum(size for name, size in new.items() if name in stretch.inputs)
        held = sum(gradients.values()) + sum(new.values()) + parameters + each.backward_scratch
        most = max(most, held - dropped)
        # A second gradient of a tensor is added to the first.
        gradients |= {name: max(size, gradients.get(name, 0)) for name, size in new.items()}
        if each.makes.name not in ends:
            passed_on = gradients.pop(each.makes.name, 0)
            if each.shares_gradient:
                heir = each.reads[0].name
                gradients[heir] = max(gradients[heir], passed_on)
        for tensor in each.saves:
            users[tensor.name] -= 1
            if not users[tensor.name] and tensor.name in kept:
                dropped += tensor.size_bytes
    return max(0, most - room)


def joined(stretches: tuple[Stretch, ...], inputs: tuple[str, ...]) -> Stretch:
    """All of them in one, which needs no collective: what flowed between them is inside it."""
    return Stretch(
        inputs=inputs,
        outputs=stretches[-1].outputs,
        operators=tuple(operator for stretch in stretches for operator in stretch.operators),
    )
