"""Lower bounds of the step time from model and strategy alone, valid for every schedule of them.

Compute: kernels of a micro-batch run in sequence on a GPU, each at least as long as alone, with
copies and those collectives of the tensor axis that are not fused; collectives of the data axis
slow down the kernels that they overlap. Bytes: data between ranks passes the narrowest cut around
a node or a GPU. Searches skip settings whose bound is worse than the best found (branch and bound:
Land and Doig 1960).
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from zsim.closed_form.by_model import alike_units, kept_stages
from zsim.closed_form.checkpoint import recomputed
from zsim.closed_form.data_volume import CopiedBytes
from zsim.closed_form.offload_formulas import ADAM_TRAFFIC
from zsim.model.expert_transport import ExpertTransport
from zsim.model.kernel import FusedPart, parts_of
from zsim.model.model import Model, Segment, Unit, Value
from zsim.schedule.schedule import FileBytes, HostBytes, WireBytes
from zsim.strategy.offload import MemoryTier
from zsim.strategy.strategy import Strategy
from zsim_plan.bounds.fused_bounds import fused_backward_s, fused_forward_s
from zsim_plan.bounds.memory_bounds import host_state_bytes
from zsim_plan.bounds.rank_speeds import (
    ALONE_IN_RING,
    KernelTime,
    KernelTimes,
    RankSpeeds,
    RankWork,
    TensorSeconds,
    tensor_s,
)
from zsim_plan.bounds.stage_kinds import units_by_kind


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkCut:
    """Bandwidths around a GPU and around a node, per direction, in bytes per second.

    Attributes:
        gpus_per_domain: GPUs that reach each other without a NIC.
        gpu: from a GPU to the switch of its domain.
        domain: of all NICs of a domain together.
        host: between a GPU and host memory; None if unknown.
        drives_read, drives_write: of the drives of a node together; None if unknown.
        adam: host memory traffic of Adam on all cores of a node; None if unknown.
    """

    gpus_per_domain: int
    gpu: int
    domain: int
    host: int | None = None
    drives_read: int | None = None
    drives_write: int | None = None
    adam: int | None = None


ADAM_MOMENTS = 2
ALL_TO_ALL = "all_to_all"
"""The exchange of tokens of experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankClock:
    """Times of a rank's sequential work: kernels, and collectives of the tensor axis.

    Runtimes run both on one stream, since the next kernel reads the result of such a collective.
    """

    strategy: Strategy
    speeds: RankSpeeds

    @property
    def kernels(self) -> KernelTimes:
        """Times of the kernels of an operation."""
        return self.speeds.kernels

    @property
    def tensor(self) -> TensorSeconds:
        """Times of collectives of the tensor axis."""
        return self.speeds.tensor

    def work(self, model: Model, *, ahead: bool = False) -> RankWork:
        """Return the work of one micro-batch; with `ahead` the part for which other stages wait.

        It is computed once for equal units: stages of a pipeline, and settings that differ in their
        shards, have the same.
        """
        goes_back = not (ahead and self.strategy.execution.splits)
        key = self._kinds(model), self.strategy.activations, goes_back
        known = self.speeds.works.get(key)
        if known is None:  # the model stays alive, so that no other kernels get the ids of its own
            known = self.speeds.works[key] = model, self._work(model, goes_back=goes_back)
        return known[1]

    def of_forward(self, model: Model) -> RankWork:
        """Return the work of one forward."""
        key = self._kinds(model), self.strategy.activations, "forward"
        known = self.speeds.works.get(key)
        if known is None:
            found = RankWork()
            for unit, names in alike_units(model):
                self._add(found, model, unit, len(names), goes_back=False)
            known = self.speeds.works[key] = model, found
        return known[1]

    def _kinds(self, model: Model) -> Hashable:
        """Return the kernels of the units of each kind, and the number that is recomputed."""
        again = set[str]()
        if not self.strategy.activations.early_stop:
            again = recomputed(model, self.strategy)
        return tuple(
            (tuple(map(_costs, unit.segments)), many, is_recomputed)
            for unit, many, is_recomputed in units_by_kind(model, again)
        )

    def _work(self, model: Model, *, goes_back: bool) -> RankWork:
        found, again = RankWork(), set[str]()
        if not self.strategy.activations.early_stop:
            again = recomputed(model, self.strategy)
        for unit, names in alike_units(model):
            self._add(found, model, unit, len(names), goes_back=goes_back)
            many = sum(name in again for name in names)
            if many:
                self._add_again(found, model, unit, many)
        return found

    def _add(
        self, found: RankWork, model: Model, unit: Unit, times: int, *, goes_back: bool
    ) -> None:
        """Add forward, and backward if it counts, of units like `unit`, `times` in number."""
        for segment, exchanged_s, fused_s in self._forward(model, unit):
            found.kernels[self.kernels(segment.forward)] += times
            found.tensor_s += times * exchanged_s
            found.fused_s += times * fused_s
            if goes_back and model.runs_backward(segment):
                found.kernels[self.kernels(segment.backward)] += times
                found.tensor_s += times * self._backward_s(model, segment)
                found.fused_s += times * fused_backward_s(
                    model, segment, self.strategy, self.speeds
                )

    def _add_again(self, found: RankWork, model: Model, unit: Unit, times: int) -> None:
        """Add the recomputation of units like `unit`, `times` in number."""
        for segment, exchanged_s, _ in self._forward(model, unit):
            found.kernels[self.kernels(segment.forward_kernels(again=True))] += times
            found.tensor_s += times * exchanged_s

    def _forward(self, model: Model, unit: Unit) -> Iterator[tuple[Segment, float, float]]:
        """Yield the segments of a unit with the seconds of exchanges of their forward.

        The last number is the time that fused exchanges add.
        """
        is_left = False
        for segment in unit.segments:
            fused_s = fused_forward_s(model, segment, self.strategy, self.speeds, is_left=is_left)
            yield segment, self._forward_s(model, segment, is_left=is_left), fused_s
            is_left = segment.leaves_gathered

    def _forward_s(self, model: Model, segment: Segment, *, is_left: bool) -> float:
        """Return the seconds to sum outputs, and to gather inputs unless they were left whole."""
        if model.tensor == 1 or parts_of(segment.forward):
            return 0.0
        total = 0.0 if is_left else self._read_s(model, segment)
        made = segment.outputs if segment.sums else ()
        return total + sum(self._summed_s(model, value) for value in made)

    def _backward_s(self, model: Model, segment: Segment) -> float:
        """Return the seconds to gather inputs again and to sum gradients."""
        if model.tensor == 1:
            return 0.0
        fused = parts_of(segment.backward)
        total = self._read_s(model, segment) if segment.saves_input and not fused else 0.0
        if segment.sums and not fused:
            made = [each for each in segment.outputs if each.tensor_sharded]
            total += sum(self._gathered_s(model, each, segment) for each in made)
        if segment.sums_gradients and FusedPart.BESIDE_SCATTER not in fused:
            values = [model.values[name] for name in segment.inputs]
            total += sum(self._summed_s(model, each) for each in values if each.requires_gradient)
        return total

    def _read_s(self, model: Model, segment: Segment) -> float:
        """Return the seconds to gather the inputs that a segment reads whole."""
        values = map(model.values.__getitem__, segment.inputs if segment.reads_gathered else ())
        return sum(self._gathered_s(model, each, segment) for each in values if each.tensor_sharded)

    def _gathered_s(self, model: Model, value: Value, segment: Segment) -> float:
        own = value.elements if segment.is_narrow else value.size_bytes  # cast: a byte each
        return self.tensor("all_gather", own * model.tensor, model.tensor)

    def _summed_s(self, model: Model, value: Value) -> float:
        """Return the seconds of one sum; a reduce-scatter if the value is sharded by tokens."""
        if value.tensor_sharded:
            return self.tensor("reduce_scatter", value.size_bytes * model.tensor, model.tensor)
        return self.tensor("all_reduce", value.size_bytes, model.tensor)


