"""A book passed on to an allocator, tensor by tensor where a course says which there are.

A buffer is one request, served where the book has it. One with a course is allocated when a
segment runs, whose tensors come and go as they do there, and those of the other buffers of the
course with them, instead of where the book has these.
"""

from collections import deque
from collections.abc import Iterator, Sequence

from zsim.memory.caching import CachingAllocator
from zsim.model.tensor_lifetime import Course
from zsim.schedule.schedule import Buffer, Program
from zsim.trace.trace import BookEntry

Deferred = tuple[tuple[int, str], ...]
"""Frees that are deferred: how many lines the book had when the host issued it, and the buffer."""

_Key = tuple[int, int]
"""A tensor in a course: the number of its buffer, and its own."""


class Service:
    """Serves the book of a rank that runs `program`, of one pool.

    Attributes:
        refused_bytes: what the allocator could not serve; 0 if it served all.
    """

    def __init__(self, allocator: CachingAllocator, program: Program, pool: str) -> None:
        self.refused_bytes = 0
        self._allocator = allocator
        self._buffers = program.by_name
        self._pool = pool
        self._rest = _beside_courses(program)
        self._count = 0
        self._alive: dict[str, deque[list[str]]] = {}
        self._waiting: dict[str, deque[str]] = {}
        self._tensors: dict[str, dict[_Key, str]] = {}

    def course(self, entries: Sequence[BookEntry], deferred: Deferred = ()) -> Iterator[int]:
        """What is reserved after each line of the pool, up to one that cannot be served."""
        pool, buffers = self._pool, self._buffers
        frees = deque(
            (line, name)
            for line, name in deferred
            if buffers[name].pool == pool and buffers[name].size_bytes
        )
        for number, entry in enumerate(entries):
            while frees and frees[0][0] <= number:
                self._defer(frees.popleft()[1])
            if entry.pool != pool:
                continue
            name, size = entry.buffer, entry.change_bytes
            if size > 0:
                if not self._take(buffers[name], size):
                    return
            elif size < 0 and self._waiting.get(name):
                self._allocator.finish(self._waiting[name].popleft())
            elif size < 0:
                for block in self._end(name):
                    self._allocator.free(block)
            yield self._allocator.reserved_bytes

    def _take(self, buffer: Buffer, size: int) -> bool:
        """Allocate a buffer, or run its course; whether there was memory."""
        group: list[str] = []
        self._alive.setdefault(buffer.name, deque()).append(group)
        course = buffer.course
        size = self._rest.get(buffer.name, 0 if course is not None else size)
        if size and not self._allocate(group, buffer.name, size, buffer.home):
            return False
        return course is None or self._run(buffer.name, course, buffer.home)

    def _allocate(self, group: list[str], name: str, size: int, stream: str) -> bool:
        self._count += 1
        block = f"{name}#{self._count}"
        if not self._allocator.allocate(block, size, stream):
            self.refused_bytes = size
            return False
        group.append(block)
        return True

    def _run(self, own: str, course: Course, stream: str) -> bool:
        """Serve the turns of a segment; whether there was memory."""
        free = self._allocator.free
        made: list[str] = []
        for number, tensor, size in course.turns:
            name = course.name(number, own)
            tensors = self._tensors.setdefault(name, {})
            if size > 0 and name:
                if not self._allocate(made, name, size, stream):
                    return False
                if (number, tensor) in tensors:
                    free(tensors[number, tensor])
                tensors[number, tensor] = made.pop()
            elif size < 0 or not self._alive.get(name):
                block = tensors.pop((number, tensor), None)
                if block is not None:
                    free(block)
        return True

    def _end(self, name: str) -> list[str]:
        """Blocks of a buffer that goes: it is no longer alive."""
        blocks = self._alive[name].popleft()
        if name in self._tensors:
            blocks += self._tensors.pop(name).values()
        return blocks

    def _defer(self, name: str) -> None:
        """Free a buffer when uses on another stream end; they have when the book says so."""
        self._count += 1
        stream = f"{name}@{self._count}"  # a stream of its own
        for block in self._end(name):
            self._allocator.use(block, stream)
            self._allocator.free(block)
        self._waiting.setdefault(name, deque()).append(stream)


def _beside_courses(program: Program) -> dict[str, int]:
    """Of buffers that take turns in courses, what is beside their tensors there."""
    tensors: dict[str, dict[_Key, int]] = {}
    for buffer in program.buffers:
        if buffer.course is not None:
            for number, tensor, size in buffer.course.turns:
                if size > 0 and number:
                    name = buffer.course.name(number, buffer.name)
                    tensors.setdefault(name, {})[number, tensor] = size
    by_name = program.by_name
    return {
        name: max(0, by_name[name].size_bytes - sum(sizes.values()))
        for name, sizes in tensors.items()
        if name
    }
