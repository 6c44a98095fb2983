"""Every drawn model in the order of every runtime: proved, simulated, its volume as promised."""

import pytest
from drawn_emulated import emulated_jobs
from drawn_examples import examples
from drawn_gpus import cluster
from hypothesis import given
from hypothesis import strategies as st

from zsim.analysis.schedule_plan import plan
from zsim.backend.backend import Job
from zsim.model.model import Model
from zsim.proof import check
from zsim.runtimes.registry import make_schedule
from zsim.strategy.strategy import Strategy
from zsim_des import SimBackend


@pytest.mark.one_commit_in(6)
@given(emulated_jobs())
@examples(150)
def test_every_drawn_order_is_proved_and_moves_what_the_closed_form_says(
    job: tuple[Model, Strategy],
) -> None:
    made = make_schedule(*job)
    assert check(made, job[0]) == ()
    assert plan(made, job[0]).wire_bytes == made.contract.wire_bytes


@given(emulated_jobs(), st.sampled_from([1, 2, 4]))
@examples(40)
def test_every_drawn_order_simulates_and_repeats_to_the_picosecond(
    job: tuple[Model, Strategy], gpus_per_node: int
) -> None:
    model, strategy = job
    made = make_schedule(model, strategy)
    work = Job(schedule=made, model=model, cluster=cluster(strategy.ranks, gpus_per_node), steps=2)
    first, again = (SimBackend().run(work, seed=7) for _ in range(2))
    assert first == again
    assert sum(rank.stands_for for rank in first.ranks) == strategy.ranks
