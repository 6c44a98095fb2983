"""The judge: a fault is planted, checkers look, and those who have to find it are asked for.

The judge knows no back end. A job has a right subject and its checkers; the truth says whether a
mutant is wrong at all, and is asked only where no checker that has to find the fault has found it,
or if `always`.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice
from typing import Protocol, TypeVar

import numpy as np

from faults.fault import Fault, Mutant

S = TypeVar("S")
T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)
S_co = TypeVar("S_co", covariant=True)


class Fact(Protocol):
    """The truth about a mutant."""

    @property
    def is_wrong(self) -> bool:
        """Whether something is wrong with it."""
        ...


@dataclass(frozen=True)
class Known:
    """The truth about a mutant where it follows from the change."""

    is_wrong: bool


class Job(Protocol[S_co, T_contra]):
    """A right subject, and those who look at its mutants."""

    @property
    def label(self) -> str:
        """The name of the subject."""
        ...

    @property
    def subject(self) -> S_co:
        """The right subject."""
        ...

    @property
    def instead(self) -> frozenset[str]:
        """Checkers that may find any fault before those who have to."""
        ...

    def findings(self, made: T_contra, /) -> Mapping[str, Sequence[str]]:
        """Return texts of findings by checker."""
        ...

    def truth(self, made: T_contra, rng: np.random.Generator, /) -> Fact:
        """Return whether a mutant is wrong, whatever checkers say."""
        ...


@dataclass(frozen=True)
class NamedRun:
    """A job whose subject is a name."""

    label: str

    @property
    def subject(self) -> str:
        """The name of the run."""
        return self.label

    @property
    def instead(self) -> frozenset[str]:
        """No checker may find a fault before those who have to."""
        return frozenset()


class Outcome(StrEnum):
    """What came of a planted fault."""

    REFUSED = "refused by a constructor"
    FOUND = "found"
    ELSEWHERE = "found by another checker"
    MISSED = "missed"
    HARMLESS = "harmless"


@dataclass(frozen=True)
class Verdict:
    """The outcome of a planted fault.

    Attributes:
        found: the checkers that have findings.
        is_named: whether a finding names the place of the change.
        is_wrong: the truth; None where it was not asked.
    """

    fault: str
    text: str
    outcome: Outcome
    found: frozenset[str] = frozenset()
    is_named: bool = False
    is_wrong: bool | None = None
    why: str = ""

    @property
    def fails(self) -> str:
        """The reason why the verdict is against the checkers; empty if it is not."""
        if self.outcome in (Outcome.MISSED, Outcome.ELSEWHERE):
            return f"{self.fault}: {self.text}: {self.outcome}, {sorted(self.found)} {self.why}"
        return ""


def judge(
    fault: Fault[S, T], mutant: Mutant[T], job: Job[S, T], *, seed: int = 0, always: bool = False
) -> Verdict:
    """Return the verdict about one mutant."""
    try:
        made = mutant.made
    except ValueError as error:
        return Verdict(fault.id, mutant.text, Outcome.REFUSED, why=str(error))
    findings = job.findings(made)
    found = frozenset(findings)
    texts = [text for name in found & fault.found_by for text in findings[name]]
    named = any(place in text for text in texts for place in mutant.where)
    accepted = found & (fault.found_by | job.instead)
    truth = None if accepted and not always else job.truth(made, np.random.default_rng(seed))
    outcome = Outcome.FOUND if accepted else Outcome.ELSEWHERE
    if truth is not None and not truth.is_wrong:
        outcome = Outcome.HARMLESS
    elif not found:
        outcome = Outcome.MISSED
    is_wrong = None if truth is None else truth.is_wrong
    return Verdict(fault.id, mutant.text, outcome, found, named, is_wrong, str(truth or ""))


@dataclass(frozen=True)
class Cell:
    """Verdicts about mutants of one fault in the jobs of one column, of `sites` that there are."""

    group: str
    fault: str
    column: str
    sites: int
    verdicts: tuple[Verdict, ...]

    def count(self, *outcomes: Outcome) -> int:
        """Return the number of verdicts with these outcomes."""
        counted = Counter(each.outcome for each in self.verdicts)
        return sum(counted[outcome] for outcome in outcomes)

    @property
    def wrong(self) -> list[Verdict]:
        """Verdicts about mutants that are wrong."""
        return [each for each in self.verdicts if each.is_wrong]


def cell(
    fault: Fault[S, T],
    column: str,
    jobs: Iterable[Job[S, T]],
    wanted: int,
    tries: int,
    *,
    seed: int = 0,
) -> Cell:
    """Judge mutants in a drawn order until `wanted` are wrong, but at most `tries`."""
    rng, jobs = np.random.default_rng(seed), list(jobs)
    most = -(-tries // len(jobs)) if fault.is_endless else None
    pairs = [
        (job, mutant)
        for number, job in enumerate(jobs)
        for mutant in islice(fault.mutants(job.subject, [seed, number]), most)
    ]
    verdicts: list[Verdict] = []
    for place in rng.permutation(len(pairs))[:tries].tolist():
        job, mutant = pairs[place]
        verdicts.append(judge(fault, mutant, job, seed=seed, always=True))
        if sum(each.is_wrong is True for each in verdicts) == wanted:
            break
    return Cell(fault.group, fault.id, column, len(pairs), tuple(verdicts))


COLUMNS = (Outcome.REFUSED, Outcome.HARMLESS, Outcome.FOUND, Outcome.ELSEWHERE, Outcome.MISSED)


def lines(cells: Sequence[Cell]) -> Iterator[str]:
    """Yield the table of detection: one line a fault, over all columns."""
    yield _row("fault", "refused", "harmless", "found", "other", "missed", "named")
    for name in (*dict.fromkeys(each.fault for each in cells), ""):
        some = [each for each in cells if name in ("", each.fault)]
        counts = [sum(each.count(outcome) for each in some) for outcome in COLUMNS]
        named = sum(one.is_named for each in some for one in each.wrong)
        yield _row(name or "all", *map(str, (*counts, named)))


def _row(name: str, *counts: str) -> str:
    return f"{name:60}" + "".join(f"{count:>9}" for count in counts)
