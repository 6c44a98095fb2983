"""Time of reads and writes of drives: what is in flight, and what the drives sustain."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zsim.cluster.cluster import ClusterError
from zsim.cluster.host_side import Drives
from zsim.compute.drive import DriveAccess, drive_bytes_per_s, wear_per_day

SECOND = 10**12
EIGHT = Drives(
    count=8,
    capacity_bytes=10**12,
    read_bytes_per_s=35 * 10**8,
    write_bytes_per_s=2 * 10**9,
    latency_ps=100 * 10**6,
)
ACCESSES = st.builds(
    DriveAccess,
    block_bytes=st.sampled_from([4096, 2**17, 2**20, 2**23]),
    queue_depth=st.sampled_from([1, 4, 32]),
    threads=st.sampled_from([1, 4, 16]),
    drives=st.sampled_from([None, 1, 3]),
    waves=st.booleans(),
)


def test_enough_in_flight_keeps_all_drives_busy_each_way() -> None:
    access = DriveAccess(queue_depth=32, threads=8)
    assert drive_bytes_per_s(EIGHT, access, writes=False) == 28 * 10**9
    assert drive_bytes_per_s(EIGHT, access, writes=True) == 16 * 10**9


def test_one_small_read_takes_the_latency_and_its_own_transfer() -> None:
    one = DriveAccess(block_bytes=4096, queue_depth=1)
    rate = drive_bytes_per_s(EIGHT, one, writes=False)
    assert 4096 / rate == pytest.approx(100e-6 + 4096 / 3.5e9, rel=1e-4)


def test_a_block_is_on_as_many_drives_as_it_has_stripes() -> None:
    # One block of 4 MiB in flight: 8 stripes of 512 KiB, on 8 drives at once.
    one = DriveAccess(block_bytes=2**22, queue_depth=1)
    rate = drive_bytes_per_s(EIGHT, one, writes=False)
    assert 2**22 / rate == pytest.approx(100e-6 + 2**22 / 28e9, rel=1e-4)


@given(ACCESSES, st.booleans())
def test_no_access_is_faster_than_its_drives_and_more_in_flight_is_never_slower(
    access: DriveAccess,
    writes: bool,
) -> None:
    rate = drive_bytes_per_s(EIGHT, access, writes=writes)
    count = access.drives or EIGHT.count
    assert 0 < rate <= count * EIGHT.rate(writes=writes)
    for change in ({"threads": 2 * access.threads}, {"queue_depth": 2 * access.queue_depth}):
        more = DriveAccess(
            block_bytes=access.block_bytes,
            queue_depth=change.get("queue_depth", access.queue_depth),
            threads=change.get("threads", access.threads),
            drives=access.drives,
            waves=access.waves,
        )
        assert drive_bytes_per_s(EIGHT, more, writes=writes) >= rate


@given(ACCESSES, st.booleans())
def test_waves_are_never_faster_than_a_queue_that_is_refilled(
    access: DriveAccess,
    writes: bool,
) -> None:
    refilled, waves = (
        drive_bytes_per_s(
            EIGHT,
            DriveAccess(
                block_bytes=access.block_bytes,
                queue_depth=access.queue_depth,
                threads=access.threads,
                drives=access.drives,
                waves=each,
            ),
            writes=writes,
        )
        for each in (False, True)
    )
    assert waves <= refilled


@pytest.mark.parametrize(
    ("access", "drives", "said"),
    [
        (
            DriveAccess(drives=9),
            EIGHT,
            "drive access: drives 9 must be at most 8, those of a node",
        ),
        (
            DriveAccess(),
            Drives(count=1, capacity_bytes=1),
            "drives: read_bandwidth: not known of this node, needed to use NVMe",
        ),
    ],
)
def test_what_cannot_be_read_is_said_in_a_line(
    access: DriveAccess, drives: Drives, said: str
) -> None:
    with pytest.raises(ClusterError) as caught:
        drive_bytes_per_s(drives, access, writes=False)
    assert str(caught.value) == said


def test_an_access_needs_blocks() -> None:
    with pytest.raises(ClusterError, match="drive access: queue_depth 0 must be at least 1"):
        DriveAccess(queue_depth=0)


def test_a_day_of_steps_takes_a_share_of_what_drives_are_rated_for() -> None:
    # 8 drives of 7 PB; 56 TB a day are a thousandth of 56 PB.
    rated = replace(EIGHT, endurance_bytes=7 * 10**15)
    step_s = 86.4
    written = 56 * 10**12 // 1000
    assert wear_per_day(written, step_s, rated) == pytest.approx(1e-3)
    assert wear_per_day(written, step_s, EIGHT) is None
    with pytest.raises(ClusterError, match="step_s 0 must be more than 0"):
        wear_per_day(written, 0, rated)
