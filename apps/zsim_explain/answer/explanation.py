"""`zsim explain`: causes of the time of recorded steps, and of its difference from another run."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Final

from zsim.api.answer import AnswerInFacts
from zsim.api.launch import run
from zsim.api.scenario import Changed
from zsim.mistake import MistakeError
from zsim.trace.kineto import kineto
from zsim.units import format_seconds
from zsim_explain.ledger.step_difference import (
    OTHERS,
    MeanStep,
    StepDifference,
    critical,
    difference,
    late_rank,
    mean_step,
)
from zsim_explain.ledger.step_ledger import LedgerPart, TimeCause
from zsim_explain.ledger.waits import Pairing, with_waits
from zsim_explain.trace.profiler_file import read_profile
from zsim_explain.trace.recorded_rank import RecordedRank, recorded_ranks

SHOWN: Final = 0.002
"""Share of a step from which a cause has a line."""

STEADY: Final = 0.001
"""Share of a step below which the spread between steps is not shown."""

WELL_EXPLAINED: Final = 0.95
"""Share of a step that the causes should explain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation(AnswerInFacts):
    """Where the time of recorded steps goes.

    Attributes:
        title: the files.
        pairing: the ranks, and their waits for each other.
        steps: the mean step of each rank.
        difference: measured minus expected; None if nothing was expected.
        expectation: description of the run that is compared.
    """

    title: str
    pairing: Pairing = field(repr=False)
    steps: Sequence[MeanStep] = field(repr=False)
    difference: StepDifference | None
    expectation: str = ""

    @property
    def shown(self) -> MeanStep:
        """The mean step of the critical rank, for which the others wait."""
        return critical(self.steps)

    @property
    def rank(self) -> RecordedRank:
        """The critical rank."""
        return self.pairing.ranks[list(self.steps).index(self.shown)]

    @property
    def explained(self) -> float:
        """Share of the step that has a cause."""
        spent = self.shown.ledger.spent
        unknown = sum(us for cause, us in spent.items() if cause.part is LedgerPart.UNKNOWN)
        return 1 - unknown / self.shown.took

    def facts(self) -> list[tuple[str, str]]:
        """Return the parts of the step, the longest first, and the causes of the difference."""
        rank, step = self.rank, self.shown
        gpu = f", {rank.gpu}" if rank.gpu else ""
        count = len(rank.steps)
        is_steady = step.spread < STEADY * step.took
        spread = (
            "" if is_steady else f", half of the steps within {_time(step.spread)} of the median"
        )
        steps = "1 step" if count == 1 else f"{count} steps"
        return [
            ("recorded", f"{rank.title}{gpu}: {steps}, by {rank.marked_by}"),
            ("step time", f"{_time(step.took)}{spread}"),
            *self._parts(),
            *self._ranks(),
            *self._causes(),
            *self._warnings(),
        ]

    def _parts(self) -> list[tuple[str, str]]:
        step = self.shown
        parts: defaultdict[LedgerPart, dict[TimeCause, float]] = defaultdict(dict)
        for cause, us in step.ledger.spent.items():
            parts[cause.part][cause] = us
        ordered = sorted(parts, key=lambda part: -sum(parts[part].values()))
        lines = [(str(part), self._part(parts[part])) for part in ordered]
        if hidden := sum(step.ledger.hidden.values()):
            lines.append(("hidden communication", f"{_time(hidden)} while kernels compute"))
        return lines

    def _part(self, causes: Mapping[TimeCause, float]) -> str:
        took = self.shown.took
        total = sum(causes.values())
        each = [
            f"{cause} {_time(us)}"
            for cause, us in sorted(causes.items(), key=lambda pair: (-pair[1], pair[0]))
            if us > SHOWN * took
        ]
        return f"{_time(total)} ({total / took:.1%}){': ' if each else ''}{', '.join(each)}"

    def _ranks(self) -> list[tuple[str, str]]:
        """Describe the waits of ranks for each other."""
        pairing = self.pairing
        if len(pairing.ranks) == 1:
            if any(cause.part is LedgerPart.EXPOSED for cause in self.shown.ledger.spent):
                why = "unknown: with files of more ranks, waits for a slow rank can be separated"
                return [("waits for others", why)]
            return []
        if pairing.refused:
            return [("waits for others", f"unknown: {pairing.refused}")]
        total, count = sum(pairing.waited.values()), len(pairing.ranks)
        late = late_rank(pairing.waited)
        share = 0.0 if late is None or not total else pairing.waited[late] / total
        who = "now one rank, now another" if late is None else f"{share:.0%} for rank {late}"
        mean = total / sum(len(rank.steps) for rank in pairing.ranks)
        paired = f"{pairing.paired:,} of {pairing.collectives:,} collectives found on all {count}"
        return [("waits for others", f"{_time(mean)} a step and rank, {who}; {paired} ranks")]

    def _causes(self) -> list[tuple[str, str]]:
        """Describe the causes of the difference."""
        if (found := self.difference) is None:
            return []
        change = found.measured - found.expected
        share = f"{change / found.expected:+.1%}" if found.expected else "nothing expected"
        lines = [
            ("expected", f"{_time(found.expected)} a step, {self.expectation}"),
            ("difference", f"{_signed(change)} ({share})"),
        ]
        noise = max(self.shown.spread, SHOWN * found.measured)
        for cause, us in found.causes:
            if abs(us) >= noise or cause == OTHERS:
                lines.append((_signed(us), cause))
        small = sum(us for cause, us in found.causes if abs(us) < noise and cause != OTHERS)
        if small:
            lines.append((_signed(small), "causes smaller than the spread between steps"))
        return lines

    def _warnings(self) -> list[tuple[str, str]]:
        lines: list[tuple[str, str]] = []
        if self.explained < WELL_EXPLAINED:
            lines.append(
                (
                    "warning",
                    f"{1 - self.explained:.0%} of the step has no cause: records of kernels or "
                    "events are missing from the file, or kernels wait for other streams "
                    "(record cuda_sync events to see that)",
                )
            )
        if self.rank.skipped:
            lines.append(("warning", f"{self.rank.skipped:,} events without a time were skipped"))
        if len(self.rank.steps) == 1:
            lines.append(("warning", "one step: record three or more to see the spread"))
        return lines

    def to_dict(self) -> dict[str, object]:
        """Return the object that `zsim explain --json` prints."""
        found = self.difference
        return {
            "title": self.title,
            "rank": self.rank.rank,
            "ranks": [each.rank for each in self.pairing.ranks],
            "gpu": self.rank.gpu,
            "steps": len(self.rank.steps),
            "step_time_s": self.shown.took / 1e6,
            "explained_share": self.explained,
            "parts": _objects(self.shown.ledger.spent),
            "hidden": _objects(self.shown.ledger.hidden),
            "waited_for_s": {str(rank): us / 1e6 for rank, us in self.pairing.waited.items()},
            "waits_refused": self.pairing.refused or None,
            "difference": None
            if found is None
            else {
                "measured_s": found.measured / 1e6,
                "expected_s": found.expected / 1e6,
                "causes": [{"cause": cause, "s": us / 1e6} for cause, us in found.causes],
            },
        }


