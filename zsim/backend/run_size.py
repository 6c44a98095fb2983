"""The size of a run, which is refused before it begins if it is beyond the limits."""

from zsim.backend.backend import Job
from zsim.limits import limits


def too_large(job: Job, *, apart: bool = False) -> str | None:
    """Return in one line why `job` is larger than the limits allow, or None.

    It is a slip of an exponent in the number of ranks or steps; `apart` says that every rank is
    computed by itself.
    """
    most, ranks = limits(), job.schedule.mesh.size
    if ranks > most.ranks:
        return f"ranks: {ranks} must be at most {most.ranks:,}"
    longest = max((len(program.by_id) for program in job.schedule.programs), default=0)
    every = longest * (ranks if apart else 1)
    if every * job.steps <= most.simulated_operations:
        return None
    each = f"{longest:,} operations" + (f" on {ranks:,} ranks, each by itself" * apart)
    return (
        f"steps: {job.steps} steps of {each} must be at most {most.simulated_operations:,} in all"
    )
