"""Coverage of the percentile that trust prints, and its table of judged runs made again."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

from zsim.api.answer import Answer, Progress, tell_nobody
from zsim.api.answer_text import table_text
from zsim.api.forecast import asked, forecasts
from zsim.api.judged_figures import figure_runs, judged_figures, scenario_features
from zsim.calibration.coverage import Coverage, CoverageTable, LeftOut, coverage
from zsim.calibration.judged_rows import different, judged_row, judges
from zsim.calibration.published import Published
from zsim.calibration.training_verdict import Quantity, RunForecast
from zsim.files.measurements import published_runs
from zsim.files.written import write
from zsim.prediction import evidence
from zsim.prediction.evidence import JudgedRun, judged_runs
from zsim.prediction.likeness import LEVEL, JudgedQuantity
from zsim.prediction.run_features import RunFeatures

COLUMNS = ("kind", "rows", "stated", "covered", "p", "printed", "observed")
LEGEND = (
    "stated: rows with enough others like them for a bound of the error; covered: of these, errors",
    "within it; p: the chance of a share so far from 90%; printed: median bound; observed: what",
    "90% of the errors are within; a run stalls that took more than twice as long as runs like it",
    "on other numbers of nodes, by what was published alone",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrustValidation(Answer):
    """Coverage of the percentile that trust prints.

    Attributes:
        runs: the table of judged runs.
        covered: coverage, by quantity and by what was left out.
        stale: rows that ship and are not predicted so any more; None if none was predicted.
        fresh: rows that are predicted otherwise than they ship, or do not ship.
    """

    runs: tuple[JudgedRun, ...]
    covered: Mapping[tuple[JudgedQuantity, LeftOut], CoverageTable]
    stale: int | None = None
    fresh: int | None = None

    def text(self) -> str:
        """Return a table of coverage by kind, for each quantity and what is left out."""
        lines = [f"{len(self.runs):,} judged runs of {_publications(self.runs):,} publications"]
        if self.stale is not None:
            lines.append(f"made again: {self.stale:,} rows that ship are stale, {self.fresh:,} new")
        for (quantity, left_out), found in self.covered.items():
            title = f"{quantity}, each {left_out} left out in turn: the {LEVEL:.0%} that is printed"
            rows = [_cells(each) for each in (found.everything, found.steady, *found.kinds)]
            lines += ["", f"{title}:", table_text(COLUMNS, rows)]
        return "\n".join([*lines, "", *LEGEND])

    def to_dict(self) -> dict[str, object]:
        """Return what `zsim validate trust --json` prints."""
        return {
            "runs": len(self.runs),
            "publications": _publications(self.runs),
            "stale": self.stale,
            "new": self.fresh,
            "coverage": [
                {
                    "quantity": str(quantity),
                    "left_out": str(left_out),
                    "all": _object(found.everything),
                    "steady": _object(found.steady),
                    "kinds": [_object(each) for each in found.kinds],
                }
                for (quantity, left_out), found in self.covered.items()
            ],
        }

    def write(self, path: str | PathLike[str]) -> None:
        """Write the table of judged runs to `path`.

        Raises:
            UnwrittenError: it cannot be written.
        """
        write(Path(path), evidence.table_text(self.runs))


def validate_trust(
    folder: str | PathLike[str] | None = None,
    *,
    figures: bool = False,
    progress: Progress = tell_nobody,
) -> TrustValidation:
    """Return how often predictions are within the percentile that trust prints of them.

    Args:
        folder: published tables from which the table of judged runs is made again; without it the
            one that ships is taken as it is.
        figures: with a folder, figures of papers are predicted again, too; else they are as they
            ship.
        progress: told how many rows are predicted, and of how many.

    Raises:
        MistakeError: there is nothing to read.
    """
    ships = judged_runs()
    if folder is None:
        return TrustValidation(runs=ships, covered=_covered(ships))
    tables = published_runs(Path(folder))
    made = made_again([run for runs in tables.values() for run in runs if judges(run)], progress)
    papers = {citation for citation, *_ in figure_runs()}
    made += (
        judged_figures(progress) if figures else [run for run in ships if run.citation in papers]
    )
    stale, fresh = different(ships, made)
    return TrustValidation(runs=tuple(made), covered=_covered(made), stale=stale, fresh=fresh)


def made_again(runs: Sequence[Published], progress: Progress) -> list[JudgedRun]:
    """Return the rows of `runs`, predicted on all processors; those that are refused are left."""
    made = forecasts([asked(run, Quantity.STEP_TIME) for run in runs], progress)
    found: list[JudgedRun] = []
    for run, forecast in zip(runs, made, strict=True):
        if isinstance(forecast, RunForecast):
            of_run = scenario_features(run.ways[forecast.way])
            if isinstance(of_run, RunFeatures):
                found.append(judged_row(run, forecast, of_run))
    return found


def _covered(runs: Sequence[JudgedRun]) -> dict[tuple[JudgedQuantity, LeftOut], CoverageTable]:
    return {
        (quantity, left_out): coverage(runs, left_out, quantity)
        for quantity in JudgedQuantity
        for left_out in LeftOut
    }


def _publications(runs: Sequence[JudgedRun]) -> int:
    return len({run.citation for run in runs})


def _cells(found: Coverage) -> tuple[str, ...]:
    counts = (found.kind, f"{found.rows:,}", f"{found.stated:,}")
    if not found.stated:
        return (*counts, "", "", "", "")
    shares = (found.share, found.printed, found.observed)
    share, printed, observed = (f"{value:.1%}" for value in shares if value is not None)
    return (*counts, share, f"{found.p_value:.2f}", printed, observed)


def _object(found: Coverage) -> dict[str, object]:
    return {
        "kind": found.kind,
        "rows": found.rows,
        "stated": found.stated,
        "covered": found.covered,
        "p_value": found.p_value,
        "median_stated_error": found.printed,
        "observed_error": found.observed,
    }
