"""Kernels that nothing can share the GPU with: their ends are known without an event for each."""

from unittest.mock import patch

import pytest
from drawn_clusters import NO_MODEL, clusters, harmless_schedules
from drawn_examples import examples
from fitting import fitting
from hypothesis import given
from hypothesis import strategies as st

from zsim.backend.backend import Job
from zsim.model.architecture import Llama
from zsim.model.pipeline_stages import in_blocks
from zsim.runtimes.registry import make_schedule
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim.strategy.train import Train
from zsim.trace.trace import Trace
from zsim_des import SimBackend
from zsim_des.engine.rank import Rank
from zsim_des.engine.stream import Stream
from zsim_runtimes.nanotron.options import Nanotron


def traces(job: Job) -> tuple[Trace, Trace]:
    """The job with kernels ahead of their events, and with an event for each."""
    with patch.object(SimBackend, "_is_steady", return_value=False):
        ahead = SimBackend(unfold=True).run(job, seed=0)
        with patch.object(Stream, "_runs_ahead", return_value=False):
            assert SimBackend(unfold=True).run(job, seed=0) == ahead
            with patch.object(Rank, "_is_alone", return_value=False):
                one_by_one = SimBackend(unfold=True).run(job, seed=0)
    return ahead, one_by_one


@pytest.mark.one_commit_in(6)
@examples(30)
@given(st.data())
def test_any_schedule_takes_the_same_times_as_with_an_event_for_each_kernel(
    data: st.DataObject,
) -> None:
    schedule = data.draw(harmless_schedules())
    cluster = data.draw(clusters(schedule.mesh.size))
    ahead, one_by_one = traces(Job(schedule=schedule, model=NO_MODEL, cluster=cluster, steps=2))
    assert ahead == one_by_one


@pytest.mark.one_commit_in(6)
@examples(8)
@given(st.data())
def test_any_pipeline_takes_the_same_times_as_with_an_event_for_each_kernel(
    data: st.DataObject,
) -> None:
    strategy = Strategy(
        parallel=Parallel(
            data=data.draw(st.integers(1, 2)),
            tensor=data.draw(st.integers(1, 2)),
            pipeline=data.draw(st.integers(2, 4)),
        ),
        zero=Zero(stage=data.draw(st.sampled_from([0, 1])), emulate=Nanotron()),
        train=Train(gradient_accumulation_steps=data.draw(st.integers(1, 5))),
    )
    shape = Llama(layers=4, hidden_size=8, attention_heads=2, sequence_length=4, vocab_size=6)
    model = in_blocks(fitting(shape, strategy))
    schedule = make_schedule(model, strategy)
    cluster = data.draw(clusters(schedule.mesh.size))
    ahead, one_by_one = traces(Job(schedule=schedule, model=model, cluster=cluster, steps=2))
    assert ahead == one_by_one
