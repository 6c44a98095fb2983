"""Exact values: the arithmetic, and what a carrier makes of races and of memory taken too early."""

from itertools import pairwise
from math import isqrt

import numpy as np
import pytest
from drawn_clusters import NO_MODEL
from drawn_examples import examples
from drawn_timings import DrawnTiming, timings
from exact_training import cluster
from hypothesis import given

from zsim.backend.backend import Job
from zsim.proof import check
from zsim.schedule.builder import ScheduleBuilder
from zsim.schedule.operation import FreeMode
from zsim.schedule.schedule import Schedule
from zsim_des import SimBackend
from zsim_des.values import Carrier, Modular, carry
from zsim_des.values.field import PRIME, Numbers, inverse, number, product, reduced


def test_the_prime_is_one_and_products_of_two_numbers_and_a_third_are_exact() -> None:
    assert all(PRIME % divisor for divisor in range(2, isqrt(PRIME) + 1))
    assert PRIME < 2**26
    largest = np.array([float(PRIME - 1)])
    assert int((largest * largest + largest).item()) == (PRIME - 1) ** 2 + PRIME - 1


@pytest.mark.parametrize("divisor", [1, 3, 7, 64, 1_000_003])
def test_division_is_undone_by_multiplication(divisor: int) -> None:
    some = np.array([0.0, 1.0, 12345.0, PRIME - 1.0])
    assert reduced(product(some, inverse(divisor)) * divisor).tolist() == some.tolist()


def test_a_fraction_is_the_number_that_its_denominator_makes_whole() -> None:
    assert number(0.25) * 4 % PRIME == 1
    assert number(-1.0) == PRIME - 1


class OneIsSlow:
    """Everything takes no time but one operation."""

    def __init__(self, slow: str) -> None:
        self.slow = slow

    def issue_ps(self, rank: int, step: int, operation: str) -> int:
        return 0

    def kernel_ps(self, rank: int, step: int, operation: str) -> int:
        return 1000 if operation == self.slow else 1

    def communication_ps(self, step: int, operation: str) -> int:
        return 1000 if operation == self.slow else 1


def carried(schedule: Schedule, slow: str = "") -> Carrier[Numbers]:
    carrier = Carrier(schedule, Modular(schedule))
    job = Job(schedule=schedule, model=NO_MODEL, cluster=cluster(schedule.mesh.size))
    SimBackend(unfold=True, durations=OneIsSlow(slow), watcher=carrier).step_ends_ps(job)
    carrier.settle()
    return carrier


def summing(*, waits: bool, mode: FreeMode, uses: bool = True) -> Schedule:
    """x = 3 on two ranks is summed on another stream; its memory is used again."""
    build = ScheduleBuilder.of("summing", data=2)
    group = build.group("data", "data")
    x, total = build.buffer("x", 4), build.buffer("total", 4, persistent=True)
    y = build.buffer("y", 4)
    build.setup.allocate(total)
    build.step.allocate(x)
    three = build.step.fill("three", x.all, 3.0)
    after = [three] if waits else []
    summed = build.step.all_reduce("sum", group, x.all, total.all, after=after)
    build.step.free(x, mode=mode, uses=[summed] if uses else [])
    build.step.allocate(y)
    build.step.fill("five", y.all, 5.0)
    build.step.free(y)
    return build.schedule()


def total_of(carrier: Carrier[Numbers]) -> list[float]:
    return [float(each) for each in carrier.memory[1].blocks["total"].memory]


@pytest.mark.parametrize("mode", FreeMode)
@pytest.mark.parametrize("slow", ["", "step/three", "step/sum", "step/five"])
def test_a_right_schedule_is_right_under_any_timing(mode: FreeMode, slow: str) -> None:
    carrier = carried(summing(waits=True, mode=mode), slow)
    assert carrier.faults == []
    assert total_of(carrier) == [6.0] * 4


