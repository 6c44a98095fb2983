"""Copies of tokens that expert ranks exchange, their gradients, and sums of loads of experts."""

from dataclasses import dataclass

from zsim.closed_form.checkpoint import recomputed
from zsim.closed_form.data_volume import all_reduces
from zsim.dtype import DType
from zsim.model.experts import LoadScope
from zsim.model.model import Model
from zsim.schedule.schedule import HostBytes, WireBytes
from zsim.strategy.strategy import Strategy


def tokens_of_experts(model: Model, strategy: Strategy) -> list[WireBytes]:
    """Return the volume of exchanges: of a rank's blocks, all but its own are sent.

    They are sent in forward and in recomputation, and their gradients in backward. Counts of copies
    are gathered in forward, or exchanged as copies are.
    """
    ranks, again = strategy.parallel.expert, recomputed(model, strategy)
    if strategy.execution.gathers_experts:
        return _gathered_tokens(model, strategy)
    sent = counted = 0
    gathers = not _swaps_counts(model, strategy)
    for unit in model.units if ranks > 1 else ():
        for segment in unit.segments:
            if not segment.swaps:
                continue
            is_again = segment.reruns or (unit.name in again and segment.sums_output(again=True))
            forward = 1 + is_again
            for value in segment.outputs:
                if value == segment.counts:
                    counted += value.size_bytes if gathers else 0
                    sent += 0 if gathers else value.size_bytes // ranks
                if not segment.exchanges_rows(value):
                    continue
                goes_back = value.requires_gradient and model.runs_backward(segment)
                block = -(-value.elements // ranks) * value.dtype.size_bytes
                sent += (forward + goes_back) * block
    steps = strategy.train.gradient_accumulation_steps
    counting = _counting_ranks(model, strategy)
    alone = counting == ranks and not strategy.execution.merges_micro_batches
    group = "expert" if alone else "tensor_expert"
    return [
        WireBytes(group="expert", collective="all_to_all", bytes=steps * (ranks - 1) * sent),
        WireBytes(group=group, collective="all_gather", bytes=steps * (counting - 1) * counted),
    ]


def _swaps_counts(model: Model, strategy: Strategy) -> bool:
    """Return True if ranks exchange counts; weights of a user's module travel with their rows."""
    return model.architecture is not None and strategy.execution.weighs_at_source


def _gathered_tokens(model: Model, strategy: Strategy) -> list[WireBytes]:
    """Return the volume of gathers of all tokens and of sums of results: a rank's own, to others.

    Recomputation gathers again. Gradients are summed where values are gathered, and vice versa.
    """
    again, gathered, scattered, is_left = recomputed(model, strategy), 0, 0, False
    for unit in model.units:
        for segment in unit.segments:
            forward = 1 + (segment.reruns or unit.name in again)
            read = [model.values[name] for name in segment.inputs if segment.reads_all]
            gathered += 0 if is_left else forward * sum(each.size_bytes for each in read)
            is_left = segment.reads_all and segment.leaves_gathered
            if not segment.adds_all:
                continue
            added = sum(each.size_bytes for each in segment.outputs)
            scattered += forward * added
            if model.runs_backward(segment):
                gathered += added
                scattered += sum(each.size_bytes for each in read if each.requires_gradient)
    ranks, steps = _counting_ranks(model, strategy), strategy.train.gradient_accumulation_steps
    group = "expert" if model.expert_tensor == 1 else "tensor_expert"
    times = steps * (ranks - 1)
    return [
        WireBytes(group=group, collective="all_gather", bytes=times * gathered),
        WireBytes(group=group, collective="reduce_scatter", bytes=times * scattered),
    ]


def _counting_ranks(model: Model, strategy: Strategy) -> int:
    """Return the ranks that gather counts: of all experts, and all of their parts."""
    return strategy.parallel.expert * model.expert_tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadGroup:
    """The group over which ranks sum loads of experts: its name, mesh axes and ranks."""

    name: str
    axes: tuple[str, ...]
    ranks: int


def load_group(strategy: Strategy, scope: LoadScope) -> LoadGroup | None:
    """Return the group of the ranks with the tokens of a scope; None if a rank has all of them.

    Megatron-LM's `tp_cp` and `tp_dp_cp` groups (`megatron/core/parallel_state.py`).
    """
    parallel = strategy.parallel
    context, tensor = parallel.context, parallel.tensor
    found = LoadGroup(name="tensor", axes=("tensor",), ranks=tensor)
    if scope is LoadScope.RANK:
        return None
    if scope is LoadScope.SEQUENCE and context > 1:
        found = LoadGroup(name="context", axes=("context",), ranks=context)
        if tensor > 1:
            both = "context", "tensor"
            found = LoadGroup(name="tensor_context", axes=both, ranks=context * tensor)
    elif scope is not LoadScope.SEQUENCE:
        name = "tensor_data" if parallel.pipeline > 1 else "world"
        every = "replicate", "data", "tensor"
        found = LoadGroup(name=name, axes=every, ranks=strategy.replicas * tensor)
    return found if found.ranks > 1 else None


def loads_of_experts(model: Model, strategy: Strategy) -> list[WireBytes]:
    """Return the volume of sums of loads: for losses in each micro-batch, for biases in a step."""
    times = strategy.train.gradient_accumulation_steps
    found: list[WireBytes] = []
    every, stacked = load_group(strategy, LoadScope.BATCH), _stacked_loads(model)
    if every is not None and stacked:
        size = DType.FP32.size_bytes
        found += all_reduces(every.name, [stacked], ranks=every.ranks, size_bytes=size)
    for unit in model.units:
        for segment in unit.segments:
            group = None if segment.loads is None else load_group(strategy, segment.loads)
            if group is not None:
                load = model.values[segment.inputs[-1]]
                sizes = [load.elements] * times
                size = load.dtype.size_bytes
                found += all_reduces(group.name, sizes, ranks=group.ranks, size_bytes=size)
    return found


def _stacked_loads(model: Model) -> int:
    """Return the elements of the loads of all biases of experts."""
    return sum(each.elements for each in model.biases)


def counts_on_host(model: Model, strategy: Strategy) -> HostBytes:
    """Return the bytes of the counts that are copied to host memory: of all ranks and experts.

    If ranks exchange them, or gather all tokens, each copies only the counts of its experts.
    """
    found = sum(
        segment.counts.size_bytes
        for unit in model.units
        for segment in unit.segments
        if (segment.swaps or segment.reads_all) and segment.counts is not None
    )
    is_own = _swaps_counts(model, strategy) or strategy.execution.gathers_experts
    sources = 1 if is_own else _counting_ranks(model, strategy)
    times = strategy.train.gradient_accumulation_steps * sources
    return HostBytes(to_host=times * found, from_host=0)
