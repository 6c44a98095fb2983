"""What a source takes of memory: by its book where that says it, else by a run."""

from zsim.backend import Job, load
from zsim.footprint import DependsOnTimeError, Footprint, footprint, footprint_of_run
from zsim.shell.source import Source


def job_of(source: Source) -> Job | None:
    """The job that `source` describes; None if it is a schedule without model or cluster."""
    document = source.document
    if document.model is None or document.cluster is None:
        return None
    return Job(
        schedule=document.schedule,
        model=document.model,
        cluster=document.cluster,
        steps=document.steps,
    )


def footprint_of(job: Job) -> Footprint:
    """The footprint of `job`, simulated only where it depends on time."""
    try:
        return footprint(job)
    except DependsOnTimeError:
        return footprint_of_run(job, load("sim")().run(job, seed=0))
