"""What profiles ship as evidence is what `zsim validate` computes from the rows that it names.

The published tables are not part of the project: `ZSIM_MEASURED` names the folder that has them.
"""

import os
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest
from kernel_evidence import ROUNDED, own_evidence

from zsim.api.forecast import forecasts
from zsim.api.run_forecast import Quantity, RunForecast
from zsim.cluster.profile.in_training import ALONE, Evidence
from zsim.files.installed import fitted_kernels, network_profiles
from zsim_lab.answer.training_calibration import FITTED
from zsim_lab.fit import b200_kernels, kernel_fit
from zsim_lab.rows.collective_rows import SCALING, stated_fabric
from zsim_lab.rows.measurements import all_tables, runs_of
from zsim_lab.verdict.network_verdict import SIZE_CLASSES, judged, size_class
from zsim_lab.verdict.training_verdict import question_of
from zsim_lab.verdict.verdict import errors_of


@pytest.fixture(scope="module")
def folder() -> Path:
    if "ZSIM_MEASURED" not in os.environ:
        pytest.skip("ZSIM_MEASURED names no folder of published tables")
    return Path(os.environ["ZSIM_MEASURED"])


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("evidence", list(own_evidence()), ids=lambda it: it.gpu)
def test_errors_of_training_are_those_of_the_rows_that_the_profile_names(
    evidence: Evidence, folder: Path
) -> None:
    runs = [
        run
        for name, found in runs_of(folder).items()
        if name in FITTED
        for run in found
        if run.judged and not run.reason and run.step_time_s is not None
        if run.scenario["compute"] == {"profile": evidence.gpu}
    ]
    named = {
        (file, int(line))
        for file, _, lines in (row.partition(": ") for row in evidence.rows)
        for line in lines.split(", ")
    }
    assert named == {(run.file, run.line) for run in runs}
    off: list[float] = []
    made = forecasts([question_of(run, Quantity.STEP_TIME) for run in runs])
    for run, found in zip(runs, made, strict=True):
        assert isinstance(found, RunForecast)
        assert run.step_time_s is not None
        off.append(abs(found.step_time_s / run.step_time_s - 1))
    assert len(off) == evidence.judged
    assert errors_of(off).median == pytest.approx(evidence.median, abs=ROUNDED)
    assert errors_of(off).p90 == pytest.approx(evidence.p90, abs=ROUNDED)


def test_errors_of_networks_and_kernels_are_those_of_the_rows_that_were_fitted(
    folder: Path,
) -> None:
    networks, tables = all_tables(folder)
    kernels = [row for rows, _ in tables.values() for row in rows] + b200_kernels.kernel_rows()
    measured = [row for name, (rows, _) in networks.items() if name != SCALING for row in rows]
    stated = {row.system: row for row in map(stated_fabric, measured) if row}
    for gpu, profiles in network_profiles().items():
        found = judged(profiles, [row for row in [*measured, *stated.values()] if row.gpu == gpu])
        for size, name in SIZE_CLASSES.items():
            off = [each.error for each in found if size_class(each.measurement.size_bytes) == size]
            if off and not profiles.scaled_from:
                # Constants ship with four digits, which moves an error by some parts in 10,000.
                assert median(off) == pytest.approx(profiles.errors[f"fitted_{name}"], abs=5e-4)
    for gpu, fitted in fitted_kernels().items():
        alone = replace(fitted.constants, training=ALONE)
        for name, error in fitted.errors.items():
            kind = name.removeprefix("fitted_")
            if kind != name:
                off = [
                    kernel_fit.error(row, alone)
                    for row in kernels
                    if row.gpu == gpu and str(row.kernels[0].kind) == kind
                ]
                assert median(off) == pytest.approx(error, abs=5e-4), (gpu, kind)
