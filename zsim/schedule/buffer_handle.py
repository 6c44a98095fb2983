"""A declared buffer, as builders hand it out: something to take views of."""

from dataclasses import dataclass

from zsim.schedule.operation import View
from zsim.schedule.schedule import Buffer


@dataclass(frozen=True, slots=True)
class BufferHandle:
    """A buffer as the builder hands it out: something to take views of."""

    buffer: Buffer

    @property
    def name(self) -> str:
        """Name of the buffer."""
        return self.buffer.name

    @property
    def all(self) -> View:
        """Every element."""
        return View(buffer=self.name, size=self.buffer.elements)

    def __getitem__(self, part: slice) -> View:
        """Return elements `start:end`, as of a list."""
        start, end, _ = part.indices(self.buffer.elements)
        return View(buffer=self.name, start=start, size=max(0, end - start))

    def own(self, axis: str, size: int, start: int = 0) -> View:
        """Return the own `size` elements of a rank: from `start` + its coordinate x `size` on."""
        return View(buffer=self.name, start=start, size=size, axis=axis)

    def window(self, layout: str, size: int, start: int = 0, *, origin: int | None = None) -> View:
        """Return what the segment of a rank has of `size` elements of `layout` from `start` on.

        The buffer holds the segment or, with `origin`, the window, from its element `origin` on.
        """
        return View(buffer=self.name, start=start, size=size, layout=layout, origin=origin)
