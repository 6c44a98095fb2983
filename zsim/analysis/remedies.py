"""Find changes of a scenario that make a run fit in memory, from mild to strong.

A change keeps the number of ranks and the sequences of a step. `remedies` tries the changes, with
functions from its caller, to find which ones help and how much time they cost.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import combinations, islice

from zsim.cluster.cluster import Cluster
from zsim.model.architecture import Attention
from zsim.model.model import Model
from zsim.scenario.tables import Scenario
from zsim.schedule.schedule import Discipline
from zsim.strategy.activations import Checkpointing
from zsim.strategy.offload import MemoryTier
from zsim.strategy.runtime_options import RuntimeOptions
from zsim.strategy.strategy import STAGES, Strategy
from zsim.strategy.zero_knobs import FusedBuffers, Keep

SMALL_BUCKET = 50_000_000
"""Elements of the bucket that replaces a larger one: 100 MB in half precision."""

MOST_BUCKETS = 10
"""Maximum number of parts of a bucket; the schedule of a large model grows by this factor."""

MOST_PARTS = 8
"""Maximum number of parts of a micro-batch; the schedule grows by this factor."""

MOST_STAGES = 16
"""Maximum factor by which the pipeline stages grow; the schedule grows by this factor."""

FEWEST_TOKENS = 1024
"""Length in tokens of the shortest sequence that is tried."""

OUTWARD = tuple(MemoryTier)
"""Memory tiers, from the GPU outwards."""

FULL_STAGE = 3
"""The ZeRO stage that shards parameters; only sharded parameters can be offloaded."""

WANTED = 3
"""Number of helpful changes wanted; if fewer help individually, pairs are tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TightScenario:
    """The run that does not fit: the scenario, and the objects that it was resolved to."""

    scenario: Scenario
    strategy: Strategy
    model: Model
    cluster: Cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class RemedyChange:
    """Settings of a scenario, and their effect on its batches.

    Attributes:
        settings: settings such as `zero.stage=3`, without the settings of batches.
        parts: number of parts that each micro-batch is split into.
        fewer: factor by which the number of replicas shrinks.
        stages: factor by which the number of pipeline stages grows.
        shares: factor by which the number of ranks per sequence grows; part of `fewer`.
    """

    settings: tuple[str, ...] = ()
    parts: int = 1
    fewer: int = 1
    stages: int = 1
    shares: int = 1

    def combined(self, other: "RemedyChange") -> "RemedyChange":
        """Return the combination of both changes."""
        return RemedyChange(
            settings=(*self.settings, *other.settings),
            parts=self.parts * other.parts,
            fewer=self.fewer * other.fewer,
            stages=self.stages * other.stages,
            shares=self.shares * other.shares,
        )

    def shared(self, more: int) -> "RemedyChange":
        """Return this change with `more` times as many ranks per sequence."""
        return replace(self, fewer=self.fewer * more, shares=self.shares * more)

    def all_settings(self, subject: TightScenario, *, fewest: bool = False) -> tuple[str, ...]:
        """Return the settings, including settings of batches that keep the sequences of a step.

        `fewest` limits the micro-batches to two per pipeline stage: more of them make a step
        longer, but do not raise its peak memory.
        """
        if self.parts * self.fewer == 1:
            return self.settings
        size = subject.model.micro_batch_size // self.parts
        steps = subject.strategy.train.gradient_accumulation_steps * self.parts * self.fewer
        if fewest:
            steps = min(steps, 2 * self.stages * subject.strategy.parallel.pipeline)
        batches: tuple[str, ...] = (f"train.gradient_accumulation_steps={steps}",)
        if size != subject.scenario.train.micro_batch_size:
            batches = (f"train.micro_batch_size={size}", *batches)
        ranks: tuple[str, ...] = ()
        if self._taken > 1 and subject.scenario.parallel.data is not None:
            ranks = (f"parallel.data={subject.strategy.parallel.data // self._taken}",)
        return (*self.settings, *ranks, *batches)

    def keeps_ranks(self, subject: TightScenario) -> bool:
        """Return True if the data axis is divisible by the ranks that other axes take from it."""
        parallel = subject.strategy.parallel
        return parallel.data % (self._taken * self.shares * parallel.context) == 0

    @property
    def _taken(self) -> int:
        """Factor by which the data axis shrinks."""
        return self.fewer // self.shares


Family = tuple[RemedyChange, ...]
"""Changes of one kind, the mildest first."""


def families(subject: TightScenario) -> tuple[Family, ...]:
    """Return every kind of change that the scenario allows."""
    found = (
        _allocator(subject),
        _buckets(subject),
        _ahead(subject),
        _activations(subject),
        _micro_batches(subject),
        _stages(subject),
        _tensor(subject),
        _context(subject),
        _pipeline(subject),
        _pinned(subject),
        _tiers(subject),
    )
    return tuple(tuple(each) for each in found if each)


def _set(*settings: str) -> RemedyChange:
    return RemedyChange(settings=settings)


def _allocator(subject: TightScenario) -> list[RemedyChange]:
    if subject.scenario.cluster.allocator is not Discipline.CACHING:
        return []
    return [_set("cluster.allocator=expandable")]


