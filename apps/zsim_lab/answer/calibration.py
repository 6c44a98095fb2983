"""Fit profile files to published measurements."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from os import PathLike
from pathlib import Path

from zsim.api.answer import Answer
from zsim.cluster.profile import kernels as kernel_profile
from zsim.cluster.profile.files import Profiles, text
from zsim.cluster.profile.kernels import FittedKernels
from zsim.files.output_file import write
from zsim.mistake import file_fault
from zsim_lab.answer.training_calibration import FITTED, with_training
from zsim_lab.fit import b200_kernels, kernel_fit
from zsim_lab.fit.network_profiles import calibrated
from zsim_lab.rows.measurements import all_tables, runs_of, timed_links
from zsim_lab.verdict.network_verdict import SIZE_CLASSES

KERNELS = "kernels"
"""Name of the subfolder for the kernel profiles."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationResult(Answer):
    """Profiles that were fitted but not written yet.

    Attributes:
        networks, kernels: content of each file: constants and the errors of their fit.
    """

    networks: Mapping[Path, Profiles]
    kernels: Mapping[Path, FittedKernels]

    def writers(self) -> list[Callable[[], object]]:
        """Return functions that each write one file; they raise UnwrittenError if they cannot."""
        texts = {path: text(found) for path, found in self.networks.items()}
        texts |= {path: kernel_profile.text(found) for path, found in self.kernels.items()}
        return [partial(write, path, content) for path, content in texts.items()]

    def text(self) -> str:
        """Return a line for each file, with the errors of its fit."""
        networks = [f"{path}: {_errors(found)}" for path, found in self.networks.items()]
        kernels = [f"{path}: {_kernel_errors(found)}" for path, found in self.kernels.items()]
        return "\n".join([*networks, *kernels])

    def to_dict(self) -> dict[str, object]:
        """Return the errors of each file."""
        networks = {str(path): dict(found.errors) for path, found in self.networks.items()}
        kernels = {str(path): dict(found.errors) for path, found in self.kernels.items()}
        return {**networks, **kernels}


def calibrate(
    source: str | PathLike[str],
    target: str | PathLike[str],
    *,
    report: Callable[[str], None],
    resume: Path | None = None,
) -> CalibrationResult:
    """Fit the tables in the folder `source` to profile files in `target`, one per kind of GPU.

    `report` receives the name of each fit; `writers` of the result write the files. The file
    `resume` keeps simulated runs of training, most of the work; a later call does not repeat them.

    Raises:
        MistakeError: there is nothing to read, or `target` cannot be created.
    """
    source, target = Path(source), Path(target)
    of_networks, of_kernels = all_tables(source)
    measured = [row for found, _ in of_networks.values() for row in found]
    kernels = [row for found, _ in of_kernels.values() for row in found]
    kernels += b200_kernels.kernel_rows() if kernels else []
    try:
        (target / KERNELS if kernels else target).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise file_fault(str(target), error) from None
    links = timed_links(source)
    networks: dict[Path, Profiles] = {}
    for profiles in calibrated(measured, links=links, report=report) if measured else ():
        networks[target / f"{profiles.gpu}.toml"] = profiles
    runs = [
        run
        for name, found in runs_of(source).items()
        if name in FITTED
        for run in found
        if not run.reason
    ]
    alone = kernel_fit.calibrated(kernels, report=report)
    found: dict[Path, FittedKernels] = {}
    today = datetime.now(UTC).date()
    for fitted in with_training(alone, runs, today=today, report=report, resume=resume):
        found[target / KERNELS / f"{fitted.gpu}.toml"] = fitted
    return CalibrationResult(networks=networks, kernels=found)


def _errors(profiles: Profiles) -> str:
    parts: list[str] = []
    for size, name in SIZE_CLASSES.items():
        fitted = profiles.errors.get(f"fitted_{name}")
        if fitted is not None:
            held_out = profiles.errors.get(f"held_out_{name}")
            parts.append(f"{size}: median error {_median(fitted, held_out)}")
    if profiles.scaled_from:
        parts.append(f"links as timed, all else scaled from {profiles.scaled_from}")
    return "; ".join(parts) or "no rows from 64 KiB up"


def _kernel_errors(fitted: FittedKernels) -> str:
    parts: list[str] = []
    for kind in ("matmul", "attention"):
        error = fitted.errors.get(f"fitted_{kind}")
        if error is not None:
            held_out = fitted.errors.get(f"held_out_{kind}")
            parts.append(f"{kind}: median error {_median(error, held_out)}")
    if fitted.sibling == kernel_profile.ASSUMED:
        parts.append("the rest is assumed")
    elif fitted.sibling:
        parts.append(f"the rest is scaled from {fitted.sibling}")
    evidence = fitted.constants.training.evidence
    if evidence is not None and evidence.gpu == fitted.gpu:
        parts.append(
            f"training: {evidence.fitted} runs fitted, {evidence.judged} judged, median error "
            f"{evidence.median:.1%}"
        )
    elif evidence is not None:
        parts.append(f"training is scaled from {evidence.gpu}")
    return "; ".join(parts)


def _median(fitted: float, held_out: float | None) -> str:
    beside = "nothing to hold out" if held_out is None else f"{held_out:.1%} held out"
    return f"{fitted:.1%} fitted, {beside}"
