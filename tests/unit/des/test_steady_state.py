"""The period of a simulated pipeline step, and why there is none."""

from fractions import Fraction
from typing import Any

import pytest
from pipeline_tables import pipeline_tables

import zsim
from zsim.backend.backend import Job, UnsteadyError
from zsim.cluster.fault import SlowGpu, Window
from zsim.trace.trace import PeriodicStep
from zsim_des import SimBackend

ALWAYS = Window()


def _job(micro_batches: int, **changes: Any) -> Job:  # noqa: ANN401  (values of tables)
    given: dict[str, Any] = {"stages": 3, "layers": 3, **changes}
    tables = pipeline_tables("megatron", micro_batches=micro_batches, **given)
    return zsim.load(tables).job


def _period(job: Job, micro_batches: int, turn: int = 1) -> PeriodicStep:
    return SimBackend().periodic_step(job, seed=0, micro_batches=micro_batches, turn=turn)


def test_each_further_micro_batch_takes_one_period() -> None:
    found = _period(_job(8), 8)
    for more in (1, 2, 5):
        *_, before_ps, end_ps = SimBackend().step_ends_ps(_job(8 + more))
        assert found.with_periods(more) == end_ps - before_ps


def test_a_step_without_a_steady_state_has_no_period() -> None:
    with pytest.raises(UnsteadyError, match="different operations"):
        _period(_job(3), 3)
    with pytest.raises(UnsteadyError, match="too short"):
        _period(_job(4), 4)


CHUNKS: dict[str, object] = {"num_virtual_stages_per_pipeline_rank": 2}


def test_a_turn_that_is_not_one_of_the_schedule_has_no_period() -> None:
    job = _job(12, stages=2, layers=4, tensor=2, options=CHUNKS)
    assert _period(job, 12, turn=2).period_ps > 0
    with pytest.raises(UnsteadyError):
        _period(job, 12, turn=1)


def test_stages_that_run_ahead_of_the_slowest_have_no_period_yet() -> None:
    job = _job(12, layers=6, options=CHUNKS)  # the last stage has the head, which takes longer
    with pytest.raises(UnsteadyError):
        _period(job, 12, turn=3)


def test_a_fault_has_no_period() -> None:
    slow = SlowGpu(rank=0, factor=Fraction(2), window=ALWAYS)
    with pytest.raises(UnsteadyError, match="faults"):
        SimBackend(faults=(slow,)).periodic_step(_job(8), seed=0, micro_batches=8, turn=1)


def test_the_run_beside_the_period_is_the_usual_one() -> None:
    job = _job(8)
    trace, found = SimBackend().run_periodic(job, seed=0, micro_batches=8, turn=1)
    assert trace == SimBackend().run(job, seed=0)
    assert found.step == SimBackend().last_step(job, seed=0)