def _buckets(subject: TightScenario) -> list[RemedyChange]:
    strategy = subject.strategy
    match strategy.zero.emulate:
        case None if strategy.zero.fused_buffers is FusedBuffers.MODEL:
            return [_set("zero.fused_buffers=constant")]
        case None if strategy.zero.bucket_elements > SMALL_BUCKET:
            smaller = max(SMALL_BUCKET, strategy.zero.bucket_elements // MOST_BUCKETS)
            return [_set(f"zero.bucket_elements={smaller}")]
        case None:
            return []
        case runtime:
            return _of_runtime(subject, runtime.smaller_buckets(SMALL_BUCKET))


def _of_runtime(subject: TightScenario, option: str | None) -> list[RemedyChange]:
    """Set an option of the runtime, unless a runtime configuration file sets all options."""
    zero = subject.scenario.zero
    if option is None or zero.is_configured:
        return []
    return [_set(f"zero.{zero.emulate}.{option}")]


def _ahead(subject: TightScenario) -> list[RemedyChange]:
    """Return changes that gather fewer parameters at once."""
    strategy = subject.strategy
    match strategy.zero.emulate:
        case None if (
            strategy.zero.stage == 3 and strategy.zero.keep_after_forward is not Keep.NOTHING
        ):
            return [_set("zero.keep_after_forward=nothing")]
        case None if strategy.zero.stage == 3 and strategy.zero.prefetch_units:
            return [_set("zero.prefetch_units=0")]
        case None:
            return []
        case runtime:
            return _of_runtime(subject, runtime.fewer_gathered())


def _activations(subject: TightScenario) -> list[RemedyChange]:
    """Return activation checkpointing, then partitioned (ZeRO-R Pa), then offloaded (Pa+cpu)."""
    strategy, shape = subject.strategy, subject.model.architecture
    if shape is None:
        return []
    now = strategy.activations.checkpointing
    found: list[RemedyChange] = []
    if now is Checkpointing.NONE and shape.attention is Attention.PLAIN:
        found.append(_set("activations.checkpointing=selective"))
    full = ("activations.checkpointing=full",) if now is not Checkpointing.FULL else ()
    if full:
        found.append(_set(*full))
    if strategy.parallel.tensor > 1 and not strategy.activations.partition:
        full = (*full, "activations.partition=true")
        found.append(_set(*full))
    if strategy.checkpoint_tier is MemoryTier.DEVICE:
        runtime = strategy.zero.emulate
        option = None if runtime is None else runtime.checkpoint_option
        out = [_set("offload.checkpoints=host")] if runtime is None else []
        out += _of_runtime(subject, None if option is None else f"{option}=true")
        found += [_set(*full, *each.settings) for each in out]
    return found


def _pinned(subject: TightScenario) -> list[RemedyChange]:
    """Return pinned memory in exact sizes if the run uses host memory and rounds sizes up."""
    strategy = subject.strategy
    uses_host = strategy.offload.uses_host or strategy.checkpoint_tier is not MemoryTier.DEVICE
    rounds = uses_host and subject.scenario.host.pinned != "exact"
    return [_set("host.pinned=exact")] if rounds else []


def _tiers(subject: TightScenario) -> list[RemedyChange]:
    """Return offload of states, first to the host, then to drives if the node has any."""
    strategy, drives = subject.strategy, subject.cluster.drives
    if strategy.zero.emulate is not None:
        return _tiers_of_runtime(subject, strategy.zero.emulate)
    tiers = [MemoryTier.HOST]
    if drives is not None and drives.read_bytes_per_s and drives.write_bytes_per_s:
        tiers.append(MemoryTier.NVME)
    now = {"optimizer": strategy.offload.optimizer, "parameters": strategy.offload.parameters}
    if strategy.zero.stage < FULL_STAGE:
        del now["parameters"]
    found: list[RemedyChange] = []
    settings: dict[str, str] = {}
    for tier in tiers:
        for name, place in now.items():
            if OUTWARD.index(place) < OUTWARD.index(tier):
                settings[name] = tier
                found.append(_set(*(f"offload.{each}={to}" for each, to in settings.items())))
        if tier is MemoryTier.NVME and strategy.offload.gradients is not tier:
            settings |= {"optimizer": tier, "gradients": tier}
            found.append(_set(*(f"offload.{each}={to}" for each, to in settings.items())))
    return found


def _tiers_of_runtime(subject: TightScenario, runtime: RuntimeOptions) -> list[RemedyChange]:
    """Return the offload options of a runtime, unless it already offloads states."""
    zero, stage = subject.scenario.zero, subject.strategy.zero.stage
    if zero.is_configured or runtime.tiers(stage=stage):
        return []
    offloads = runtime.offloads(stage=stage)
    return [_set(*(f"zero.{zero.emulate}.{each}" for each in options)) for options in offloads]


def _micro_batches(subject: TightScenario) -> list[RemedyChange]:
    """Return smaller micro-batches, with proportionally more of them."""
    size = subject.model.micro_batch_size
    if subject.model.architecture is None or subject.scenario.zero.is_configured:
        return []
    return [RemedyChange(parts=parts) for parts in range(2, MOST_PARTS + 1) if size % parts == 0]


def _stages(subject: TightScenario) -> list[RemedyChange]:
    """Return the higher ZeRO stages that the runtime supports."""
    strategy, zero = subject.strategy, subject.scenario.zero
    if zero.is_configured:
        return []
    known = STAGES if strategy.zero.emulate is None else strategy.zero.emulate.stages
    return [_set(f"zero.stage={stage}") for stage in known if stage > strategy.zero.stage]


def _tensor(subject: TightScenario) -> list[RemedyChange]:
    """Return higher tensor degrees within a node; fewer replicas run more micro-batches each."""
    strategy = subject.strategy
    if subject.model.architecture is None or subject.scenario.zero.is_configured:
        return []
    found: list[RemedyChange] = []
    fewer = 2
    while (
        strategy.parallel.data % fewer == 0
        and strategy.parallel.tensor * fewer <= subject.cluster.gpus_per_node
    ):
        setting = f"parallel.tensor={strategy.parallel.tensor * fewer}"
        found.append(RemedyChange(settings=(setting,), fewer=fewer))
        fewer *= 2
    return found


def _context(subject: TightScenario) -> list[RemedyChange]:
    """Return higher context degrees; fewer replicas run more micro-batches each."""
    strategy = subject.strategy
    if subject.model.architecture is None or subject.scenario.zero.is_configured:
        return []
    return [
        _set(f"parallel.context={strategy.parallel.context * more}").shared(more)
        for more in (2, 4, 8, 16)
        if strategy.parallel.data % (strategy.parallel.context * more) == 0
    ]


def shorter(subject: TightScenario) -> list[RemedyChange]:
    """Return shorter sequences, longest first, each without and with activation checkpointing.

    They change the training, so they are used only if nothing else makes the run fit.
    """
    shape = subject.model.architecture
    if shape is None:
        return []
    found: list[RemedyChange] = []
    length = shape.sequence_length // 2
    full = _set("activations.checkpointing=full")
    checkpoints = subject.strategy.activations.checkpointing is not Checkpointing.FULL
    while length >= FEWEST_TOKENS:
        change = _set(f"model.sequence_length={length}")
        found += [change, change.combined(full)] if checkpoints else [change]
        length //= 2
    return found


def _pipeline(subject: TightScenario) -> list[RemedyChange]:
    """Return more pipeline stages, taken from the data axis, if the runtime has a pipeline."""
    strategy = subject.strategy
    runtime = strategy.zero.emulate
    if runtime is None or not runtime.has_pipeline or subject.scenario.zero.is_configured:
        return []
    found: list[RemedyChange] = []
    more = 2
    while strategy.parallel.data % more == 0 and more <= MOST_STAGES:
        setting = f"parallel.pipeline={strategy.parallel.pipeline * more}"
        found.append(RemedyChange(settings=(setting,), fewer=more, stages=more))
        more *= 2
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """Settings with which the run fits, with the step time in seconds and the peak in bytes."""

    settings: tuple[str, ...]
    step_time_s: float
    reserved_bytes: int


Fits = Callable[[tuple[str, ...]], bool]
"""Return True if the run fits with these settings, False if they are invalid."""

Run = Callable[[tuple[str, ...]], Remedy | None]
"""Simulate the run with these settings; None if it does not fit."""


def remedies(subject: TightScenario, fits: Fits, run: Run) -> tuple[Remedy, ...]:
    """Return at most `WANTED` changes that make `subject` fit, shortest step time first.

    Each kind contributes its mildest change that helps. If fewer than `WANTED` kinds help, pairs of
    the others are tried. If still none helps, all are combined, and finally sequences shortened.
    """

    def enough(change: RemedyChange) -> bool:
        return change.keeps_ranks(subject) and fits(change.all_settings(subject, fewest=True))

    helping: list[RemedyChange] = []
    weak: list[Family] = []
    for family in families(subject):
        mildest = next(filter(enough, family), None)
        if mildest is None:
            weak.append(family)
        else:
            helping.append(mildest)
    for one, other in combinations(weak, 2):
        if len(helping) >= WANTED:
            break
        if enough(one[-1].combined(other[-1])):
            helping.append(_mildest_pair(one, other, enough))
    if not helping and len(weak) > 2:
        everything = weak[0][-1]
        for family in weak[1:]:
            everything = everything.combined(family[-1])
        helping = [everything] if enough(everything) else []
    if not helping:
        helping = list(islice(filter(enough, shorter(subject)), 1))
    made = [run(change.all_settings(subject)) for change in helping]
    found = [each for each in made if each is not None]
    return tuple(sorted(found, key=lambda each: each.step_time_s)[:WANTED])


def _mildest_pair(
    one: Family, other: Family, enough: Callable[[RemedyChange], bool]
) -> RemedyChange:
    """Return one change of each family, as mild as possible, that suffice together."""
    first = next(change for change in one if enough(change.combined(other[-1])))
    return next(first.combined(change) for change in other if enough(first.combined(change)))
