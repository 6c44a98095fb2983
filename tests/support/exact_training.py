"""Runs schedules with exact values on a cluster that does not matter."""

from drawn_clusters import CPU, DRIVES, RATES

from zsim.backend.backend import Job
from zsim.cluster.cluster import Cluster, Gpu, Link
from zsim.cluster.host_side import Host
from zsim.model.model import Model
from zsim.proof import check
from zsim.runtimes.registry import make_schedule
from zsim.schedule.issue_order import NO_OVERFLOW
from zsim.schedule.schedule import Schedule
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Strategy
from zsim_des.engine.watch import Durations
from zsim_des.values import PlainState, Result, train, train_by_schedule

STEPS = 3
LINK = Link(bytes_per_s=10**9)


def cluster(ranks: int) -> Cluster:
    """One node with a GPU for each rank."""
    return Cluster(
        name="exact",
        nodes=1,
        gpus_per_node=ranks,
        gpu=Gpu(name="exact", memory_bytes=10**12, memory_bytes_per_s=10**9, rates=RATES),
        switch_link=LINK,
        nics_per_node=1,
        nic_link=LINK,
        host=Host(memory_bytes=10**13, memory_bytes_per_s=10**9, cpu=CPU),
        drives=DRIVES,
    )


def trains(
    model: Model, strategy: Strategy, timing: Durations, overflow_steps: frozenset[int]
) -> None:
    """Assert that the schedule trains as one process does, as the cluster times it and as drawn."""
    if strategy.train.precision is not Precision.FP16 or not model.parameter_count:
        overflow_steps = NO_OVERFLOW
    expected = train(model, strategy, STEPS, overflow_steps)
    made = make_schedule(model, strategy)
    for durations in (None, timing):
        result = trained(made, model, expected, durations, overflow_steps=overflow_steps)
        assert result.is_right, result


def proves_and_trains(made: Schedule, model: Model, strategy: Strategy) -> None:
    """Assert that a schedule is proved, and trains as one process does."""
    assert check(made, model) == ()
    result = trained(made, model, train(model, strategy, STEPS))
    assert result.is_right, result


def trained(
    schedule: Schedule,
    model: Model,
    expected: PlainState,
    durations: Durations | None = None,
    *,
    overflow_steps: frozenset[int] = NO_OVERFLOW,
) -> Result:
    """Three steps of `schedule` under one timing."""
    job = Job(schedule=schedule, model=model, cluster=cluster(schedule.mesh.size), steps=STEPS)
    return train_by_schedule(job, expected, durations=durations, overflow_steps=overflow_steps)
