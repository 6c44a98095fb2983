"""Memory, streams and communicators of a rank."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Self

import torch

from zsim.schedule.schedule import Program, Schedule
from zsim_torch.execute.collectives import ProcessGroups
from zsim_torch.execute.compute import Computer, RankCompute
from zsim_torch.execute.cuda_streams import CudaStreams
from zsim_torch.execute.executor import Executor, RankMachine
from zsim_torch.execute.freed_memory import keep_freed
from zsim_torch.execute.host_memory import HostPools
from zsim_torch.execute.host_workers import HostWorkers, worker_streams
from zsim_torch.execute.live_memory import LiveMemory, MemorySetting
from zsim_torch.execute.poison import Poison
from zsim_torch.execute.shard_compute import Initial
from zsim_torch.execute.streams import CpuStreams, Streams
from zsim_torch.module.unit import TorchUnit
from zsim_torch.module.visit import LaterUses
from zsim_torch.observe.observer import Observer


class Bench:
    """Memory, streams and communicators of a rank, and its observer."""

    def __init__(
        self,
        schedule: Schedule,
        program: Program,
        *,
        rank: int,
        device: torch.device,
        observer: Observer | None,
        pools: HostPools,
    ) -> None:
        self.schedule = schedule
        self.program = program
        self.device = device
        self.observer = observer
        self.coordinates = schedule.mesh.coordinates(rank)
        self.communicators = ProcessGroups(schedule.mesh, schedule.groups, rank, device)
        self.pools = pools
        workers = HostWorkers(worker_streams(schedule, program))
        self.streams: Streams = CpuStreams(workers)
        if device.type == "cpu":
            keep_freed()
        else:
            self.streams = CudaStreams(device, schedule.streams, workers)

    def executor(
        self,
        units: Sequence[TorchUnit],
        *,
        initial: Initial,
        next_batch: Callable[[], object],
        on_loss: Callable[[torch.Tensor], None],
        on_norm: Callable[[torch.Tensor, float], None],
        poison: Poison,
        on_issue: Callable[[int, str], None] | None = None,
    ) -> Executor:
        """Return an executor that is ready to run setup."""
        setting = MemorySetting(
            device=self.device,
            making=self.observer.executor if self.observer else _unwatched,
            on_home=self.streams.on,
            pools=self.pools,
            poison=poison.generator is not None,
            is_observed=self.observer is not None,
        )
        memory = LiveMemory(self.schedule, self.program, self.coordinates, setting)
        work = RankCompute(
            schedule=self.schedule,
            coordinates=self.coordinates,
            memory=memory,
            units={unit.key: unit for unit in units},
            last=units[-1].key,
            forecast=LaterUses.of(self.program),
            initial=initial,
            next_batch=next_batch,
            on_loss=on_loss,
            on_norm=on_norm,
            observed=self.observer is not None,
        )
        machine = RankMachine(
            schedule=self.schedule,
            program=self.program,
            coordinates=self.coordinates,
            memory=memory,
            streams=self.streams,
            communicators=self.communicators,
            computer=Computer(work),
            poison=poison,
        )
        scalars = {scalar.name: scalar.initial for scalar in self.schedule.scalars}
        executor = Executor(machine, scalars, on_issue)
        if self.observer is not None:
            self.observer.where = lambda: executor.operation
        return executor

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close threads and communicators; after an error, close the memory pools instead."""
        self.streams.workers.close()
        if error is None:
            self.communicators.close()
        else:
            self.pools.close()


def _unwatched() -> AbstractContextManager[None]:
    return nullcontext()
