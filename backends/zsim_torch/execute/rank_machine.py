"""Memory, streams and communicators of a rank."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from zsim.schedule.schedule import Program, Schedule
from zsim_torch.execute.collectives import ProcessGroups
from zsim_torch.execute.compute import Computer, Initial, RankCompute
from zsim_torch.execute.cuda_streams import CudaStreams
from zsim_torch.execute.executor import Executor, RankMachine
from zsim_torch.execute.live_memory import LiveMemory, MemorySetting
from zsim_torch.execute.poison import Poison
from zsim_torch.execute.streams import CpuStreams, Streams
from zsim_torch.module.unit import TorchUnit
from zsim_torch.module.visit import LaterUses
from zsim_torch.observe.observer import Observer


class Bench:
    """Memory, streams and communicators of a rank, and what watches them."""

    def __init__(
        self,
        schedule: Schedule,
        program: Program,
        *,
        rank: int,
        device: torch.device,
        observer: Observer | None,
    ) -> None:
        self.schedule = schedule
        self.program = program
        self.device = device
        self.observer = observer
        self.coordinates = schedule.mesh.coordinates(rank)
        self.communicators = ProcessGroups(schedule.mesh, schedule.groups, rank, device)
        self.streams: Streams = CpuStreams()
        if device.type == "cuda":
            self.streams = CudaStreams(device, schedule.streams)

    def executor(
        self,
        units: Sequence[TorchUnit],
        *,
        initial: Initial,
        next_batch: Callable[[], object],
        on_loss: Callable[[torch.Tensor], None],
        poison: Poison,
        on_issue: Callable[[int, str], None] | None = None,
    ) -> Executor:
        """Return an executor at the start of setup."""
        setting = MemorySetting(
            device=self.device,
            making=self.observer.executor if self.observer else _unwatched,
            on_home=self.streams.on,
            poison=poison.generator is not None,
        )
        memory = LiveMemory(self.schedule, self.program, self.coordinates, setting)
        work = RankCompute(
            schedule=self.schedule,
            coordinates=self.coordinates,
            memory=memory,
            units={unit.name: unit for unit in units},
            last_unit=units[-1].name,
            forecast=LaterUses.of(self.program),
            initial=initial,
            next_batch=next_batch,
            on_loss=on_loss,
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
        return Executor(machine, scalars, on_issue)

    def close(self) -> None:
        """Nothing is left but the executor's memory."""
        self.communicators.close()


def _unwatched() -> AbstractContextManager[None]:
    return nullcontext()
