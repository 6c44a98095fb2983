"""State of the ranks of one class while a schedule runs: buffers, and host scalars."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from zsim.proof.execution.collective_runner import UnfollowedError
from zsim.proof.execution.datum import Datum, written
from zsim.proof.execution.tensors import Index

BufferWrite = tuple[str, Index, Datum]
"""A write: a buffer, the places in it, and the new values of those places."""


@dataclass(slots=True)
class ClassMemory:
    """State of the ranks of one class: buffers by name, and host scalars."""

    buffers: dict[str, Datum] = field(default_factory=dict[str, Datum])
    scalars: dict[str, float] = field(default_factory=dict[str, float])

    def write(self, writes: Iterable[BufferWrite], anew: Callable[[str], Datum]) -> None:
        """Write views of buffers in order; `anew` returns the initial content of a new buffer.

        Parts of one buffer are written together, so that it is copied once.

        Raises:
            UnfollowedError: a view has another number of pieces than its new values.
        """
        buffers = self.buffers
        parts: dict[str, list[tuple[Index, Datum]]] = {}
        for name, index, new in writes:
            if new.count != index.count:
                raise UnfollowedError(f"{name} is not cut as what is written into it")
            if index.is_whole:
                buffers[name] = new
                parts.pop(name, None)
            else:
                parts.setdefault(name, []).append((index, new))
        for name, found in parts.items():
            datum = buffers.get(name)
            buffers[name] = written(anew(name) if datum is None else datum, found)
