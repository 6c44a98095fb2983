"""Runs of the executor on real ranks, where collectives and messages fly: values and witnesses.

A run is judged by a plain loop in poison mode, where what flies has no numbers, and what it reads
must not change; then by witnesses, which see memory and collectives that the executor does not tell
of. A mutant is planted on every rank. Those that nobody watches are judged by a plain loop alone.
"""

from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

from flights_by_hand import LEFT, RANKS, run_flying
from tiny_training import BOUND, Parameters, distance
from torch import distributed
from trained_axes import (
    DEEP_LLAMA,
    FSDP2_OF_STAGES,
    FSDP2_OF_TOKENS,
    KEPT,
    NANOTRON,
    PLAIN,
    SMALL_GPT,
    SMALL_LLAMA,
    AxesCase,
    RankResult,
    by_plain_loop,
    by_rank,
    on,
    sharing,
    whole,
)

from faults.judge import Known, NamedRun
from faults.of_executor.patches import (
    FLYING,
    RANKS_1,
    RANKS_2,
    RANKS_3,
    RANKS_ALONE,
    RANKS_DEFERRED,
    RANKS_RESERVED,
    SHARED,
    STAGES,
    STAGES_4,
    TENSOR,
    WITNESSED,
    Plant,
    by_checker,
    check_reached,
)
from faults.of_executor.registry import PLANTS
from faults.of_executor.witnessed_jobs import FOUR, job
from zsim.proof import against_trace as refinement
from zsim.schedule.schedule import Schedule
from zsim.strategy.precision import Precision
from zsim.trace.trace import Trace
from zsim_runtimes.fsdp1.options import FSDP1
from zsim_torch.backend import Assignment, train_on_rank
from zsim_torch.execute import reserve
from zsim_torch.rank_result import merged
from zsim_torch.supervise.rank_failure import RankFailedError
from zsim_torch.supervise.ranks import RankPool

TIMEOUT_S = 45.0
SLACK = 1.02
"""A thread of Gloo may hold a tensor longer than its collective."""

RUNS: dict[str, AxesCase] = {
    **{
        name: AxesCase(SMALL_LLAMA, on(PLAIN, data=2, stage=stage, bucket_elements=200))
        for stage, name in ((1, RANKS_1), (2, RANKS_2), (3, RANKS_3), (3, RANKS_RESERVED))
    },
    RANKS_ALONE: AxesCase(
        SMALL_LLAMA, on(PLAIN, data=2, stage=2, bucket_elements=200), steps=4, observe=False
    ),
    RANKS_DEFERRED: AxesCase(
        SMALL_LLAMA,
        on(PLAIN, data=2, stage=3, emulate=FSDP1()).but({"train.precision": Precision.FP32}),
    ),
    STAGES: AxesCase(SMALL_LLAMA, on(FSDP2_OF_STAGES, pipeline=2)),
    STAGES_4: AxesCase(DEEP_LLAMA, on(FSDP2_OF_STAGES, pipeline=4)),
    SHARED: AxesCase(replace(SMALL_LLAMA, sequence_length=8), sharing(FSDP2_OF_TOKENS, 2, 2)),
    TENSOR: AxesCase(SMALL_GPT, on(NANOTRON, tensor=2, stage=1, emulate=KEPT, clip_norm=0.1)),
}


def is_on_ranks(run: str) -> bool:
    """Return True if a run is one of real ranks."""
    return run in RUNS or run == FLYING or run.startswith(WITNESSED)


@dataclass(frozen=True, slots=True)
class Planted:
    """Plants of a rank by id, or their functions unchanged; changes that the rank comes to are
    files in `folder`.
    """

    folder: Path
    ids: tuple[str, ...] = ()
    unchanged: bool = False
    reserved: bool = False

    @contextmanager
    def inside(self) -> Generator[None]:
        """Plant them."""
        with ExitStack() as planted:
            if self.reserved:
                planted.enter_context(patch.object(reserve, "LARGE_BYTES", 1))
            for each in map(PLANTS.__getitem__, self.ids):
                if each.rank in (None, distributed.get_rank()):
                    reached = planted.enter_context(each.inside(unchanged=self.unchanged))
                    reached.tell = (self.folder / each.id).touch
            yield


class Ranks(ExitStack):
    """Ranks that are started once for all runs, and end with this context."""

    def __init__(self) -> None:
        super().__init__()
        self._pools: dict[int, RankPool] = {}
        self.live: dict[str, list[float]] = {}
        """Bytes that live in the mean on each rank in a run, where nothing is planted."""

    def pool(self, ranks: int) -> RankPool:
        """Return the pool of `ranks` ranks."""
        if ranks not in self._pools:
            self._pools[ranks] = self.enter_context(RankPool(ranks, timeout_s=TIMEOUT_S))
        return self._pools[ranks]


