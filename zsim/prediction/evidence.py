"""The table of published runs: published values and predictions of each run.

`judged_runs.json` has one entry for each publication. The run of a row is a scenario: the tables in
`base`, with the row's values for the keys in `keys`; null omits a key. `outcomes` has runs that fit
or ran out of memory, with their predicted memory. `zsim validate error --data DIR --to FILE`
creates the file again, and a test predicts rows of it.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from importlib.resources import files
from typing import Any

from zsim.prediction.run_features import RunFeatures

FILE = "judged_runs.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedRun:
    """A published run of a sweep that fitted no constant, and what is predicted of it.

    Attributes:
        publication: short name of the publication.
        citation: source of the row in the publication.
        sweep: runs of one publication with the same model and machine: constants are never fitted
            to some runs of a sweep and judged by others.
        step_s, predicted_step_s: published and predicted step time in seconds.
        peak_bytes, predicted_peak_bytes: published and predicted peak of device memory; None if it
            was not published.
        features: features of the run.
        settings: the scenario that was predicted: its values by dotted keys.
        fitted: a choice of its scenario was read from its figures; it gives no score.
    """

    publication: str
    citation: str
    sweep: str
    step_s: float
    predicted_step_s: float
    peak_bytes: int | None
    predicted_peak_bytes: int | None
    features: RunFeatures
    settings: Mapping[str, object]
    fitted: bool = False

    @property
    def step_error(self) -> float:
        """Relative error of the predicted step time; negative if it is too short."""
        return self.predicted_step_s / self.step_s - 1

    @property
    def peak_error(self) -> float | None:
        """Relative error of the predicted peak of memory; None if not published."""
        if self.peak_bytes is None or self.predicted_peak_bytes is None:
            return None
        return self.predicted_peak_bytes / self.peak_bytes - 1

    @property
    def scenario(self) -> dict[str, object]:
        """Tables of the predicted scenario."""
        tables: dict[str, Any] = {"title": self.publication}
        for key, value in self.settings.items():
            *path, last = key.split(".")
            inner = tables
            for name in path:
                inner = inner.setdefault(name, {})
            inner[last] = value
        return tables


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryOutcome:
    """A published run that fit or ran out of memory, and its predicted memory.

    Attributes:
        publication: short name of the publication.
        sweep: sweep as in `JudgedRun`.
        needed_bytes: bytes of device memory that a rank is predicted to need.
        usable_bytes: bytes that a rank may reserve.
        ran: True if it fit.
    """

    publication: str
    sweep: str
    needed_bytes: int
    usable_bytes: int
    ran: bool

    @property
    def group(self) -> str:
        """Name of the publication and the sweep, which are held out together."""
        return f"{self.publication}, {self.sweep}"


FEATURES = tuple(field.name for field in fields(RunFeatures))
OUTCOME = tuple(field.name for field in fields(MemoryOutcome))
FIGURES = ("step_s", "predicted_step_s", "peak_bytes", "predicted_peak_bytes")


@cache
def judged_runs() -> tuple[JudgedRun, ...]:
    """Return the runs of the packaged table."""
    return parse((files("zsim.prediction") / FILE).read_text("utf-8"))


@cache
def memory_outcomes() -> tuple[MemoryOutcome, ...]:
    """Return the runs of the packaged table that fit or ran out of memory."""
    return parsed_outcomes((files("zsim.prediction") / FILE).read_text("utf-8"))


def parsed_outcomes(text: str) -> tuple[MemoryOutcome, ...]:
    """Return the memory outcomes of a table that `table_text` wrote."""
    rows = json.loads(text)["outcomes"]
    return tuple(MemoryOutcome(**dict(zip(OUTCOME, row, strict=True))) for row in rows)


def parse(text: str) -> tuple[JudgedRun, ...]:
    """Return the runs of a table that `table_text` wrote."""
    return tuple(
        _run(entry, row) for entry in json.loads(text)["publications"] for row in entry["rows"]
    )


def _run(entry: Mapping[str, Any], row: Mapping[str, Any]) -> JudgedRun:
    figures = dict(zip(FIGURES, row["figures"], strict=True))
    settings = {**entry["base"], **dict(zip(entry["keys"], row["values"], strict=True))}
    return JudgedRun(
        publication=entry["publication"],
        citation=entry["citations"][row["citation"]],
        sweep=row["sweep"],
        features=RunFeatures(**dict(zip(FEATURES, row["features"], strict=True))),
        settings={key: value for key, value in settings.items() if value is not None},
        fitted=row.get("fitted", False),
        **figures,
    )


def table_text(runs: Sequence[JudgedRun], outcomes: Sequence[MemoryOutcome] = ()) -> str:
    """Return the table of `runs` and `outcomes` as the text of its file, with one line for each."""
    entries = []
    for publication in dict.fromkeys(run.publication for run in runs):
        found = [run for run in runs if run.publication == publication]
        entries.append(_entry_text(publication, found))
    head = f'"features": {json.dumps(FEATURES)},\n"figures": {json.dumps(FIGURES)}'
    lines = ",\n".join(json.dumps([getattr(each, name) for name in OUTCOME]) for each in outcomes)
    return (
        f'{{{head},\n"publications": [\n{",".join(entries)}],\n'
        f'"outcome": {json.dumps(OUTCOME)},\n"outcomes": [\n{lines}]}}\n'
    )


def _entry_text(publication: str, runs: Sequence[JudgedRun]) -> str:
    settings = [run.settings for run in runs]
    names = sorted({key for each in settings for key in each})
    same = {key for key in names if all(each.get(key) == settings[0].get(key) for each in settings)}
    keys = [key for key in names if key not in same]
    citations = list(dict.fromkeys(run.citation for run in runs))
    rows = [
        json.dumps(
            {
                "citation": citations.index(run.citation),
                "sweep": run.sweep,
                "figures": [getattr(run, name) for name in FIGURES],
                "features": [getattr(run.features, name) for name in FEATURES],
                "values": [each.get(key) for key in keys],
                **({"fitted": True} if run.fitted else {}),
            }
        )
        for run, each in zip(runs, settings, strict=True)
    ]
    head = {
        "publication": publication,
        "citations": citations,
        "base": {key: settings[0][key] for key in names if key in same},
        "keys": keys,
    }
    lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in head.items()]
    body = ",\n".join(rows)
    return "{\n" + ",\n".join(lines) + f',\n"rows": [\n{body}\n]}}\n'


def flat(tables: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Return the values of `tables` by dotted keys."""
    found: dict[str, object] = {}
    for name, value in tables.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found
