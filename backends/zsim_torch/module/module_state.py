"""State of a module beside its parameters: its mode, and buffers, which DDP makes equal."""

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import distributed, nn

from zsim.schedule.operation import Compute, walk
from zsim.schedule.schedule import Schedule
from zsim_torch.execute.generator_state import RandomState
from zsim_torch.module.saving import version
from zsim_torch.module.unit import TorchUnit


@contextmanager
def unchanged(module: nn.Module) -> Generator[None]:
    """Give buffers and generators back what they had before."""
    random = RandomState.now()
    kept = [(buffer, buffer.clone()) for buffer in module.buffers()]
    try:
        yield
    finally:
        random.set()
        with torch.no_grad():
            for buffer, before in kept:
                buffer.copy_(before)


@contextmanager
def evaluating(modules: list[nn.Module]) -> Generator[None]:
    """Set modules to evaluation mode inside; afterwards each part is in the mode that it had."""
    modes = [(part, part.training) for module in modules for part in module.modules()]
    for part, _ in modes:
        part.training = False
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode


class SharedBuffers:
    """Buffers of `module` on the device of a run; after a step all ranks have rank 0's.

    So DDP does it (`broadcast_buffers`), before the forward that follows. None travels while no
    step changes any, which holds for all ranks alike. That one was changed does not tell of the
    others: a batch norm writes its statistics without a note in their versions.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._buffers = [each for each in module.buffers() if not each.is_meta]
        self._homes = [buffer.device for buffer in self._buffers]
        for buffer in self._buffers:
            buffer.data = buffer.data.to(device)
        self._versions = self._now()

    def share(self, first: int = 0, group: distributed.ProcessGroup | None = None) -> None:
        """Give all ranks what rank `first` has, if the step has changed it; every rank calls it.

        With a `group` these are its ranks: a stage of a pipeline changes buffers for itself.
        """
        joined = distributed.is_initialized() and distributed.get_world_size(group) > 1
        if joined and self._versions != self._now():
            for buffer in self._buffers:
                _broadcast(buffer, first, group)
        self._versions = self._now()

    def settle(self, owners: Mapping[int, int]) -> None:
        """Give all ranks each buffer of stages from the rank that `owners` has for its `id`."""
        for buffer in self._buffers:
            if id(buffer) in owners:
                _broadcast(buffer, owners[id(buffer)], None)

    def back(self) -> None:
        """Put buffers where they were before the run."""
        for buffer, home in zip(self._buffers, self._homes, strict=True):
            buffer.data = buffer.data.to(home)

    def _now(self) -> list[int]:
        return [version(buffer) for buffer in self._buffers]


def _broadcast(buffer: torch.Tensor, first: int, group: distributed.ProcessGroup | None) -> None:
    sent = buffer.detach().contiguous()
    distributed.broadcast(sent, src=first, group=group)
    if sent.data_ptr() != buffer.data_ptr():
        buffer.data.copy_(sent)


def buffer_owners(schedule: Schedule, units: Sequence[TorchUnit]) -> dict[int, int]:
    """Return the first rank of the stage that has a buffer of a unit, by the `id` of the buffer.

    Without stages all ranks have all, and rank 0 is believed.
    """
    found: dict[int, int] = {}
    if len(schedule.programs) == 1:
        return found
    ranks = range(schedule.mesh.size)
    roles = [schedule.program_of(rank).role for rank in ranks]
    for program in schedule.programs:
        run = {
            (each.unit, each.segment) for each in walk(program.step) if isinstance(each, Compute)
        }
        for unit in units:
            if unit.key in run:
                for buffer in unit.module.buffers():
                    found.setdefault(id(buffer), roles.index(program.role))
    return found
