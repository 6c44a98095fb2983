"""Compare a prediction with a measured run on the local ranks, by class of operation."""

from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from zsim.analysis.class_times import STEP, ClassTime, class_times
from zsim.api.answer import Answer
from zsim.api.answer_text import table_text
from zsim.api.launch import run
from zsim.api.placement import placed
from zsim.api.run_result import RunResult
from zsim.api.scenario import Changed, LoadedScenario, load
from zsim.mistake import MistakeError
from zsim.units import format_seconds

STEPS: Final = 20
"""Default steps of a real run."""

WARM_UP: Final = 2
"""Steps at the beginning of a run that are ignored."""

REAL: Final = "torch"


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedClass:
    """Seconds per step of a class of operations: predicted, and measured over several steps."""

    name: str
    predicted_s: float
    lowest_s: float
    median_s: float

    @property
    def error(self) -> float | None:
        """Relative excess of the prediction over the median; None if the median is 0."""
        return self.predicted_s / self.median_s - 1 if self.median_s > 0 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class RealComparisonResult(Answer):
    """A predicted and a measured run, by class of operations.

    Attributes:
        title: title of the scenario.
        node: name of the node of the prediction.
        steps: number of measured steps.
        classes: the whole step, and each class of its operations.
    """

    title: str
    node: str
    steps: int
    classes: tuple[PredictedClass, ...]

    @property
    def step(self) -> PredictedClass:
        """The class of the whole step."""
        return next(each for each in self.classes if each.name == STEP)

    def text(self) -> str:
        """Return a line for each class of operations."""
        rows = [
            (
                each.name,
                format_seconds(each.predicted_s),
                format_seconds(each.lowest_s),
                format_seconds(each.median_s),
                "" if each.error is None else f"{each.error:+.0%}",
            )
            for each in self.classes
        ]
        columns = ("", "predicted", "lowest", "median", "predicted to median")
        return "\n".join(
            [
                f"{self.title}: predicted on {self.node}, measured over {self.steps} steps",
                table_text(columns, rows),
            ]
        )

    def to_dict(self) -> dict[str, object]:
        """Return the object that `zsim compare --real --json` prints."""
        return {
            "title": self.title,
            "node": self.node,
            "steps": self.steps,
            "classes": [
                {
                    "name": each.name,
                    "predicted_s": each.predicted_s,
                    "lowest_s": each.lowest_s,
                    "median_s": each.median_s,
                    "error": each.error,
                }
                for each in self.classes
            ],
        }


def compare_with_real(
    scenario: LoadedScenario | str | PathLike[str] | Mapping[str, object],
    changes: Changed = None,
    *,
    ranks: int | None = None,
    node: str | PathLike[str] | None = None,
    steps: int = STEPS,
) -> RealComparisonResult:
    """Predict a scenario on the ranks of this machine, run it there, and compare both.

    Args:
        scenario: scenario as in `load`.
        changes: values by key, as in `load`.
        ranks: number of ranks; default all of the node.
        node: node file of `measure`; without it, the machine is measured first.
        steps: steps of the real run; the first two are ignored.

    Raises:
        MistakeError: it cannot be run with these arguments.
        RefutedError: the schedule is wrong; only one from a file can be.
        RunFailedError: a rank failed.
    """
    if steps <= WARM_UP:
        raise MistakeError(f"--steps: {steps} must be at least {WARM_UP + 1}")
    loaded = load(scenario, changes, ranks=ranks, steps=steps)
    if node is None:
        with TemporaryDirectory(prefix="zsim-node-") as folder:
            path = Path(folder) / "node.toml"
            from zsim import measure  # of an app: the index finds it

            measured = measure(ranks=ranks)
            measured.write(path)
            predicted = _predicted(loaded, path)
        name = measured.title
    else:
        predicted, name = _predicted(loaded, node), fspath(node)
    if loaded.schedule_json is None:
        loaded = load(loaded, ranks=predicted.job.schedule.mesh.size)
    real = run(loaded, backend=REAL, unobserved=True)
    return RealComparisonResult(
        title=loaded.title,
        node=name,
        steps=steps - WARM_UP,
        classes=paired(predicted, real),
    )


def _predicted(loaded: LoadedScenario, node: str | PathLike[str]) -> RunResult:
    return run(placed(load(loaded, steps=WARM_UP + 1), node=node), folds=False)


def paired(predicted: RunResult, real: RunResult) -> tuple[PredictedClass, ...]:
    """Return the classes of both runs; a class missing in one run has time 0 there."""
    sides = [
        {each.name: each for each in class_times(side.job.schedule, side.recorded, warm_up=WARM_UP)}
        for side in (predicted, real)
    ]
    nothing = ClassTime(name="", lowest_s=0.0, median_s=0.0)
    return tuple(
        PredictedClass(
            name=name,
            predicted_s=sides[0].get(name, nothing).median_s,
            lowest_s=sides[1].get(name, nothing).lowest_s,
            median_s=sides[1].get(name, nothing).median_s,
        )
        for name in dict.fromkeys((*sides[1], *sides[0]))
    )
