"""Notify observers of collectives that consist of several calls, and of allocated memory.

A torch dispatch mode sees single calls. If the executor builds one collective from several calls,
it notifies the observers of the tensors that the collective reads and writes. It also notifies them
of memory that it allocates without an operator of torch.
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
    """A collective of `kind` in a group: its source and target on this rank."""

    kind: str
    group: distributed.ProcessGroup
    source: torch.Tensor
    target: torch.Tensor
    reduction: str = ""


class Watcher(Protocol):
    """An observer of collectives and memory."""

    def see_exchange(self, exchange: Exchange) -> Callable[[], object]:
        """Record an issued collective.

        The returned function is called when its target is complete.
        """
        ...

    def see_memory(self, tensor: torch.Tensor, *, on_host: bool) -> None:
        """Record allocated memory of the device or the host, perhaps without an operator."""
        ...


_watching: list[Watcher] = []


@contextmanager
def watching(watcher: Watcher) -> Generator[None]:
    """Return a context in which `watcher` sees exchanges and memory."""
    _watching.append(watcher)
    try:
        yield
    finally:
        _watching.remove(watcher)


def is_watched() -> bool:
    """Return True if there is a watcher; then operators must read the schedule's buffers."""
    return bool(_watching)


def seen(exchange: Exchange) -> list[Callable[[], object]]:
    """Notify all watchers of an exchange; return the functions to call at its end."""
    return [watcher.see_exchange(exchange) for watcher in _watching]


def see_taken(tensor: torch.Tensor, *, on_host: bool = False) -> None:
    """Notify all watchers of memory allocated on the device or in a host pool."""
    for watcher in _watching:
        watcher.see_memory(tensor, on_host=on_host)


def unwatched() -> AbstractContextManager[object]:
    """Return a context in which dispatch modes see no operators."""
    return _disable_current_modes() if is_in_torch_dispatch_mode() else nullcontext()
