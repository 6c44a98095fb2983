"""Steps of small scripts, lifted: what becomes of waits, memory and copies, and what is refused."""

from collections.abc import Callable, Iterable
from typing import TypeVar, cast

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from zsim.proof import prove
from zsim.schedule.operation import (
    Allocate,
    AllReduce,
    Compute,
    Copy,
    Free,
    FreeMode,
    HostWait,
    Operation,
    Previous,
)
from zsim.schedule.schedule import Place, Schedule
from zsim_record import recording
from zsim_record.lift.communicator_mesh import mesh_of
from zsim_record.lift.lifted_step import cut
from zsim_record.lift.step_events import LiftError
from zsim_record.record.device_module import DeviceModule
from zsim_record.record.tape import Tape

Kind = TypeVar("Kind", bound=Operation)


def device() -> DeviceModule:
    return cast("DeviceModule", torch.get_device_module("zsim"))


def ones(size: int = 64) -> torch.Tensor:
    return torch.ones(size, device="zsim")


def lifted(
    step: Callable[[], object], *, steps: int = 3, world: int = 2, rank: int = 0
) -> Schedule:
    with recording(world=world, rank=rank, lifts=True) as tape:
        dist.init_process_group("nccl")
        repeat(tape, step, steps)
        return tape.schedule()


def repeat(tape: Tape, step: Callable[[], object], steps: int) -> None:
    for _ in range(steps):
        step()
        tape.end_step()


def of(schedule: Schedule, kind: type[Kind]) -> list[Kind]:
    return [each for each in schedule.programs[0].step if isinstance(each, kind)]


def test_a_step_has_its_operations_and_memory() -> None:
    def step() -> None:
        value = ones()
        dist.all_reduce(value)

    schedule = lifted(step)
    kinds = [type(each) for each in schedule.programs[0].step]
    assert kinds == [Allocate, Compute, AllReduce, Free]
    assert schedule.contract.peak_bytes == (("all", "device", 256),)
    assert prove(schedule).findings == ()


def test_what_the_host_waits_for_is_a_wait_of_the_host() -> None:
    schedule = lifted(lambda: ones().sum().item())
    (wait,) = of(schedule, HostWait)
    assert isinstance(wait.operation, str)
    assert "item" in wait.operation
    assert prove(schedule).findings == ()


def test_a_stream_that_waits_for_another_has_one_edge_and_no_more() -> None:
    with recording(world=2, lifts=True) as tape:
        side = device().Stream()

        def step() -> None:
            value = ones()
            value.mul_(2)
            side.wait_stream(device().current_stream())
            with device().stream(side):
                value.mul_(3)
                value.mul_(4)
            device().current_stream().wait_stream(side)
            value.mul_(5)

        repeat(tape, step, 3)
        schedule = tape.schedule()
    edges = [len(each.after) for each in of(schedule, Compute)]
    assert edges == [0, 0, 1, 0, 1]
    assert prove(schedule).findings == ()


def test_an_edge_to_the_step_before_is_to_a_previous_operation() -> None:
    with recording(world=2, lifts=True) as tape:
        side, kept = device().Stream(), ones()

        def step() -> None:
            device().current_stream().wait_stream(side)
            kept.mul_(2)
            side.wait_stream(device().current_stream())
            with device().stream(side):
                kept.mul_(3)

        repeat(tape, step, 4)
        schedule = tape.schedule()
    first, second = of(schedule, Compute)
    assert first.after == (Previous(second.id),)
    assert second.after == (first.id,)
    assert schedule.programs[0].persistent
    assert prove(schedule).findings == ()


def test_a_race_of_the_script_is_one_of_the_schedule() -> None:
    with recording(world=2, lifts=True) as tape:
        tape.hazards.assumes = False
        side, kept = device().Stream(), ones()

        def step() -> None:
            kept.mul_(2)
            with device().stream(side):
                kept.mul_(3)

        repeat(tape, step, 3)
        schedule = tape.schedule()
    assert {each.invariant for each in prove(schedule).findings} == {"races"}


def test_a_recording_with_findings_is_not_lifted() -> None:
    with recording(world=2, lifts=True) as tape:
        side, kept = device().Stream(), ones()

        def step() -> None:
            kept.mul_(2)
            with device().stream(side):
                kept.mul_(3)

        repeat(tape, step, 3)
        with pytest.raises(LiftError, match="findings have to be mended first"):
            tape.schedule()


def test_memory_that_record_stream_was_told_of_is_freed_later() -> None:
    with recording(world=2, lifts=True) as tape:
        side = device().Stream()

        def step() -> None:
            value = ones()
            side.wait_stream(device().current_stream())
            with device().stream(side):
                value.mul_(2)
            value.record_stream(cast("torch.Stream", side))
            del value
            device().current_stream().wait_stream(side)
            ones()

        repeat(tape, step, 3)
        schedule = tape.schedule()
    told = [each for each in of(schedule, Free) if each.mode is FreeMode.DEFERRED]
    assert [len(each.uses) for each in told] == [1]
    assert not [each for each in prove(schedule).findings if each.invariant != "memory"]


def test_a_tensor_that_lives_until_the_next_one_is_there_takes_two_turns() -> None:
    kept: list[torch.Tensor] = []

    def step() -> None:
        made = ones()
        kept[:] = [made]

    with recording(world=2, lifts=True) as tape:
        repeat(tape, step, 4)
        schedule = tape.schedule()
        kept.clear()
    names = {each.name for each in schedule.programs[0].buffers}
    assert len(names) == 2
    assert len(of(schedule, Compute)) == 2
    assert prove(schedule).findings == ()


