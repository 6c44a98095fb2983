"""zsim's own executor on the streams of the pretended device: its code for CUDA, unchanged."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import torch
import torch.distributed as dist
from thread_clocks import ThreadClocks
from torch import nn

from zsim.backend.backend import Job
from zsim.schedule.operation import Action, Compute, walk
from zsim.schedule.schedule import Schedule
from zsim_record import recording
from zsim_record.record.tape import Tape
from zsim_torch.execute.cuda_streams import CudaStreams
from zsim_torch.execute.executor import Executor
from zsim_torch.execute.host_memory import HostPools
from zsim_torch.execute.host_workers import HostWorkers, worker_streams
from zsim_torch.execute.poison import Poison
from zsim_torch.execute.rank_machine import Bench
from zsim_torch.execute.shard_compute import Initial
from zsim_torch.feed import feed
from zsim_torch.module.transformer import initial_value, transformer
from zsim_torch.module.unit import TorchUnit, resolve
from zsim_torch.run_option import given_by_strategy


def recorded(
    job: Job,
    *,
    rank: int = 0,
    keeps_trace: bool = True,
    has_caller: bool = False,
    on_step: Callable[[Tape, Executor], object] | None = None,
) -> Tape:
    """Record setup and steps of `job` on one rank.

    A caller makes the batches, and reads the losses, on a stream of its own. `on_step` is called
    when a step has been issued.
    """
    shape = job.model.architecture
    assert shape is not None
    sizes = {parameter.name: parameter.shape for parameter in job.model.parameters}
    module = transformer(shape, seed=None)
    run = RecordedRun(
        job.schedule,
        rank,
        resolve(module, module.units),
        lambda name: initial_value(shape, name, sizes[name], seed=0),
        feed(job, rank, data=None, seed=0),
    )
    with (
        recording(world=job.schedule.mesh.size, rank=rank, cuda=True) as tape,
        ThreadClocks(tape).kept(),
    ):
        executor = run.start(keeps_trace=keeps_trace)
        for step in range(job.steps):
            run.step(step, has_caller=has_caller)
            if on_step is not None:
                on_step(tape, executor)
        executor.machine.streams.drain()
        executor.machine.streams.workers.close()
    return tape


@dataclass
class RecordedRun:
    """A schedule on the executor for CUDA, inside a recording."""

    schedule: Schedule
    rank: int
    units: tuple[TorchUnit, ...]
    initial: Initial
    batches: Iterator[Any]

    def start(self, *, keeps_trace: bool) -> Executor:
        """Run setup."""
        schedule, device = self.schedule, torch.device("cuda", 0)
        dist.init_process_group("nccl")
        program = schedule.program_of(self.rank)
        pools = HostPools(schedule, program, folder=Path(gettempdir()), device=device, poison=False)
        bench = Bench(schedule, program, rank=self.rank, device=device, observer=None, pools=pools)
        workers = HostWorkers(worker_streams(schedule, program))
        bench.streams = CudaStreams(device, schedule.streams, workers)  # as for a "cuda" device
        self.given: list[torch.Tensor] = []
        self.losses: list[torch.Tensor] = []
        self.executor = bench.executor(
            self.units,
            initial=self.initial,
            next_batch=lambda: self.given.pop(0) if self.given else self._batch(),
            on_loss=self.losses.append,
            on_norm=lambda *_: None,
            poison=Poison(None),
        )
        self.executor.keeps_trace = keeps_trace
        self.executor.run_setup()
        return self.executor

    def _batch(self) -> torch.Tensor:
        batch: torch.Tensor = next(self.batches).long().to("cuda", non_blocking=True)
        return batch

    def step(self, step: int, *, has_caller: bool) -> None:
        """Run a step, with its caller on the default stream."""
        streams, program = self.executor.machine.streams, self.executor.machine.program
        if has_caller:
            loads = [
                each
                for each in walk(program.step)
                if isinstance(each, Compute) and each.action is Action.LOAD
            ]
            self.given += [self._batch() for _ in loads]
            streams.follow_caller()
        given = given_by_strategy(self.schedule)
        self.executor.run_step(step, {name: at(step) for name, at in given.items()})
        if has_caller:
            streams.hand_out(self.losses)
            torch.stack(self.losses).mean()
        self.losses.clear()


def recorded_schedule(
    schedule: Schedule, *, steps: int, on_step: Callable[[Tape, Executor], object]
) -> Tape:
    """Record a schedule that runs no unit, on rank 0."""
    run = RecordedRun(
        schedule, 0, resolve(nn.Identity(), ("",)), dict[str, torch.Tensor]().__getitem__, iter(())
    )
    with recording(world=schedule.mesh.size, rank=0, cuda=True) as tape, ThreadClocks(tape).kept():
        executor = run.start(keeps_trace=False)
        for step in range(steps):
            run.step(step, has_caller=False)
            on_step(tape, executor)
    return tape
