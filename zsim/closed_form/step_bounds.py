"""Lower bounds of a step from model and strategy alone: what no schedule of them can beat.

Compute: kernels of a micro-batch run one after the other on a GPU, each at least as long as alone,
and sums over the tensor axis between them. Bytes: what ranks must exchange passes the narrowest cut
around a node, or around a GPU. Memory: what persists, and the activations that are kept where the
last backward begins. Searches leave out settings whose bound is worse than what they have found
(branch and bound: Land and Doig 1960).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from zsim.closed_form.checkpoint import recomputed
from zsim.closed_form.offload_formulas import ADAM_TRAFFIC
from zsim.model.kernel import Kernel
from zsim.model.model import BATCH, Model, Segment, Unit, Value
from zsim.model.pipeline_stages import stages
from zsim.schedule.schedule import FileBytes, HostBytes, WireBytes
from zsim.strategy.offload import MemoryTier
from zsim.strategy.strategy import Strategy

ALONE_IN_RING = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}
"""Laps of a ring for each collective: how often all but a share of the tensor is sent."""

SWITCHED = frozenset({"all_reduce"})
"""Collectives that a switch can do for its GPUs, which then send the tensor once, not twice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkCut:
    """Bandwidths around a GPU and around a node, per direction, in bytes per second.

    Attributes:
        gpus_per_domain: GPUs that reach each other without a NIC.
        gpu: from a GPU to the switch of its domain.
        domain: of all NICs of a domain together.
        host: from a GPU to host memory, and back; None where none is known.
        drives_read, drives_write: of the drives of a node together; None where they are not known.
        adam: that Adam on all cores of a node reads and writes host memory at; None if not known.
    """

    gpus_per_domain: int
    gpu: int
    domain: int
    host: int | None = None
    drives_read: int | None = None
    drives_write: int | None = None
    adam: int | None = None


ADAM_MOMENTS = 2

KernelSeconds = Callable[[tuple[Kernel, ...]], float]
"""Seconds that kernels take one after the other, nothing beside them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Clock:
    """Times of what a rank does in a row: kernels, and collectives of the tensor axis."""

    strategy: Strategy
    seconds: KernelSeconds
    gpu: int

    def stage_s(self, model: Model) -> float:
        """Return the seconds of all units of a model, or of a stage, for one micro-batch."""
        again = set[str]()
        if not self.strategy.activations.early_stop:
            again = recomputed(model, self.strategy)
        last = model.units[-1]
        return sum(
            self._unit_s(model, unit, again=unit.name in again, followed=unit is not last)
            for unit in model.units
        )

    def _unit_s(self, model: Model, unit: Unit, *, again: bool, followed: bool) -> float:
        """Return the seconds of a unit: forward, again, backward.

        Nothing waits for what the last one sums; a recomputation need not wait for the gradient of
        the block behind it.
        """
        last, total = unit.segments[-1], 0.0
        for segment in unit.segments:
            total += self.seconds(segment.forward)
            if segment is not last or followed:
                total += self._summed_s(model, segment)
            if again:
                total += self.seconds(segment.forward_kernels(again=True))
                total += self._summed_s(model, segment) if segment is not last else 0.0
            if model.runs_backward(segment):
                total += self.seconds(segment.backward)
                if segment is not unit.segments[0]:
                    total += self._summed_back_s(model, segment)
        return total

    def _summed_s(self, model: Model, segment: Segment) -> float:
        """Return the seconds in which the outputs of a segment are summed over the tensor axis."""
        if not segment.reduces_output:
            return 0.0
        return sum(self._sum_s(model, value) for value in segment.outputs)

    def _summed_back_s(self, model: Model, segment: Segment) -> float:
        """Return the seconds in which the gradients of its inputs are."""
        if not segment.reduces_input_gradient:
            return 0.0
        values = [model.values[name] for name in segment.inputs]
        return sum(self._sum_s(model, value) for value in values if value.requires_gradient)

    def _sum_s(self, model: Model, value: Value) -> float:
        """Return the seconds of one sum, which a switch may do on its way."""
        ranks = model.tensor
        if ranks == 1:
            return 0.0
        if value.tensor_sharded:
            return value.size_bytes * (ranks - 1) / self.gpu
        return value.size_bytes * min(2 * (ranks - 1) / ranks, 1 + 1 / ranks) / self.gpu


def busy_s(model: Model, strategy: Strategy, seconds: KernelSeconds, cut: LinkCut) -> float:
    """Return the seconds in which the busiest rank computes or sums over the tensor axis, at least.

    In a pipeline, a stage waits for the first micro-batch to come down, and the first stage for the
    last one to come back (Narayanan et al. 2021, section 2.2).
    """
    clock = _Clock(strategy=strategy, seconds=seconds, gpu=cut.gpu)
    times, count = strategy.train.gradient_accumulation_steps, strategy.parallel.pipeline
    if count == 1:
        return times * clock.stage_s(model)
    each = [clock.stage_s(stage.model) for stage in stages(model, strategy)]
    return max(times * own + sum(each[:index]) for index, own in enumerate(each))


def exchange_s(lines: Iterable[WireBytes], strategy: Strategy, cut: LinkCut) -> float:
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
        switched = (ranks + 1) / (2 * (ranks - 1)) if line.collective in SWITCHED else 1
        near += line.bytes * min(switched, 1)
        far += _leaving(line.bytes, (ranks, stride), strategy.ranks, cut.gpus_per_domain)
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


def _leaving(sent: int, group: tuple[int, int], world: int, domain: int) -> float:
    """Return the bytes that leave a domain of GPUs, whose ranks send so many each around a ring.

    Of a tensor that is spread over k domains, each needs all but the k-th part that it has. Groups
    that do not divide domains evenly count nothing.
    """
    ranks, stride = group
    inside = max(1, domain // stride) if domain % stride == 0 else 0
    if not inside or world <= domain or ranks <= inside or ranks % inside:
        return 0.0
    domains = ranks // inside
    groups = min(domain, world) // inside
    return groups * sent * ranks / (ranks - 1) * (domains - 1) / domains


def offload_s(host: HostBytes, files: FileBytes | None, strategy: Strategy, cut: LinkCut) -> float:
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
        for stage in stages(model, strategy)
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

    What segments save, and their inputs as far as backward reads them; of blocks that are run
    again, what they are given.
    """
    total, inputs, again = 0, set[str](), recomputed(model, strategy)
    for unit in model.units:
        if unit.name in again:
            own = {value.name for segment in unit.segments for value in segment.outputs}
            given = {name for segment in unit.segments for name in segment.inputs} - own
            inputs |= set() if strategy.moves_checkpoints else given
            continue
        for segment in unit.segments:
            if model.runs_backward(segment):
                total += segment.saved_bytes
                inputs |= set(segment.inputs) if segment.saves_input else set()
    return total + sum(model.values[name].size_bytes for name in inputs - {BATCH})


def host_update_s(model: Model, strategy: Strategy, cut: LinkCut) -> float:
    """Return the seconds in which CPUs update the states that are in host memory, at least.

    Runtimes that are emulated do so after the last backward and before the next forward.
    """
    held = host_state_bytes(model, strategy)
    if cut.adam is None or strategy.zero.emulate is None or strategy.moments != ADAM_MOMENTS:
        return 0.0
    size = strategy.train.precision.optimizer.size_bytes * (strategy.moments + 1)
    sharers = min(cut.gpus_per_domain, strategy.ranks)
    return held / size * ADAM_TRAFFIC * sharers / cut.adam


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