def test_a_copy_of_pinned_memory_is_a_copy_between_places() -> None:
    with recording(world=2, lifts=True) as tape:
        host, value = torch.empty(64, pin_memory=True), ones()

        def step() -> None:
            host.copy_(value, non_blocking=True)
            value.mul_(2)

        repeat(tape, step, 3)
        schedule = tape.schedule()
    (copy,) = of(schedule, Copy)
    places = {pool.name: pool.place for pool in schedule.pools}
    program = schedule.programs[0]
    assert places[program.by_name[copy.target.buffer].pool] is Place.HOST
    assert prove(schedule).findings == ()


def test_work_of_the_host_on_pinned_memory_is_refused() -> None:
    with recording(world=2, lifts=True) as tape:
        host = torch.empty(64, pin_memory=True)

        def step() -> None:
            ones()
            host.add_(1)

        repeat(tape, step, 3)
        with pytest.raises(LiftError, match="the host works on pinned memory"):
            tape.schedule()


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(LiftError, match="2 steps are recorded, at least 3 are needed"):
        lifted(ones, steps=2)


def test_steps_that_differ_are_refused_by_the_line() -> None:
    count = iter(range(10))

    def step() -> None:
        value = ones()
        if next(count) == 2:
            value.mul_(2)

    with pytest.raises(LiftError, match=r"the last two steps differ: .*test_lift\.py"):
        lifted(step)


def test_memory_that_grows_is_refused() -> None:
    kept: list[torch.Tensor] = []
    with pytest.raises(LiftError, match="memory grows"):
        lifted(lambda: kept.append(ones()))


def test_a_collective_that_schedules_do_not_have_is_refused() -> None:
    with pytest.raises(LiftError, match="schedules have no such collective"):
        lifted(lambda: dist.all_to_all_single(ones(), ones()))


def test_without_being_asked_a_recording_keeps_nothing_to_lift() -> None:
    with recording(world=2) as tape, pytest.raises(LiftError, match="lifts=True"):
        tape.schedule()


def test_the_part_of_a_rank_is_that_of_every_rank() -> None:
    """An all-gather in place: each rank writes its own slot, and one schedule says so for all."""

    def step(rank: int) -> Callable[[], None]:
        def run() -> None:
            whole = torch.empty(64, device="zsim")
            own = whole[rank * 16 :][:16]
            own.fill_(1)
            dist.all_gather_single(whole, own)

        return run

    schedules = [lifted(step(rank), world=4, rank=rank) for rank in (0, 3)]
    assert schedules[0] == schedules[1]
    assert prove(schedules[0]).findings == ()


@st.composite
def meshes(draw: st.DrawFn) -> tuple[list[int], list[tuple[int, int]], int]:
    """Draw sizes of axes, ranges of neighbouring axes that communicate, and a rank."""
    sizes = draw(st.lists(st.integers(2, 4), min_size=1, max_size=3))
    ends = st.integers(0, len(sizes))
    spans = draw(st.lists(st.tuples(ends, ends).map(sorted).map(tuple), max_size=4))
    world = 1
    for size in sizes:
        world *= size
    return sizes, [(a, b) for a, b in spans if a < b], draw(st.integers(0, world - 1))


@settings(max_examples=60, deadline=None)
@given(meshes())
def test_communicators_of_a_mesh_are_rows_of_the_mesh_that_is_found(
    drawn: tuple[list[int], list[tuple[int, int]], int],
) -> None:
    sizes, spans, rank = drawn
    world = 1
    for size in sizes:
        world *= size
    communicators = {str(span): row(sizes, span, rank) for span in spans}
    found = mesh_of(world, rank, communicators)
    assert found.mesh.size == world
    at = found.mesh.coordinates(rank)
    for name, ranks in communicators.items():
        assert found.groups[name].members(found.mesh, at) == ranks


def row(sizes: list[int], span: tuple[int, int], rank: int) -> tuple[int, ...]:
    """Return the ranks that differ from `rank` along the axes of `span` alone."""

    def place(number: int) -> list[int]:
        found: list[int] = []
        for size in reversed(sizes):
            number, at = divmod(number, size)
            found.insert(0, at)
        return found

    world = 1
    for size in sizes:
        world *= size
    here = place(rank)
    outside = [axis for axis in range(len(sizes)) if not span[0] <= axis < span[1]]
    return tuple(
        other for other in range(world) if all(place(other)[axis] == here[axis] for axis in outside)
    )


def test_ranks_in_no_order_of_a_mesh_are_refused() -> None:
    with pytest.raises(LiftError, match="no row of a mesh"):
        mesh_of(8, 0, {"pair": (0, 3, 4)})


SPANS = st.lists(
    st.tuples(st.integers(0, 20), st.integers(1, 8)).map(lambda each: (each[0], sum(each))),
    max_size=5,
)


@given(SPANS, SPANS)
def test_spans_are_cut_where_others_begin_and_end(
    spans: list[tuple[int, int]], others: list[tuple[int, int]]
) -> None:
    pieces = cut(spans, [*spans, *others])

    def points(of: Iterable[tuple[int, int]]) -> set[int]:
        return {place for start, end in of for place in range(start, end)}

    assert points(pieces) == points(spans)
    assert sum(end - start for start, end in pieces) == len(points(pieces))
    for start, end in pieces:
        assert not any(start < edge < end for span in (*spans, *others) for edge in span)
