"""Data volumes of DeepSpeed's stage 3, with parameters padded to a multiple of the ranks.

The number of gathers of a parameter in a micro-batch depends on the frees. It is found by a walk
over the recorded order, unit by unit, forward and then backward.
"""

from bisect import bisect_right
from itertools import accumulate

from zsim.closed_form.checkpoint import goes_back
from zsim.closed_form.data_volume import CopiedBytes, DataVolume
from zsim.dtype import DType
from zsim.model.model import Model, Parameter
from zsim.schedule.schedule import FileBytes, HostBytes, WireBytes
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Strategy
from zsim_runtimes.deepspeed.checkpoint_volume import checkpoints
from zsim_runtimes.deepspeed.options import DeepSpeed, OffloadDevice


def data(model: Model, strategy: Strategy) -> list[WireBytes]:
    """Return the volume over the data axis and its inner part."""
    options = strategy.options(DeepSpeed)
    ranks, micro_batches = strategy.parallel.data, strategy.train.gradient_accumulation_steps
    inner = strategy.inner
    size = strategy.train.precision.compute.size_bytes
    wire = (options.communication_data_type or strategy.train.precision.compute).size_bytes
    often = gathers(model, strategy)
    gathered, inside, scattered = 0, 0, 0
    for parameter in model.parameters:
        shard = -(-parameter.elements // ranks)
        times = micro_batches * often[parameter.name] if parameter.name in often else 1
        if inner is not None:
            inside += (times - 1) * (inner - 1) * (shard * ranks // inner) * size
            times = 1
        gathered += times * (ranks - 1) * shard * size
        if not parameter.frozen:
            scattered += micro_batches * (ranks - 1) * shard * wire
    return [
        WireBytes(group="data", collective="all_gather", bytes=gathered),
        WireBytes(group="inner", collective="all_gather", bytes=inside),
        WireBytes(group="data", collective="reduce_scatter", bytes=scattered),
    ]


def host(model: Model, strategy: Strategy) -> HostBytes:
    """Return the bytes that a rank copies if the optimizer or parameters are on the CPU.

    With the optimizer on the CPU: a rank's part of each gradient goes out and in once in every
    micro-batch, in the model's dtype, and out once more for the update, in the optimizer's. Python
    reads the norm of each sub-group, in fp64, and again its sum over all ranks. A parameter comes
    back once if it is kept on the device, otherwise for each gather over the data axis. With only
    the parameters on the CPU, masters are copied to them.
    """
    options, precision = strategy.options(DeepSpeed), strategy.train.precision
    ranks, micro_batches = strategy.parallel.data, strategy.train.gradient_accumulation_steps
    compute, number = precision.compute.size_bytes, precision.optimizer.size_bytes
    shards = {each.name: -(-each.elements // ranks) for each in model.parameters}
    trained = sum(shards[each.name] for each in model.parameters if not each.frozen)
    out = back = 0
    if options.offload_optimizer.is_on:
        groups = norms(model, strategy)
        out = trained * (micro_batches * compute + number)
        out += groups * (DType.FP64.size_bytes + number)
        back = micro_batches * trained * compute
        back += (groups + (precision is Precision.FP16)) * number
        back += 0 if options.offload_param.is_on else trained * compute
    elif options.offload_param.is_on:
        out = trained * number
    often = gathers(model, strategy)
    for name, shard in shards.items() if options.offload_param.is_on else ():
        once = name not in often or strategy.inner is not None
        back += (1 if once else micro_batches * often[name]) * shard * compute
    return HostBytes(to_host=out, from_host=back)


def files(model: Model, strategy: Strategy) -> FileBytes | None:
    """Return the bytes a rank reads and writes in files; None if nothing is in files.

    States of large sub-groups are moved, and parameters in files. A gradient is written up to the
    alignment of files, and not at all if it is smaller than the smallest file.
    """
    options, ranks = strategy.options(DeepSpeed), strategy.parallel.data
    on_nvme = options.offload_optimizer.device is OffloadDevice.NVME
    if not on_nvme and options.offload_param.device is not OffloadDevice.NVME:
        return None
    number, least = strategy.train.precision.optimizer.size_bytes, options.least_file_bytes
    moved = 0
    groups = [group for own in sub_groups(model, strategy) for group in own]
    for shards in ([-(-each.elements // ranks) for each in group] for group in groups):
        if not on_nvme or sum(shards) * number < least:
            continue
        moved += (1 + strategy.moments) * sum(shards) * number
        whole = (shard - shard % options.file_alignment for shard in shards)
        moved += sum(each * number for each in whole if each * number >= least)
    filed, often = in_files(model, strategy), gathers(model, strategy)
    compute = strategy.train.precision.compute.size_bytes
    read = written = moved
    for each in model.parameters:
        if each.name in filed:
            size = -(-each.elements // ranks) * compute
            read += strategy.train.gradient_accumulation_steps * often[each.name] * size
            written += 0 if each.frozen else size
    return FileBytes(read=read, written=written)


def in_files(model: Model, strategy: Strategy) -> set[str]:
    """Return the parameters with shards in files: large ones that do not fit on the CPU."""
    options = strategy.options(DeepSpeed)
    if options.offload_param.device is not OffloadDevice.NVME:
        return set()
    ranks, size = strategy.parallel.data, strategy.train.precision.compute.size_bytes
    beyond = {each for each in model.parameters if each.frozen}
    left = options.offload_param.max_in_cpu
    for own in sub_groups(model, strategy):
        total = 0
        for group in own:
            total += sum(-(-each.elements // ranks) for each in group)
            if total > left:
                beyond.update(group)
        left = max(0, left - total)
    return {
        each.name
        for each in beyond
        if each.elements > options.stage3_param_persistence_threshold
        and -(-each.elements // ranks) * size >= options.least_file_bytes
    }


def norms(model: Model, strategy: Strategy) -> int:
    """Return the number of norms that are reduced: one for each sub-group."""
    return sum(map(len, sub_groups(model, strategy)))


def sub_groups(model: Model, strategy: Strategy) -> list[list[list[Parameter]]]:
    """Return the sub-groups of the parameters of each rule."""
    limit, ranks = strategy.options(DeepSpeed).sub_group_size, strategy.parallel.data
    rules = [strategy.train.optimizer, *(group.rule for group in strategy.train.groups)]
    found: list[list[list[Parameter]]] = []
    for rule in dict.fromkeys(rules):
        own = [
            each
            for each in model.parameters
            if not each.frozen and strategy.rule_of(each.name) == rule
        ]
        whole = sum(-(-each.elements // ranks) for each in own)
        most = whole + 1 if whole <= limit else limit
        left = 0
        found.append([])
        for each in own:
            if left <= 0:
                found[-1].append([])
                left = most
            found[-1][-1].append(each)
            left -= -(-each.elements // ranks)
    return found


def gathers(model: Model, strategy: Strategy) -> dict[str, int]:
    """Count the gathers in a micro-batch of each parameter that does not stay whole.

    A parameter in a file is not gathered ahead before its shard is read. Shards are read ahead
    while there are slots, up to twice the elements that are being gathered.
    """
    options = strategy.options(DeepSpeed)
    filed, slots, coming = in_files(model, strategy), set[str](), dict[str, int]()
    units, uses, visits = _uses(model)
    begins = list(accumulate((sum(each.elements for each in unit) for unit in units), initial=0))
    small = options.stage3_param_persistence_threshold
    found = {each.name: 0 for each in model.parameters if each.elements > small}
    whole: dict[str, int] = {}
    seen = {each.name: -1 for each in model.parameters}
    place = 0

    def gather(parameter: Parameter) -> int:
        if parameter.name not in found or parameter.name in whole:
            return 0
        whole[parameter.name] = coming[parameter.name] = parameter.elements
        slots.update(filed.intersection([parameter.name]))
        found[parameter.name] += 1
        return parameter.elements

    for visit, parameters in enumerate(units):
        for parameter in parameters:
            gather(parameter)
        for parameter in parameters:
            coming.pop(parameter.name, None)
        while any(seen[parameter.name] < visit for parameter in parameters):
            at, parameter = uses[place]
            seen[parameter.name] = at
            place += 1
        live = sum(whole.values())
        room = min(options.stage3_prefetch_bucket_size, options.stage3_max_live_parameters - live)
        while room > 0 and place < len(uses):
            at, parameter = uses[place]
            if parameter.name in filed - slots:
                break
            seen[parameter.name] = at
            room -= gather(parameter)
            place += 1
        if filed and options.stage3_prefetch_bucket_size:
            free = options.offload_param.buffer_count - len(slots)
            slots |= _read_ahead(uses[place:], filed - slots, 2 * sum(coming.values()), free)
        near = begins[visit + 1] + options.stage3_max_reuse_distance
        for parameter in parameters:
            later = visits[parameter.name]
            following = bisect_right(later, visit)
            soon = following < len(later) and begins[later[following]] < near
            if not soon and seen[parameter.name] <= visit + 1:
                whole.pop(parameter.name, None)
                slots.discard(parameter.name)
    return found


Uses = list[tuple[int, Parameter]]
"""Pairs of a visit and a parameter that it uses."""


def _uses(model: Model) -> tuple[list[tuple[Parameter, ...]], Uses, dict[str, list[int]]]:
    """Return the parameters of each visit, their uses in the recorded order, and by parameter."""
    back = [unit for unit in reversed(model.units) if goes_back(model, unit)]
    units = [unit.parameters for unit in (*model.units, *back)]
    order = {parameter.name: place for place, parameter in enumerate(model.parameters)}
    uses = [
        (visit, parameter)
        for visit, parameters in enumerate(units)
        for parameter in sorted(parameters, key=lambda each: order[each.name])
    ]
    visits: dict[str, list[int]] = {}
    for visit, parameter in uses:
        visits.setdefault(parameter.name, []).append(visit)
    return units, uses, visits


def _read_ahead(uses: Uses, unread: set[str], most: int, free: int) -> set[str]:
    """Return the parameters to read ahead, limited by free slots and `most` elements."""
    found: set[str] = set()
    for _, parameter in uses:
        if most < 0 or len(found) >= free:
            break
        found |= unread.intersection([parameter.name])
        most -= parameter.elements
    return found


def copied(model: Model, strategy: Strategy) -> CopiedBytes:
    """Return the bytes of gradients that are copied to a bucket, rearranged by rank and divided.

    A gradient larger than a bucket is rearranged without that copy.
    """
    options, compute = strategy.options(DeepSpeed), strategy.train.precision.compute
    if strategy.parallel.data == 1:
        return CopiedBytes()
    size = compute.size_bytes
    wire = (options.communication_data_type or compute).size_bytes
    found = 0
    for each in model.parameters:
        if not each.frozen:
            fits = each.elements <= options.reduce_bucket_size
            found += each.elements * ((2 * size if fits else 0) + size + 3 * wire)
    return CopiedBytes(beside=strategy.train.gradient_accumulation_steps * found)


VOLUME = DataVolume(
    data=data, norms=norms, host=host, files=files, copied=copied, checkpoints=checkpoints
)