def _costs(segment: Segment) -> Hashable:
    """Return a key that is equal for equal segments of the stages of a model."""
    made = tuple(value.elements for value in segment.outputs)
    return id(segment.forward), id(segment.backward), id(segment.again), made


@dataclass(frozen=True, slots=True, kw_only=True)
class BusyTime:
    """Seconds in which a rank computes, copies or sums; `kernels_s` without copies."""

    seconds: float
    kernels_s: float


def busy_time(
    model: Model,
    strategy: Strategy,
    speeds: RankSpeeds,
    copied: Callable[[Model], CopiedBytes],
    *,
    exchanged_s: float,
    swapped_s: Mapping[str, float],
) -> BusyTime:
    """Return a lower bound of the time in which the busiest rank computes, copies or exchanges.

    Collectives of the data axis, which take at least `exchanged_s`, slow down overlapping kernels.
    Exchanges of tokens of experts, which take `swapped_s` on ranks of each role, overlap none.
    In a pipeline, a stage waits until the first micro-batch arrives, and the first stage until the
    last one returns, both through one chunk of each stage in between (Narayanan et al. 2021,
    section 2.2).
    """
    clock = RankClock(strategy=strategy, speeds=speeds)
    times, count = strategy.train.gradient_accumulation_steps, strategy.parallel.pipeline
    if count > 1:
        made = kept_stages(model, strategy)
        each = [clock.work(stage.model).seconds for stage in made]
        first = [clock.work(stage.chunks[0].model, ahead=True).seconds for stage in made]
        copies = [copied(stage.model).compute / speeds.copied_bytes_per_s for stage in made]
        swapped = [swapped_s.get(stage.name, 0.0) for stage in made]
        kernels = [
            times * own + apart + sum(first[:index])
            for index, (own, apart) in enumerate(zip(each, swapped, strict=True))
        ]
        whole = max(own + copied for own, copied in zip(kernels, copies, strict=True))
        return BusyTime(seconds=whole, kernels_s=max(kernels))
    work, moved = clock.work(model), copied(model)
    copies_s = moved.compute / speeds.copied_bytes_per_s
    if not work.tensor_s:  # kernels run all the time, so copies on other streams add to it
        copies_s += moved.beside / speeds.copied_bytes_per_s
    tensor_s = times * work.tensor_s
    beside = [(each, times * many) for each, many in work.kernels.items()]
    beside.append((KernelTime(copies_s, copies_s), 1))
    slowed_s = _slowed_s(beside, exchanged_s - tensor_s, speeds.collective_share)
    kernels_s = times * work.seconds + swapped_s.get("", 0.0)
    return BusyTime(seconds=kernels_s + copies_s + slowed_s, kernels_s=kernels_s)


