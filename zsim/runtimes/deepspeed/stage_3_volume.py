"""Parameters and gradients in DeepSpeed's stage 3, each padded to a multiple of the ranks.

How often a parameter is gathered in a micro-batch follows from what is freed: a walk over the
recorded order, unit by unit, forward and then backward.
"""

from bisect import bisect_right
from itertools import accumulate

from zsim.closed_form.checkpoint import goes_back
from zsim.closed_form.data_volume import DataVolume
from zsim.dtype import DType
from zsim.model.model import Model, Parameter
from zsim.runtimes.deepspeed.options import DeepSpeed, OffloadDevice
from zsim.schedule.schedule import FileBytes, HostBytes, WireBytes
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Strategy


def data(model: Model, strategy: Strategy) -> list[WireBytes]:
    """Volume over the data axis and its inner part."""
    options = strategy.options(DeepSpeed)
    ranks, micro_batches = strategy.parallel.data, strategy.train.gradient_accumulation_steps
    inner = strategy.inner
    size = strategy.train.precision.compute.size_bytes
    wire = (options.communication_data_type or strategy.train.precision.compute).size_bytes
    often = gathers(model, options)
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
    """Return what a rank copies, with the optimizer on the CPU, or parameters, or both.

    With the optimizer: its part of each gradient goes out and in once in every micro-batch, in the
    model's format, and out once more for the update, in the optimizer's. Of each sub-group Python
    reads the norm, in fp64, and again what it is over all ranks. A parameter comes back once where
    it is kept on the device, else for each gather over the data axis. Without, masters go out to
    parameters.
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
    often = gathers(model, options)
    for name, shard in shards.items() if options.offload_param.is_on else ():
        once = name not in often or strategy.inner is not None
        back += (1 if once else micro_batches * often[name]) * shard * compute
    return HostBytes(to_host=out, from_host=back)


def files(model: Model, strategy: Strategy) -> FileBytes | None:
    """Return what a rank reads and writes: states of large sub-groups, and what fits of gradients.

    A gradient is written up to the alignment of files, one that is smaller than the least of them
    not at all.
    """
    options = strategy.options(DeepSpeed)
    if options.offload_optimizer.device is not OffloadDevice.NVME:
        return None
    number, least = strategy.train.precision.optimizer.size_bytes, options.least_file_bytes
    moved = 0
    for shards in sub_groups(model, strategy):
        if sum(shards) * number < least:
            continue
        moved += (1 + strategy.moments) * sum(shards) * number
        whole = (shard - shard % options.file_alignment for shard in shards)
        moved += sum(each * number for each in whole if each * number >= least)
    return FileBytes(read=moved, written=moved)


def norms(model: Model, strategy: Strategy) -> int:
    """Sub-groups, each of which has its norm reduced: of all parameters with one rule."""
    return len(sub_groups(model, strategy))


def sub_groups(model: Model, strategy: Strategy) -> list[list[int]]:
    """Return the elements of the shards in each sub-group."""
    limit, found = strategy.options(DeepSpeed).sub_group_size, list[list[int]]()
    rules = [strategy.train.optimizer, *(group.rule for group in strategy.train.groups)]
    for rule in dict.fromkeys(rules):
        shards = [
            -(-parameter.elements // strategy.parallel.data)
            for parameter in model.parameters
            if not parameter.frozen and strategy.rule_of(parameter.name) == rule
        ]
        most = sum(shards) + 1 if sum(shards) <= limit else limit
        left = 0
        for shard in shards:
            if left <= 0:
                found.append([])
                left = most
            found[-1].append(shard)
            left -= shard
    return found


def gathers(model: Model, options: DeepSpeed) -> dict[str, int]:
    """Count the gathers in a micro-batch of each parameter that does not stay whole."""
    back = [unit for unit in reversed(model.units) if goes_back(model, unit)]
    units = [unit.parameters for unit in (*model.units, *back)]
    small = options.stage3_param_persistence_threshold
    order = {parameter.name: place for place, parameter in enumerate(model.parameters)}
    uses = [
        (visit, parameter)
        for visit, parameters in enumerate(units)
        for parameter in sorted(parameters, key=lambda each: order[each.name])
    ]
    visits: dict[str, list[int]] = {}
    for visit, parameter in uses:
        visits.setdefault(parameter.name, []).append(visit)
    begins = list(accumulate((sum(each.elements for each in unit) for unit in units), initial=0))
    found = {each.name: 0 for each in model.parameters if each.elements > small}
    whole: dict[str, int] = {}
    seen = {each.name: -1 for each in model.parameters}
    place = 0

    def gather(parameter: Parameter) -> int:
        if parameter.name not in found or parameter.name in whole:
            return 0
        whole[parameter.name] = parameter.elements
        found[parameter.name] += 1
        return parameter.elements

    for visit, parameters in enumerate(units):
        for parameter in parameters:
            gather(parameter)
        while any(seen[parameter.name] < visit for parameter in parameters):
            at, parameter = uses[place]
            seen[parameter.name] = at
            place += 1
        live = sum(whole.values())
        room = min(options.stage3_prefetch_bucket_size, options.stage3_max_live_parameters - live)
        while room > 0 and place < len(uses):
            at, parameter = uses[place]
            seen[parameter.name] = at
            room -= gather(parameter)
            place += 1
        near = begins[visit + 1] + options.stage3_max_reuse_distance
        for parameter in parameters:
            later = visits[parameter.name]
            following = bisect_right(later, visit)
            soon = following < len(later) and begins[later[following]] < near
            if not soon and seen[parameter.name] <= visit + 1:
                whole.pop(parameter.name, None)
    return found


VOLUME = DataVolume(data=data, norms=norms, host=host, files=files)
