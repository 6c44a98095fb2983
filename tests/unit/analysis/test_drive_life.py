"""Bytes that offloaded training writes to drives in a day, and how long they are rated for it."""

from dataclasses import replace

import pytest

import zsim
from zsim.analysis.drive_life import DriveLife, drive_life, written_bytes
from zsim.backend.backend import Job

DAY_S = 86_400


@pytest.fixture(scope="module")
def job() -> Job:
    """Masters and moments in files, on a node whose drives are rated."""
    return zsim.load("tiny", {"offload.optimizer": "nvme", "train.precision": "bf16"}).job


def test_a_rank_writes_masters_and_both_moments_of_its_shard_in_fp32(job: Job) -> None:
    ranks = job.schedule.mesh.size
    parameters = sum(each.elements for each in job.model.parameters)
    assert 12 * parameters <= written_bytes(job) * ranks <= 12 * parameters * 1.01  # with padding


def test_drives_last_until_all_ranks_of_the_node_have_written_what_they_are_rated_for(
    job: Job,
) -> None:
    found = drive_life(job, written_bytes(job), 2.0)
    drives = job.cluster.drives
    assert found is not None
    assert drives is not None
    assert drives.endurance_bytes is not None
    assert found.days is not None
    assert found.bytes_per_day == job.schedule.mesh.size * written_bytes(job) * DAY_S / 2
    assert found.days * found.bytes_per_day == pytest.approx(drives.count * drives.endurance_bytes)
    slower = drive_life(job, written_bytes(job), 4.0)
    assert slower is not None
    assert slower.days == pytest.approx(2 * found.days)


def test_nothing_is_said_of_a_run_that_writes_no_files_or_has_no_clock(job: Job) -> None:
    assert drive_life(job, 0, 2.0) is None
    assert drive_life(job, 1, 0.0) is None
    bare = replace(job, cluster=replace(job.cluster, drives=None))
    assert drive_life(bare, 1, 2.0) is None


@pytest.mark.parametrize(
    ("drives", "days", "text"),
    [
        (8, 730.0, "1 GB a day to each of 8 drives, which bear it for 2.0 years as rated"),
        (8, 100.4, "1 GB a day to each of 8 drives, which bear it for 100 days as rated"),
        (1, 1.0, "8 GB a day to one drive, which bears it for 24 hours as rated"),
        (1, None, "8 GB a day to one drive, whose endurance is not known"),
    ],
)
def test_how_long_drives_last_is_said_in_years_days_or_hours(
    drives: int, days: float | None, text: str
) -> None:
    assert DriveLife(drives=drives, bytes_per_day=8e9, days=days).text() == text
