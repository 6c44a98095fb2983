"""The torch backend: start ranks, or join those of torchrun, and run a job on them."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import distributed, nn

from zsim.backend.backend import BackendTraits, Job, RefusedError
from zsim.trace.trace import Trace
from zsim_torch import admission, loss_journal
from zsim_torch.capability import of_memory
from zsim_torch.execute.poison import NanOrigin, PoisonError
from zsim_torch.feed import feed
from zsim_torch.job_module import JobModule
from zsim_torch.local_devices import slowest_operation_s
from zsim_torch.module.unit import UnitChoice
from zsim_torch.rank_result import merged
from zsim_torch.supervise.process_group import DeviceChoice, under_torchrun
from zsim_torch.supervise.rank_failure import RankFailedError
from zsim_torch.supervise.ranks import TIMEOUT_S, RankPool, run_ranks
from zsim_torch.train import Option, Trained, train


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """Settings of a rank."""

    job: Job
    seed: int
    data: Path | None
    poison: bool
    witness: bool = False
    journal: Path | None = None
    offload_path: Path | None = None
    device_budget: int | None = None
    observe: bool = True


class TorchBackend:
    """Runs a job on real ranks: local processes, or the processes that torchrun started.

    A transformer is built from plain torch modules and trained on text; a schedule without units
    needs no model. Under torchrun every process calls `run` as one rank, and gets the trace of all
    ranks.

    Attributes:
        data: the text to train on, with bytes as tokens; by default one that ships with the
            package.
        timeout_s: seconds without progress on any rank after which a run fails, in addition to the
            time of the schedule's largest operation on slow cores.
        poison: fill invalid memory with NaN, and delay ranks at random; a run that reads invalid
            memory fails.
        witness: record the operators that torch runs on each rank, for `zsim check --against`.
        unobserved: do not watch live storages, so that steps take as long as in a training.
        offload_path: folder of the files that stand for NVMe, on the drive to use; by default the
            temporary folder.
        device_budget: limit of live bytes on the device of a rank, as counted by an observer; by
            default the machine's memory.
        device: device of the ranks; see `zsim_torch.supervise.process_group`.
        pool: local ranks to use for every run; by default each run starts its own.
        progress: called with the number of steps that all local ranks have finished, and the total.

    Raises:
        TextError: `data` cannot be read, or is empty.
        RefusedError: poison and witness are both set.
    """

    name = "torch"
    traits = BackendTraits(
        is_real=True,
        options=frozenset(
            {
                "data",
                "timeout_s",
                "poison",
                "witness",
                "unobserved",
                "progress",
                "offload_path",
                "device_budget",
            }
        ),
    )

    def __init__(  # noqa: PLR0913  (options, by keyword)
        self,
        *,
        data: Path | None = None,
        timeout_s: float = TIMEOUT_S,
        poison: bool = False,
        witness: bool = False,
        unobserved: bool = False,
        offload_path: Path | None = None,
        device_budget: int | None = None,
        device: DeviceChoice = DeviceChoice.AUTO,
        pool: RankPool | None = None,
        progress: Callable[[int, int], object] | None = None,
    ) -> None:
        if data is not None:
            admission.look_at(data)
        if poison and witness:
            raise RefusedError("witness: must be off with poison, whose copies it would record")
        self.data = None if data is None else data.absolute()
        self.timeout_s = timeout_s
        self.poison = poison
        self.witness = witness
        self.unobserved = unobserved
        self.offload_path = None if offload_path is None else offload_path.absolute()
        self.device_budget = device_budget
        self.device = device
        self.pool = pool
        self.progress = progress

    def refusal(self, job: Job) -> str | None:
        """Return why `job` cannot run here, in one line, or None."""
        job, torchrun = _named(job), under_torchrun()
        reason = admission.refusal(job, device=self.device, torchrun=torchrun, data=self.data)
        local = job.schedule.mesh.size if torchrun is None else torchrun.local_ranks
        return reason or of_memory(
            job.schedule,
            job.schedule.programs,
            local_ranks=local,
            witness=self.witness,
            offload_path=self.offload_path,
            device_budget=self.device_budget,
        )

    def run(self, job: Job, *, seed: int) -> Trace:
        """Train for the steps of `job` and return the trace of all ranks.

        Raises:
            RefusedError: `refusal` returns a reason; nothing was started.
            RankFailedError: a rank raised, died or made no progress for too long.
        """
        reason = self.refusal(job)
        if reason is not None:
            raise RefusedError(reason)
        job = _named(job)
        ranks = job.schedule.mesh.size
        if self.pool is not None and self.pool.ranks != ranks:
            raise RefusedError(
                f"ranks: the schedule is for {ranks}, the pool has {self.pool.ranks}"
            )
        work = Assignment(
            job=job,
            seed=seed,
            data=self.data,
            poison=self.poison,
            witness=self.witness,
            observe=not self.unobserved,
            offload_path=self.offload_path,
            device_budget=self.device_budget,
        )
        told = self.progress or (lambda done, steps: None)

        def on_steps(done: int) -> None:
            told(done, job.steps)

        if self.pool is not None:
            traces = self.pool.run(train_on_rank, work, on_steps=on_steps)
        else:
            traces = self._run_kept(work, ranks, on_steps)
        told(job.steps, job.steps)
        return merged(traces)

    def _run_kept(
        self, work: Assignment, ranks: int, on_steps: Callable[[int], None]
    ) -> tuple[Trace, ...]:
        """Run `work` on new ranks; if it fails, keep its losses in a file.

        Raises:
            RankFailedError: a rank failed; the message names the file.
        """
        timeout_s = self.timeout_s + slowest_operation_s(work.job.schedule, ranks)
        journal = loss_journal.begin()
        work = replace(work, journal=journal)
        try:
            traces = run_ranks(
                train_on_rank,
                work,
                ranks=ranks,
                timeout_s=timeout_s,
                device=self.device,
                on_steps=on_steps,
            )
        except RankFailedError as failure:
            if where := loss_journal.kept(journal):
                failure.args = (f"{failure}; {where}",)
            raise
        except KeyboardInterrupt:
            raise KeyboardInterrupt(loss_journal.kept(journal)) from None
        journal.unlink(missing_ok=True)
        return traces


def _named(job: Job) -> Job:
    """Return `job` with named counts, if units choose experts: their numbers depend on data."""
    if not admission.runs_units(job.schedule):
        return job
    return replace(job, schedule=job.written, named=None, binding=None, excess=None)


def train_on_rank(work: Assignment) -> Trace:
    """Run `work` as this process's rank of the process group; return the trace of this rank."""
    trained = trained_on_rank(work)
    trained.close()
    if work.poison:
        _need_numbers(trained.nan_origin)
    return trained.trace


