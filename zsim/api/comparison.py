"""`zsim.compare`: two runs side by side, the largest difference first."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from zsim.analysis.run_comparison import (
    Comparison,
    Difference,
    Measure,
    counts,
    ratio_error,
    sort_of,
)
from zsim.analysis.run_comparison import compare as compared
from zsim.api.answer import Answer
from zsim.api.answer_text import table_text
from zsim.api.data_frame import data_frame
from zsim.api.notebook import table_html
from zsim.api.run_result import RunResult
from zsim.api.scenario import Changed, LoadedScenario, as_settings, load
from zsim.backend.backend import BackendError, NoRouteError, predicts
from zsim.backend.document import DocumentError, decode_trace
from zsim.files.input_file import read_file
from zsim.mistake import MistakeError, file_fault, mistakes
from zsim.trace.trace import Trace
from zsim.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from pandas import DataFrame


FIGURES, SORTS, OPERATIONS = 10, 6, 8
"""Number of rows of each that `text` shows; `rows()` has all."""

NOTHING = 1e-6
"""Minimum difference of a shown row, as a fraction of the step time or of all bytes."""

Given: TypeAlias = RunResult | LoadedScenario | str | PathLike[str] | Mapping[str, object]
"""A result, a trace in a JSON file, or a scenario as `load` takes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One of the two runs: its name and its trace."""

    name: str
    trace: Trace = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonResult(Answer):
    """Two runs side by side; each list starts with the largest difference.

    Attributes:
        first, second: the two runs.
        found: differences of the step time, of figures, of kinds of operations, and of operations.
    """

    first: Side
    second: Side
    found: Comparison = field(repr=False)

    @property
    def step_times_s(self) -> tuple[float, float]:
        """Step times of the first and the second run in seconds."""
        return self.found.step.first, self.found.step.second

    @property
    def steps_differ(self) -> bool | None:
        """True if the step times differ by more than the error of their ratio; None if unknown."""
        errors = (self.first.trace.error, self.second.trace.error)
        return counts(self.found.step.relative or 0.0, *errors)

    @property
    def ratio_error(self) -> float | None:
        """Error of the ratio of the two step times, as a fraction; None if unknown."""
        return ratio_error(self.first.trace.error, self.second.trace.error)

    def text(self) -> str:
        """Return the step times, and the figures, kinds and operations that differ most."""
        found = self.found
        rows = [_row(found.step)]
        for title, differences, most in (
            ("", found.figures, FIGURES),
            ("time of operations by kind", found.sorts, SORTS),
            ("the operation of each kind that differs most", _firsts(found.operations), OPERATIONS),
        ):
            shown = [_row(each) for each in differences if each.weight > NOTHING][:most]
            rows += [(title, "", "", "", "")] if title and shown else []
            rows += shown
        lines = [
            *(
                f"{letter}: {side.name} ({side.trace.backend})"
                for letter, side in (("A", self.first), ("B", self.second))
            ),
            table_text(("", "A", "B", "B - A", ""), rows),
            _rest(found),
            self._how_surely(),
        ]
        return "\n".join(filter(None, lines))

    def _how_surely(self) -> str:
        """Return a sentence on the significance of the difference; empty for measured runs."""
        traces = (self.first.trace, self.second.trace)
        if not self.found.step.relative or not all(predicts(each.backend) for each in traces):
            return ""
        if self.steps_differ is None:
            return "The error of the ratio of the steps is unknown."
        how = "more" if self.steps_differ else "no more"
        return (
            f"The steps differ by {how} than the error of their ratio, ±{self.ratio_error:.1%} "
            "(90 % of comparable pairs)."
        )

    def to_dict(self) -> dict[str, object]:
        """Return the object that `zsim compare --json` prints."""
        found = self.found
        return {
            "first": self.first.name,
            "second": self.second.name,
            "step_time_s": _entry(found.step),
            "ratio_error": self.ratio_error,
            "step_time_differs_by_more_than_error": self.steps_differ,
            "figures": [_entry(each) for each in found.figures],
            "sorts": [_entry(each) for each in found.sorts],
            "operations": [_entry(each) for each in found.operations],
            "operations_only_in_first": found.only_first,
            "operations_only_in_second": found.only_second,
        }

    def rows(self) -> list[dict[str, object]]:
        """Return each number that both runs have; `measure` is its unit, seconds or bytes."""
        found = self.found
        levels = {
            "step": (found.step,),
            "figure": found.figures,
            "kind of operation": found.sorts,
            "operation": found.operations,
        }
        return [
            {
                "level": level,
                "name": each.name,
                "measure": str(each.measure),
                "first": each.first,
                "second": each.second,
                "change": each.change,
                "relative": each.relative,
            }
            for level, differences in levels.items()
            for each in differences
        ]

    def to_pandas(self) -> "DataFrame":
        """Return `rows()` as a pandas DataFrame.

        Raises:
            MistakeError: pandas is not installed.
        """
        return data_frame(self.rows())

    def _repr_html_(self) -> str:
        return table_html(f"{self.first.name} | {self.second.name}", self.rows())


def compare(
    first: Given,
    second: Given | None = None,
    changes: Changed = None,
    *,
    common: Changed = None,
) -> ComparisonResult:
    """Compare two runs; simulate each that is given as a scenario.

    Args:
        first: a result, the path of a trace in JSON, or a scenario as in `load`.
        second: the same; without it, the first scenario with `changes`.
        changes: values by key that change only the second scenario, as in `load`.
        common: values by key that change both scenarios.

    Raises:
        MistakeError: a run cannot be read or simulated, or there is nothing to compare with.
    """
    changes, common = as_settings(changes), as_settings(common)
    if second is None and not changes:
        raise MistakeError("second: missing; give a second run, or changes of the first")
    one = _read(first, common)
    other = _read(first if second is None else second, (*common, *changes))
    sides = [each if isinstance(each, Side) else _simulated(each) for each in (one, other)]
    return ComparisonResult(
        first=sides[0], second=sides[1], found=compared(sides[0].trace, sides[1].trace)
    )


def _read(given: Given, settings: tuple[str, ...]) -> Side | LoadedScenario:
    """Return the run if there is one, else the scenario to simulate."""
    if isinstance(given, RunResult):
        name, trace = given.title, given.whole.recorded
    elif isinstance(given, str | PathLike) and is_trace(fspath(given)):
        name, trace = fspath(given), _trace(fspath(given))
    else:
        return load(given, settings)
    if settings:
        raise MistakeError(f"{settings[0]}: {name} is a trace; settings are for scenarios")
    return Side(name=name, trace=trace)


def is_trace(name: str) -> bool:
    """Return True if the file `name` is JSON but not a schedule.

    Raises:
        MistakeError: the file cannot be read.
    """
    return Path(name).suffix == ".json" and '"zsim": "job"' not in _text(name)[:200]


def _text(name: str) -> str:
    try:
        return read_file(name)
    except OSError as error:
        raise file_fault(name, error) from None
    except UnicodeDecodeError:
        raise MistakeError(f"{name}: not text: traces and schedules are JSON") from None


def _trace(name: str) -> Trace:
    text = _text(name)
    with mistakes(DocumentError, prefix=f"{name}: "):
        return decode_trace(text)


def _simulated(scenario: LoadedScenario) -> Side:
    changed = ", ".join(scenario.changes.all_settings)
    source = scenario.source
    with mistakes(BackendError, NoRouteError, prefix=f"{source.title}: "):
        trace = source.simulation().run(source.job(), seed=0)
    return Side(name=f"{scenario.name} with {changed}" if changed else scenario.name, trace=trace)


def _entry(each: Difference) -> dict[str, object]:
    return {
        "name": each.name,
        f"first_{each.measure}": each.first,
        f"second_{each.measure}": each.second,
        "relative": each.relative,
    }


def _firsts(operations: Iterable[Difference]) -> list[Difference]:
    """Return the first operation of each kind."""
    found: dict[str, Difference] = {}
    for each in operations:
        found.setdefault(sort_of(each.name), each)
    return list(found.values())


def _row(each: Difference) -> tuple[str, ...]:
    shown = format_seconds if each.measure is Measure.SECONDS else _bytes
    sign = "-" if each.change < 0 else "+" if each.change > 0 else ""
    change = f"{sign}{shown(abs(each.change))}"
    return each.name, shown(each.first), shown(each.second), change, _relative(each)


def _relative(each: Difference) -> str:
    """Return the change in percent, or as a factor if the second number is 10 times the first."""
    if each.relative is None:
        return ""
    if each.relative < 9:
        return f"{each.relative:+.1%}"
    return f"x {each.second / each.first:,.0f}"


def _bytes(amount: float) -> str:
    return format_bytes(int(amount))


def _rest(found: Comparison) -> str:
    """Return a sentence about the operations that the table omits."""
    count = len(found.operations)
    same = sum(not each.change for each in found.operations)
    text = f"{count:,} operations are in both"
    text += f", {same:,} of them equal" if same else ""
    for side, alone in (("A", found.only_first), ("B", found.only_second)):
        text += f"; {alone:,} in {side} alone" if alone else ""
    return f"{text}."