def ring_of_four() -> Schedule:
    """Each rank passes a three on, and what comes to it, and keeps the last."""
    build = ScheduleBuilder.of("ring", data=4)
    group = build.group("data", "data")
    parts = [build.buffer(f"part{place}", 2) for place in range(4)]
    total = build.buffer("total", 2, persistent=True)
    build.setup.allocate(total)
    build.step.allocate(*parts)
    came = build.step.fill("three", parts[0].all, 3.0)
    for place, (source, target) in enumerate(pairwise(parts)):
        build.step.send(f"send{place}", group, source.all, 1)
        build.step.receive(f"receive{place}", group, target.all, -1)
        came = build.step.together(f"pass{place}", 2, after=[came])
    build.step.copy("keep", parts[-1].all, total.all, after=[came])
    build.step.free(*parts, uses=[came])
    return build.schedule()


@given(timings())
@examples(30)
def test_a_ring_is_right_under_any_timing(timing: DrawnTiming) -> None:
    """The end of a message that is known last may be the earlier one."""
    schedule = ring_of_four()
    assert check(schedule) == ()
    carrier = Carrier(schedule, Modular(schedule))
    job = Job(schedule=schedule, model=NO_MODEL, cluster=cluster(4), steps=2)
    carry(job, carrier, durations=timing)
    assert carrier.faults == []
    assert [list(each.blocks["total"].memory) for each in carrier.memory] == [[3.0, 3.0]] * 4


def test_a_read_before_the_write_it_needs_gives_no_number() -> None:
    carrier = carried(summing(waits=False, mode=FreeMode.WAITED), "step/three")
    assert np.isnan(total_of(carrier)).all()


def test_a_source_that_changes_while_it_is_read_is_a_fault() -> None:
    carrier = carried(summing(waits=False, mode=FreeMode.WAITED), "step/sum")
    assert ("step/sum", "changed while it was read") in {
        (fault.operation, fault.why) for fault in carrier.faults
    }


def test_a_free_that_does_not_wait_for_a_use_on_another_stream_is_met() -> None:
    carrier = carried(summing(waits=True, mode=FreeMode.WAITED, uses=False), "step/sum")
    assert np.isnan(total_of(carrier)).all()


def test_memory_is_spoiled_when_it_is_freed_even_if_nobody_takes_it_again() -> None:
    build = ScheduleBuilder.of("late", data=1)
    x, y = build.buffer("x", 1), build.buffer("y", 1, persistent=True)
    build.setup.allocate(y)
    build.step.allocate(x)
    written = build.step.fill("one", x.all, 1.0)
    build.step.free(x)
    build.step.copy("copy", x.all, y.all, after=[written])
    carrier = carried(build.schedule())
    assert [fault.why for fault in carrier.faults] == ["used without memory"]
    assert np.isnan(carrier.memory[0].blocks["y"].memory).all()


def test_two_writes_of_one_place_at_one_time_are_a_fault() -> None:
    build = ScheduleBuilder.of("twice", data=1)
    build.stream("other")
    x = build.buffer("x", 3, persistent=True)
    build.setup.allocate(x)
    build.step.fill("one", x.all, 1.0)
    build.step.fill("two", x.all, 2.0, stream="other")
    carrier = carried(build.schedule())
    assert {fault.why for fault in carrier.faults} == {
        "another operation wrote it while this one did"
    }


def test_a_send_arrives_where_its_receive_says() -> None:
    build = ScheduleBuilder.of("ring", pipe=3)
    group = build.group("pipe", "pipe")
    x, y = build.buffer("x", 3), build.buffer("y", 1, persistent=True)
    build.setup.allocate(y)
    build.step.allocate(x)
    build.step.fill("zero", x.all, 0.0)
    one = build.step.fill("one", x.own("pipe", 1), 1.0)
    build.step.send("send", group, x[1:2], 1)
    build.step.receive("receive", group, y.all, -1)
    both = build.step.together("both", 2, after=[one])
    build.step.free(x, uses=[both])
    carrier = carried(build.schedule())
    assert carrier.faults == []
    got = [carrier.memory[rank].blocks["y"].memory.tolist() for rank in range(3)]
    assert got == [[0.0], [0.0], [1.0]]
