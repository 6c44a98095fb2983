"""Verdicts: published values with predictions of them, and the errors of groups of rows."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median, quantiles

WORST = 5
"""Rows that are named because they are predicted worst."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """Errors of `rows` predictions, as fractions of the published values."""

    rows: int
    median: float
    mean: float
    p90: float
    most: float


def errors_of(errors: Sequence[float]) -> Errors:
    """Return a summary of `errors`, of which there is at least one."""
    p90 = quantiles(errors, n=10, method="inclusive")[-1] if len(errors) > 1 else errors[0]
    return Errors(
        rows=len(errors), median=median(errors), mean=fmean(errors), p90=p90, most=max(errors)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictRow:
    """A published value and its prediction.

    Attributes:
        place: line of the file, or label of the row.
        name: of the row in a list of the worst.
        is_kept: no constant may have been fitted to it.
        groups: names of the groups that it belongs to, by the kind of group.
        source: the published row.
        alternative: which of its scenarios is predicted, counted from 0.
    """

    place: int | str
    name: str
    published: float
    predicted: float
    is_kept: bool = True
    groups: Mapping[str, str] = field(default_factory=dict[str, str])
    source: object = None
    alternative: int = 0

    @property
    def off(self) -> float:
        """Error as a fraction of the published value; less than 0 if predicted too small."""
        return self.predicted / self.published - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class UnjudgedRow:
    """A prediction of a row without a published value."""

    name: str
    predicted: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """A further result: its name and value in JSON, and its lines of text."""

    name: str
    value: object
    lines: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Rows of a table or a figure with their predictions.

    Attributes:
        name: of the table, or of the figure.
        quantity: name of the quantity that is compared.
        rows: every row that is predicted.
        shown: writes a value in its unit.
        unmodelled: places of the rows that are not predicted, each with the reason.
        unjudged: predictions of rows without a published value, which claims use.
        without: number of other predicted rows without a result.
        facts: further results.
    """

    name: str
    quantity: str
    rows: tuple[VerdictRow, ...]
    shown: Callable[[float], str]
    unmodelled: tuple[tuple[int | str, str], ...] = ()
    without: int = 0
    unjudged: tuple[UnjudgedRow, ...] = ()
    facts: tuple[Fact, ...] = ()

    @property
    def total(self) -> int:
        """Number of rows, predicted or not."""
        return self.modelled + len(self.unmodelled)

    @property
    def modelled(self) -> int:
        """Number of rows that are predicted."""
        return len(self.rows) + len(self.unjudged) + self.without

    @property
    def predicted(self) -> dict[str, float]:
        """Predicted values by the name of their row."""
        every = (*((row.name, row.predicted) for row in self.rows),)
        return dict((*every, *((row.name, row.predicted) for row in self.unjudged)))

    @property
    def all(self) -> Errors | None:
        """Errors of all rows; None if there is none."""
        return _errors(self.rows)

    @property
    def kept(self) -> Errors | None:
        """Errors of rows that fitted no constant; None if there is none."""
        return _errors(self.kept_rows)

    @property
    def fitted(self) -> Errors | None:
        """Errors of the other rows; None if there is none."""
        return _errors(row for row in self.rows if not row.is_kept)

    @property
    def kept_rows(self) -> tuple[VerdictRow, ...]:
        """Rows that fitted no constant."""
        return tuple(row for row in self.rows if row.is_kept)

    @property
    def worst(self) -> tuple[VerdictRow, ...]:
        """The rows furthest off, worst first."""
        return tuple(sorted(self.rows, key=lambda row: -abs(row.off))[:WORST])

    def groups(self) -> dict[str, dict[str, Errors]]:
        """Return the errors of kept rows by the kind and the name of their groups."""
        found: defaultdict[str, defaultdict[str, list[float]]]
        found = defaultdict(lambda: defaultdict(list))
        for row in self.kept_rows:
            for kind, name in row.groups.items():
                if name:
                    found[kind][name].append(abs(row.off))
        return {
            kind: {name: errors_of(errors) for name, errors in sorted(names.items())}
            for kind, names in found.items()
        }


def _errors(rows: Iterable[VerdictRow]) -> Errors | None:
    errors = [abs(row.off) for row in rows]
    return errors_of(errors) if errors else None