def explain(
    traces: Sequence[str | PathLike[str]],
    *,
    against: Sequence[str | PathLike[str]] = (),
    scenario: str | PathLike[str] | None = None,
    changes: Changed = None,
) -> Explanation:
    """Explain the time of the steps in `traces`, a file for each rank.

    Args:
        traces: files of PyTorch's profiler.
        against: traces of a run that was faster, to say what differs.
        scenario: scenario that predicts the step, to say what differs.
        changes: changes to the scenario.

    Raises:
        MistakeError: a file cannot be read, is no such trace, or has no marked steps; both
            `against` and `scenario` are given; or the scenario has another number of ranks.
    """
    if against and scenario is not None:
        raise MistakeError("--against: cannot be combined with --scenario; remove one")
    if changes and scenario is None:
        raise MistakeError("--set: changes a scenario; add --scenario")
    pairing = _paired(traces)
    steps = [mean_step(rank) for rank in pairing.ranks]
    title = ", ".join(str(each) for each in traces)
    if scenario is not None:
        rank = pairing.ranks[steps.index(critical(steps))]
        expected, words = _simulated(scenario, changes, rank), f"as {scenario} is simulated"
    elif against:
        expected, words = [mean_step(each) for each in _paired(against).ranks], "as recorded before"
    else:
        return Explanation(title=title, pairing=pairing, steps=steps, difference=None)
    found = difference(steps, pairing.waited, expected, by_class=scenario is None)
    return Explanation(
        title=title, pairing=pairing, steps=steps, difference=found, expectation=words
    )


def _paired(files: Sequence[str | PathLike[str]]) -> Pairing:
    """Return the ranks in the files, with their waits for each other.

    Raises:
        MistakeError: a file cannot be read, or two are of one rank.
    """
    ranks = [
        rank for file in files for rank in recorded_ranks(Path(file), read_profile(Path(file)))
    ]
    numbers = [rank.rank for rank in ranks]
    for rank in ranks:
        if numbers.count(rank.rank) > 1:
            same = [str(each.path) for each in ranks if each.rank == rank.rank]
            raise MistakeError(
                f"{', '.join(same[:3])}: all of rank {rank.rank}; give one file a rank"
            )
    if len(ranks) == 1:
        return Pairing(ranks, 0, 0, 0.0, {})
    return with_waits(ranks)


def _simulated(
    scenario: str | PathLike[str], changes: Changed, like: RecordedRank
) -> list[MeanStep]:
    """Return the mean steps of the ranks of a simulated scenario with the role of `like`.

    Raises:
        MistakeError: the scenario cannot run, or has another number of ranks.
    """
    ran = run(scenario, changes, folds=False)
    schedule, ranks = ran.job.schedule, ran.job.schedule.mesh.size
    if like.rank >= ranks or like.world not in (None, ranks):
        raise MistakeError(
            f"--scenario: {scenario} has {ranks:,} ranks, and the trace is of {like.title}; change "
            "the scenario with --set"
        )
    role = schedule.program_of(like.rank).role
    return [
        mean_step(rank)
        for each in ran.recorded.ranks
        if schedule.program_of(each.rank).role == role
        for rank in recorded_ranks(Path(str(scenario)), kineto(schedule, ran.recorded, each))
    ]


def _objects(amounts: Mapping[TimeCause, float]) -> list[dict[str, object]]:
    return [
        {"part": str(cause.part), "what": cause.what, "group": cause.group or None, "s": us / 1e6}
        for cause, us in sorted(amounts.items(), key=lambda pair: (-pair[1], pair[0]))
    ]


def _time(us: float) -> str:
    return format_seconds(us / 1e6)


def _signed(us: float) -> str:
    return f"{'+' if us >= 0 else '-'}{_time(abs(us))}"
