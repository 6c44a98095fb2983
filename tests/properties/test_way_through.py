"""Every drawn model and strategy goes the whole way: schedule, check, simulation, and again."""

from drawn import jobs
from hypothesis import given, settings
from hypothesis import strategies as st

from zsim.backend import Job
from zsim.check import check
from zsim.cluster import Cluster, Gpu, Link, Rate
from zsim.dtype import DType
from zsim.model import Model
from zsim.strategy import Strategy
from zsim.zero import schedule
from zsim_des import SimBackend

GPU = Gpu(
    name="drawn",
    memory_bytes=10**9,
    memory_bytes_per_s=10**11,
    rates=tuple(
        Rate(dtype=dtype, peak=10**12, matmul=10**12, elementwise=10**12) for dtype in DType
    ),
)


def cluster(ranks: int, gpus_per_node: int) -> Cluster:
    """Enough nodes for `ranks`; times that make communication and computation alike."""
    return Cluster(
        name="drawn",
        nodes=-(-ranks // gpus_per_node),
        gpus_per_node=gpus_per_node,
        gpu=GPU,
        switch_link=Link(bytes_per_s=10**10, latency_ps=10**6),
        nics_per_node=gpus_per_node,
        nic_link=Link(bytes_per_s=10**9, latency_ps=10**6),
    )


@given(jobs())
@settings(max_examples=200)
def test_every_drawn_schedule_is_proved(job: tuple[Model, Strategy]) -> None:
    assert check(schedule(*job), job[0]) == ()


@given(jobs(), st.sampled_from([1, 2, 4]), st.integers(1, 3))
@settings(max_examples=60)
def test_every_drawn_schedule_simulates_and_repeats_to_the_picosecond(
    job: tuple[Model, Strategy], gpus_per_node: int, steps: int
) -> None:
    model, strategy = job
    made = schedule(model, strategy)
    work = Job(
        schedule=made, model=model, cluster=cluster(strategy.ranks, gpus_per_node), steps=steps
    )
    first, again = (SimBackend().run(work, seed=7) for _ in range(2))
    assert first == again
    assert len(first.step_end_ps) == steps
    assert sum(rank.stands_for for rank in first.ranks) == strategy.ranks
