"""What a schedule takes of memory is known before it runs, where frees do not depend on time."""

import pytest

from zsim.analysis.memory_footprint import DependsOnTimeError, footprint, footprint_of_run
from zsim.files.source import Changes, read
from zsim_des import SimBackend

SETTINGS = [
    (),
    ("zero.stage=0", "cluster.allocator=expandable"),
    ("zero.stage=2", "cluster.gpu_memory=3 MB"),
    ("zero.stage=3", "cluster.gpu_memory=6 MB", "cluster.allocator=exact"),
]


@pytest.mark.parametrize("settings", SETTINGS)
def test_a_footprint_is_that_of_the_run(settings: tuple[str, ...]) -> None:
    job = read("tiny", Changes(settings=settings, steps=2)).job()
    assert footprint(job) == footprint_of_run(job, SimBackend().run(job, seed=0))


def test_one_that_depends_on_time_is_not_guessed() -> None:
    settings = ("zero.emulate=fsdp1", "zero.bucket_elements=500_000_000")
    job = read("tiny", Changes(settings=settings)).job()
    with pytest.raises(DependsOnTimeError, match="deferred"):
        footprint(job)