def trained_on_rank(work: Assignment) -> Trained:
    """Run `work` as this process's rank, without deleting its files."""
    job, seed = work.job, work.seed
    module: nn.Module = nn.Sequential(nn.Identity())  # if the schedule runs no unit
    units: Sequence[UnitChoice] = ("0",)
    batches: Iterable[object] = ()
    option = Option(
        observe=work.observe,
        poison=work.poison,
        witness=work.witness,
        write_back=False,
        offload_path=work.offload_path,
        device_budget=work.device_budget,
        journal=work.journal,
    )
    if job.model.architecture is not None:
        made = JobModule.of(job, seed=seed)
        module, units = made.module, made.units
        rank = distributed.get_rank() if distributed.is_initialized() else 0
        batches = feed(job, rank, data=work.data, seed=seed)
        option = replace(option, initial=made.initial)
    return train(module, units, job.schedule, batches, steps=job.steps, seed=seed, option=option)


def _need_numbers(own: NanOrigin | None) -> None:
    """Raise PoisonError on every rank if a rank has read invalid memory.

    The message names the first operation that wrote NaN.
    """
    seen: list[NanOrigin | None] = [own]
    if distributed.is_initialized():
        seen = [None] * distributed.get_world_size()
        distributed.all_gather_object(seen, own)
    found = [nan_origin for nan_origin in seen if nan_origin is not None]
    if found:
        raise PoisonError(f"memory that is not valid was read: no number first at {min(found)}")
