"""The second account of happens-before: what has an order, what has none, and what hangs."""

import pytest
from faults.happens_before import Graph, StuckError
from faults.schedules import split

from zsim.schedule.builder import ScheduleBuilder
from zsim.schedule.issue_order import NO_OVERFLOW
from zsim.schedule.mesh import Span
from zsim.schedule.operation import FreeMode
from zsim.schedule.schedule import Schedule


def pairs(schedule: Schedule) -> set[tuple[str, str]]:
    """Operations without an order."""
    return {(race.one[2], race.other[2]) for race in Graph(schedule, NO_OVERFLOW).races()}


def summing(*, waits: bool = True, uses: bool = True, mode: FreeMode = FreeMode.WAITED) -> Schedule:
    """x is written on one stream, summed on another, and its memory used again at once."""
    build = ScheduleBuilder.of("summing", data=2)
    group = build.group("data", "data")
    x, y = build.buffer("x", 4), build.buffer("y", 4)
    total = build.buffer("total", 4, persistent=True)
    build.setup.allocate(total)
    build.step.allocate(x)
    written = build.step.fill("write", x.all, 3.0)
    summed = build.step.all_reduce("sum", group, x.all, total.all, after=[written] if waits else [])
    build.step.free(x, mode=mode, uses=[summed] if uses else [])
    build.step.allocate(y)
    build.step.fill("again", y.all, 5.0)
    build.step.free(y)
    return build.schedule()


@pytest.mark.parametrize("mode", FreeMode)
def test_what_is_waited_for_has_an_order(mode: FreeMode) -> None:
    assert pairs(summing(mode=mode)) == set()


def test_a_read_on_another_stream_without_an_edge_has_none() -> None:
    assert ("step/write", "step/sum") in pairs(summing(waits=False))


def test_memory_that_is_freed_before_its_use_is_over_races_with_the_use() -> None:
    found = pairs(summing(uses=False))
    assert ("step/sum", "step/x/free") in found
    assert ("step/sum", "step/again") in found


@pytest.mark.parametrize("answers", [True, False])
def test_an_order_that_arises_only_through_another_rank_counts(*, answers: bool) -> None:
    """Rank 0 writes x again once rank 1 has answered, which it may do before it has got x."""
    build = ScheduleBuilder.of("there and back", pipe=2)
    build.stream("back")
    there, back = build.group("there", "pipe"), build.group("back", "pipe")
    first = build.role("first", Span(axis="pipe", start=0, end=1))
    second = build.role("second", Span(axis="pipe", start=1, end=2))
    x, y = first.buffer("x", 1, persistent=True), first.buffer("y", 1, persistent=True)
    first.setup.allocate(x, y)
    written = first.step.fill("write", x.all, 1.0)
    first.step.send("send", there, x.all, 1, after=[written])
    answer = first.step.receive("answer", back, y.all, 1, stream="back")
    again = first.step.fill("again", x.all, 2.0, after=[answer])
    first.step.host_wait("end", again)
    z = second.buffer("z", 1, persistent=True)
    second.setup.allocate(z)
    got = second.step.receive("get", there, z.all, 1)
    second.step.send("say", back, z.all, 1, stream="back", after=[got] if answers else [])
    assert (("step/send", "step/again") in pairs(build.schedule())) is not answers


def test_collectives_that_wait_for_one_another_never_begin() -> None:
    def ordered(first: str, second: str) -> Schedule:
        build = ScheduleBuilder.of("crossed", data=2)
        build.stream("other")
        one, other = build.group("one", "data"), build.group("other", "data")
        x, y = build.buffer("x", 1, persistent=True), build.buffer("y", 1, persistent=True)
        build.setup.allocate(x, y)
        for name in (first, second):
            build.step.all_reduce(name, *((one, x.all) if name == "a" else (other, y.all)))
        return build.schedule()

    with pytest.raises(StuckError):
        Graph(split(ordered("a", "b"), ordered("b", "a")), NO_OVERFLOW)
