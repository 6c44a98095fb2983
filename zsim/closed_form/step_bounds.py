"""Lower bounds of a step from model and strategy alone: what no schedule of them can beat.

Compute: kernels of a micro-batch run one after the other on a GPU, each at least as long as alone.
Bytes: what ranks must exchange passes the narrowest cut around a node, or around a GPU. Memory: what
persists, and the activations that are kept at the end of a forward. Searches leave out settings
whose bound is worse than what they have found (branch and bound: Land and Doig 1960).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from zsim.closed_form.checkpoint import recomputed
from zsim.model.kernel import Kernel
from zsim.model.model import BATCH, Model, Unit
from zsim.model.pipeline_stages import stages
from zsim.schedule.schedule import FileBytes, HostBytes, WireBytes
from zsim.strategy.offload import MemoryTier
from zsim.strategy.strategy import Strategy

ALONE_IN_RING = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}
"""Laps of a ring for each collective: how often all but a share of the tensor is sent."""

SWITCHED = frozenset({"all_reduce"})
"""Collectives that a switch can do for its GPUs, which then send the tensor once, not twice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Bandwidths around a GPU and around a node, per direction, in bytes per second.

    Attributes:
        gpus_per_domain: GPUs that reach each other without a NIC.
        gpu: from a GPU to the switch of its domain.
        domain: of all NICs of a domain together.
        host: from a GPU to host memory, and back; None where none is known.
        drives_read, drives_write: of the drives of a node together; None where they are not known.
    """

    gpus_per_domain: int
    gpu: int
    domain: int
    host: int | None = None
    drives_read: int | None = None
    drives_write: int | None = None


KernelSeconds = Callable[[tuple[Kernel, ...]], float]
"""Seconds that kernels take one after the other, nothing beside them."""


def compute_s(model: Model, strategy: Strategy, seconds: KernelSeconds) -> float:
    """Return the seconds in which the busiest rank computes in a step, at least.

    In a pipeline, a stage waits for the first micro-batch to come down, and the first stage for the
    last one to come back (Narayanan et al. 2021, section 2.2).
    """
    times = strategy.train.gradient_accumulation_steps
    count = strategy.parallel.pipeline
    if count == 1:
        return times * sum(_unit_s(model, unit, strategy, seconds) for unit in model.units)
    each = [
        sum(_unit_s(stage.model, unit, strategy, seconds) for unit in stage.model.units)
        for stage in stages(model, count)
    ]
    return max(times * own + sum(each[:index]) for index, own in enumerate(each))


def _unit_s(model: Model, unit: Unit, strategy: Strategy, seconds: KernelSeconds) -> float:
    """Return the seconds of a unit for one micro-batch: forward, again, backward."""
    again = recomputed(model, unit, strategy)
    total = 0.0
    for segment in unit.segments:
        total += seconds(segment.forward)
        if again and not strategy.activations.early_stop:
            total += seconds(segment.forward_kernels(again=True))
        if model.runs_backward(segment):
            total += seconds(segment.backward)
    return total


def exchange_s(lines: Iterable[WireBytes], strategy: Strategy, cut: Cut) -> float:
    """Return the seconds that the bytes of a step take through the narrowest cut, at least.

    `lines` are ring-equivalent bytes of a rank, of a pipeline by stage.
    """
    by_role: dict[str, tuple[float, float]] = {}
    for line in lines:
        if line.scalar or line.collective not in ALONE_IN_RING:
            continue
        ranks, stride = _group(line.group, strategy)
        if ranks < 2:
            continue
        near, far = by_role.get(line.role, (0.0, 0.0))
        halves = 2 if line.collective in SWITCHED else 1
        near += line.bytes / halves
        far += _leaving(line.bytes, ranks, stride, strategy.ranks, cut.gpus_per_domain)
        by_role[line.role] = near, far
    return max(
        (max(near / cut.gpu, far / cut.domain) for near, far in by_role.values()), default=0.0
    )


def _group(name: str, strategy: Strategy) -> tuple[int, int]:
    """Return the ranks of a group, and how far its neighbours are apart in the order of ranks."""
    parallel = strategy.parallel
    match name:
        case "tensor":
            return parallel.tensor, 1
        case "data":
            return parallel.data, parallel.tensor
        case "inner":
            return strategy.inner or 1, parallel.tensor
        case "replicate":
            return parallel.replicate, parallel.tensor * parallel.data
        case _:
            return 1, 1


def _leaving(sent: int, ranks: int, stride: int, world: int, domain: int) -> float:
    """Return the bytes that leave a domain of GPUs, whose ranks send so many each around a ring.

    Of a tensor that is spread over k domains, each needs all but the k-th part that it has. Groups
    that do not divide domains evenly count nothing.
    """
    inside = max(1, domain // stride) if domain % stride == 0 else 0
    if not inside or world <= domain or ranks <= inside or ranks % inside:
        return 0.0
    domains = ranks // inside
    groups = min(domain, world) // inside
    return groups * sent * ranks / (ranks - 1) * (domains - 1) / domains


def offload_s(host: HostBytes, files: FileBytes | None, strategy: Strategy, cut: Cut) -> float:
    """Return the seconds in which a rank's bytes pass between its GPU, its host and drives."""
    found = [0.0]
    if cut.host is not None:
        found.append(max(host.to_host, host.from_host) / cut.host)
    if files is not None:
        sharers = min(cut.gpus_per_domain, strategy.ranks)
        if cut.drives_read is not None:
            found.append(sharers * files.read / cut.drives_read)
        if cut.drives_write is not None:
            found.append(sharers * files.written / cut.drives_write)
    return max(found)


