"""`zsim validate --all-rows`: a folder of published tables judged whole, none of it fitted."""

import sys
from collections.abc import Callable
from pathlib import Path

from zsim.api.forecast import forecasts
from zsim.calibration.memory_fit import Fit
from zsim.calibration.memory_fit import fit as fit_of
from zsim.calibration.published import Published
from zsim.calibration.verdict import Forecast, Quantity, Verdict, verdict
from zsim.cli.answer import print_json
from zsim.cli.measured import measurements_of, not_read, runs_of
from zsim.cli.validate import network_object, network_verdicts, print_network
from zsim.cli.validate_training import fit_object, print_fit, print_verdicts, verdict_object
from zsim.files.installed import network_profiles
from zsim.mistake import MistakeError

PARTS = 20
"""Lines of progress for each table and quantity."""


def validate_all(folder: Path, *, as_json: bool) -> None:
    """Print how well everything in `folder` is predicted: collectives, step times, memory.

    Raises:
        MistakeError: there is nothing to read.
    """
    if not folder.is_dir():
        raise MistakeError(f"{folder}: no such folder")
    profiles = network_profiles()
    networks = network_verdicts(measurements_of(folder), profiles)
    tables = runs_of(folder)
    if not networks and not tables:
        raise MistakeError(f"{folder}: holds no table of a form that is known")
    runs = {name: _judged(name, found) for name, found in tables.items()}
    if as_json:
        files: dict[str, dict[str, object]] = {
            each.file: {"network": network_object(each)} for each in networks
        }
        for name, (verdicts, fit) in runs.items():
            files[name] = {str(each.quantity): verdict_object(each) for each in verdicts}
            if fit is not None:
                files[name]["fit"] = fit_object(fit)
        print_json({"files": files, "not_read": not_read(folder)})
        return
    if networks:
        print_network(networks)
    for quantity in Quantity:
        found = [each for verdicts, _ in runs.values() for each in verdicts]
        if of_quantity := [each for each in found if each.quantity is quantity]:
            print(f"{quantity}:")
            print_verdicts(of_quantity)
    for _, fit in runs.values():
        if fit is not None:
            print_fit(fit)
    if unread := not_read(folder):
        print(f"not read, of a form that is not known: {', '.join(unread)}")


def _judged(name: str, runs: list[Published]) -> tuple[list[Verdict], Fit | None]:
    """Judge step times and memory of every row, each predicted once."""
    timed = [run for run in runs if run.step_time_s is not None or run.reason]
    others = [run for run in runs if run.step_time_s is None and not run.reason]
    found: dict[int, Forecast | str | None] = {}
    for some, quantity in ((timed, Quantity.STEP_TIME), (others, Quantity.MEMORY)):
        made = forecasts([run.ways for run in some], quantity, _teller(name, quantity))
        found |= {run.line: each for run, each in zip(some, made, strict=True)}
    with_peaks = [run for run in runs if run.peak_bytes is not None or run.failed or run.reason]
    verdicts = [
        verdict(name, quantity, some, [found[run.line] for run in some], whole=True)
        for quantity, some in ((Quantity.STEP_TIME, timed), (Quantity.MEMORY, with_peaks))
        if any(not run.reason for run in some)
    ]
    return verdicts, fit_of(name, runs, [found[run.line] for run in runs])


def _teller(name: str, quantity: Quantity) -> Callable[[int, int], None]:
    """Return what says on standard error how many rows are predicted, in twentieths."""

    def told(done: int, of: int) -> None:
        if done == of or done * PARTS // of > (done - 1) * PARTS // of:
            line = f"{name}: {quantity} of {done:,} of {of:,} runs predicted"
            print(line, file=sys.stderr, flush=True)

    return told
