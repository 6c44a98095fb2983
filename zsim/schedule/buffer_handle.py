"""A handle of a declared buffer, from which callers take views."""

from dataclasses import dataclass

from zsim.schedule.operation import View
from zsim.schedule.schedule import Buffer


@dataclass(frozen=True, slots=True)
class BufferHandle:
    """A declared buffer, as the builder returns it; index it to take a view."""

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
        """Return a view of elements `start:end`, with the slice rules of a list."""
        start, end, _ = part.indices(self.buffer.elements)
        return View(buffer=self.name, start=start, size=max(0, end - start))

    def own(self, axis: str, size: int, start: int = 0) -> View:
        """Return a view of `size` elements that starts at `start` + rank's coordinate * `size`."""
        return View(buffer=self.name, start=start, size=size, axis=axis)

    def window(self, layout: str, size: int, start: int = 0, *, origin: int | None = None) -> View:
        """Return a view of the part of a window that lies in the rank's segment of `layout`.

        The window has `size` elements of the layout and starts at element `start`. Without
        `origin` the buffer holds the rank's segment; with it, the window, from the buffer's
        element `origin` on.
        """
        return View(buffer=self.name, start=start, size=size, layout=layout, origin=origin)
