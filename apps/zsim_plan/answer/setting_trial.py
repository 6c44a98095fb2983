"""Bounds and simulations of single settings, for the search of the best setting."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from math import inf
from typing import Any

from zsim.api.counted_work import counted_work
from zsim.api.forecast import (
    RUN_FAULTS,
    accumulating,
    forecast,
    settled_source,
    simulated_micro_batches,
)
from zsim.cluster.cluster import Cluster, Gpu
from zsim.cluster.host_side import HostKernel
from zsim.compute.roofline import kernel_ps
from zsim.files.installed import (
    network_profile,
    topology,
)
from zsim.files.nearest_gpu import kernel_profile
from zsim.files.source import with_files
from zsim.mistake import MistakeError
from zsim.model.expert_transport import transport_of
from zsim.model.kernel import Kernel, KernelKind, bound
from zsim.model.model import Model, ModelError
from zsim.prediction.closest_runs import slower_of
from zsim.prediction.error_rule import SURE, shipped_rules
from zsim.prediction.memory_margin import is_tight
from zsim.prediction.predicted_error import step_error
from zsim.prediction.run_features import features, features_of
from zsim.runtimes.registry import copied_bytes, file_bytes, host_bytes, need_trainable, wire_bytes
from zsim.scenario.resolve import resolve
from zsim.scenario.resolved_scenario import ResolvedScenario
from zsim.scenario.tables import ScenarioError, from_tables
from zsim.schedule.binding import Ratio
from zsim.schedule.schedule import WireBytes
from zsim.strategy.offload import MemoryTier
from zsim.strategy.strategy import Strategy
from zsim.trace.trace import StepError
from zsim.units import PICOSECONDS_PER_SECOND, format_bytes
from zsim_plan.answer.folded_pipeline import FoldedPipeline, folded_pipeline
from zsim_plan.answer.setting_bound import SettingBound, least_bound, lightest_bound
from zsim_plan.bounds.collective_bounds import CollectiveBounds
from zsim_plan.bounds.memory_bounds import device_bytes, host_state_bytes
from zsim_plan.bounds.pipeline_bounds import pipeline_s
from zsim_plan.bounds.rank_speeds import (
    KernelTime,
    KernelTimes,
    RankSpeeds,
    TensorSeconds,
    tensor_s,
)
from zsim_plan.bounds.step_bounds import (
    CollectiveSeconds,
    GroupCollective,
    LinkCut,
    busy_time,
    data_exchange_s,
    exchange_s,
    filed_update_s,
    host_update_s,
    least_exchange_s,
    offload_s,
    swapped_seconds,
)
from zsim_plan.search.space import SettingGroup

NAME = "best"
"""Name of the generated scenarios in messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingOutcome:
    """Result of simulating one setting.

    Attributes:
        refusal: reason why it cannot run, in one line; empty if it runs.
        step_time_s: step time in seconds; 0 if it was not simulated.
        memory_bytes: memory that a rank needs on the device, even beyond `usable_bytes`.
        usable_bytes: device memory that a rank may reserve.
        kept_bytes: peak of device memory without the buffers of collectives.
        error_text: error of the step time, in one line.
        error: error of the step time; None if unknown.
        slower: median ratio of published to predicted times of similar runs.
        operations: operations of the schedules written or simulated for it.
    """

    refusal: str = ""
    step_time_s: float = 0.0
    memory_bytes: int = 0
    usable_bytes: int = 0
    kept_bytes: int = 0
    fits: bool = False
    error_text: str = ""
    error: StepError | None = None
    slower: float = 1.0
    operations: int = 0

    @property
    def fit_probability(self) -> float:
        """Probability that the setting fits, from published runs that fit or failed."""
        if self.memory_bytes == 0:
            return 0.0
        return shipped_rules().fit.probability(self.memory_bytes, self.usable_bytes)

    @property
    def is_sure(self) -> bool:
        """True if it fits with at least the probability `SURE`."""
        return self.fits and self.fit_probability >= SURE

    @property
    def is_tight(self) -> bool:
        """True if it fits, but with almost no free memory."""
        return self.fits and is_tight(self.memory_bytes, self.usable_bytes)

    @property
    def keeps_to_be_unsure(self) -> bool:
        """True if `kept_bytes` alone exceed the memory that fits with the probability `SURE`."""
        return self.kept_bytes > sure_bytes(self.usable_bytes)

    @property
    def keeps_too_much(self) -> bool:
        """True if `kept_bytes` exceed the usable memory; knobs that add memory cannot fit then."""
        return self.kept_bytes > self.usable_bytes

    @property
    def keeps_nearly_all(self) -> bool:
        """True if `kept_bytes` leave almost no free memory."""
        return is_tight(self.kept_bytes, self.usable_bytes)


