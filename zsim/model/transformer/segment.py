"""The segment that runs a stretch: its saved tensors, workspace and kernels."""

from collections.abc import Collection, Container, Iterable, Mapping, Sequence, Set
from dataclasses import replace

from zsim.model.kernel import CUDNN, Kernel, KernelKind
from zsim.model.model import Segment, SplitBackward, Value
from zsim.model.segment_exchange import flags_of
from zsim.model.tensor_lifetime import AllocationEvent
from zsim.model.transformer.autograd_lifetime import (
    SAVED,
    backward_course,
    forward_course,
    input_course,
    intermediates,
    weight_course,
)
from zsim.model.transformer.operator import Operator, Stretch, Tensor, parameters_of, with_gradients
from zsim.strategy.execution import PLAIN, Execution


def segments(
    stretches: Collection[Stretch], given: Iterable[Value], execution: Execution = PLAIN
) -> tuple[Segment, ...]:
    """Return the segments that run the stretches of a unit; `given` are the unit's inputs."""
    needed = with_gradients(stretches, given)
    shared = {name for each in stretches if each.exchanges for name in each.inputs}
    return tuple(_segment(each, needed, execution, shared) for each in stretches)


def _segment(
    stretch: Stretch, needed: Container[str], execution: Execution, shared: Set[str]
) -> Segment:
    """Return the segment for `stretch` under `execution`; tensors in `needed` have a gradient.

    `shared` are values that a segment reads after an exchange of keys and values.
    """
    differentiated = [each for each in stretch.operators if each.makes.name in needed]
    saved = {tensor.name: tensor for each in differentiated for tensor in each.saves}
    kept = {name: tensor for name, tensor in saved.items() if name not in stretch.inputs}
    backward = tuple(
        kernel for each in reversed(stretch.operators) for kernel in each.kernels_back(needed)
    )
    again = _until_saved(stretch.operators, saved.keys() | shared)
    chosen: list[Operator] = []
    if execution.operations and differentiated:
        chosen = _chosen(stretch.operators)
        backward = (*_forward(each for each in again if each not in chosen), *backward)
        kept = {tensor.name: tensor for each in chosen for tensor in _results(each)}
    ran_again = again if chosen else ()
    course = backward_course(stretch, kept, needed, again=ran_again, chosen=chosen)
    return Segment(
        inputs=stretch.inputs,
        outputs=tuple(
            replace(value, requires_gradient=value.name in needed) for value in stretch.outputs
        ),
        parameters=tuple(parameter.name for parameter in parameters_of([stretch])),
        saved_bytes=sum(tensor.size_bytes for tensor in kept.values()),
        saves_input=any(name in saved for name in stretch.inputs),
        forward_workspace_bytes=_forward_workspace(stretch, kept),
        backward_workspace_bytes=_backward_workspace(course),
        **flags_of(stretch.begins, stretch.ends),
        adds=stretch.adds,
        side=stretch.side,
        reruns=stretch.reruns,
        routes=stretch.routes,
        loads=stretch.loads,
        drops=stretch.drops,
        draws=next((each.draws for each in stretch.operators if each.draws is not None), None),
        forward=_forward(stretch.operators),
        backward=backward,
        again=_forward(again) if execution.early_stop else (),
        forward_course=forward_course(stretch, kept),
        backward_course=course,
        split=None if chosen else _split(stretch, needed),
    )


def until_saved(found: Sequence[Segment]) -> tuple[Segment, ...]:
    """Return the segments of a checkpoint that stops once all saved tensors are recomputed.

    Segments after the last one that saves something do not run again. Outputs that none of the
    others reads are not summed over the tensor axis (`_StopRecomputationError`, torch 2.13,
    torch/utils/checkpoint.py).
    """
    end = len(found)
    while end > 1 and not (found[end - 1].saved_bytes or found[end - 1].saves_input):
        end -= 1
    read = {name for each in found[:end] for name in each.inputs}
    return tuple(
        replace(
            each,
            runs_again=number < end,
            sums_again=any(value.name in read for value in each.outputs),
        )
        for number, each in enumerate(found)
    )


def _split(stretch: Stretch, needed: Container[str]) -> SplitBackward | None:
    """Return the backward in two parts; None if it lacks input or parameter gradients.

    Kernels of the second part are in the order of parameters (`stage_backward_weight`, torch 2.13).
    """
    training = intermediates(stretch, needed)
    if not training or not any(name in needed for name in stretch.inputs):
        return None
    courses = input_course(stretch, needed), weight_course(stretch, needed)
    return SplitBackward(
        intermediate_bytes=sum(each.makes.size_bytes for each in training),
        inputs=tuple(
            kernel
            for each in reversed(stretch.operators)
            if each.makes.name in needed
            for kernel in each.kernels_of_inputs(needed)
        ),
        weights=tuple(kernel for each in training for kernel in each.kernels_of_weights),
        input_workspace_bytes=_backward_workspace(courses[0]),
        weight_workspace_bytes=_backward_workspace(courses[1]),
        input_course=courses[0],
        weight_course=courses[1],
    )


def _forward(operators: Iterable[Operator]) -> tuple[Kernel, ...]:
    return tuple(kernel for each in operators for kernel in each.forward)


def _until_saved(operators: Sequence[Operator], saved: Container[str]) -> Sequence[Operator]:
    """Return operators up to the one that produces the last tensor in `saved`."""
    needed = [
        index
        for index, each in enumerate(operators)
        if each.makes.name in saved
        or any(tensor.name in saved and tensor not in each.reads for tensor in each.saves)
    ]
    return operators[: needed[-1] + 1] if needed else operators


def _chosen(operators: Iterable[Operator]) -> list[Operator]:
    """Return the operators whose results selective checkpointing by operations keeps."""
    chosen: list[Operator] = []
    products = 0
    for each in operators:
        kinds = [kernel.kind for kernel in each.forward]
        if KernelKind.ATTENTION in kinds:
            if each.forward[0].version != CUDNN:  # not in torchtitan's list of kept operations
                chosen.append(each)
        elif KernelKind.MATMUL in kinds:
            products += 1
            if products % 2:
                chosen.append(each)
    return chosen


def _results(operator: Operator) -> tuple[Tensor, ...]:
    """Return the output, and the saved tensors that are not inputs."""
    own = (tensor for tensor in operator.saves if tensor not in operator.reads)
    return (operator.makes, *(tensor for tensor in own if tensor != operator.makes))


def _forward_workspace(stretch: Stretch, kept: Mapping[str, Tensor]) -> int:
    """Return the peak memory of forward, less its results; tensors live until their last read."""
    left = {value.name: value.size_bytes for value in stretch.outputs}
    left |= {
        each.makes.name: each.makes.size_bytes
        for each in stretch.operators
        if each.makes.name in left  # whole, if it will be scattered
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


def _backward_workspace(course: Iterable[AllocationEvent]) -> int:
    """Return the peak memory of backward beyond the buffers that exist anyway.

    The gradients of all parameters and inputs have buffers from the start. Saved tensors keep
    theirs until the end, though autograd drops them in between.
    """
    level = most = room = 0
    for buffer, _, size in course:
        level += size
        most = max(most, level)
        room += size if size > 0 and buffer > SAVED else 0
    return max(0, most - room)
