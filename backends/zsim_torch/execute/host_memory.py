"""Allocate host memory and file ranges for buffers of a schedule, and count their bytes.

Memory is anonymous and page-aligned, so that files are read and written past the page cache; torch
tensors are views of it. With CUDA it is registered with the driver (`cudaHostRegister`) in its
exact size: PyTorch's own allocator rounds pinned memory up to powers of two (pytorch #95823).
Without CUDA it is not locked: `mlock` of a pool would need a limit that users rarely have.

Freed memory is reused for the next buffer of its size. It may still be in use: then operations on
the new buffer wait for the old uses, and the host does not block.
"""

import mmap
import weakref
from bisect import insort
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import torch

from zsim.schedule.issue_order import taken
from zsim.schedule.operation import Allocate, Free
from zsim.schedule.schedule import Place, Program, Schedule
from zsim_torch.execute.host_workers import Awaitable
from zsim_torch.execute.range_file import ALIGNMENT, POISON, RangeFile, aligned


@dataclass(slots=True, eq=False)
class HostBlock:
    """Pages of a buffer, and the earlier operations that still use them."""

    pages: mmap.mmap
    size: int
    busy: list[Awaitable] = field(default_factory=list[Awaitable])

    @property
    def room(self) -> int:
        """Return the number of unused bytes in the last page."""
        return len(self.pages) - self.size

    def tensor(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the first elements as a tensor, which keeps the pages alive."""
        if not elements:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self.pages, dtype=dtype, count=elements)

    def invalidate(self) -> None:
        """Fill the pages with NaN bytes, so that invalid reads show."""
        torch.frombuffer(self.pages, dtype=torch.uint8).fill_(POISON)


@dataclass(slots=True, eq=False)
class FileRange:
    """Byte range of a file for a buffer, and the earlier operations that still use it."""

    file: RangeFile
    offset: int
    size: int
    busy: list[Awaitable] = field(default_factory=list[Awaitable])

    def invalidate(self) -> None:
        """Fill the range with NaN bytes, so that invalid reads show."""
        self.file.fill(self.offset, _blocks(self.size), POISON)


@dataclass(slots=True)
class PoolUsage:
    """Live and peak bytes of the buffers of a pool."""

    live: int = 0
    peak: int = 0

    def add(self, size: int) -> None:
        """Add an allocation of `size` bytes; negative for a free."""
        self.live += size
        self.peak = max(self.peak, self.live)


class HostPool:
    """Pages of one pool in host memory."""

    def __init__(self, limit: int, *, pinned: bool, poison: bool) -> None:
        self.usage = PoolUsage()
        self.mapped = 0
        self._limit = limit
        self._pinned = pinned
        self._poison = poison
        self._free: list[HostBlock] = []
        self._registered: dict[int, mmap.mmap] = {}
        weakref.finalize(self, _unregister_all, self._registered)

    def take(self, size: int) -> HostBlock:
        """Return pages for `size` bytes: idle ones if there are any, else new ones."""
        self.usage.add(size)
        pages = _blocks(size)
        fitting = [block for block in self._free if len(block.pages) == pages]
        for block in fitting:
            if _is_idle(block.busy):
                return self._again(block, size)
        if fitting and self.mapped + pages > self._limit:
            return self._again(fitting[0], size)
        while self._free and self.mapped + pages > self._limit:
            self._unmap(self._free.pop(0))
        self.mapped += pages
        block = HostBlock(mmap.mmap(-1, pages), size)
        if self._pinned:
            _register(block.pages)
            self._registered[id(block.pages)] = block.pages
        if self._poison:
            block.invalidate()
        return block

    def _again(self, block: HostBlock, size: int) -> HostBlock:
        self._free.remove(block)
        return HostBlock(block.pages, size, [each for each in block.busy if not each.is_over()])

    def give_back(self, block: HostBlock, busy: Iterable[Awaitable]) -> None:
        """Let the pages be reused once the operations in `busy` have finished."""
        self.usage.add(-block.size)
        block.busy = [*block.busy, *busy]
        self._free.append(block)

    def _unmap(self, block: HostBlock) -> None:
        for each in block.busy:
            each.wait()
        self.mapped -= len(block.pages)
        if self._pinned:
            _unregister(self._registered.pop(id(block.pages)))

    def close(self) -> None:
        """Release the pages that no buffer uses."""
        while self._free:
            self._unmap(self._free.pop())


class FilePool:
    """Ranges of the file of one NVMe pool, each in whole blocks."""

    def __init__(self, file: RangeFile) -> None:
        self.usage = PoolUsage()
        self.file = file
        self._space = FileSpace()

    def take(self, size: int) -> FileRange:
        """Return the first free range with room for `size` bytes."""
        self.usage.add(size)
        offset, busy = self._space.take(_blocks(size))
        self.file.grow(self._space.end)
        return FileRange(self.file, offset, size, [each for each in busy if not each.is_over()])

    def give_back(self, held: FileRange, busy: Iterable[Awaitable]) -> None:
        """Let the range be reused once the operations in `busy` have finished."""
        self.usage.add(-held.size)
        self._space.give_back(held.offset, _blocks(held.size), [*held.busy, *busy])


class FileSpace:
    """Free ranges of a file, first fit; everything beyond its end is free."""

    def __init__(self) -> None:
        self.end = 0
        self._free: list[tuple[int, int, tuple[Awaitable, ...]]] = []

    def take(self, size: int) -> tuple[int, list[Awaitable]]:
        """Return the start of `size` free bytes, and the operations that still use them."""
        run: list[tuple[int, int, tuple[Awaitable, ...]]] = []
        for start, length, busy in self._free:
            if run and sum(run[-1][:2]) != start:
                run = []
            run.append((start, length, busy))
            if sum(each[1] for each in run) >= size:
                return self._cut(run, size)
        if not run or sum(run[-1][:2]) != self.end:
            run = []
        start = run[0][0] if run else self.end
        for each in run:
            self._free.remove(each)
        self.end = start + size
        return start, [user for each in run for user in each[2]]

    def _cut(
        self, run: list[tuple[int, int, tuple[Awaitable, ...]]], size: int
    ) -> tuple[int, list[Awaitable]]:
        start = run[0][0]
        for each in run:
            self._free.remove(each)
        rest = sum(run[-1][:2]) - start - size
        if rest:
            insort(self._free, (start + size, rest, run[-1][2]), key=lambda each: each[0])
        return start, [user for each in run for user in each[2]]

    def give_back(self, start: int, size: int, busy: Iterable[Awaitable] = ()) -> None:
        """Mark a range as free once the operations in `busy` have finished."""
        if size:
            insort(self._free, (start, size, tuple(busy)), key=lambda each: each[0])


def file_bytes_needed(schedule: Schedule, program: Program) -> dict[str, int]:
    """Return the file size that a run needs for each NVMe pool, in whole blocks."""
    return {
        pool.name: max(_needed(program, pool.name, overflows=each)[1] for each in (False, True))
        for pool in schedule.pools
        if pool.place is Place.NVME
    }


def _needed(program: Program, pool: str, *, overflows: bool) -> tuple[int, int]:
    """Return the peak of live bytes of a pool and the end of its used range, in whole blocks."""
    space, live, peak = FileSpace(), 0, 0
    starts: dict[str, int] = {}
    for part in (program.setup, program.step, program.step):
        for operation in taken(part, overflows=overflows):
            if not isinstance(operation, Allocate | Free):
                continue
            buffer = program.by_name[operation.buffer]
            if buffer.pool != pool:
                continue
            size = _blocks(buffer.size_bytes)
            if isinstance(operation, Allocate):
                starts[buffer.name], _ = space.take(size)
                live += size
                peak = max(peak, live)
            elif buffer.name in starts:
                space.give_back(starts.pop(buffer.name), size)
                live -= size
    return peak, space.end


class HostPools:
    """All pools of a rank in host memory and on NVMe."""

    def __init__(
        self,
        schedule: Schedule,
        program: Program,
        *,
        folder: Path,
        device: torch.device,
        poison: bool,
    ) -> None:
        self.memory: dict[str, HostPool] = {}
        self.files: dict[str, FilePool] = {}
        sizes = file_bytes_needed(schedule, program)
        try:
            for pool in schedule.pools:
                if pool.place is Place.HOST:
                    limit = max(
                        _needed(program, pool.name, overflows=each)[0] for each in (False, True)
                    )
                    self.memory[pool.name] = HostPool(
                        limit, pinned=device.type == "cuda", poison=poison
                    )
                elif pool.place is Place.NVME:
                    file = RangeFile(folder, sizes[pool.name], poison=poison)
                    self.files[pool.name] = FilePool(file)
        except BaseException:
            self.close()
            raise

    def figures(self) -> tuple[tuple[str, float], ...]:
        """Return peak and mapped bytes of each pool, and the traffic of files."""
        found: list[tuple[str, float]] = []
        for name, host in self.memory.items():
            found.append((f"live_bytes_peak/pool/{name}", host.usage.peak))
            found.append((f"mapped_bytes/pool/{name}", host.mapped))
        for name, each in self.files.items():
            found.append((f"live_bytes_peak/pool/{name}", each.usage.peak))
            found.append((f"file_bytes/pool/{name}", each.file.size))
            found.append((f"read_bytes/pool/{name}", each.file.read_bytes))
            found.append((f"written_bytes/pool/{name}", each.file.written_bytes))
            found.append((f"is_direct/pool/{name}", each.file.direct))
        return tuple(found)

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of all pools that are not on the device."""
        return (*self.memory, *self.files)

    def has(self, pool: str) -> bool:
        """Return True if `pool` is a host memory or NVMe pool."""
        return pool in self.memory or pool in self.files

    def take(self, pool: str, size: int) -> HostBlock | FileRange:
        """Return memory of a pool for `size` bytes."""
        held = self.memory.get(pool) or self.files[pool]
        return held.take(size)

    def give_back(
        self, pool: str, held: HostBlock | FileRange, busy: Iterable[Awaitable] = ()
    ) -> None:
        """Let memory be reused once the operations in `busy` have finished."""
        if isinstance(held, HostBlock):
            self.memory[pool].give_back(held, busy)
        else:
            self.files[pool].give_back(held, busy)

    def forget_traffic(self) -> None:
        """Reset the counters of file traffic."""
        for each in self.files.values():
            each.file.read_bytes = each.file.written_bytes = 0

    def close(self) -> None:
        """Release unused pages and delete all files."""
        for pool in self.memory.values():
            pool.close()
        for each in self.files.values():
            each.file.close()


def _blocks(size: int) -> int:
    """Return `size` rounded up to whole blocks, at least one, in bytes."""
    return aligned(max(size, 1))


def _is_idle(busy: Iterable[Awaitable]) -> bool:
    return all(each.is_over() for each in busy)


def _register(pages: mmap.mmap) -> None:
    """Pin pages, so that a GPU can copy from and to them asynchronously."""
    start = torch.frombuffer(pages, dtype=torch.uint8, count=1).data_ptr()
    _driver("cudaHostRegister")(start, len(pages), 0)


def _unregister(pages: mmap.mmap) -> None:
    start = torch.frombuffer(pages, dtype=torch.uint8, count=1).data_ptr()
    _driver("cudaHostUnregister")(start)


def _unregister_all(registered: dict[int, mmap.mmap]) -> None:
    while registered:
        _unregister(registered.popitem()[1])


def _driver(name: str) -> Callable[..., object]:
    """Return a function of the CUDA runtime that raises MemoryError on an error code."""
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    called = cast("Callable[..., int]", getattr(runtime, name))

    def checked(*arguments: object) -> object:
        code = int(called(*arguments))
        if code:
            raise MemoryError(f"{name} of host memory failed with CUDA error {code}")
        return code

    return checked


assert ALIGNMENT % mmap.PAGESIZE == 0 or mmap.PAGESIZE % ALIGNMENT == 0
