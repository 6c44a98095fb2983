"""Runs jobs on real ranks with faults planted in the executor."""

from contextlib import ExitStack

from planted_host import FAULTS
from torch import distributed
from witnessed_jobs import job

from zsim.trace.trace import Trace
from zsim_torch.backend import Assignment, train_on_rank


def traced(name: str, fault: str | None) -> Trace:
    """Run the job `name` on this rank, with a fault or without, and record it."""
    with ExitStack() as patches:
        if fault is not None:
            found = FAULTS[fault]
            if found.rank in (None, distributed.get_rank()):
                found.plant(patches)
        return train_on_rank(
            Assignment(job=job(name), seed=0, data=None, poison=False, witness=True)
        )