def _slowed_s(kernels: Iterable[tuple[KernelTime, int]], beside_s: float, share: float) -> float:
    """Return a lower bound of the time that collectives of `beside_s` seconds add to kernels.

    While it is in flight, a collective takes `share` of the processors from a computing kernel,
    and none from one that moves memory. The minimum is reached if it overlaps the kernels that
    move most. Time added to a kernel may itself overlap a collective.
    """
    total, left = 0.0, beside_s
    for each, many in sorted(kernels, key=lambda pair: -pair[0].moving_s / (pair[0].seconds or 1)):
        if left <= 0 or not each.seconds:
            continue
        taken = min(left, each.seconds * many)
        total += share * (1 - each.moving_s / each.seconds) * taken
        left -= taken
    return total / (1 + share)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCollective:
    """A collective over the ranks of a group: its name, the bytes of the whole tensor, the group.

    `ranks` are spread evenly over `domains` domains; 0 if they are not. A domain contains ranks of
    `sharers` such groups. A library that exchanges tokens of experts sends fewer copies of them:
    `near` and `far` are those on a GPU's link and on NICs, for each copy of NCCL's; 1 for NCCL.
    """

    collective: str
    size_bytes: float
    ranks: int
    domains: int
    sharers: int = 1
    near: float = 1.0
    far: float = 1.0


