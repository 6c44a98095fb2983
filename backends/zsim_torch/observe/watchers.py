"""Watchers of collectives that are made of several calls of torch.distributed, and of memory.

A mode under torch's dispatcher sees calls. Where the executor makes one collective of several, it
says so to those who watch, with the tensors that the collective reads and writes; and where it
takes memory by no operator of torch, that too.
"""

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple, Protocol

import torch
from torch import distributed
from torch.utils._python_dispatch import (
    _disable_current_modes,  # pyright: ignore[reportPrivateUsage]  # torch has no public one
    is_in_torch_dispatch_mode,
)


class Exchange(NamedTuple):
    """A collective of `kind` in a group: the tensors that it is given, whole and this rank's."""

    kind: str
    group: distributed.ProcessGroup
    source: torch.Tensor
    target: torch.Tensor
    reduction: str = ""


class Watcher(Protocol):
    """Somebody who notes collectives and memory."""

    def see_exchange(self, exchange: Exchange) -> Callable[[], object]:
        """Note one that is handed over; what is returned is called when its target is whole."""
        ...

    def see_memory(self, tensor: torch.Tensor, *, on_host: bool) -> None:
        """Note memory that was taken, perhaps by no operator, of the device or of the host."""
        ...


_watching: list[Watcher] = []


@contextmanager
def watching(watcher: Watcher) -> Generator[None]:
    """Let `watcher` see exchanges inside."""
    _watching.append(watcher)
    try:
        yield
    finally:
        _watching.remove(watcher)


def is_watched() -> bool:
    """Return whether somebody watches, to whom what is read has to be a buffer."""
    return bool(_watching)


def seen(exchange: Exchange) -> list[Callable[[], object]]:
    """Tell all who watch of an exchange; returns what is to be called at its end."""
    return [watcher.see_exchange(exchange) for watcher in _watching]


def see_taken(tensor: torch.Tensor, *, on_host: bool = False) -> None:
    """Tell all who watch of memory that was taken, on the device or in a pool of the host."""
    for watcher in _watching:
        watcher.see_memory(tensor, on_host=on_host)


def unwatched() -> AbstractContextManager[object]:
    """Return a context in which no mode sees an operator of ours, or a part of a collective."""
    return _disable_current_modes() if is_in_torch_dispatch_mode() else nullcontext()
