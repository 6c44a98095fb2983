"""The table of judged runs is what the simulation predicts now: runs drawn from it, or all."""

from collections.abc import Iterable
from dataclasses import replace
from zlib import crc32

import numpy as np
import pytest

from zsim.api.forecast import forecast
from zsim.api.run_forecast import RunForecast
from zsim.prediction.evidence import JudgedRun, judged_runs, table_text
from zsim.prediction.run_features import RunFeatures
from zsim_lab.answer.judged_figures import scenario_features
from zsim_lab.verdict.judged_rows import different, rounded

DRAWN = 4
"""Rows without a pipeline that are predicted in the suite; of those with one it is one."""

FEW_NODES = 2
"""Nodes of these: their simulation takes a fraction of a second."""

Predicted = tuple[JudgedRun, RunForecast, RunFeatures | str]
"""A row, and what is predicted of its scenario now."""


def predicted(run: JudgedRun) -> Predicted:
    made = forecast(run.scenario)
    assert isinstance(made, RunForecast)
    return run, made, scenario_features(run.scenario)


@pytest.fixture(scope="module")
def drawn() -> list[Predicted]:
    """Return rows that the table itself draws, so that each new table has others tried."""
    generator = np.random.default_rng(crc32(table_text(judged_runs()).encode()))
    small = [run for run in judged_runs() if run.features.nodes <= FEW_NODES]
    plain = [run for run in small if run.features.pipeline == 1]
    two = [run for run in small if run.features.pipeline == 2]
    chosen = [plain[number] for number in generator.choice(len(plain), size=DRAWN, replace=False)]
    return [predicted(run) for run in (*chosen, two[generator.integers(len(two))])]


def stale(rows: Iterable[Predicted]) -> list[str]:
    """Return the rows that are not predicted as they ship, in words."""
    found: list[str] = []
    for run, made, features in rows:
        # No peak was published, or one of reserved or of allocated memory.
        peaks = {None, made.needed_bytes, made.peak_allocated_bytes}
        now = (rounded(made.step_time_s), features)
        if now != (run.predicted_step_s, run.features) or run.predicted_peak_bytes not in peaks:
            found.append(f"{run.citation}: {run.predicted_step_s} s, now {now}")
    return found


@pytest.mark.one_commit_in(24)
def test_rows_drawn_from_the_table_are_predicted_as_they_ship(drawn: list[Predicted]) -> None:
    assert stale(drawn) == [], "make the table again: zsim validate error --data DIR --to FILE"


@pytest.mark.one_commit_in(24)
def test_a_row_that_is_predicted_otherwise_is_seen(drawn: list[Predicted]) -> None:
    run, made, features = drawn[0]
    for changed in (
        replace(run, predicted_step_s=run.predicted_step_s * 1.00002),
        replace(run, predicted_peak_bytes=1),
        replace(run, features=replace(run.features, width=1)),
    ):
        assert len(stale([(changed, made, features)])) == 1
        assert different([run], [changed]) == (1, 1)
    assert different([run, run], [run, run]) == (0, 0)
    assert different([run, run], [run]) == (1, 0)
    assert different([run], []) == (1, 0)


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_every_row_of_the_table_is_predicted_as_it_ships() -> None:
    assert stale(map(predicted, judged_runs())) == []