CollectiveSeconds = Callable[[GroupCollective], tuple[float, float]]
"""Return lower bounds of its seconds on the link of a GPU, and on the NICs of a domain.

Data that leaves a domain need not pass the link of a GPU, so one of the two is 0."""


def least_exchange_s(exchange: GroupCollective, cut: LinkCut) -> tuple[float, float]:
    """Return lower bounds of a collective's seconds from bandwidths, for any algorithm.

    If a tensor is spread over k domains, each needs all but the k-th part that it has.
    """
    ranks, domains = exchange.ranks, exchange.domains
    if not domains:
        return 0.0, 0.0
    if exchange.collective == ALL_TO_ALL:  # its size is that of one rank's blocks
        if domains == 1:
            return exchange.near * exchange.size_bytes * (ranks - 1) / ranks / cut.gpu, 0.0
        sent = exchange.far * exchange.size_bytes * (domains - 1) / domains
        return 0.0, exchange.sharers * ranks / domains * sent / cut.domain
    if domains == 1:
        return tensor_s(exchange.collective, exchange.size_bytes, ranks, cut.gpu), 0.0
    sharers = exchange.sharers * ALONE_IN_RING[exchange.collective]
    return 0.0, sharers * exchange.size_bytes * (domains - 1) / domains / cut.domain


def exchange_s(
    lines: Iterable[WireBytes],
    strategy: Strategy,
    cut: LinkCut,
    seconds: CollectiveSeconds,
    *,
    transport: ExpertTransport | None = None,
) -> float:
    """Return a lower bound of the seconds that a step's bytes need through the narrowest cut.

    `lines` are ring-equivalent bytes of a rank, of a pipeline by stage. `transport` is the library
    that exchanges tokens of experts, if NCCL does not.
    """
    by_role: dict[str, tuple[float, float]] = {}
    for line in lines:
        if (exchange := _exchange(line, strategy, cut, transport)) is not None:
            near, far = by_role.get(line.role, (0.0, 0.0))
            near_s, far_s = seconds(exchange)
            by_role[line.role] = near + near_s, far + far_s
    return max((max(each) for each in by_role.values()), default=0.0)


def swapped_seconds(
    lines: Iterable[WireBytes],
    strategy: Strategy,
    cut: LinkCut,
    seconds: CollectiveSeconds,
    *,
    transport: ExpertTransport | None,
) -> dict[str, float]:
    """Return lower bounds of the seconds in which ranks exchange tokens of experts, by role.

    All runtimes do so on the compute stream, and all ranks of a domain at the same time.
    """
    found: dict[str, float] = {}
    for line in lines:
        exchange = _exchange(line, strategy, cut, transport)
        if line.collective == ALL_TO_ALL and exchange is not None:
            found[line.role] = found.get(line.role, 0.0) + max(seconds(exchange))
    return found


def data_exchange_s(
    lines: Iterable[WireBytes], strategy: Strategy, cut: LinkCut, seconds: CollectiveSeconds
) -> float:
    """Return a lower bound of the seconds in which a data-axis collective is in flight.

    Collectives of one communicator run in sequence.
    """
    found = (_exchange(line, strategy, cut) for line in lines if line.group == "data")
    return sum(max(seconds(exchange)) for exchange in found if exchange is not None)


def _exchange(
    line: WireBytes, strategy: Strategy, cut: LinkCut, transport: ExpertTransport | None = None
) -> GroupCollective | None:
    """Return the collectives of a line as one; None if there are none to count."""
    laps = 1 if line.collective == ALL_TO_ALL else ALONE_IN_RING.get(line.collective)
    if line.scalar or laps is None:
        return None
    ranks, stride = _group(line.group, strategy)
    if ranks < 2:
        return None
    domains, sharers = _domains(ranks, stride, strategy.ranks, cut.gpus_per_domain)
    near = far = 1.0
    if transport is not None and line.collective == ALL_TO_ALL and domains:
        choice = transport.choice
        near, far = (choice.places(each) / choice.top_k for each in (ranks, domains))
    return GroupCollective(
        collective=line.collective,
        size_bytes=line.bytes * ranks / (ranks - 1) / laps,
        ranks=ranks,
        domains=domains,
        sharers=sharers,
        near=near,
        far=far,
    )


