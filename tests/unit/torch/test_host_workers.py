"""Threads of the host: order, overlap, failures and their end."""

import threading
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zsim.schedule.operation import Previous
from zsim_torch.execute.flights import StreamEntry
from zsim_torch.execute.host_memory import FileSpace
from zsim_torch.execute.host_workers import HostWorkError, HostWorkers
from zsim_torch.execute.range_file import ALIGNMENT
from zsim_torch.execute.streams import CpuStreams

PATIENCE_S = 20.0


def after_waiting(begin: threading.Event, done: list[str], name: str) -> Callable[[], None]:
    """An operation that ends no sooner than somebody lets it."""

    def act() -> None:
        begin.wait(PATIENCE_S)
        done.append(name)

    return act


def test_threads_work_beside_each_other_and_beside_the_host() -> None:
    workers = HostWorkers(["reads", "adam", "writes"])
    meeting = threading.Barrier(4)

    def meet() -> None:
        meeting.wait(PATIENCE_S)

    for stream in ("reads", "adam", "writes"):
        workers.hand_over(stream, 0, stream, meet)
    meeting.wait(PATIENCE_S)  # all four are at work at one time
    workers.drain()
    workers.close()


def test_a_thread_does_its_own_in_order_and_waits_for_what_others_do() -> None:
    workers, done = HostWorkers(["one", "two"]), list[str]()
    begin = threading.Event()
    workers.hand_over("a", 0, "one", after_waiting(begin, done, "a"))
    workers.hand_over("b", 0, "two", lambda: done.append("b"), after=["a"])
    workers.hand_over("c", 0, "two", lambda: done.append("c"))
    assert done == []
    begin.set()
    workers.drain()
    assert done == ["a", "b", "c"]
    workers.close()


def test_the_host_goes_on_and_waits_where_it_is_the_stream() -> None:
    streams, done = CpuStreams(HostWorkers(["adam"])), list[str]()
    begin = threading.Event()

    streams.compute(
        StreamEntry(operation="update", stream="adam"), after_waiting(begin, done, "update")
    )
    streams.compute(
        StreamEntry(operation="forward", stream="compute"), lambda: done.append("forward")
    )
    assert done == ["forward"]
    begin.set()
    streams.compute(
        StreamEntry(operation="upload", stream="compute", after=("update",)),
        lambda: done.append("upload"),
    )
    assert done == ["forward", "update", "upload"]
    streams.workers.close()


def test_a_free_on_a_thread_waits_there_and_on_the_device_on_the_host() -> None:
    streams, done = CpuStreams(HostWorkers(["adam", "writes"])), list[str]()
    begin = threading.Event()

    streams.compute(
        StreamEntry(operation="update", stream="adam"), after_waiting(begin, done, "update")
    )
    busy = streams.home_waits("writes", "slot", ["update"], lambda: done.append("drop slot"))
    assert done == []
    assert not any(each.is_over() for each in busy)
    begin.set()
    assert streams.home_waits("compute", "x", ["update"], lambda: done.append("drop x")) == ()
    assert done.index("update") < done.index("drop x")
    streams.drain()
    assert sorted(done) == ["drop slot", "drop x", "update"]
    streams.workers.close()


def test_an_edge_to_the_step_before_waits_for_its_job() -> None:
    workers, done = HostWorkers(["reads", "writes"]), list[str]()
    begin = threading.Event()
    workers.hand_over("write", 0, "writes", after_waiting(begin, done, "write"))
    workers.end_step()
    workers.hand_over("read", 1, "reads", lambda: done.append("read"), after=[Previous("write")])
    begin.set()
    workers.drain()
    assert done == ["write", "read"]
    workers.close()


def test_a_failure_names_its_operation_wherever_somebody_waits() -> None:
    workers, done = HostWorkers(["reads", "adam"]), list[str]()
    begin = threading.Event()

    def fail() -> None:
        begin.wait(PATIENCE_S)
        raise OSError(28, "No space left on device")

    workers.hand_over("step/read0", 3, "reads", fail)
    workers.hand_over("step/read1", 3, "reads", lambda: done.append("read1"))
    workers.hand_over("step/update", 3, "adam", lambda: done.append("update"), after=["step/read1"])
    begin.set()
    why = r"^step/read0 in step 3: \[Errno 28\] No space left on device$"
    with pytest.raises(HostWorkError, match=why):
        workers.wait(workers.named(["step/update"]))
    with pytest.raises(HostWorkError, match=why):
        workers.hand_over("step/next", 3, "adam", lambda: None)
    with pytest.raises(HostWorkError, match=why):
        workers.drain()
    assert done == []
    workers.close()


def test_the_end_of_a_run_does_not_wait_for_what_was_never_begun() -> None:
    workers, done = HostWorkers(["adam"]), list[str]()
    begin = threading.Event()
    workers.hand_over("a", 0, "adam", after_waiting(begin, done, "a"))
    for number in range(100):
        workers.hand_over(f"b{number}", 0, "adam", lambda: done.append("b"))
    threading.Timer(0.05, begin.set).start()
    workers.close()
    assert done == ["a"]


class Never:
    """Somebody who is never done."""

    def wait(self) -> None:
        raise AssertionError

    def is_over(self) -> bool:
        return False


@settings(deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 5)), max_size=40))
def test_ranges_of_a_file_never_overlap_and_are_used_again(drawn: list[tuple[bool, int]]) -> None:
    space, held = FileSpace(), list[tuple[int, int]]()
    most = 0
    for takes, blocks in drawn:
        if takes or not held:
            size = blocks * ALIGNMENT
            start, _ = space.take(size)
            assert all(start + size <= low or high <= start for low, high in held)
            held.append((start, start + size))
            most = max(most, space.end)
        else:
            low, high = held.pop(blocks % len(held))
            space.give_back(low, high - low)
    if not held:
        start, _ = space.take(max(most, 1))
        assert start == 0


def test_a_range_tells_its_next_buffer_what_still_uses_it() -> None:
    space, user = FileSpace(), Never()
    start, _ = space.take(2 * ALIGNMENT)
    space.give_back(start, 2 * ALIGNMENT, [user])
    assert space.take(ALIGNMENT) == (0, [user])
    assert space.take(ALIGNMENT) == (ALIGNMENT, [user])
    assert space.take(ALIGNMENT) == (2 * ALIGNMENT, [])
