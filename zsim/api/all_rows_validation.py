"""Validation against a whole folder of published tables: collectives, step times and memory."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

from zsim.api.answer import Answer, Progress, tell_nobody
from zsim.api.forecast import asked, forecasts
from zsim.api.network_validation import network_object, network_text
from zsim.api.training_validation import fit_object, fit_text, verdict_object, verdicts_text
from zsim.calibration.memory_fit import MemoryFit
from zsim.calibration.memory_fit import fit as fit_of
from zsim.calibration.network_verdict import NetworkVerdict
from zsim.calibration.network_verdict import verdict as network_verdict
from zsim.calibration.published import Published
from zsim.calibration.training_verdict import Quantity, RunForecast, TrainingVerdict, verdict
from zsim.files.installed import network_profiles
from zsim.files.measurements import measurements_of, not_read, runs_of
from zsim.files.written import is_folder
from zsim.mistake import MistakeError


@dataclass(frozen=True, slots=True, kw_only=True)
class AllRowsValidation(Answer):
    """Validation against every row of a folder, for tables that no fit used.

    Attributes:
        networks: errors of the tables of collectives.
        verdicts: errors of the tables of runs, of step times and of memory.
        fits: accuracy of predicting which runs fit in memory, by table.
        not_read: tables in the folder whose format is unknown.
    """

    networks: tuple[NetworkVerdict, ...]
    verdicts: tuple[TrainingVerdict, ...]
    fits: Mapping[str, MemoryFit]
    not_read: tuple[str, ...]

    def text(self) -> str:
        """Return tables of errors, the worst rows, and the rows that zsim does not model."""
        lines = [network_text(self.networks)] if self.networks else []
        for quantity in Quantity:
            if found := [each for each in self.verdicts if each.quantity is quantity]:
                lines += [f"{quantity}:", verdicts_text(found)]
        lines += map(fit_text, self.fits.values())
        if self.not_read:
            lines.append(f"not read, of a form that is not known: {', '.join(self.not_read)}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, object]:
        """Return the object that `zsim validate --all-rows --json` prints."""
        files: dict[str, dict[str, object]] = {
            each.file: {"network": network_object(each)} for each in self.networks
        }
        for each in self.verdicts:
            files.setdefault(each.file, {})[str(each.quantity)] = verdict_object(each)
        for name, fit in self.fits.items():
            files.setdefault(name, {})["fit"] = fit_object(fit)
        return {"files": files, "not_read": list(self.not_read)}


def validate_all_rows(
    folder: str | PathLike[str], *, progress: Progress = tell_nobody
) -> AllRowsValidation:
    """Predict every row of the tables in `folder` and return the errors.

    Raises:
        MistakeError: there is no such folder, or it holds no table of a known format.
    """
    path = Path(folder)
    if not is_folder("data", path):
        raise MistakeError(f"{folder}: no such folder")
    profiles = network_profiles()
    networks = [
        network_verdict(name, found, left, profiles)
        for name, (found, left) in measurements_of(path).items()
    ]
    tables = runs_of(path)
    if not networks and not tables:
        raise MistakeError(f"{folder}: holds no table of a form that is known")
    made = _forecasts([run for runs in tables.values() for run in runs], progress)
    verdicts: list[TrainingVerdict] = []
    fits: dict[str, MemoryFit] = {}
    for name, runs in tables.items():
        found = {run.line: made[name, run.line] for run in runs}
        verdicts += _verdicts(name, runs, found)
        fit = fit_of(name, runs, [found[run.line] for run in runs])
        if fit is not None:
            fits[name] = fit
    return AllRowsValidation(
        networks=tuple(networks),
        verdicts=tuple(verdicts),
        fits=fits,
        not_read=tuple(not_read(path)),
    )


def _forecasts(
    runs: Sequence[Published], progress: Progress
) -> dict[tuple[str, int], RunForecast | str | None]:
    """Predict each row once, by file and line; rows without a step time get memory alone."""

    def told(done: int, of: int) -> None:
        progress(done * len(runs) // of, len(runs))

    made = forecasts([asked(run, _most(run)) for run in runs], told)
    return {(run.file, run.line): each for run, each in zip(runs, made, strict=True)}


def _most(run: Published) -> Quantity:
    return Quantity.MEMORY if run.step_time_s is None else Quantity.STEP_TIME


def _verdicts(
    name: str, runs: Sequence[Published], found: Mapping[int, RunForecast | str | None]
) -> list[TrainingVerdict]:
    timed = [run for run in runs if run.step_time_s is not None or run.reason]
    with_peaks = [run for run in runs if run.peak_bytes is not None or run.failed or run.reason]
    return [
        verdict(name, quantity, some, [found[run.line] for run in some], whole=True)
        for quantity, some in ((Quantity.STEP_TIME, timed), (Quantity.MEMORY, with_peaks))
        if any(not run.reason for run in some)
    ]
