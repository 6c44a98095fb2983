"""Memory that a job takes: by its ledger where that says it, else by a run."""

from zsim.analysis.memory_footprint import (
    DependsOnTimeError,
    Footprint,
    footprint,
    footprint_of_run,
)
from zsim.backend.backend import Job, load


def footprint_of(job: Job) -> Footprint:
    """Return the footprint of `job`, simulated only where it depends on time."""
    try:
        return footprint(job)
    except DependsOnTimeError:
        return footprint_of_run(job, load("sim")().run(job, seed=0))