def device_bytes(model: Model, strategy: Strategy) -> int:
    """Return the bytes of device memory that a rank holds at its peak, at least.

    Where the backward of the last unit begins: parameters where a stage does not cut them, masters
    and moments as far as they are cut, activations of the micro-batches in flight, and what the
    last unit works in. What schedules hold on top (gradients, buckets, other gathered parameters)
    is left out.
    """
    count, times = strategy.parallel.pipeline, strategy.train.gradient_accumulation_steps
    if count == 1:
        working = _working(model, model.units[-1], strategy)
        return _states(model, strategy) + kept_activations(model, strategy) + working
    return max(
        _states(stage.model, strategy)
        + min(count - stage.index, times) * kept_activations(stage.model, strategy)
        for stage in stages(model, count)
    )


def _working(model: Model, unit: Unit, strategy: Strategy) -> int:
    """Return the bytes that the last segment of a unit works in, with its gathered parameters."""
    last = unit.segments[-1]
    gathered = 0
    if strategy.zero.stage == 3:
        size = strategy.train.precision.compute.size_bytes
        read = set(last.parameters)
        gathered = sum(each.elements for each in unit.parameters if each.name in read) * size
    return last.backward_workspace_bytes + gathered


def _states(model: Model, strategy: Strategy) -> int:
    held = sum(each.elements for each in model.parameters)
    trained = sum(each.elements for each in model.parameters if not each.frozen)
    precision, stage = strategy.train.precision, strategy.zero.stage
    parameters = 0 if stage == 3 else held * precision.compute.size_bytes
    if _leaves_device(strategy):
        return parameters
    kept = strategy.moments + (1 if strategy.keeps_master or stage == 3 else 0)
    shard = trained // strategy.parallel.data if stage else trained
    return parameters + kept * shard * precision.optimizer.size_bytes


def _leaves_device(strategy: Strategy) -> bool:
    """Tell whether some states are not kept on the device."""
    runtime, offload = strategy.zero.emulate, strategy.offload
    if runtime is not None:
        return bool(runtime.tiers(stage=strategy.zero.stage))
    return offload.optimizer is not MemoryTier.DEVICE


def kept_activations(model: Model, strategy: Strategy) -> int:
    """Return the bytes that a micro-batch keeps for its backward, at least.

    What segments save beyond their inputs; of blocks that are run again, their inputs.
    """
    total = 0
    inputs: dict[str, int] = {}
    moves = strategy.moves_checkpoints
    for unit in model.units:
        if recomputed(model, unit, strategy):
            own = {value.name for segment in unit.segments for value in segment.outputs}
            for segment in unit.segments:
                for name in segment.inputs:
                    if name not in own and name != BATCH and not moves:
                        inputs[name] = model.values[name].size_bytes
        else:
            total += sum(each.saved_bytes for each in unit.segments if model.runs_backward(each))
    return total + sum(inputs.values())


def host_state_bytes(model: Model, strategy: Strategy) -> int:
    """Return the bytes of masters and moments that a rank keeps in host memory, at least."""
    if strategy.zero.emulate is None:
        on_host = strategy.offload.optimizer is MemoryTier.HOST
    else:
        tiers = strategy.zero.emulate.tiers(stage=strategy.zero.stage)
        of_states = [tier for option, tier in tiers.items() if "param" not in option]
        on_host = bool(of_states) and all(tier is MemoryTier.HOST for tier in of_states)
    if not on_host:
        return 0
    trained = sum(each.elements for each in model.parameters if not each.frozen)
    shard = trained // strategy.parallel.data if strategy.zero.stage else trained
    kept = strategy.moments + (1 if strategy.keeps_master else 0)
    return kept * shard * strategy.train.precision.optimizer.size_bytes
