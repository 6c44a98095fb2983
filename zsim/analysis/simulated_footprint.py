"""What a job takes of memory: by its book where that says it, else by a run."""

from zsim.analysis.memory_footprint import (
    DependsOnTimeError,
    Footprint,
    footprint,
    footprint_of_run,
)
from zsim.backend.backend import Job, load


def footprint_of(job: Job) -> Footprint:
    """The footprint of `job`, simulated only where it depends on time."""
    try:
        return footprint(job)
    except DependsOnTimeError:
        return footprint_of_run(job, load("sim")().run(job, seed=0))
