"""The null backend records what it is given: every role, setup and steps, at time zero."""

from drawn_clusters import NO_MODEL

from zsim.backend.backend import Job
from zsim.cluster.cluster import Cluster, Gpu, Link
from zsim.schedule.builder import ScheduleBuilder
from zsim.schedule.mesh import Span
from zsim_null import NullBackend

LINK = Link(bytes_per_s=1)
CLUSTER = Cluster(
    name="any",
    nodes=1,
    gpus_per_node=1,
    gpu=Gpu(name="any", memory_bytes=1, memory_bytes_per_s=1, rates=()),
    switch_link=LINK,
    nics_per_node=1,
    nic_link=LINK,
)


def job() -> Job:
    build = ScheduleBuilder.of("recorded", pipe=4)
    group = build.group("pipe", "pipe")
    for name, start, end in (("first", 0, 1), ("rest", 1, 4)):
        part = build.role(name, Span(axis="pipe", start=start, end=end))
        x, y = part.buffer("x", 5, persistent=True), part.buffer("y", 5)
        part.setup.allocate(x)
        part.setup.fill("zero", x.all, 0.0)
        part.step.allocate(y)
        part.step.send("send", group, x.all, 1)
        part.step.receive("receive", group, y.all, -1)
        part.step.together("both", 2)
        part.step.free(y)
    return Job(schedule=build.schedule(), model=NO_MODEL, cluster=CLUSTER, steps=2)


def test_one_rank_of_each_role_is_recorded_with_what_it_stands_for() -> None:
    trace = NullBackend().run(job(), seed=3)
    assert [(rank.role, rank.rank, rank.stands_for) for rank in trace.ranks] == [
        ("first", 0, 1),
        ("rest", 1, 3),
    ]
    assert (trace.seed, trace.steps, trace.step_end_ps) == (3, 2, (0, 0))


def test_operations_stand_in_the_order_of_issue_and_take_no_time() -> None:
    (first, _) = NullBackend().run(job(), seed=0).ranks
    assert [(event.step, event.operation) for event in first.events] == [
        (-1, "setup/zero"),
        (0, "step/both"),
        (1, "step/both"),
    ]
    assert {(event.start_ps, event.end_ps) for event in first.events} == {(0, 0)}


def test_members_of_a_together_are_transfers_of_their_own() -> None:
    (first, _) = NullBackend().run(job(), seed=0).ranks
    # A send counts its 5 elements of 4 bytes, a receive nothing.
    assert [(each.collective, each.elements, each.bytes) for each in first.transfers[:2]] == [
        ("send", 5, 20),
        ("receive", 5, 0),
    ]
    assert [entry.change_bytes for entry in first.book] == [20, 20, -20, 20, -20]


def test_nothing_is_refused() -> None:
    assert NullBackend().refusal(job()) is None
