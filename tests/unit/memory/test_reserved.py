"""What a pool reserves for a book, by its discipline."""

from dataclasses import replace

from drawn_clusters import NO_MODEL
from hypothesis import given
from hypothesis import strategies as st

from zsim.analysis.summary import summary
from zsim.backend.backend import Job
from zsim.backend.document import decode_trace, encode_trace
from zsim.cluster.cluster import Cluster, Gpu, Link, Overheads
from zsim.memory import (
    capacity_bytes,
    communicators,
    deferred_frees,
    handed_out,
    memory_ledger,
    peak_bytes,
    reserve,
)
from zsim.schedule.builder import COMMUNICATION, ScheduleBuilder
from zsim.schedule.operation import FreeMode
from zsim.schedule.schedule import Discipline, Place, Pool, Program, Schedule, Scope
from zsim_des import SimBackend

MIB = 1024 * 1024
CACHING = Pool(name="device", discipline=Discipline.CACHING)
EXPANDABLE = Pool(name="device", discipline=Discipline.EXPANDABLE)


def one_after_the_other(*elements: int) -> Schedule:
    """Buffers of 4 bytes an element, each freed before the next one comes."""
    build = ScheduleBuilder.of("in turn", data=1)
    for number, count in enumerate(elements):
        buffer = build.buffer(f"b{number}", count)
        build.step.allocate(buffer)
        build.step.free(buffer)
    return build.schedule()


def program(schedule: Schedule) -> Program:
    (only,) = schedule.programs
    return only


def cluster(memory: int) -> Cluster:
    return Cluster(
        name="one",
        nodes=1,
        gpus_per_node=1,
        gpu=Gpu(name="one", memory_bytes=memory, memory_bytes_per_s=1, rates=()),
        switch_link=Link(bytes_per_s=1),
        nics_per_node=1,
        nic_link=Link(bytes_per_s=1),
    )


@given(st.lists(st.integers(0, 9 * MIB), min_size=1, max_size=20), st.integers(1, 3))
def test_reserved_is_at_least_the_book_and_exactly_the_book_if_exact(
    elements: list[int], steps: int
) -> None:
    subject = program(one_after_the_other(*elements))
    entries = memory_ledger(subject, steps)
    largest = peak_bytes(entries, "device")
    assert reserve(subject, entries, Pool(name="device")).peak_bytes == largest
    for pool in (CACHING, EXPANDABLE):
        assert reserve(subject, entries, pool).peak_bytes >= largest


def test_what_a_cache_keeps_counts() -> None:
    subject = program(one_after_the_other(8 * MIB, 10 * MIB, 12 * MIB))  # 32, 40, 48 MiB
    entries = memory_ledger(subject, 1)
    assert reserve(subject, entries, CACHING).peak_bytes == 120 * MIB
    assert reserve(subject, entries, EXPANDABLE).peak_bytes == 60 * MIB
    # On a smaller device, 32 and 40 MiB go back when 48 are asked for.
    assert reserve(subject, entries, CACHING, 100 * MIB).peak_bytes == 72 * MIB


