"""State of a module besides its parameters: its mode, and its buffers, which are synchronized."""

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress

import torch
from torch import distributed, nn

from zsim.schedule.operation import Compute, walk
from zsim.schedule.schedule import Schedule
from zsim_torch.module.generator_state import NumpyState, RandomState
from zsim_torch.module.python_state import PythonState
from zsim_torch.module.saving import version
from zsim_torch.module.unit import ModuleUnitError, TorchUnit


@contextmanager
def unchanged(*roots: object) -> Generator[None]:
    """Return a context after which generators, buffers and Python objects are restored.

    Raises:
        ModuleUnitError: something has changed that cannot be restored.
    """
    generators = RandomState.now(), NumpyState.now()
    objects = PythonState.of(roots)
    try:
        yield
    except BaseException:
        with suppress(ModuleUnitError):
            objects.restore()
        raise
    else:
        objects.restore()
    finally:
        for each in generators:
            each.set()


_Table = dict[str, torch.Tensor | None]


@contextmanager
def evaluating(modules: list[nn.Module]) -> Generator[None]:
    """Return a context in which modules are in evaluation mode; it restores their modes."""
    modes = [(part, part.training) for module in modules for part in module.modules()]
    for part, _ in modes:
        part.training = False
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode


class SharedBuffers:
    """Buffers of `module` on the device of a run; after a step all ranks get rank 0's.

    DDP does the same before the next forward (`broadcast_buffers`). Nothing is sent if the step
    changed no buffer, which is the same on all ranks. If one changed, all are sent: a batch norm
    writes its statistics without a change of their version. A forward may replace a buffer by
    another tensor, so buffers are looked up each time.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._tables: list[tuple[str, _Table]] = [
            (f"{path}." if path else "", vars(part)["_buffers"])
            for path, part in module.named_modules()
        ]
        self._homes = {name: each.device for name, each in self._named().items()}
        for buffer in self._named().values():
            buffer.data = buffer.data.to(device)
        self._versions = self._now()

    def share(
        self,
        hand_out: Callable[[Iterable[torch.Tensor]], object],
        first: int = 0,
        group: distributed.ProcessGroup | None = None,
    ) -> None:
        """Send the buffers of rank `first` to all ranks if the step has changed any.

        All ranks call it. The broadcast runs on the caller's stream; `hand_out` orders it after the
        streams of the schedule. With a `group`, only its ranks take part: each pipeline stage
        changes its own buffers.
        """
        joined = distributed.is_initialized() and distributed.get_world_size(group) > 1
        now = self._now()
        if joined and self._have_changed(now):
            hand_out([buffer for buffer, _ in now])
            for buffer, _ in now:
                _broadcast(buffer, first, group)
            now = self._now()
        self._versions = now

    def settle(self, owners: Mapping[str, int]) -> None:
        """Send each buffer of pipeline stages from its rank in `owners` to all ranks."""
        for name, buffer in self._named().items():
            if name in owners:
                _broadcast(buffer, owners[name], None)

    def back(self) -> None:
        """Move buffers back to the devices that they were on before the run."""
        for name, buffer in self._named().items():
            if name in self._homes:
                buffer.data = buffer.data.to(self._homes[name])

    def _named(self) -> dict[str, torch.Tensor]:
        """Return buffers by name, each once, as `named_buffers` does; modules are listed once."""
        found: dict[int, tuple[str, torch.Tensor]] = {}
        for path, table in self._tables:
            for key, buffer in table.items():
                if buffer is not None and not buffer.is_meta:
                    found.setdefault(id(buffer), (f"{path}{key}", buffer))
        return dict(found.values())

    def _now(self) -> list[tuple[torch.Tensor, int]]:
        return [(buffer, version(buffer)) for buffer in self._named().values()]

    def _have_changed(self, now: list[tuple[torch.Tensor, int]]) -> bool:
        return len(now) != len(self._versions) or any(
            buffer is not known or number != before
            for (buffer, number), (known, before) in zip(now, self._versions, strict=True)
        )


def _broadcast(buffer: torch.Tensor, first: int, group: distributed.ProcessGroup | None) -> None:
    sent = buffer.detach().contiguous()
    distributed.broadcast(sent, src=first, group=group)
    if sent.data_ptr() != buffer.data_ptr():
        buffer.data.copy_(sent)


def buffer_owners(
    module: nn.Module, schedule: Schedule, units: Sequence[TorchUnit]
) -> dict[str, int]:
    """Return, by buffer name, the first rank of the pipeline stage that has the buffer.

    Without pipeline stages the result is empty: all ranks have all buffers, and rank 0's count.
    """
    found: dict[str, int] = {}
    if len(schedule.programs) == 1:
        return found
    names: dict[int, list[str]] = {}
    for name, buffer in module.named_buffers(remove_duplicate=False):
        names.setdefault(id(buffer), []).append(name)
    ranks = range(schedule.mesh.size)
    roles = [schedule.program_of(rank).role for rank in ranks]
    for program in schedule.programs:
        run = {
            (each.unit, each.segment) for each in walk(program.step) if isinstance(each, Compute)
        }
        for unit in units:
            if unit.key in run:
                for buffer in unit.module.buffers():
                    for name in names.get(id(buffer), ()):
                        found.setdefault(name, roles.index(program.role))
    return found
