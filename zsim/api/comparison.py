"""`zsim.compare`: two runs side by side, the largest difference first."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING

from zsim.analysis.compare import Comparison, Difference, counts
from zsim.analysis.compare import compare as compared
from zsim.api.data_frame import data_frame
from zsim.api.notebook import table_html
from zsim.api.run_result import RunResult
from zsim.api.scenario import LoadedScenario, load
from zsim.backend.backend import BackendError, NoWayError
from zsim.backend.document import DocumentError, decode_trace
from zsim.mistake import MistakeError, file_fault, mistakes
from zsim.trace.trace import Trace

if TYPE_CHECKING:
    from pandas import DataFrame


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One of the two runs: what it is called, and what happened."""

    name: str
    trace: Trace = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonResult:
    """Two runs side by side; each list has the largest difference first.

    Attributes:
        first, second: the two runs.
        found: the time of a step, figures, kinds of operations, and operations.
    """

    first: Side
    second: Side
    found: Comparison = field(repr=False)

    @property
    def step_times_s(self) -> tuple[float, float]:
        """Seconds of a step of the first run and of the second."""
        return self.found.step.first, self.found.step.second

    @property
    def steps_differ(self) -> bool | None:
        """True if the steps differ by more than predictions are off; None where nobody knows."""
        errors = [each.trace.error for each in (self.first, self.second)]
        return counts(self.found.step.relative or 0.0, errors)

    def to_dict(self) -> dict[str, object]:
        """Return what `zsim compare --json` prints."""
        found = self.found
        return {
            "first": self.first.name,
            "second": self.second.name,
            "step_time_s": _entry(found.step),
            "step_time_differs_by_more_than_error": self.steps_differ,
            "figures": [_entry(each) for each in found.figures],
            "sorts": [_entry(each) for each in found.sorts],
            "operations": [_entry(each) for each in found.operations],
            "operations_only_in_first": found.only_first,
            "operations_only_in_second": found.only_second,
        }

    def rows(self) -> list[dict[str, object]]:
        """Return each number that both runs have: seconds or bytes, as `measure` says."""
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
        """Return `rows()` as a table of pandas.

        Raises:
            MistakeError: pandas is not installed.
        """
        return data_frame(self.rows())

    def _repr_html_(self) -> str:
        return table_html(f"{self.first.name} | {self.second.name}", self.rows())


def compare(
    first: RunResult | LoadedScenario | str | PathLike[str] | Mapping[str, object],
    second: RunResult | LoadedScenario | str | PathLike[str] | Mapping[str, object] | None = None,
    changes: Mapping[str, object] | None = None,
) -> ComparisonResult:
    """Compare two runs; what did not run yet is simulated.

    Args:
        first: a result, a trace in a JSON file, or a scenario as `load` takes it.
        second: another one; without it the first scenario again, with `changes`.
        changes: values by key that change the second alone.

    Raises:
        MistakeError: one of them cannot be read or simulated.
    """
    if second is None and not changes:
        raise MistakeError("second: missing; give a second run, or changes of the first")
    one, other = _side(first, None), _side(first if second is None else second, changes)
    return ComparisonResult(first=one, second=other, found=compared(one.trace, other.trace))


def _side(
    given: RunResult | LoadedScenario | str | PathLike[str] | Mapping[str, object],
    changes: Mapping[str, object] | None,
) -> Side:
    if isinstance(given, RunResult):
        name, trace = given.title, given.recorded
    elif isinstance(given, str | PathLike) and is_trace(fspath(given)):
        name, trace = fspath(given), _trace(fspath(given))
    else:
        return _simulated(load(given, changes))
    if changes:
        raise MistakeError(f"changes: {name} is a trace; changes are for scenarios")
    return Side(name=name, trace=trace)


def is_trace(name: str) -> bool:
    """Tell whether the file `name` is in JSON and no schedule.

    Raises:
        MistakeError: it cannot be read.
    """
    return Path(name).suffix == ".json" and '"zsim": "job"' not in _text(name)[:200]


def _text(name: str) -> str:
    try:
        return Path(name).read_text("utf-8")
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
    with mistakes(BackendError, NoWayError, prefix=f"{source.title}: "):
        trace = source.simulation().run(source.job(), seed=0)
    return Side(name=f"{scenario.name} with {changed}" if changed else scenario.name, trace=trace)


def _entry(each: Difference) -> dict[str, object]:
    return {
        "name": each.name,
        f"first_{each.measure}": each.first,
        f"second_{each.measure}": each.second,
        "relative": each.relative,
    }
