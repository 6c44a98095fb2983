# ruff: noqa: ANN401  (a wrong function takes whatever the right one takes)
"""Wrong copies to and from host memory, and host memory that lives too long or not long enough."""

from collections.abc import Callable
from typing import Any

import torch

from faults.of_executor.buffers import allocated
from faults.of_executor.patches import Function, altered, plant
from zsim.schedule.operation import Copy, View
from zsim.schedule.replace import replace
from zsim_torch.execute.compute import Computer
from zsim_torch.execute.copying import Copier
from zsim_torch.execute.host_memory import HostBlock, HostPool
from zsim_torch.execute.live_memory import LiveMemory
from zsim_torch.execute.operands import Operands

ZSIM, FSDP1, FSDP2, DEEPSPEED, ENGINE = (
    f"{name}, checkpoints on the host"
    for name in ("stage 2", "fsdp1", "fsdp2", "deepspeed 1", "deepspeed 3, on their stream")
)


def on_host(buffer: str) -> bool:
    return buffer.endswith("/host")


# Copies.


@plant(ZSIM, Copier, "run", why="did not write bytes 0 to 64 of embedding/output/host")
@altered
def a_checkpoint_does_not_go_out(right: Function, self: Copier, copy: Copy) -> Any:
    return None if on_host(copy.target.buffer) else right(self, copy)


@plant(DEEPSPEED, Copier, "run", rank=1, why="did not read bytes 0 to 64 of block1/output/host")
@altered
def a_checkpoint_does_not_come_back(right: Function, self: Copier, copy: Copy) -> Any:
    return None if copy.source.buffer == "block1/output/host" else right(self, copy)


@plant(FSDP2, Copier, "run", why="reads bytes 0 to 64 of block0/output/host")
@altered
def the_checkpoint_of_another_block_comes_back(right: Function, self: Copier, copy: Copy) -> Any:
    is_other = copy.source.buffer == "block1/output/host"
    other = replace(copy.source, buffer="block0/output/host")
    return right(self, replace(copy, source=other) if is_other else copy)


@plant(ENGINE, Copier, "run", why="put element 0 of embedding/output/host at 8 of")
@altered
def halves_of_a_checkpoint_are_swapped(right: Function, self: Copier, copy: Copy) -> Any:
    if copy.source.buffer != "embedding/output/host":
        return right(self, copy)
    half = copy.source.size // 2
    for start in (0, half):
        source = replace(copy.source, start=start, size=half)
        right(self, replace(copy, source=source, target=_half(copy.target, half - start)))
    return None


def _half(view: View, start: int) -> View:
    return replace(view, start=start, size=view.size // 2)


@plant(FSDP1, Copier, "run", why="writes bytes 0 to 64 of block1/output/host")
@altered
def a_checkpoint_goes_where_another_lies(right: Function, self: Copier, copy: Copy) -> Any:
    is_other = copy.target.buffer == "block2/output/host"
    other = replace(copy.target, buffer="block1/output/host")
    return right(self, replace(copy, target=other) if is_other else copy)


@plant(ZSIM, LiveMemory, "pieces", rank=1, why="which is of no buffer that it has")
def the_checkpoint_of_the_first_micro_batch_comes_back(right: Function) -> Function:
    first: dict[str, Any] = {}

    def wrong(memory: LiveMemory, view: View) -> Any:
        found = list(right(memory, view))
        if on_host(view.buffer):
            return first.setdefault(view.buffer, [(at, each.clone()) for at, each in found])
        return found

    return wrong


# Life of memory.


@plant(ZSIM, HostPool, "take", why="still alive was given out again")
@altered
def pages_are_given_out_while_a_checkpoint_has_them(
    right: Function, self: HostPool, size: int
) -> Any:
    block: HostBlock = right(self, size)
    if block not in self._free:  # pyright: ignore[reportPrivateUsage]
        self._free.append(block)  # pyright: ignore[reportPrivateUsage]
    return block


@plant(FSDP2, Computer, "_forward", rank=1, why="memory of embedding/output/host was released by")
@altered
def host_memory_is_freed_before_it_is_read(right: Function, self: Computer, known: Operands) -> Any:
    right(self, known)
    flat = allocated(self)
    for name in filter(on_host, flat):
        flat[name] = flat[name].clone()


@plant(DEEPSPEED, LiveMemory, "take_away", why="memory of embedding/output/host was released by")
def host_memory_is_freed_late(right: Function) -> Function:
    held: list[torch.Tensor | None] = []

    def wrong(memory: LiveMemory, name: str) -> Any:
        remains = right(memory, name)
        if on_host(name):
            held[:] = [remains.flat]
        return remains

    return wrong


@plant(FSDP1, LiveMemory, "drop", why="was never released")
def host_memory_is_kept_for_ever(right: Function) -> Function:
    held: list[Any] = []

    def wrong(memory: LiveMemory, name: str, remains: Any, lent: Any, **named: Any) -> Any:
        if on_host(name):
            held.append(remains.flat)
        right(memory, name, remains, lent, **named)

    return wrong


@plant(ENGINE, HostBlock, "tensor", why="bytes were taken, it takes 64")
@altered
def host_memory_has_whole_pages(
    right: Callable[..., torch.Tensor], self: HostBlock, elements: int, dtype: torch.dtype
) -> torch.Tensor:
    return right(self, len(self.pages) // dtype.itemsize, dtype)[:elements]
