"""Whether an edited schedule is wrong: by running it with exact values, and by nothing else.

Wrong is what fails, hangs, disturbs itself or ends with another state than plain training: as the
cluster times it, in drawn timings and in those that a race would need; without overflow, and with
one in a drawn place. Every place on its own must reach what branches read. What hosts count is held
against plain counting over many steps, and formats against those of the strategy (`edits.widths`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice

import numpy as np
from drawn_timings import PALETTES, DrawnTiming
from exact_training import STEPS, cluster
from mutants.races import Graph
from mutants.verdict import timings

from edits.widths import Formats, formats_of, poorer_than
from zsim.backend.backend import Job, RefusedError, RunFailedError
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
TIMINGS = 2
"""Drawn timings in which an edit is run that nothing else shows to be wrong."""


class Kind(StrEnum):
    """How an edited schedule is wrong, if it is."""

    STUCK = "stuck"
    WRONG = "wrong"
    OVERFLOW = "wrong after an overflow"
    COUNT = "counts otherwise"
    FORMAT = "poorer format"
    RACING = "wrong under a timing"
    UNREAD = "counts otherwise what nothing reads"
    HARMLESS = "harmless as far as seen"


@dataclass(frozen=True)
class Verdict:
    """How a schedule is wrong, if it is, and why in words."""

    kind: Kind
    why: str = ""

    @property
    def is_wrong(self) -> bool:
        """Whether something was seen that no right schedule does."""
        return self.kind not in (Kind.HARMLESS, Kind.UNREAD)


class Court:
    """Judges edits of one schedule, which is right."""

    def __init__(self, schedule: Schedule, model: Model, strategy: Strategy) -> None:
        self.schedule = schedule
        self.model = model
        self.strategy = strategy
        self.scales = strategy.train.precision is Precision.FP16 and bool(model.parameter_count)
        self._places = list(plantable(schedule, model)) if self.scales else []
        self._expected: dict[frozenset[int], PlainState] = {}
        self._read = read_scalars(schedule)
        self._formats: Formats | None = None

    def judge(self, made: Schedule, rng: np.random.Generator) -> Verdict:
        """What `made`, an edit of the schedule, is."""
        found = Verdict(Kind.HARMLESS)
        for verdict in self._verdicts(made, rng):
            if verdict is not None and verdict.is_wrong:
                return verdict
            found = verdict or found
        return found

    def _verdicts(self, made: Schedule, rng: np.random.Generator) -> Iterator[Verdict | None]:
        yield self.run(made)
        yield self._counts(made)
        if self.scales:
            step = int(rng.integers(STEPS - 1))
            planted = self._places[int(rng.integers(len(self._places)))]
            yield self.run(made, planted=_at(planted, step))
            yield self.run(made, overflow_steps=frozenset({0}))
            yield self._unseen(made)
        yield self._poorer(made)
        yield from self._timed(made, rng)

    def _timed(self, made: Schedule, rng: np.random.Generator) -> Iterator[Verdict | None]:
        """Runs that take other times: what races could spoil, and some drawn."""
        some = frozenset({1}) if self.scales else NO_OVERFLOW
        for overflow_steps in {NO_OVERFLOW, some}:
            for race in islice(Graph(made, overflow_steps).races(), RACES_MAX):
                for timing in timings(race):
                    yield self.run(made, timing, overflow_steps=overflow_steps, kind=Kind.RACING)
        for _ in range(TIMINGS):
            chosen = [PALETTES[int(each)] for each in rng.integers(len(PALETTES), size=3)]
            drawn = DrawnTiming(int(rng.integers(2**32)), *chosen)
            yield self.run(made, drawn, overflow_steps=some, kind=Kind.RACING)

    def run(
        self,
        made: Schedule,
        durations: Durations | None = None,
        *,
        overflow_steps: frozenset[int] = NO_OVERFLOW,
        planted: Planted | None = None,
        kind: Kind | None = None,
    ) -> Verdict | None:
        """What is wrong with a run, if something is."""
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
            return Verdict(kind or Kind.STUCK, str(error))
        except (ArithmeticError, ValueError) as error:
            return Verdict(kind or Kind.WRONG, f"{type(error).__name__}: {error}")
        if result.failure:
            return Verdict(kind or Kind.STUCK, result.failure)
        unread = [each for each in result.differences if self._is_unread(each)]
        wrong = [*map(str, result.faults), *result.differences]
        wrong = [each for each in wrong if each not in unread]
        if wrong:
            return Verdict(kind or (Kind.OVERFLOW if steps else Kind.WRONG), wrong[0])
        return Verdict(Kind.UNREAD, unread[0]) if unread else None

    def _is_unread(self, difference: str) -> bool:
        """Whether a difference is of a number of the host that nothing reads."""
        _, _, text = difference.partition(": scalar ")
        return bool(text) and text.split(" ")[0] not in self._read

    def _job(self, made: Schedule) -> Job:
        return Job(schedule=made, model=self.model, cluster=cluster(made.mesh.size), steps=STEPS)

    def _unseen(self, made: Schedule) -> Verdict | None:
        missed = unseen(self._job(made), self._places)
        return Verdict(Kind.OVERFLOW, f"{missed[0]} is not seen") if missed else None

    def _poorer(self, made: Schedule) -> Verdict | None:
        precision = self.strategy.train.precision
        if self._formats is None:
            self._formats = formats_of(self._job(self.schedule), precision)
        try:
            why = poorer_than(formats_of(self._job(made), precision), self._formats)
        except RunFailedError as error:
            return Verdict(Kind.STUCK, str(error))
        return Verdict(Kind.FORMAT, why) if why else None

    def _counts(self, made: Schedule) -> Verdict | None:
        """What hosts count over so many steps that a loss scale grows, and falls to the least."""
        interval = self.strategy.train.loss_scale.interval if self.scales else 2
        overflows = [step in (1, 4) for step in range(2 * interval + 6)]
        overflows += [self.scales] * 20
        if not self.scales:
            overflows = [False] * len(overflows)
        wanted = scalars(self.strategy)
        for overflow in overflows:
            count(self.strategy, wanted, overflows=overflow)
        for program in made.programs:
            known = counted(made, program, overflows)
            for name, value in sorted(wanted.items(), key=lambda each: each[0] not in self._read):
                if known.get(name) != value:
                    why = f"{program.role}: {name} is {known.get(name)}, not {value}"
                    return Verdict(Kind.COUNT if name in self._read else Kind.UNREAD, why)
        return None


def read_scalars(schedule: Schedule) -> set[str]:
    """Numbers of the host that something reads: a kernel, or what counts by them."""
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
    """What a host has counted after steps of which some overflow."""
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


def _at(place: Planted, step: int) -> Planted:
    return Planted(
        step,
        place.ranks,
        place.micro_batch,
        place.unit,
        place.segment,
        place.gradient,
        place.element,
    )