def test_a_trace_has_what_is_reserved_after_each_line_of_the_book() -> None:
    schedule = replace(one_after_the_other(8 * MIB, 10 * MIB), pools=(CACHING,))
    job = Job(schedule=schedule, model=NO_MODEL, cluster=cluster(100 * MIB))
    trace = SimBackend().run(job, seed=0)
    (rank,) = trace.ranks
    (found,) = rank.reservations
    assert (found.pool, found.capacity_bytes) == ("device", 100 * MIB)
    # 32 MiB taken, given back, then 40: the 32 stay in the cache.
    assert [change.change_bytes // MIB for change in rank.book] == [32, -32, 40, -40]
    assert [size // MIB for size in found.course_bytes] == [32, 32, 72, 72]
    assert decode_trace(encode_trace(trace)) == trace


def test_a_shortage_names_the_request_and_what_was_alive() -> None:
    build = ScheduleBuilder.of("two", data=1)
    kept = build.buffer("kept", 8 * MIB, persistent=True)
    more = build.buffer("more", MIB)
    build.setup.allocate(kept)
    build.step.allocate(more)
    build.step.free(more)
    schedule = build.schedule()
    entries = memory_ledger(program(schedule), 1)
    # 36 MiB are booked, but a request of 4 MiB takes a segment of 20.
    found = reserve(program(schedule), entries, CACHING, 40 * MIB)
    assert found.shortage is not None
    assert found.shortage.operation == "step/more/allocate"
    assert found.shortage.alive == (("kept", 32 * MIB), ("more", 4 * MIB))
    assert reserve(program(schedule), entries, CACHING, 52 * MIB).shortage is None
    assert reserve(program(schedule), entries, Pool(name="device"), 36 * MIB).shortage is None


def test_a_run_fits_if_what_its_pool_reserves_fits() -> None:
    exact = one_after_the_other(8 * MIB, 10 * MIB)
    caching = replace(exact, pools=(CACHING,))
    fits: list[bool] = []
    for schedule, memory in ((exact, 40), (caching, 72), (caching, 40), (caching, 39)):
        job = Job(schedule=schedule, model=NO_MODEL, cluster=cluster(memory * MIB))
        found = summary(job, SimBackend().run(job, seed=0))
        fits.append(found.fits)
        assert found.peak_allocated_bytes == 40 * MIB
        assert 40 * MIB <= found.peak_reserved_bytes <= memory * MIB or not found.fits
    assert fits == [True, True, True, False]


def used_elsewhere(first: int, second: int) -> Schedule:
    """A buffer that another stream uses, its free deferred, then a second one; nobody waits."""
    build = ScheduleBuilder.of("deferred", data=2)
    world = build.group("world", "data")
    one, two = build.buffer("first", first), build.buffer("second", second)
    build.step.allocate(one)
    used = build.step.all_reduce("sum", world, one.all, stream=COMMUNICATION)
    build.step.free(one, mode=FreeMode.DEFERRED, uses=[used])
    build.step.allocate(two)
    build.step.free(two)
    return build.schedule()


def test_a_buffer_that_is_allocated_again_before_its_deferred_free_is_over_has_two_blocks() -> None:
    subject = program(used_elsewhere(8 * MIB, 0))
    entries = memory_ledger(subject, 3)  # nobody waits: the host may be three steps ahead
    deferred = deferred_frees(subject, entries, 3)
    assert reserve(subject, entries, CACHING).peak_bytes == 96 * MIB
    assert reserve(subject, entries, CACHING, deferred=deferred).peak_bytes == 96 * MIB


def test_memory_does_not_run_out_while_uses_of_a_freed_block_can_be_waited_for() -> None:
    subject = program(used_elsewhere(8 * MIB, 9 * MIB))  # 32 MiB and 36
    entries = memory_ledger(subject, 1)
    deferred = deferred_frees(subject, entries, 1)
    assert deferred == ((1, "first"),)
    plain = reserve(subject, entries, CACHING, 40 * MIB)
    assert plain.shortage is not None
    waited = reserve(subject, entries, CACHING, 40 * MIB, deferred=deferred)
    assert waited.shortage is None
    assert waited.peak_bytes == 36 * MIB


@given(st.lists(st.integers(0, 3 * MIB), min_size=2, max_size=6), st.integers(1, 3))
def test_without_a_limit_it_is_all_one_whether_a_deferred_free_is_seen_at_once(
    elements: list[int], steps: int
) -> None:
    build = ScheduleBuilder.of("deferred", data=2)
    world = build.group("world", "data")
    for number, count in enumerate(elements):
        buffer = build.buffer(f"b{number}", count)
        build.step.allocate(buffer)
        used = build.step.all_reduce(f"sum{number}", world, buffer.all, stream=COMMUNICATION)
        build.step.free(buffer, mode=FreeMode.DEFERRED, uses=[used])
        if number % 2:
            build.step.host_wait(f"wait{number}", used)
    subject = program(build.schedule())
    entries = memory_ledger(subject, steps)
    deferred = deferred_frees(subject, entries, steps)
    assert len(deferred) == steps * len(elements)
    for pool in (CACHING, EXPANDABLE):
        plain = reserve(subject, entries, pool)
        found = reserve(subject, entries, pool, deferred=deferred)
        assert found.course_bytes == plain.course_bytes
        # What is freed is not needed any more, whoever still uses it.
        assert found.needed_bytes <= plain.needed_bytes


def communicating(**axes: int) -> Schedule:
    """An all-reduce over each axis, and one over all ranks."""
    build = ScheduleBuilder.of("communicating", **axes)
    flag = build.buffer("flag", 1)
    build.step.allocate(flag)
    for name in axes:
        build.step.all_reduce(name, build.group(name, name), flag.all)
    build.step.all_reduce("all", build.group("all", *axes), flag.all)
    build.step.free(flag)
    return build.schedule()


def test_a_rank_has_a_communicator_for_each_group_of_several_ranks_that_it_uses() -> None:
    schedule = communicating(data=4, tensor=2)
    assert communicators(schedule, program(schedule)) == 3
    schedule = communicating(data=4, tensor=1)
    assert communicators(schedule, program(schedule)) == 2
    assert communicators(one_after_the_other(1), program(one_after_the_other(1))) == 0


def test_a_rank_may_reserve_what_cuda_and_nccl_leave() -> None:
    schedule = communicating(data=4, tensor=2)
    overheads = Overheads(context_bytes=10, workspace_bytes=5, communicator_bytes=20)
    plain = cluster(100).gpu
    found: list[int | None] = []
    for gpu in (
        plain,
        replace(plain, overheads=overheads),
        replace(plain, overheads=overheads, visible_bytes=110),
        replace(plain, overheads=overheads, visible_bytes=70),
    ):
        given = replace(cluster(100), gpu=gpu)
        found.append(capacity_bytes(CACHING, schedule, program(schedule), given))
    assert found == [100, 25, 35, 0]  # 10 + 5 + 3 x 20 is off


def test_device_memory_can_be_handed_out_in_another_way() -> None:
    exact = one_after_the_other(8 * MIB)
    assert handed_out(exact, Discipline.EXACT) is exact
    expandable = handed_out(exact, Discipline.EXPANDABLE)
    assert expandable.pools == (EXPANDABLE,)
    assert expandable.programs == exact.programs


def test_a_pool_with_a_capacity_of_its_own_has_that() -> None:
    schedule = one_after_the_other(1)
    given = replace(CACHING, capacity_bytes=7)
    assert capacity_bytes(given, schedule, program(schedule), cluster(100)) == 7
    host = Pool(name="host", place=Place.HOST)
    assert capacity_bytes(host, schedule, program(schedule), cluster(100)) is None


def test_ranks_of_a_node_share_its_pool_in_equal_parts() -> None:
    of_node = Pool(name="host", place=Place.HOST, scope=Scope.NODE, capacity_bytes=1000)
    four = replace(cluster(7), gpus_per_node=4)
    for ranks, part in ((8, 250), (2, 500)):
        schedule = communicating(data=ranks)
        assert capacity_bytes(of_node, schedule, program(schedule), four) == part