@dataclass(frozen=True)
class RankRun(NamedRun):
    """A run of the executor on real ranks: a job of the judge."""

    ranks: Ranks

    def findings(self, made: Plant) -> dict[str, list[str]]:
        """Return findings by checker, with a plant on its ranks."""
        return self.planted([made])

    def truth(self, made: Plant, _: object) -> Known:
        """Return that a plant is wrong, unless nobody can see a difference."""
        return Known(is_wrong=not made.same)

    def planted(self, plants: Sequence[Plant], *, unchanged: bool = False) -> dict[str, list[str]]:
        """Return findings by checker, with plants, each of which a rank has to reach."""
        if self.label.startswith(WITNESSED):
            return self._witnessed(plants)
        with TemporaryDirectory() as name:
            folder, ids = Path(name), tuple(each.id for each in plants)
            reserved = self.label in (RANKS_RESERVED, RANKS_ALONE)
            found = self._judged(Planted(folder, ids, unchanged, reserved))
            check_reached(plants, {each.name for each in folder.iterdir()})
        return by_checker(found)

    def _witnessed(self, plants: Sequence[Plant]) -> dict[str, list[str]]:
        name = self.label.removeprefix(WITNESSED)
        trace = witnessed(name, self.ranks, *plants)
        why = [each.why for each in refinement.examine(job(name).schedule, trace)]
        return {"witnesses": why} if why else {}

    def _judged(self, planted: Planted) -> str:
        run = self.label
        try:
            if run == FLYING:
                left = self.ranks.pool(RANKS).run(by_hand_with, planted)
                return "" if left == (LEFT,) * RANKS else f"values: {left}"
            case = RUNS[run]
            pool = self.ranks.pool(case.strategy.ranks)
            if run == RANKS_ALONE:
                return by_values(case, pool.run(by_rank_with, case, planted))
            results = pool.run(by_rank_with, replace(case, poison=True), planted)
            if found := by_values(case, results):
                return found
            results = pool.run(by_rank_with, replace(case, witness=True), planted)
        except RankFailedError as error:
            return f"error: {str(error)[:100]}"
        if found := by_values(case, results) or by_witnesses(case, results):
            return found
        live = [mean_bytes(each.trace) for each in results]
        if planted.ids and not planted.unchanged and run not in self.ranks.live:
            self.planted([])  # the right run, whose bytes are kept
        right = self.ranks.live.setdefault(run, live)
        if any(one > SLACK * other for one, other in zip(live, right, strict=True)):
            return f"memory: {live} bytes in the mean, not {right}"
        return ""


def witnessed(name: str, ranks: Ranks, *plants: Plant) -> Trace:
    """Run a job on real ranks, with plants, and return what witnesses have seen."""
    pool = ranks.pool(4 if name == FOUR else 2)
    with TemporaryDirectory() as folder:
        planted = Planted(Path(folder), tuple(each.id for each in plants))
        return merged(pool.run(traced, name, planted))


def traced(name: str, planted: Planted) -> Trace:
    """Run a job on this rank, with what is planted, and let witnesses record it."""
    with planted.inside():
        return train_on_rank(
            Assignment(job=job(name), seed=0, data=None, poison=False, witness=True)
        )


def by_rank_with(case: AxesCase, planted: Planted) -> RankResult:
    """Train a case on this rank with what is planted."""
    with planted.inside():
        return by_rank(case, case.job())


def by_hand_with(planted: Planted) -> dict[str, float]:
    """Run the step by hand on this rank, with what is planted."""
    with planted.inside():
        return run_flying(poison=True)


def by_witnesses(case: AxesCase, results: Sequence[RankResult]) -> str:
    """Return the first thing that witnesses have seen and the schedule does not say."""
    trace = merged([each.trace for each in results])
    found = refinement.examine(schedule(case), trace)
    return next((f"witnesses: {each.why[:60]}" for each in found), "")


def mean_bytes(trace: Trace) -> float:
    """Return how many bytes a witness saw live when operations began, in the mean of all."""
    (rank,) = trace.ranks
    assert rank.witness is not None
    changes = [(each.tick, 0, 0) for each in rank.witness.marks]
    for each in rank.witness.storages:
        changes.append((each.made or 0, 1, each.bytes))
        if each.released is not None:
            changes.append((each.released, 1, -each.bytes))
    live, total = 0, 0
    for _, is_change, size in sorted(changes):
        live += size
        total += 0 if is_change else live
    return total / len(rank.witness.marks)


def by_values(case: AxesCase, results: Sequence[RankResult]) -> str:
    """Judge losses and parameters by those of a plain loop."""
    before, after, losses = plain_loop(case)
    bound = BOUND[case.strategy.train.precision]
    if not all(
        abs(one - other) <= 10 * bound * abs(other)  # not so either of what is no number
        for result in results
        for one, other in zip(result.losses, losses, strict=True)
    ):
        return "values: other losses than a plain loop"
    try:
        found = whole(case, results)
    except AssertionError:
        return "values: ranks differ, or have no numbers"
    if not distance(found, after, before) <= bound:
        return "values: not those of a plain loop"
    return ""


@cache
def plain_loop(case: AxesCase) -> tuple[Parameters, Parameters, tuple[float, ...]]:
    """Train a case on one process, once."""
    return by_plain_loop(case)


@cache
def schedule(case: AxesCase) -> Schedule:
    """Make the schedule of a case once."""
    return case.job().schedule
