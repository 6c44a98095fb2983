"""Memory requests of a host as a list, to replay, record and compare."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import assert_never

from zsim.memory.caching import CachingAllocator
from zsim.memory.expandable import ExpandableAllocator
from zsim.memory.settings import AllocatorSettings


@dataclass(frozen=True, slots=True)
class Take:
    """Allocate bytes on a stream."""

    name: str
    size_bytes: int
    stream: str


@dataclass(frozen=True, slots=True)
class Use:
    """A stream other than its own uses a live block: `Tensor.record_stream`."""

    name: str
    stream: str


@dataclass(frozen=True, slots=True)
class Give:
    """Free a live block."""

    name: str


@dataclass(frozen=True, slots=True)
class Finish:
    """A stream has caught up with the host."""

    stream: str


@dataclass(frozen=True, slots=True)
class Empty:
    """Wait for all streams and return wholly free segments to the device: `empty_cache`."""


Request = Take | Use | Give | Finish | Empty


def caching_allocator(
    *, capacity_bytes: int | None = None, settings: AllocatorSettings | None = None
) -> CachingAllocator:
    """Return an allocator with these settings; PyTorch's defaults if None."""
    kind = ExpandableAllocator if settings and settings.expandable_segments else CachingAllocator
    return kind(capacity_bytes=capacity_bytes, settings=settings)


def replay(requests: Iterable[Request], allocator: CachingAllocator) -> tuple[str, ...]:
    """Serve `requests`; return the names that ran out of memory, whose later requests are void."""
    refused: dict[str, None] = {}
    allocate, free = allocator.allocate, allocator.free
    for request in requests:
        if isinstance(request, Take):
            if not allocate(request.name, request.size_bytes, request.stream):
                refused[request.name] = None
        elif isinstance(request, Give):
            if request.name not in refused:
                free(request.name)
        else:
            match request:
                case Use(name, stream):
                    if name not in refused:
                        allocator.use(name, stream)
                case Finish(stream):
                    allocator.finish(stream)
                case Empty():
                    allocator.empty_cache()
                case _:
                    assert_never(request)
    return tuple(refused)
