"""The truth about a changed schedule: it is run with exact values, and nothing is asked of a proof.

Wrong is a run that fails, hangs, disturbs itself or ends with another state than plain training: as
the cluster times it, in drawn timings and in those that a race would need; without overflow, and
with one in a drawn place. Every place on its own must reach the branches. Counts of hosts are
compared with plain counting over many steps, formats with those of the right schedule
(`faults.formats`), and so are peaks where the contract promises them.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import islice

import numpy as np
from drawn_timings import PALETTES, DrawnTiming
from exact_training import STEPS, cluster

from faults.formats import Formats, formats_of, poorer_than
from faults.happens_before import Graph, Name, Race
from zsim.backend.backend import Job, RefusedError, RunFailedError
from zsim.memory import memory_ledger, peak_bytes, pools
from zsim.model.model import Model
from zsim.schedule.issue_order import NO_OVERFLOW, taken
from zsim.schedule.operation import Compute, Fill, SetScalar
from zsim.schedule.schedule import Program, Schedule
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Strategy
from zsim_des.engine.watch import Durations
from zsim_des.values import (
    PlainState,
    Planted,
    plantable,
    train,
    train_by_schedule,
    unseen,
)
from zsim_des.values.carrier import set_scalar
from zsim_des.values.plain import count, scalars

RACES_MAX = 2
"""Races of a schedule that are run; a schedule with one has many."""
TIMINGS = 2
"""Drawn timings in which a schedule is run that nothing else shows to be wrong."""
LONG_PS = 10**6


class Kind(StrEnum):
    """The way in which a schedule is wrong, if it is."""

    STUCK = "stuck"
    WRONG = "wrong"
    OVERFLOW = "wrong after an overflow"
    COUNT = "counts otherwise"
    FORMAT = "poorer format"
    LARGER = "larger peak"
    RACING = "wrong under a timing"
    UNDECIDED = "accesses without an order"
    UNREAD = "counts otherwise what nothing reads"
    HARMLESS = "harmless as far as seen"


NOT_WRONG = (Kind.HARMLESS, Kind.UNREAD, Kind.UNDECIDED)


@dataclass(frozen=True)
class Truth:
    """The way in which a schedule is wrong, if it is, and why in words."""

    kind: Kind
    why: str = ""

    @property
    def is_wrong(self) -> bool:
        """Whether something was seen that no right schedule does."""
        return self.kind not in NOT_WRONG


@dataclass(frozen=True)
class Targeted:
    """Times of nothing for operations before one, and of a while for everything else."""

    fast: frozenset[Name]
    slow: Name
    else_ps: int
    host_ps: int = 0

    def issue_ps(self, rank: int, step: int, operation: str) -> int:
        return self.host_ps

    def kernel_ps(self, rank: int, step: int, operation: str) -> int:
        name = (rank, step, operation)
        if name == self.slow:
            return LONG_PS
        return 0 if name in self.fast else self.else_ps

    def communication_ps(self, step: int, operation: str) -> int:
        if (step, operation) == self.slow[1:]:
            return LONG_PS
        fast = any((rank, step, operation) in self.fast for rank in range(self.slow[0] + 1))
        return 0 if fast else self.else_ps


def timings(race: Race) -> list[Targeted]:
    """Return timings in which one operation runs before the other, after it, and while it runs.

    The host is far ahead, or close ahead: then memory that a free spoils was written already.
    """
    nothing = frozenset[Name]()
    return [
        Targeted(race.before_other | {race.other}, race.one, LONG_PS),
        Targeted(race.before_one | {race.one}, race.other, LONG_PS),
        Targeted(race.before_one, race.one, 1),
        Targeted(race.before_other, race.other, 1),
        Targeted(nothing, race.one, 10, host_ps=10),
        Targeted(nothing, race.other, 10, host_ps=10),
        Targeted(nothing, race.one, 19, host_ps=10),
    ]


class GroundTruth:
    """Judges changes of one schedule, which is right."""

    def __init__(self, schedule: Schedule, model: Model, strategy: Strategy) -> None:
        self.schedule = schedule
        self.model = model
        self.strategy = strategy
        self.scales = strategy.train.precision is Precision.FP16 and bool(model.parameter_count)
        self._places = list(plantable(schedule, model)) if self.scales else []
        self._expected: dict[frozenset[int], PlainState] = {}
        self._read = read_scalars(schedule)
        self._formats: Formats | None = None

    @property
    def overflows(self) -> tuple[frozenset[int], ...]:
        """Sets of steps that overflow in runs: none, and one in the middle if there is a scale."""
        return (NO_OVERFLOW, frozenset({1})) if self.scales else (NO_OVERFLOW,)

    def judge(self, made: Schedule, rng: np.random.Generator) -> Truth:
        """Return the truth about `made`, a change of the schedule."""
        found = Truth(Kind.HARMLESS)
        for truth in self._truths(made, rng):
            if truth is not None and truth.is_wrong:
                return truth
            found = truth or found
        return found

    def _truths(self, made: Schedule, rng: np.random.Generator) -> Iterator[Truth | None]:
        yield self.run(made)
        yield self._counts(made)
        if self.scales:
            step = int(rng.integers(STEPS - 1))
            planted = self._places[int(rng.integers(len(self._places)))]
            yield self.run(made, planted=replace(planted, step=step))
            yield self.run(made, overflow_steps=frozenset({0}))
            yield self._unseen(made)
        yield self._poorer(made)
        yield self._larger(made)
        yield from self._timed(made, rng)

    def _timed(self, made: Schedule, rng: np.random.Generator) -> Iterator[Truth | None]:
        """Run with other times: those by which races could spoil something, and some drawn."""
        undecided = None
        for overflow_steps in self.overflows:
            for race in islice(Graph(made, overflow_steps).races(), RACES_MAX):
                undecided = Truth(Kind.UNDECIDED, f"{race.one} and {race.other}")
                for timing in timings(race):
                    yield self.run(made, timing, overflow_steps=overflow_steps, kind=Kind.RACING)
        for _ in range(TIMINGS):
            chosen = [PALETTES[int(each)] for each in rng.integers(len(PALETTES), size=3)]
            drawn = DrawnTiming(int(rng.integers(2**32)), *chosen)
            last = self.overflows[-1]
            yield self.run(made, drawn, overflow_steps=last, kind=Kind.RACING)
        yield undecided

    def run(
        self,
        made: Schedule,
        durations: Durations | None = None,
        *,
        overflow_steps: frozenset[int] = NO_OVERFLOW,
        planted: Planted | None = None,
        kind: Kind | None = None,
    ) -> Truth | None:
        """Return what is wrong with a run, if something is."""
        places = () if planted is None else (planted,)
        steps = overflow_steps | {each.step for each in places}
        if steps not in self._expected:
            self._expected[steps] = train(self.model, self.strategy, STEPS, steps)
        try:
            result = train_by_schedule(
                self._job(made),
                self._expected[steps],
                durations=durations,
                overflow_steps=overflow_steps,
                planted=places,
            )
        except RefusedError as error:
            return Truth(kind or Kind.STUCK, str(error))
        except (ArithmeticError, ValueError) as error:
            return Truth(kind or Kind.WRONG, f"{type(error).__name__}: {error}")
        if result.failure:
            return Truth(kind or Kind.STUCK, result.failure)
        unread = [each for each in result.differences if self._is_unread(each)]
        wrong = [*map(str, result.faults), *result.differences]
        wrong = [each for each in wrong if each not in unread]
        if wrong:
            return Truth(kind or (Kind.OVERFLOW if steps else Kind.WRONG), wrong[0])
        return Truth(Kind.UNREAD, unread[0]) if unread else None

    def _is_unread(self, difference: str) -> bool:
        """Return True if a difference is of a number of the host that nothing reads."""
        _, _, text = difference.partition(": scalar ")
        return bool(text) and text.split(" ")[0] not in self._read

    def _job(self, made: Schedule) -> Job:
        return Job(schedule=made, model=self.model, cluster=cluster(made.mesh.size), steps=STEPS)

    def _unseen(self, made: Schedule) -> Truth | None:
        missed = unseen(self._job(made), self._places)
        return Truth(Kind.OVERFLOW, f"{missed[0]} is not seen") if missed else None

    def _poorer(self, made: Schedule) -> Truth | None:
        precision = self.strategy.train.precision
        if self._formats is None:
            self._formats = formats_of(self._job(self.schedule), precision)
        try:
            why = poorer_than(formats_of(self._job(made), precision), self._formats)
        except RunFailedError as error:
            return Truth(Kind.STUCK, str(error))
        return Truth(Kind.FORMAT, why) if why else None

    def _larger(self, made: Schedule) -> Truth | None:
        """Return a pool whose peak is promised and larger than that of the right schedule."""
        promised = {(role, pool) for role, pool, _ in made.contract.peak_bytes}
        right = self._peaks(self.schedule) if promised else {}
        for where, size in (self._peaks(made) if promised else {}).items():
            if where in promised and size > right.get(where, 0):
                return Truth(Kind.LARGER, f"{where}: {size} > {right.get(where, 0)}")
        return None

    def _peaks(self, schedule: Schedule) -> dict[tuple[str, str], int]:
        """Return the largest book of each role, by pool."""
        found: dict[tuple[str, str], int] = {}
        for program in schedule.programs:
            entries = memory_ledger(program, STEPS, self.overflows[-1])
            for pool in pools(entries):
                found[program.role, pool] = peak_bytes(entries, pool)
        return found

    def _counts(self, made: Schedule) -> Truth | None:
        """Compare counts of hosts over so many steps that a scale grows, and falls to the least."""
        interval = self.strategy.train.loss_scale.interval if self.scales else 2
        overflows = [self.scales and step in (1, 4) for step in range(2 * interval + 6)]
        overflows += [self.scales] * 20
        wanted = scalars(self.strategy)
        for overflow in overflows:
            count(self.strategy, wanted, overflows=overflow)
        for program in made.programs:
            known = counted(made, program, overflows)
            for name, value in sorted(wanted.items(), key=lambda each: each[0] not in self._read):
                if known.get(name) != value:
                    why = f"{program.role}: {name} is {known.get(name)}, not {value}"
                    return Truth(Kind.COUNT if name in self._read else Kind.UNREAD, why)
        return None


def read_scalars(schedule: Schedule) -> set[str]:
    """Return numbers of the host that something reads: a kernel, or another count."""
    found: set[str] = set()
    for program in schedule.programs:
        for operation in program.by_id.values():
            match operation:
                case Compute(scalars=names):
                    found |= set(names)
                case Fill(scalar=str(name)) | SetScalar(counter=str(name)):
                    found.add(name)
                case _:
                    pass
    return found


def counted(schedule: Schedule, program: Program, overflows: list[bool]) -> dict[str, float]:
    """Return the counts of a host after steps of which some overflow."""
    known = {each.name: each.initial for each in schedule.scalars}
    for change in taken(program.setup, overflows=False):
        if isinstance(change, SetScalar):
            set_scalar(change, known)
    changes = {
        overflow: [
            each for each in taken(program.step, overflows=overflow) if isinstance(each, SetScalar)
        ]
        for overflow in (False, True)
    }
    for overflow in overflows:
        for change in changes[overflow]:
            set_scalar(change, known)
    return known
