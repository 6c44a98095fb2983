"""Messages that are issued as one, in the simulation."""

from dataclasses import replace
from fractions import Fraction

from drawn_clusters import NO_MODEL
from exact_training import cluster

from zsim.backend.backend import Job
from zsim.schedule.builder import ScheduleBuilder
from zsim.schedule.mesh import Span
from zsim.trace.trace import Trace
from zsim_des import SimBackend


def times(trace: Trace, rank: int) -> dict[str, tuple[int, int]]:
    (found,) = [each for each in trace.ranks if each.rank == rank]
    return {
        event.operation.removeprefix("step/"): (event.start_ps, event.end_ps)
        for event in found.events
    }


def test_what_is_issued_with_a_message_that_waits_does_not_hold_the_other_end_up() -> None:
    build = ScheduleBuilder.of("three", pipe=3)
    group = build.group("pipe", "pipe")
    for index in range(3):
        part = build.role(f"stage{index}", Span(axis="pipe", start=index, end=index + 1))
        x, y = part.buffer("x", 25), part.buffer("y", 25)
        part.step.allocate(x, y)
        if index == 0:
            part.step.send("early", group, x.all, 1)
            part.step.send("later", group, y.all, 2)
        elif index == 1:
            part.step.receive("receive", group, x.all, -1)
            part.step.receive("receive_back", group, y.all, 1)
            part.step.together("both", 2)
        else:
            part.step.receive("first", group, y.all, -2)
            part.step.send("then", group, x.all, -1)
    job = Job(schedule=build.schedule(), model=NO_MODEL, cluster=cluster(3), steps=1)
    trace = SimBackend().run(job, seed=0)
    # The middle takes what the first stage sends at once, though what else it takes comes only
    # after the last stage has taken something of the first.
    first, middle, last = (times(trace, rank) for rank in range(3))
    one = first["early"][1]
    assert (first["later"], last["first"]) == ((one, 2 * one), (0, 2 * one))
    assert last["then"] == (2 * one, 3 * one)
    assert middle["both"] == (0, 3 * one)


def test_a_ring_of_equal_ranks_slows_kernels_down_as_the_same_ranks_one_by_one_do() -> None:
    build = ScheduleBuilder.of("ring", ring=3)
    group = build.group("ring", "ring")
    x, y, z = (build.buffer(name, 100_000) for name in ("x", "y", "z"))
    build.step.allocate(x, y, z)
    build.step.copy("copy", x.all, z.all)
    build.step.send("send", group, x.all, 1)
    build.step.receive("receive", group, y.all, -1)
    build.step.together("shift", 2)
    drawn = cluster(3)
    gpu = replace(
        drawn.gpu,
        collective_share=Fraction(1, 4),
        memory_bytes_per_s=4 * drawn.switch_link.bytes_per_s,
    )
    job = Job(schedule=build.schedule(), model=NO_MODEL, cluster=replace(drawn, gpu=gpu), steps=1)
    folded, one_by_one = (times(SimBackend(unfold=it).run(job, seed=0), 0) for it in (False, True))
    assert folded == one_by_one
    alone_ps = 2 * x.all.size * 4 * 10**12 // gpu.memory_bytes_per_s
    assert folded["copy"][1] > alone_ps
