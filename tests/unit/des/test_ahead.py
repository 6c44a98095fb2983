"""Runs whose collectives never share the network: all times are known without events."""

from dataclasses import replace
from fractions import Fraction
from unittest.mock import patch

import pytest
from drawn_clusters import NO_MODEL, RATES, clusters, harmless_schedules, troubles
from drawn_examples import examples
from fitting import fitting
from hypothesis import given
from hypothesis import strategies as st

from zsim.backend.backend import Job, NoRouteError, RefusedError, RunFailedError
from zsim.cluster.cluster import Cluster, Gpu, Link
from zsim.cluster.fault import DeadNic, Fault, Jitter, Neighbour, SlowGpu, SlowNic, Window
from zsim.model.architecture import Llama
from zsim.model.pipeline_stages import in_blocks
from zsim.runtimes.registry import make_schedule
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim.strategy.train import Train
from zsim.trace.trace import Trace
from zsim_des import SimBackend
from zsim_des.clock.ready_queue import Clock
from zsim_des.engine.ahead import AheadRun

NODES = Cluster(
    name="two nodes of two GPUs",
    nodes=2,
    gpus_per_node=2,
    gpu=Gpu(name="any", memory_bytes=10**12, memory_bytes_per_s=10**9, rates=RATES),
    switch_link=Link(bytes_per_s=10**8, latency_ps=500_000),
    nics_per_node=2,
    nic_link=Link(bytes_per_s=10**7, latency_ps=2_500_000),
)
LATER = Window(start_ps=10**6)


def training(cluster: Cluster, data: int = 4, stage: int = 3, micro_batches: int = 1) -> Job:
    strategy = Strategy(
        parallel=Parallel(data=data),
        zero=Zero(stage=stage),
        train=Train(gradient_accumulation_steps=micro_batches),
    )
    shape = Llama(layers=2, hidden_size=8, attention_heads=2, sequence_length=4, vocab_size=6)
    model = in_blocks(fitting(shape, strategy))
    schedule = make_schedule(model, strategy)
    return Job(schedule=schedule, model=model, cluster=cluster, steps=3)


def needs_events(backend: SimBackend, job: Job) -> bool:
    """Return True if the clock rings in a run."""
    with patch.object(Clock, "at", autospec=True, side_effect=Clock.at) as rung:
        backend.run(job, seed=1)
    return bool(rung.called)


def test_zero_3_on_gpus_that_collectives_do_not_slow_down_needs_no_event() -> None:
    job = training(NODES)
    assert not needs_events(SimBackend(), job)
    slow: list[Fault] = [
        SlowGpu(rank=1, factor=Fraction(2)),
        SlowNic(node=0, nic=0, factor=Fraction(3)),
    ]
    assert not needs_events(SimBackend(faults=[*slow, DeadNic(node=1, nic=1)]), job)


@pytest.mark.parametrize(
    "backend",
    [
        SimBackend(faults=[SlowNic(node=0, nic=0, factor=Fraction(3), window=LATER)]),
        SimBackend(faults=[DeadNic(node=1, nic=1, window=LATER)]),
        SimBackend(neighbours=[Neighbour(first_node=0, last_node=1, bytes_per_s=10**6)]),
    ],
    ids=["slow later", "dead later", "neighbour"],
)
def test_a_link_that_changes_its_speed_during_a_step_needs_events(backend: SimBackend) -> None:
    assert needs_events(backend, training(NODES))


def test_a_gpu_whose_kernels_collectives_slow_down_needs_events() -> None:
    shared = replace(NODES, gpu=replace(NODES.gpu, collective_share=Fraction(1, 4)))
    assert needs_events(SimBackend(), training(shared))


def test_a_schedule_that_once_needed_events_is_not_tried_without_them_again() -> None:
    tensor = Strategy(parallel=Parallel(data=2, tensor=2), zero=Zero(stage=3))
    shape = Llama(layers=2, hidden_size=8, attention_heads=2, sequence_length=4, vocab_size=6)
    model = in_blocks(fitting(shape, tensor))
    job = Job(schedule=make_schedule(model, tensor), model=model, cluster=NODES)
    backend = SimBackend()
    assert needs_events(backend, job)
    with patch.object(AheadRun, "drain", side_effect=AssertionError):
        backend.run(job, seed=1)


def outcome(backend: SimBackend, job: Job) -> Trace | str:
    """Return the trace of a run, or the reason why there is none."""
    try:
        return backend.run(job, seed=1)
    except (NoRouteError, RefusedError, RunFailedError) as error:
        return f"{type(error).__name__}: {error}"


@examples(30)
@given(
    st.sampled_from([(2, 0), (4, 1), (3, 2), (4, 3)]), st.integers(1, 2), st.booleans(), st.data()
)
def test_zero_takes_the_same_times_as_with_events(
    size: tuple[int, int], micro_batches: int, jitters: bool, data: st.DataObject
) -> None:
    cluster = data.draw(clusters(size[0]))
    steady = replace(cluster, gpu=replace(cluster.gpu, collective_share=Fraction(0)))
    faults, neighbours = data.draw(troubles(steady, size[0]))
    backend = SimBackend(
        faults=[*faults, *[Jitter(deviation=0.1)] * jitters],
        neighbours=neighbours,
        overflow_steps=frozenset({1}),
    )
    job = training(steady, *size, micro_batches)
    ahead = outcome(backend, job)
    with patch.object(SimBackend, "_is_steady", return_value=False):
        assert ahead == outcome(backend, job)


@pytest.mark.one_commit_in(3)
@examples(30)
@given(st.data())
def test_any_schedule_takes_the_same_times_as_with_events(data: st.DataObject) -> None:
    schedule = data.draw(harmless_schedules())
    cluster = data.draw(clusters(schedule.mesh.size))
    job = Job(schedule=schedule, model=NO_MODEL, cluster=cluster, steps=2)
    backend = SimBackend()
    ahead = backend.run(job, seed=1)
    with patch.object(SimBackend, "_is_steady", return_value=False):
        assert ahead == backend.run(job, seed=1)
