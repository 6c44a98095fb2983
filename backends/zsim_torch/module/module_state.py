"""State of a module beside its parameters: its mode, and buffers, which DDP makes equal."""

from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch import distributed, nn

from zsim_torch.execute.generator_state import RandomState
from zsim_torch.module.autograd import version


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

    def share(self) -> None:
        """Give all ranks what rank 0 has, if the step has changed it; every rank calls it."""
        joined = distributed.is_initialized() and distributed.get_world_size() > 1
        if joined and self._versions != self._now():
            for buffer in self._buffers:
                sent = buffer.detach().contiguous()
                distributed.broadcast(sent, src=0)
                if sent.data_ptr() != buffer.data_ptr():
                    buffer.data.copy_(sent)
        self._versions = self._now()

    def back(self) -> None:
        """Put buffers where they were before the run."""
        for buffer, home in zip(self._buffers, self._homes, strict=True):
            buffer.data = buffer.data.to(home)

    def _now(self) -> list[int]:
        return [version(buffer) for buffer in self._buffers]
