"""Which rank owns which part of a flat tensor, which parameters lie in it, and where padding is."""

from dataclasses import dataclass
from itertools import pairwise


class LayoutError(ValueError):
    """A layout that cannot exist."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """`size` elements from `start` on hold parameter `parameter`, flattened in row-major order.

    `copies` names axes along which every rank holds the same values (a layer norm under tensor
    parallelism): a norm counts them once.
    """

    parameter: str
    start: int
    size: int
    copies: tuple[str, ...] = ()

    @property
    def end(self) -> int:
        """First element past the piece."""
        return self.start + self.size


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A flat tensor of `elements`, padding included, cut along `axis`.

    What no piece covers is padding: zero, always. Without `cuts` the tensor falls in equal
    segments, one for each coordinate of `axis`; with it segment i is [cuts[i], cuts[i + 1]), which
    may be empty. Without `axis` it is whole on every rank.
    """

    name: str
    pieces: tuple[Piece, ...]
    elements: int
    axis: str | None = None
    cuts: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.elements < 0:
            raise LayoutError(f"layout {self.name}: elements {self.elements} must be >= 0")
        for piece in self.pieces:
            if piece.start < 0 or piece.size < 0:
                raise LayoutError(
                    f"layout {self.name}: {piece.parameter} has a negative start or size"
                )
        if self.cuts is None:
            return
        if self.axis is None:
            raise LayoutError(f"layout {self.name}: cuts need an axis")
        if any(low > high for low, high in pairwise(self.cuts)) or len(self.cuts) < 2:
            raise LayoutError(f"layout {self.name}: cuts {self.cuts} must ascend")

    def segment(self, coordinate: int, count: int) -> tuple[int, int]:
        """Start and size of what the rank at `coordinate` of `count` along the axis owns.

        Raises:
            LayoutError: `count` does not fit the cuts, or does not divide the elements.
        """
        if self.axis is None:
            return 0, self.elements
        if self.cuts is not None:
            if len(self.cuts) != count + 1:
                raise LayoutError(
                    f"layout {self.name}: {len(self.cuts)} cuts for {count} ranks, "
                    f"{count + 1} needed"
                )
            return self.cuts[coordinate], self.cuts[coordinate + 1] - self.cuts[coordinate]
        if self.elements % count:
            raise LayoutError(
                f"layout {self.name}: {self.elements} elements in {count} equal segments"
            )
        size = self.elements // count
        return coordinate * size, size

    def window(self, start: int, size: int, segment: tuple[int, int]) -> tuple[int, int]:
        """What a segment has of the window, counted from the segment's first element."""
        low = max(start, segment[0])
        high = min(start + size, segment[0] + segment[1])
        return (low - segment[0], high - low) if low < high else (0, 0)
