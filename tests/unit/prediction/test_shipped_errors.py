"""Errors that constants of kernels ship as evidence are those of the table of judged runs.

Each is written down by itself: by `zsim calibrate` in the constants, by `zsim validate error` in
the table. `tests/unit/cli/test_shipped_evidence.py` predicts the rows again, where it has them.
`zsim calibrate` sees the tables that it is given, and no run that ships in a publication's figures.
"""

import pytest
from kernel_evidence import ROUNDED, own_evidence

from zsim.cluster.profile.in_training import Evidence
from zsim.files.installed import fitted_kernels
from zsim.prediction.evidence import judged_runs
from zsim_lab.answer.judged_figures import figure_runs
from zsim_lab.verdict.verdict import errors_of

FULLY_SHARDED = ("FSDP1", "FSDP2")
"""Runtimes whose runs judge the constants of any GPU; others judge those of their publication."""


@pytest.mark.matrix(9)
@pytest.mark.parametrize("evidence", list(own_evidence()), ids=lambda it: it.gpu)
def test_errors_of_constants_are_those_of_the_judged_runs_that_take_them(
    evidence: Evidence,
) -> None:
    of_figures = {citation for citation, *_ in figure_runs()}
    off = [
        abs(run.step_error)
        for run in judged_runs()
        if run.features.constants.partition(",")[0] == evidence.gpu
        and (run.features.runtime in FULLY_SHARDED or run.publication in evidence.publications)
        and run.citation not in of_figures
    ]
    assert len(off) == evidence.judged
    assert errors_of(off).median == pytest.approx(evidence.median, abs=ROUNDED)
    assert errors_of(off).p90 == pytest.approx(evidence.p90, abs=ROUNDED)


def test_constants_that_have_no_runs_of_their_own_ship_those_of_the_gpu_that_they_name() -> None:
    shipped = {gpu: fitted.constants.training.evidence for gpu, fitted in fitted_kernels().items()}
    taken = {gpu: it for gpu, it in shipped.items() if it is not None and it.gpu != gpu}
    assert taken
    for gpu, evidence in taken.items():
        assert evidence == shipped[evidence.gpu], gpu