def sure_bytes(usable_bytes: int) -> float:
    """Return the memory up to which a run fits with at least the probability `SURE`."""
    return min(shipped_rules().fit.room(SURE), 1.0) * usable_bytes


def tried(tables: Mapping[str, Any], *, times_unsure: bool = True) -> SettingOutcome:
    """Return the result of simulating a setting, with the numbers of `zsim run`.

    With `times_unsure=False`, a setting that certainly keeps too much memory to fit with the
    probability `SURE` gets no step time.
    """
    with counted_work() as work:
        found = _tried(tables, times_unsure=times_unsure)
    return replace(found, operations=work.operations)


def _tried(tables: Mapping[str, Any], *, times_unsure: bool) -> SettingOutcome:
    try:
        pipeline = folded_pipeline(tables)
        return _outcome(tables, pipeline, times_unsure=times_unsure)
    except RUN_FAULTS as fault:
        return SettingOutcome(refusal=str(fault).removeprefix("scenario: "))


def _outcome(
    tables: Mapping[str, Any], pipeline: FoldedPipeline | None, *, times_unsure: bool
) -> SettingOutcome:
    """Return the result of a setting, from its memory alone if that decides.

    Raises:
        MistakeError, BackendError, RunFailedError, NoRouteError: the setting cannot run.
    """
    found, is_certain = (forecast(tables, None), False) if pipeline is None else pipeline.memory()
    if found is not None and not isinstance(found, str) and found.fits:
        outcome = SettingOutcome(
            memory_bytes=found.needed_bytes,
            usable_bytes=found.usable_bytes,
            kept_bytes=found.kept_bytes,
            fits=True,
        )
        is_certain = is_certain or found.step_time_s > 0  # else memory may be an upper bound
        is_unsure = outcome.keeps_to_be_unsure or (is_certain and not outcome.is_sure)
        if is_unsure and not times_unsure:
            return outcome
        found = None
    if found is None:
        found = forecast(tables) if pipeline is None else pipeline.forecast()
    if isinstance(found, str):
        return SettingOutcome(refusal=found.removeprefix("scenario: "))
    outcome = SettingOutcome(
        step_time_s=found.step_time_s,
        memory_bytes=found.needed_bytes,
        usable_bytes=found.usable_bytes,
        kept_bytes=found.kept_bytes,
        fits=found.fits,
    )
    if not found.fits:
        return outcome
    job = settled_source(_as_simulated(tables)).job() if pipeline is None else pipeline.job
    found_error = step_error(job)
    return replace(
        outcome,
        error_text=found_error.text,
        error=StepError.of(found_error.bounds, found_error.features_text),
        slower=slower_of(job.cluster, features_of(job)),
    )


