"""Data volumes of DeepSpeed's stages 1 and 2: a gather a step, and all-reduced buckets.

The flat tensor of all parameters with one update rule is padded to a multiple of twice the ranks,
and gathered. Gradients are all-reduced whole, in the order in which backward completes them, at
most `reduce_bucket_size` elements at a time: once a step in stage 1, in every micro-batch in stage
2.
"""

from collections.abc import Iterator, Sequence

from zsim.closed_form.data_volume import CopiedBytes, DataVolume, all_reduces
from zsim.dtype import DType
from zsim.model.model import Model, Parameter
from zsim.schedule.schedule import HostBytes, WireBytes
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Strategy
from zsim_runtimes.deepspeed.checkpoint_volume import checkpoints
from zsim_runtimes.deepspeed.expert_layers import GROUP_ELEMENTS
from zsim_runtimes.deepspeed.options import DeepSpeed


def flat_groups(model: Model, strategy: Strategy) -> list[list[Parameter]]:
    """Return the parameters of each flat tensor; experts with expert ranks are last."""
    if not strategy.has_expert_order:
        return grouped(model, strategy)
    dense, experts = (
        [[each for each in group if each.expert is expert] for group in grouped(model, strategy)]
        for expert in (False, True)
    )
    found = [group for group in dense if group]
    for group in experts:
        found.append([])
        filled = 0
        for each in group:
            if filled and filled + each.elements > GROUP_ELEMENTS:
                found.append([])
                filled = 0
            found[-1].append(each)
            filled += each.elements
    return [group for group in found if group]


def grouped(model: Model, strategy: Strategy) -> list[list[Parameter]]:
    """Return the parameters by rule: the optimizer's first, then those of each group."""
    rules = [strategy.train.optimizer, *(group.rule for group in strategy.train.groups)]
    found = [
        [
            each
            for each in model.parameters
            if not each.frozen and strategy.rule_of(each.name) == rule
        ]
        for number, rule in enumerate(rules)
        if rule not in rules[:number]
    ]
    return [parameters for parameters in found if parameters]


def padded_elements(model: Model, strategy: Strategy) -> int:
    """Return the number of elements of all flat tensors."""
    return sum(_padded(own, strategy.parallel.data) for own in grouped(model, strategy))


def completed(model: Model) -> list[Parameter]:
    """Return each trained parameter in the order in which backward completes it."""
    order: dict[str, Parameter] = {}
    for unit in reversed(model.units):
        for parameter in reversed(unit.parameters):
            order.pop(parameter.name, None)  # another unit adds to it
            if not parameter.frozen:
                order[parameter.name] = parameter
    return list(order.values())


def data(model: Model, strategy: Strategy) -> list[WireBytes]:
    """Return the volume over the data axis."""
    options = strategy.options(DeepSpeed)
    parameters, groups = completed(model), flat_groups(model, strategy)
    if strategy.zero.stage == 1 and not options.overlap_comm:
        parameters = [parameter for group in groups for parameter in reversed(group)]
    buckets = [*_buckets(parameters, options.reduce_bucket_size)]
    compute = strategy.train.precision.compute
    wire = (options.communication_data_type or compute).size_bytes
    times = strategy.train.gradient_accumulation_steps if strategy.zero.stage == 2 else 1
    found: list[WireBytes] = []
    for axis, expert, ranks in (
        ("data", False, strategy.parallel.data),
        ("expert_data", True, strategy.expert_data),
    ):
        apart = strategy.has_expert_order
        if expert and not apart:
            continue
        flats = [each for each in groups if not apart or each[0].expert is expert]
        shards = sum(_padded(each, ranks) // ranks for each in flats)
        bytes_sent = shards * (ranks - 1) * compute.size_bytes
        found.append(WireBytes(group=axis, collective="all_gather", bytes=bytes_sent))
        own = [
            _elements([each for each in bucket if not apart or each.expert is expert])
            for bucket in buckets
        ]
        sizes = [size for size in own if size] * times
        found += all_reduces(axis, sizes, ranks=ranks, size_bytes=wire)
    return found


def _buckets(parameters: Sequence[Parameter], limit: int) -> Iterator[list[Parameter]]:
    """Yield the gradients that are reduced together.

    One that is too large is reduced alone, after the gradients in the bucket.
    """
    bucket: list[Parameter] = []
    filled = 0
    for each in parameters:
        if bucket and filled + each.elements > limit:
            yield bucket
            bucket, filled = [], 0
        bucket.append(each)
        filled += each.elements
        if each.elements > limit:
            yield bucket
            bucket, filled = [], 0
    if bucket:
        yield bucket


def host(model: Model, strategy: Strategy) -> HostBytes:
    """Return the bytes of the rank that copies the most, with the optimizer on the CPU.

    A rank's part of each gradient goes to the host in the optimizer's dtype. If stage 2
    accumulates, sums of micro-batches go out each time and come back for the next. Python reads
    scalars: a norm in fp64 and a test of each parameter, and the norm of each group, which is
    reduced over ranks through the device. Updated parameters, with padding, go to the device in the
    model's dtype.
    """
    if not strategy.options(DeepSpeed).offload_optimizer.is_on:
        return HostBytes(to_host=0, from_host=0)
    precision, ranks = strategy.train.precision, strategy.parallel.data
    compute, number = precision.compute.size_bytes, precision.optimizer.size_bytes
    found = grouped(model, strategy)
    owned = [min(_padded(group, ranks) // ranks, _elements(group)) for group in found]
    measured = sum(each.elements > 0 for group in found for each in group)
    sums = strategy.train.gradient_accumulation_steps if strategy.zero.stage == 2 else 1
    out = sum(owned) * (number + (sums * compute if sums > 1 else 0))
    out += measured * (DType.FP64.size_bytes + number) + len(found) * number
    delays = strategy.delays_updates  # delivers parameters one by one, without padding
    updated = sum(owned) if delays else padded_elements(model, strategy) // ranks
    back = updated * compute + (sums - 1) * sum(owned) * compute
    back += (len(found) + (precision is Precision.FP16)) * number
    return HostBytes(to_host=out, from_host=back)


def _elements(group: list[Parameter]) -> int:
    return sum(each.elements for each in group)


def _padded(group: list[Parameter], ranks: int) -> int:
    """Return the number of elements of a flat tensor."""
    return -(-_elements(group) // (2 * ranks)) * 2 * ranks


def copied(model: Model, strategy: Strategy) -> CopiedBytes:
    """Return the bytes of gradients that are flattened and divided before their reduction."""
    compute = strategy.train.precision.compute
    wire = (strategy.options(DeepSpeed).communication_data_type or compute).size_bytes
    times = strategy.train.gradient_accumulation_steps if strategy.zero.stage == 2 else 1
    trained = sum(each.elements for each in model.parameters if not each.frozen)
    return CopiedBytes(beside=times * trained * (compute.size_bytes + wire))


VOLUME = DataVolume(
    host=host,
    data=data,
    norms=lambda model, strategy: len(flat_groups(model, strategy)),
    copied=copied,
    checkpoints=checkpoints,
)
