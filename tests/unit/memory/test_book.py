"""The allocator's book: what is alive when, in host issue order, and deferred frees."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zsim.memory import AtOnce, memory_ledger, peak, peak_bytes, pools, witness
from zsim.schedule.builder import COMMUNICATION, ScheduleBuilder
from zsim.schedule.operation import Allocate, Free, FreeMode, Operation
from zsim.schedule.schedule import Kind, Program


def small(mode: FreeMode, *, waits: bool = False) -> Program:
    """A buffer used on the other stream and freed, then a second one."""
    build = ScheduleBuilder.of("book", data=2)
    world = build.group("world", "data")
    kept = build.buffer("kept", 2, kind=Kind.PARAMETER, persistent=True)
    first = build.buffer("first", 10)
    second = build.buffer("second", 10, kind=Kind.COMMUNICATION)
    build.setup.allocate(kept)
    build.step.allocate(first)
    used = build.step.all_reduce("sum", world, first.all, stream=COMMUNICATION)
    build.step.free(first, mode=mode, uses=[used])
    if waits:
        build.step.host_wait("wait", used)
    build.step.allocate(second)
    build.step.free(second)
    (program,) = build.schedule().programs
    return program


def test_a_waited_free_gives_memory_back_when_the_host_issues_it() -> None:
    # kept 8, then first 40, freed, then second 40: never more than 48 bytes.
    entries = memory_ledger(small(FreeMode.WAITED), steps=3)
    assert peak_bytes(entries, "device") == 48
    assert sum(entry.change_bytes for entry in entries) == 8
    assert pools(entries) == ("device",)


def test_a_deferred_free_nobody_waits_for_keeps_its_memory() -> None:
    # The host may run ahead of the device for ever: each step adds another `first`.
    entries = memory_ledger(small(FreeMode.DEFERRED), steps=3)
    assert peak_bytes(entries, "device") == 8 + 3 * 40 + 40


def test_a_deferred_free_returns_at_the_allocation_after_the_host_waited() -> None:
    entries = memory_ledger(small(FreeMode.DEFERRED, waits=True), steps=2)
    assert peak_bytes(entries, "device") == 48
    (returned, *_) = [entry for entry in entries if entry.change_bytes == -40]
    assert (returned.buffer, returned.operation) == ("first", "step/second/allocate")


@dataclass
class Drawn:
    """Uses of the free at each place in turn end at a drawn time; each allocation is 1 later."""

    ends: list[int]
    now: int = -1

    def issue(self, step: int, operation: Operation) -> None:
        del step
        self.now += isinstance(operation, Allocate)

    def over_at(self, step: int, free: Free) -> int:
        del step
        return self.ends[int(free.buffer)]


@given(st.lists(st.integers(-1, 12), min_size=1, max_size=10))
def test_what_has_ended_returns_at_the_next_allocation_in_the_order_of_frees(
    ends: list[int],
) -> None:
    build = ScheduleBuilder.of("drawn", data=1)
    buffers = [build.buffer(str(number), 1) for number in range(len(ends))]
    for buffer in buffers:
        build.step.allocate(buffer)
        build.step.free(buffer, mode=FreeMode.DEFERRED)
    (program,) = build.schedule().programs
    expected: list[tuple[str, bool]] = []
    waiting: list[int] = []
    for now in range(2 * len(ends)):  # two steps
        over = [number for number in waiting if ends[number] <= now]
        waiting = [number for number in waiting if ends[number] > now]
        expected += [(str(number), False) for number in over]
        waiting.append(now % len(ends))
        expected.append((str(waiting[-1]), True))
    entries = memory_ledger(program, steps=2, returns=Drawn(ends))
    assert [(entry.buffer, entry.change_bytes > 0) for entry in entries] == expected


@pytest.mark.parametrize("returns", [None, AtOnce()])
@pytest.mark.parametrize("waits", [False, True])
def test_fewer_steps_of_a_program_that_is_known_are_the_beginning_of_its_book(
    returns: AtOnce | None, *, waits: bool
) -> None:
    program, again = (small(FreeMode.DEFERRED, waits=waits) for _ in range(2))
    assert len(memory_ledger(program, 5, returns=returns)) > len(
        memory_ledger(program, 2, returns=returns)
    )
    assert memory_ledger(program, 2, returns=returns) == memory_ledger(again, 2, returns=returns)


def test_the_peak_says_what_was_alive_by_kind_and_by_buffer() -> None:
    found = peak(memory_ledger(small(FreeMode.WAITED), steps=1), "device")
    assert (found.bytes, found.step, found.operation) == (48, 0, "step/first/allocate")
    assert found.alive == (("first", 40), ("kept", 8))
    assert dict(found.by_kind)[Kind.PARAMETER] == 8
    assert sum(size for _, size in found.by_kind) == 48


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=20))
def test_the_witness_is_the_first_that_does_not_fit(
    sizes: list[tuple[int, int]],
) -> None:
    build = ScheduleBuilder.of("drawn", data=1)
    for index, (kept, passing) in enumerate(sizes):
        one = build.buffer(f"kept{index}", kept, persistent=True)
        two = build.buffer(f"passing{index}", passing)
        build.setup.allocate(one, two)
        build.setup.free(two)
    (program,) = build.schedule().programs
    entries = memory_ledger(program, steps=1)
    largest = peak_bytes(entries, "device")
    assert peak(entries, "device").bytes == largest
    for capacity in range(largest):
        found = witness(entries, "device", capacity)
        assert capacity < found.bytes <= largest
        assert sum(size for _, size in found.alive) == found.bytes
