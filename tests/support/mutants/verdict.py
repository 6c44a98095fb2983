"""Whether a mutant is wrong: by running it with values, under the timings that would show it."""

from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import islice

from exact_training import STEPS, cluster, trained

from mutants.mutant import Mutant
from mutants.races import Graph, Name, Race
from zsim.backend.backend import Job, RefusedError
from zsim.memory import book, peak_bytes, pools
from zsim.model.model import Model
from zsim.schedule.issue_order import NO_OVERFLOW
from zsim.schedule.schedule import Schedule
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Strategy
from zsim_des.engine.watch import Durations
from zsim_des.values import plantable, train, unseen

LONG_PS = 10**6
RACES_MAX = 3
"""Races of a mutant that are run; a mutant with one has many."""


class Kind(StrEnum):
    """What a mutant is."""

    REFUSED = "refused"
    STUCK = "stuck"
    WRONG = "wrong"
    RACING = "wrong under a timing"
    LARGER = "larger peak"
    HARMLESS = "harmless, proved"
    UNDECIDED = "undecided"


EFFECTIVE = frozenset({Kind.STUCK, Kind.WRONG, Kind.RACING, Kind.LARGER})


@dataclass(frozen=True)
class Verdict:
    """What a mutant is, why in words, and the schedule if there is one."""

    kind: Kind
    why: str = ""
    schedule: Schedule | None = None


@dataclass(frozen=True)
class Targeted:
    """What must be over before an operation takes no time, everything else a while."""

    fast: frozenset[Name]
    slow: Name
    else_ps: int
    host_ps: int = 0

    def issue_ps(self, rank: int, step: int, operation: str) -> int:
        return self.host_ps

    def kernel_ps(self, rank: int, step: int, operation: str) -> int:
        return self._time_ps((rank, step, operation))

    def communication_ps(self, step: int, operation: str) -> int:
        if (step, operation) == self.slow[1:]:
            return LONG_PS
        fast = any((rank, step, operation) in self.fast for rank in range(self.slow[0] + 1))
        return 0 if fast else self.else_ps

    def _time_ps(self, name: Name) -> int:
        if name == self.slow:
            return LONG_PS
        return 0 if name in self.fast else self.else_ps


def timings(race: Race) -> list[Targeted]:
    """Timings in which one operation runs before the other, after it, and while it runs.

    The host is far ahead, or close ahead: then what a free spoils was written already.
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


class Court:
    """Judges mutants of one schedule, which is right."""

    def __init__(self, schedule: Schedule, model: Model, strategy: Strategy) -> None:
        self.schedule = schedule
        self.model = model
        self.overflow_steps = NO_OVERFLOW
        if strategy.train.precision is Precision.FP16 and model.parameter_count:
            self.overflow_steps = frozenset({0})
        self._places = list(plantable(schedule, model)) if self.overflow_steps else []
        self._expected = train(model, strategy, STEPS, self.overflow_steps)
        self._peaks = self._peaks_of(schedule)

    def judge(self, mutant: Mutant) -> Verdict:
        """What `mutant` is."""
        try:
            made = mutant.make()
        except ValueError as error:
            return Verdict(Kind.REFUSED, str(error))
        return replace(self._judge(made), schedule=made)

    def _judge(self, made: Schedule) -> Verdict:
        wrong = self.run(made) or self._unseen(made)
        if wrong is not None:
            return wrong
        for pool, size in self._peaks_of(made).items():
            if size > self._peaks.get(pool, 0):
                return Verdict(Kind.LARGER, f"{pool}: {size} > {self._peaks.get(pool, 0)}")
        races = list(islice(Graph(made, self.overflow_steps).races(), RACES_MAX))
        for race in races:
            for timing in timings(race):
                wrong = self.run(made, timing)
                if wrong is not None:
                    return replace(wrong, kind=Kind.RACING)
        if races:
            return Verdict(Kind.UNDECIDED, f"{races[0].one} and {races[0].other} have no order")
        return Verdict(Kind.HARMLESS)

    def run(self, made: Schedule, durations: Durations | None = None) -> Verdict | None:
        """What is wrong with a run, if something is."""
        try:
            result = trained(
                made, self.model, self._expected, durations, overflow_steps=self.overflow_steps
            )
        except RefusedError as error:
            return Verdict(Kind.STUCK, str(error))
        if result.failure:
            return Verdict(Kind.STUCK, result.failure)
        if not result.is_right:
            return Verdict(Kind.WRONG, str((*result.faults, *result.differences)[:1]))
        return None

    def _unseen(self, made: Schedule) -> Verdict | None:
        """A gradient that is not finite and does not reach what a branch reads, if there is one."""
        if not self.overflow_steps:
            return None
        job = Job(schedule=made, model=self.model, cluster=cluster(made.mesh.size))
        missed = unseen(job, self._places)
        return Verdict(Kind.WRONG, f"{missed[0]} is not seen") if missed else None

    def _peaks_of(self, schedule: Schedule) -> dict[str, int]:
        """The largest book of any role, by pool."""
        found: dict[str, int] = {}
        for program in schedule.programs:
            entries = book(program, STEPS, self.overflow_steps)
            for pool in pools(entries):
                found[pool] = max(found.get(pool, 0), peak_bytes(entries, pool))
        return found
