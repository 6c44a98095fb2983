"""What of a buffer has been written: elements, own parts along an axis, windows on a layout."""

from zsim.check.overlap import Overlap, Span, frame
from zsim.operation import View
from zsim.schedule import Buffer


class Cover:
    """The parts of one buffer that hold something; `whole` if all of it does."""

    def __init__(self, buffer: Buffer, overlap: Overlap) -> None:
        self.buffer = buffer
        self.overlap = overlap
        self.whole = buffer.elements == 0
        self._spans: tuple[Span, ...] = ()
        self._own: set[tuple[str, int, int]] = set()
        self._windows: dict[tuple[str, int | None], tuple[Span, ...]] = {}

    def copy(self) -> "Cover":
        """The same, to go another way with."""
        other = Cover(self.buffer, self.overlap)
        other.whole, other._spans, other._own = self.whole, self._spans, set(self._own)
        other._windows = dict(self._windows)
        return other

    def clear(self) -> None:
        """Nothing holds anything: the memory is new."""
        self.whole = self.buffer.elements == 0
        self._spans, self._own, self._windows = (), set(), {}

    def write(self, view: View) -> None:
        """`view` holds something on every rank."""
        if not view.size:
            return
        if view.axis is not None and self.overlap.ranks(view.axis) > 1:
            self._own.add((view.axis, view.start, view.size))
        elif view.layout is not None:
            key = view.layout, frame(view)
            self._windows[key] = _with(self._windows.get(key, ()), _span(view))
            layout = self.overlap.layouts[view.layout]
            inside = self._windows[key]
            if view.origin is None and _within((0, layout.elements), inside):
                self.whole = True
        else:
            self._spans = _with(self._spans, _span(view))
            self.whole |= _within((0, self.buffer.elements), self._spans)

    def holds(self, view: View) -> bool:
        """Whether all that any rank has of `view` holds something."""
        if self.whole or not view.size or _within(self.overlap.hull(view), self._spans):
            return True
        if view.axis is not None:
            return (view.axis, view.start, view.size) in self._own
        if view.layout is not None:
            return _within(_span(view), self._windows.get((view.layout, frame(view)), ()))
        return False

    def gap(self, view: View) -> Span:
        """The first elements that some rank has of `view` and that hold nothing on some rank."""
        low, high = self.overlap.hull(view)
        for start, end in self._spans:
            if low < start:
                return low, min(start, high)
            low = max(low, end)
        return low, high


def _span(view: View) -> Span:
    return view.start, view.start + view.size


def _with(spans: tuple[Span, ...], added: Span) -> tuple[Span, ...]:
    """`spans`, in order and apart, and one more."""
    if spans and spans[-1][1] == added[0]:
        return (*spans[:-1], (spans[-1][0], added[1]))
    low, high = added
    before = [span for span in spans if span[1] < low]
    behind = [span for span in spans if span[0] > high]
    for start, end in spans[len(before) : len(spans) - len(behind)]:
        low, high = min(low, start), max(high, end)
    return (*before, (low, high), *behind)


def _within(span: Span, spans: tuple[Span, ...]) -> bool:
    return any(start <= span[0] and span[1] <= end for start, end in spans)