def _as_simulated(tables: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the tables of the last scenario that `forecast` scheduled."""
    few, _ = simulated_micro_batches(tables)
    many = tables["train"]["gradient_accumulation_steps"] > few
    return accumulating(tables, few) if many else tables


class Bounder:
    """Computes bounds of settings; caches models and kernel times that settings share."""

    def __init__(self) -> None:
        self._topology = cache(topology)
        self._models: dict[object, Model] = {}
        self._times: dict[object, CollectiveBounds] = {}
        self._speeds: dict[object, tuple[RankSpeeds, CollectiveBounds | None]] = {}

    def bound_of_all(
        self, group: SettingGroup, scenario: Callable[[int], Mapping[str, Any]]
    ) -> SettingBound:
        """Return a lower bound of all settings of a group; `scenario` returns their tables."""
        default = self.bound_of_defaults(group, scenario)
        return default if default.why_not else self.least_of_all(default, group, scenario)

    def bound_of_defaults(
        self,
        group: SettingGroup,
        scenario: Callable[[int], Mapping[str, Any]],
        *,
        sure_only: bool = False,
    ) -> SettingBound:
        """Return the bound of the first setting, which has the default knobs; of memory, the least.

        If communication takes longest, return the bound of all settings, since knobs change the
        communication. Else knobs cannot lower it below `kernels_s`, except those that gather less
        over the tensor axis, which are included. With `sure_only`, settings that cannot surely fit
        get no bound of the step time.
        """
        found = self.bound(scenario(0), sure_only=sure_only)
        if group.lighter and (found.is_full or not found.why_not):
            others = [self.bound(scenario(each), sure_only=sure_only) for each in group.lighter]
            found = lightest_bound(found, others)
        if found.why_not or (sure_only and found.is_unsure):
            return found
        is_busy = found.step_time_s <= found.busy_s
        asked = group.gathering_less if is_busy else range(1, len(group.knobs))
        least = least_bound(found, [self.bound(scenario(each)) for each in asked])
        return least if is_busy else replace(least, kernels_s=least.step_time_s)

    def least_of_all(
        self,
        default: SettingBound,
        group: SettingGroup,
        scenario: Callable[[int], Mapping[str, Any]],
    ) -> SettingBound:
        """Return the smallest bound of the settings of a group whose defaults can run.

        Knobs that may copy less, or slow kernels for less time, are tried one by one, and then
        all those that lower the bound together.
        """
        alone = {number: self.bound(scenario(number)) for number in group.leaner}
        lower = [number for number, found in alone.items() if found.is_below(default)]
        asked, union = [*alone.values()], group.together(lower)
        if union is not None and len(lower) > 1:
            asked.append(self.bound(scenario(union)))
        return least_bound(default, asked)

    def bound(self, tables: Mapping[str, Any], *, sure_only: bool = False) -> SettingBound:
        """Return lower bounds of a setting, or the reason why it cannot run."""
        try:
            found = self._resolved(tables)
            return self._of(found, self._model(found), sure_only=sure_only)
        except (MistakeError, ScenarioError, ModelError) as refusal:
            return SettingBound(why_not=str(refusal).removeprefix(f"{NAME}: "))

    def _resolved(self, tables: Mapping[str, Any]) -> ResolvedScenario:
        scenario, _ = with_files(NAME, from_tables(tables))
        return resolve(scenario, self._topology, network_profile, kernel_profile)

    def _of(self, found: ResolvedScenario, model: Model, *, sure_only: bool) -> SettingBound:
        strategy, cluster = found.strategy, found.cluster
        need_trainable(model, strategy)
        memory = device_bytes(model, strategy, busiest=_busiest(found, model).times)
        known = _memory_bound(memory, cluster.gpu, _groups(strategy))
        if known.is_full or (known.is_unsure and sure_only):
            return known
        held = host_state_bytes(model, strategy) * min(cluster.gpus_per_node, strategy.ranks)
        if cluster.host is not None and held > cluster.host.memory_bytes:
            most = format_bytes(cluster.host.memory_bytes)
            why = f"needs more host memory than the {most} of a node"
            return SettingBound(why_not=why, is_full=True)
        if (missing := _lacking_drives(found)) is not None:
            return SettingBound(why_not=missing)
        lines = wire_bytes(model, strategy)
        known = _memory_bound(memory, cluster.gpu, communicators_of(lines))
        if known.is_full or (known.is_unsure and sure_only):
            return known
        cut = cut_of(cluster)
        files = file_bytes(model, strategy)
        updating = host_update_s(model, strategy, cut)
        updating += filed_update_s(files, strategy, cut)
        moved = offload_s(host_bytes(model, strategy), files, strategy, cut)
        between = exchange_seconds(cluster, self._collective_bounds(found))
        transport = transport_of(model.architecture)
        busy = busy_time(
            model,
            strategy,
            self._speeds_of(found, model),
            lambda part: copied_bytes(part, strategy),
            exchanged_s=data_exchange_s(lines, strategy, cut, between),
            swapped_s=swapped_seconds(lines, strategy, cut, between, transport=transport),
        )
        busy_s = updating + busy.seconds
        exchanged_s = exchange_s(lines, strategy, cut, between, transport=transport)
        seconds = max(busy_s, exchanged_s, moved)
        return replace(
            known,
            step_time_s=seconds,
            busy_s=busy_s,
            kernels_s=updating + busy.kernels_s,
            slower=slower_of(cluster, features(strategy, model, cluster)),
        )

    def sharpened(
        self, default: SettingBound, group: SettingGroup, tables: Mapping[str, Any]
    ) -> SettingBound:
        """Return the bound of a group, with the waits of its pipeline stages for messages.

        `tables` has its default setting. The computation takes longer than that of `default`.
        """
        if group.changes["parallel.pipeline"] == 1 or group.leaner or group.gathering_less:
            return default
        found = self._resolved(tables)
        few, turn = simulated_micro_batches(tables)
        model, cut = self._model(found), cut_of(found.cluster)
        speeds = self._speeds_of(found, model)
        step_s = pipeline_s(model, found.strategy, speeds, cut, few=few, turn=turn)
        return replace(
            default,
            step_time_s=max(default.step_time_s, step_s),
            busy_s=max(default.busy_s, step_s),
        )

    def full(self, tables: Mapping[str, Any]) -> SettingOutcome | None:
        """Return the outcome of a setting that cannot fit by its bound of memory; else None.

        The bound of a group is that of its defaults; options of a runtime may keep more.
        """
        try:
            found = self._resolved(tables)
            model = self._model(found)
            busiest = _busiest(found, model).times
            memory = device_bytes(model, found.strategy, busiest=busiest)
        except (MistakeError, ScenarioError, ModelError):
            return None  # its simulation says why
        usable = found.cluster.gpu.usable_bytes(_groups(found.strategy))
        if memory <= usable:
            return None
        return SettingOutcome(memory_bytes=memory, usable_bytes=usable, kept_bytes=memory)

    def _model(self, found: ResolvedScenario) -> Model:
        strategy = found.strategy
        key = (
            found.shape,
            found.micro_batch_size,
            strategy.parallel.tensor,
            strategy.parallel.pipeline > 1,
            strategy.execution,
            found.cluster.gpu.fp8_any_layout,
            strategy.train.precision,
            (strategy.cuts_tokens, strategy.keeps_gathered, strategy.in_place_loss),
        )
        if key not in self._models:
            self._models[key] = found.make_model()
        return self._models[key]

    def _speeds_of(self, found: ResolvedScenario, model: Model) -> RankSpeeds:
        """Return the simulated speeds of kernels, copies and tensor-parallel collectives."""
        bounds, busiest = self._collective_bounds(found), _busiest(found, model)
        gpu, link = found.cluster.gpu, found.cluster.switch_link
        reach = found.cluster.gpus_per_node * found.cluster.nodes_per_domain
        key = gpu, link, reach, id(bounds), busiest
        known = self._speeds.get(key)
        if known is None:  # the bounds stay alive, so that no other object gets their id
            known = self._speeds[key] = (self._new_speeds(found, bounds, busiest), bounds)
        return known[0]

    def _new_speeds(
        self, found: ResolvedScenario, bounds: CollectiveBounds | None, busiest: "_Busiest"
    ) -> RankSpeeds:
        gpu = found.cluster.gpu
        copied = gpu.memory_bytes_per_s * (1.0 if gpu.kernels is None else gpu.kernels.copying)
        is_measured = gpu.measured is not None
        return RankSpeeds(
            kernels=self._kernel_times(gpu, busiest),
            tensor=tensor_seconds(found.cluster, bounds),
            copied_bytes_per_s=inf if is_measured else copied,
            collective_share=0.0 if is_measured else float(gpu.collective_share),
            link_bytes_per_s=inf if is_measured else found.cluster.switch_link.bytes_per_s,
        )

    def _kernel_times(self, gpu: Gpu, busiest: "_Busiest") -> KernelTimes:
        every: dict[int, tuple[KernelTime, tuple[Kernel, ...]]] = {}

        def of(kernels: tuple[Kernel, ...]) -> KernelTime:
            known = every.get(id(kernels))
            if known is None:
                times = [(each.kind, kernel_ps(busiest.kernel(each), gpu)) for each in kernels]
                moving = sum(ps for kind, ps in times if not kind.multiplies_matrices)
                second = PICOSECONDS_PER_SECOND
                found = KernelTime(sum(ps for _, ps in times) / second, moving / second)
                # Keep the kernels alive, so that no other object gets their id.
                known = every[id(kernels)] = (found, kernels)
            return known[0]

        return of

    def _collective_bounds(self, found: ResolvedScenario) -> CollectiveBounds | None:
        """Return bounds of collectives; None if no fitted constants choose their algorithm."""
        cluster = found.cluster
        forced = found.decision is not None and found.decision.algorithm is not None
        if cluster.network is None or forced or cluster.gpu.measured is not None:
            return None
        key = (id(cluster.network), cluster.name, cluster.nodes)
        known = self._times.get(key)
        if known is None or known.cluster.network is not cluster.network:
            known = self._times[key] = CollectiveBounds(cluster)
        return known


@dataclass(frozen=True, slots=True)
class _Busiest:
    """The rank of experts with most rows: `times` the mean of `members` ranks."""

    times: float = 1.0
    members: int = 1

    def kernel(self, mean: Kernel) -> Kernel:
        """Return a kernel of this rank at least, from that of the mean."""
        if self.times == 1 or mean.loads is None or mean.kind is not KernelKind.GROUPED_MATMUL:
            return mean
        experts, total = mean.loads.experts, mean.loads.total
        # Each member sends a whole number of rows to each expert.
        rows = int(self.times * total / experts) - 2 * self.members
        if rows * experts <= total:
            return mean
        return bound(mean, replace(mean.loads, groups=((experts, rows),)))


def _busiest(found: ResolvedScenario, model: Model) -> _Busiest:
    """Return the busiest rank of experts; of ranks with equal rows or a capacity, any."""
    binding, routing = found.experts.binding, model.routing
    if not isinstance(binding, Ratio) or routing is None or routing.capacity:
        return _Busiest()
    return _Busiest(binding.busiest, model.expert)


ONE_LAP = {"all_to_all": "all_gather"}
"""Collectives by another one that sends equally many bytes over a GPU's link."""


def tensor_seconds(cluster: Cluster, times: CollectiveBounds | None) -> TensorSeconds:
    """Return a function for the seconds of tensor-parallel collectives."""

    def of(collective: str, size_bytes: int, ranks: int) -> float:
        if times is None or ranks > cluster.gpus_per_node * cluster.nodes_per_domain:
            of_links = ONE_LAP.get(collective, collective)
            return tensor_s(of_links, size_bytes, ranks, cluster.switch_link.bytes_per_s)
        return times.alone_s(collective, size_bytes, ranks)

    return of


def exchange_seconds(cluster: Cluster, times: CollectiveBounds | None) -> CollectiveSeconds:
    """Return a function for lower bounds of the seconds that collectives occupy links."""
    cut = cut_of(cluster)

    def of(exchange: GroupCollective) -> tuple[float, float]:
        by_library = exchange.near < 1 or exchange.far < 1
        if times is None or not exchange.domains or by_library:
            return least_exchange_s(exchange, cut)
        return times.moving_s(
            exchange.collective, exchange.size_bytes, exchange.ranks, exchange.domains
        )

    return of


def _memory_bound(memory_bytes: int, gpu: Gpu, communicators: int) -> SettingBound:
    """Return a bound of memory alone, for a rank with this number of communicators."""
    usable = gpu.usable_bytes(communicators)
    if memory_bytes > usable:
        why = f"needs more device memory than the {format_bytes(usable)} of a GPU"
        return SettingBound(why_not=why, is_full=True)
    return SettingBound(memory_bytes=memory_bytes, is_unsure=memory_bytes > sure_bytes(usable))


def _groups(strategy: Strategy) -> int:
    """Return the minimum number of communicators of a rank, known from its degrees."""
    parallel = strategy.parallel
    return sum(degree > 1 for degree in (parallel.data, parallel.tensor))


def communicators_of(lines: Iterable[WireBytes]) -> int:
    """Return the minimum number of communicators of a rank, by the groups in which it sends."""
    by_role: dict[str, set[str]] = {}
    for line in lines:
        by_role.setdefault(line.role, set()).add(line.group)
    return min(map(len, by_role.values()), default=0)


def _lacking_drives(found: ResolvedScenario) -> str | None:
    """Return why states cannot be on NVMe; None if they can, or if NVMe is not used."""
    runtime, drives = found.strategy.zero.emulate, found.cluster.drives
    tiers = {} if runtime is None else runtime.tiers(stage=found.strategy.zero.stage)
    if MemoryTier.NVME not in tiers.values() or drives is None:
        return None
    if drives.read_bytes_per_s is None or drives.write_bytes_per_s is None:
        return f"nvme: reads and writes of the drives of {found.cluster.name} are not published"
    return None


@lru_cache(maxsize=64)
def cut_of(cluster: Cluster) -> LinkCut:
    """Return the published bandwidths of `cluster`; fitted constants only reduce them."""
    copies, drives = cluster.copies, cluster.drives
    read = written = None
    host = None
    if cluster.pcie_link is not None:
        host = cluster.pcie_link.bytes_per_s
        if copies is not None:
            host = max(copies.to_gpu_bytes_per_s, copies.from_gpu_bytes_per_s)
    per_domain, adam = cluster.nodes_per_domain, None
    if cluster.host is not None and cluster.host.cpu is not None:
        share = cluster.host.cpu.share(HostKernel.ADAM)
        adam = int(cluster.host.memory_bytes_per_s * share) * per_domain
    if drives is not None:
        read, written = (
            None if each is None else each * drives.count * per_domain
            for each in (drives.read_bytes_per_s, drives.write_bytes_per_s)
        )
    return LinkCut(
        gpus_per_domain=cluster.gpus_per_node * per_domain,
        gpu=cluster.switch_link.bytes_per_s,
        domain=cluster.nics_per_node * cluster.nic_link.bytes_per_s * per_domain,
        host=host,
        drives_read=read,
        drives_write=written,
        adam=adam,
    )