def _group(name: str, strategy: Strategy) -> tuple[int, int]:
    """Return the number of ranks of a group, and the distance of its neighbours in rank order."""
    parallel = strategy.parallel
    match name:
        case "tensor":
            return parallel.tensor, 1
        case "data":
            return parallel.data, parallel.tensor
        case "expert":
            return parallel.expert, strategy.expert_tensor
        case "expert_data":
            return strategy.expert_data, strategy.parallel.expert * strategy.expert_tensor
        case "inner":
            return strategy.inner or 1, parallel.tensor
        case "replicate":
            return parallel.replicate, parallel.tensor * parallel.data
        case _:
            return 1, 1


def _domains(ranks: int, stride: int, world: int, domain: int) -> tuple[int, int]:
    """Return the number of GPU domains of a group, and the number of groups per domain.

    Returns (0, 0) if the group is not spread evenly.
    """
    if world <= domain or (ranks * stride <= domain and domain % (ranks * stride) == 0):
        return 1, 1
    inside = max(1, domain // stride) if domain % stride == 0 else 0
    if not inside or world <= domain or ranks <= inside or ranks % inside:
        return 0, 0
    return ranks // inside, min(domain, world) // inside


def offload_s(
    host: Sequence[HostBytes], files: FileBytes | None, strategy: Strategy, cut: LinkCut
) -> float:
    """Return the seconds in which a rank's bytes pass between its GPU, its host and drives."""
    found = [0.0]
    if cut.host is not None:
        found += [max(each.to_host, each.from_host) / cut.host for each in host]
    if files is not None:
        sharers = min(cut.gpus_per_domain, strategy.ranks)
        if cut.drives_read is not None:
            found.append(sharers * files.read / cut.drives_read)
        if cut.drives_write is not None:
            found.append(sharers * files.written / cut.drives_write)
    return max(found)


def host_update_s(model: Model, strategy: Strategy, cut: LinkCut) -> float:
    """Return a lower bound of the seconds in which CPUs update the states in host memory.

    It is 0 unless the runtime is emulated: those update after the last backward and before the
    next forward.
    """
    held = host_state_bytes(model, strategy)
    if cut.adam is None or strategy.zero.emulate is None or strategy.moments != ADAM_MOMENTS:
        return 0.0
    size = strategy.train.precision.optimizer.size_bytes * (strategy.moments + 1)
    sharers = min(cut.gpus_per_domain, strategy.ranks)
    return held / size * ADAM_TRAFFIC * sharers / cut.adam


def filed_update_s(files: FileBytes | None, strategy: Strategy, cut: LinkCut) -> float:
    """Return a lower bound of the seconds to read and write states in files for an update.

    Between the last backward and the next forward DeepSpeed reads each sub-group, updates it and
    writes it back (runtime/zero/stage3.py, `step`), in sequence except with `pipeline_read` and
    `pipeline_write`. Gradients and parameters in files may move before and after.
    """
    runtime = strategy.zero.emulate
    if files is None or runtime is None:
        return 0.0
    tiers = runtime.tiers(stage=strategy.zero.stage)
    if MemoryTier.NVME not in {tier for option, tier in tiers.items() if "param" not in option}:
        return 0.0
    number = strategy.train.precision.optimizer.size_bytes
    states = (1 + strategy.moments) * number
    others = number + strategy.train.precision.compute.size_bytes
    moved = files.written * states / (states + others) * min(cut.gpus_per_domain, strategy.ranks)
    return max(moved / rate for rate in (cut.drives_read, cut.drives_write) if rate is not None)
