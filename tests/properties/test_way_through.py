"""Every drawn model and strategy goes the whole way: schedule, check, simulation, and again."""

import pytest
from drawn import jobs
from drawn_examples import examples
from drawn_gpus import cluster
from hypothesis import given
from hypothesis import strategies as st

from zsim.backend.backend import Job
from zsim.model.model import Model
from zsim.proof import check
from zsim.runtimes.registry import make_schedule
from zsim.strategy.strategy import Strategy
from zsim_des import SimBackend


@pytest.mark.one_commit_in(12)
@given(jobs())
@examples(100)
def test_every_drawn_schedule_is_proved(job: tuple[Model, Strategy]) -> None:
    assert check(make_schedule(*job), job[0]) == ()


@pytest.mark.one_commit_in(9)
@given(jobs(), st.sampled_from([1, 2, 4]), st.integers(1, 3))
@examples(60)
def test_every_drawn_schedule_simulates_and_repeats_to_the_picosecond(
    job: tuple[Model, Strategy], gpus_per_node: int, steps: int
) -> None:
    model, strategy = job
    made = make_schedule(model, strategy)
    work = Job(
        schedule=made, model=model, cluster=cluster(strategy.ranks, gpus_per_node), steps=steps
    )
    first, again = (SimBackend().run(work, seed=7) for _ in range(2))
    assert first == again
    assert len(first.step_end_ps) == steps
    assert sum(rank.stands_for for rank in first.ranks) == strategy.ranks
