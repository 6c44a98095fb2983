"""The torch backend: starts ranks, or joins those that torchrun started, and runs a job on them."""

import atexit
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from torch import distributed, nn

from zsim.backend import Job, RefusedError
from zsim.trace import Trace
from zsim_torch import admission
from zsim_torch.failure import Cause, RankFailedError, failure_of
from zsim_torch.feed import feed
from zsim_torch.gpt import gpt, initial_value
from zsim_torch.machine import slowest_operation_s
from zsim_torch.process_group import DeviceChoice, Placement, join, under_torchrun
from zsim_torch.ranks import TIMEOUT_S, RankPool
from zsim_torch.train import Option, merged, train

_GRACE_S: Final = 3.0
"""How long a rank that lost its peer waits under torchrun, so that the origin is heard first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """What every rank is given."""

    job: Job
    seed: int
    data: Path | None
    poison: bool


class TorchBackend:
    """Runs a job on real ranks: local processes, or the processes that torchrun started.

    A GPT is built in plain torch modules from the model's architecture and trained on text; a
    schedule that runs no unit needs no model. Under torchrun every process calls `run`, takes the
    rank that torchrun gave it, and gets the trace of all.

    Attributes:
        data: the text to train on, bytes as tokens; by default one that ships with the package.
        timeout_s: seconds without progress on any rank after which a run has failed, beside those
            that the largest operation of the schedule may take on slow cores.
        poison: fill memory that is not valid with what is no number, and delay ranks at random.
        device: where ranks compute; see `zsim_torch.process_group`.
        pool: local ranks to use for every run; by default each run starts its own.

    Raises:
        TextError: `data` is not a file that can be read, or is empty.
    """

    name = "torch"

    def __init__(
        self,
        *,
        data: Path | None = None,
        timeout_s: float = TIMEOUT_S,
        poison: bool = False,
        device: DeviceChoice = DeviceChoice.AUTO,
        pool: RankPool | None = None,
    ) -> None:
        if data is not None:
            admission.look_at(data)
        self.data = data
        self.timeout_s = timeout_s
        self.poison = poison
        self.device = device
        self.pool = pool

    def refusal(self, job: Job) -> str | None:
        """One line that says why `job` cannot run here, or None if it can."""
        return admission.refusal(job, device=self.device, torchrun=under_torchrun(), data=self.data)

    def run(self, job: Job, *, seed: int) -> Trace:
        """Train for the steps of `job`; the trace has every rank.

        Raises:
            RefusedError: `refusal` has something to say; nothing was started.
            RankFailedError: a rank raised, died or made no progress for too long.
        """
        reason = self.refusal(job)
        if reason is not None:
            raise RefusedError(reason)
        work = Assignment(job=job, seed=seed, data=self.data, poison=self.poison)
        placement = under_torchrun()
        if placement is None and self.pool is not None:
            return merged(self.pool.run(train_on_rank, work))
        ranks = job.schedule.mesh.size
        local_ranks = ranks if placement is None else placement.local_ranks
        timeout_s = self.timeout_s + slowest_operation_s(job.schedule, local_ranks)
        if placement is not None:
            return self._run_as(placement, work, timeout_s)
        with RankPool(ranks, timeout_s=timeout_s, device=self.device) as pool:
            return merged(pool.run(train_on_rank, work))

    def _run_as(self, placement: Placement, work: Assignment, timeout_s: float) -> Trace:
        """Run as the rank at `placement` of those that torchrun started."""
        try:
            if not distributed.is_initialized():
                join(placement, self.device, timeout_s=timeout_s)
                atexit.register(distributed.destroy_process_group)
            own = train_on_rank(work)
            traces: list[Trace | None] = [None] * placement.ranks
            distributed.all_gather_object(traces, own)
        except Exception as error:
            failure = failure_of(placement.rank, error)
            if failure.cause is Cause.LOST_ITS_PEER:
                time.sleep(_GRACE_S)  # torchrun ends this process when it sees the origin fail
            raise RankFailedError(failure, [failure.details]) from error
        return merged([trace for trace in traces if trace is not None])


def train_on_rank(work: Assignment) -> Trace:
    """Do `work` as this process's rank of the process group; the trace has this rank alone."""
    job, seed = work.job, work.seed
    module: nn.Module = nn.Sequential(nn.Identity())  # where no unit runs
    units: tuple[str, ...] = ("0",)
    batches: Iterable[object] = ()
    option = Option(poison=work.poison, write_back=False)
    shape = job.model.architecture
    if shape is not None:
        module = decoder = gpt(shape, seed=None)
        sizes = {parameter.name: parameter.shape for parameter in job.model.parameters}
        units = decoder.units
        batches = feed(job, distributed.get_rank(), data=work.data, seed=seed)
        option = replace(
            option, initial=lambda name: initial_value(shape, name, sizes[name], seed=seed)
        )
    trained = train(module, units, job.schedule, batches, steps=job.steps, seed=seed, option=option)
    return trained.trace
