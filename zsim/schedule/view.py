"""Views that operations act on, and the edges between operations."""

from msgspec import Struct

DIVISOR_MAX = 2**53
"""Largest divisor of numbers: floats hold every whole number up to it."""


class OperationError(ValueError):
    """Raised for an invalid operation."""


class View(Struct, frozen=True, kw_only=True, gc=False):
    """`size` elements of `buffer` from `start` on.

    With `axis`, the view is the rank's own shard: `size` times its coordinate is added to the
    start. With `layout`, `start` and `size` define a window on that whole tensor, and the view is
    the part of the window in the rank's segment, possibly empty. Parts of uneven shards and single
    parameters are named like this. The buffer holds the rank's segment or, with `origin`, the
    window, from the buffer's element `origin` on.
    """

    buffer: str
    start: int = 0
    size: int
    axis: str | None = None
    layout: str | None = None
    origin: int | None = None

    def __post_init__(self) -> None:
        if self.start < 0 or self.size < 0:
            raise self._wrong(f"start {self.start} and size {self.size} must be >= 0")
        if self.axis is not None and self.layout is not None:
            raise self._wrong("name an axis or a layout, not both")
        if self.origin is not None and (self.layout is None or self.origin < 0):
            raise self._wrong(f"origin {self.origin} needs a layout, and to be >= 0")

    def _wrong(self, why: str) -> OperationError:
        return OperationError(f"view of {self.buffer}: {why}")


class Previous(Struct, frozen=True, gc=False):
    """An edge to the latest earlier instance of `operation` that ran; setup counts as one."""

    operation: str


Edge = str | Previous
"""An operation that must have finished: by id, or its previous instance."""
