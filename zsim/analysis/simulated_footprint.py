"""Memory footprint of a job: from its memory ledger if that suffices, else from a simulation."""

from zsim.analysis.memory_footprint import (
    DependsOnTimeError,
    Footprint,
    footprint,
    footprint_of_run,
)
from zsim.backend.backend import Job, simulator


def footprint_of(job: Job) -> Footprint:
    """Return the footprint of `job`; simulate the job only if its memory depends on timing."""
    try:
        return footprint(job)
    except DependsOnTimeError:
        return footprint_of_run(job, simulator().run(job, seed=0))
