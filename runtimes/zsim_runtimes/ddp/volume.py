"""Data volumes of DistributedDataParallel: all trained gradients once, in buckets.

A bucket is closed by the parameter with which it reaches its limit. Every gradient is reduced once
a step with `no_sync`, otherwise once a micro-batch. PowerSGD reduces of each bucket the small
tensors, all left factors and all right factors.
"""

from math import prod

from zsim.closed_form.data_volume import CopiedBytes, DataVolume, all_reduces
from zsim.dtype import DType
from zsim.model.model import Model, Parameter
from zsim.schedule.schedule import WireBytes
from zsim.strategy.strategy import Strategy
from zsim_runtimes.ddp.options import DDP, WIRE, CommunicationHook


def sizes(model: Model, strategy: Strategy) -> list[int]:
    """Return the elements of each all-reduce of gradients."""
    options, found = strategy.options(DDP), list[int]()
    for bucket in buckets(model, strategy):
        parts = [0, 0, 0]
        for each in bucket:
            rows, columns = each.shape[0], prod(each.shape[1:])
            rank = min(rows, columns, options.matrix_approximation_rank)
            few = (rows + columns) * rank * options.min_compression_rate < rows * columns
            if few and options.comm_hook is CommunicationHook.POWER_SGD:
                parts[1] += rows * rank
                parts[2] += columns * rank
            else:
                parts[0] += each.elements
        found += [size for size in parts if size]
    return found


def buckets(model: Model, strategy: Strategy) -> list[list[Parameter]]:
    """Return the parameters of each bucket."""
    options = strategy.options(DDP)
    order: dict[str, Parameter] = {}
    for unit in model.units if options.finds_unused else model.units[::-1]:
        for each in unit.parameters if options.finds_unused else unit.parameters[::-1]:
            if not options.finds_unused:
                order.pop(each.name, None)
            if not each.frozen:
                order.setdefault(each.name, each)
    each_bytes = strategy.train.precision.optimizer.size_bytes
    limit, later = options.limits
    found: list[list[Parameter]] = [[]]
    for each in order.values():
        found[-1].append(each)
        if sum(other.elements for other in found[-1]) * each_bytes >= limit:
            found.append([])
            limit = later
    return [bucket for bucket in found if bucket]


def data(model: Model, strategy: Strategy) -> list[WireBytes]:
    """Return the volume over the data axis."""
    options, ranks = strategy.options(DDP), strategy.parallel.data
    accumulates = strategy.train.gradient_accumulation_steps
    times = 1 if options.no_sync else accumulates
    wire = WIRE.get(options.comm_hook, strategy.train.precision.optimizer).size_bytes
    found = all_reduces("data", sizes(model, strategy) * times, ranks=ranks, size_bytes=wire)
    if options.finds_unused:
        used = sum(not each.frozen for each in model.parameters)
        found += all_reduces("data", [used] * times, ranks=ranks, size_bytes=DType.FP32.size_bytes)
    if elements := options.broadcast_buffers:
        sent = (ranks - 1) * -(-elements // ranks) * DType.FP32.size_bytes * times
        scalar = elements == 1
        found.append(WireBytes(group="data", collective="broadcast", bytes=sent, scalar=scalar))
    return found


def copied(model: Model, strategy: Strategy) -> CopiedBytes:
    """Return the bytes of copies of gradients into buckets, and back unless they are views."""
    options, precision = strategy.options(DDP), strategy.train.precision
    number = precision.optimizer.size_bytes
    trained = sum(each.elements for each in model.parameters if not each.frozen)
    each = number + precision.compute.size_bytes
    if not options.gradient_as_bucket_view:
        each += 2 * number
    return CopiedBytes(compute=trained * each)


def norms(model: Model, strategy: Strategy) -> int:
    """Return 0: every rank has all gradients, so no norm is reduced."""
    del model, strategy
    return 0


VOLUME = DataVolume(data=data, norms=norms, copied=copied, reduces_overflow=False)


def volume(strategy: Strategy) -> DataVolume:
    """Return the data volumes of every schedule."""
    del strategy
    return VOLUME
