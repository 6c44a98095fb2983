"""Of which gradients a number is, that was measured: each parameter has to be in it, and once.

That holds of each role for the parameters that it has a part of: what is reduced over all roles is
then of all parameters.

Cost: one look at each piece of what is measured, once for each different list of operands.
"""

from bisect import bisect_left, bisect_right
from itertools import chain

from zsim.check.content import Contents
from zsim.check.tensor import Tensors
from zsim.operation import View
from zsim.schedule import Program, Schedule

Covered = tuple[View, int]
"""A view that was measured, and its content."""

Spans = list[tuple[str, int, int]]
"""Parameters, and from which to before which element of each."""


class Coverage:
    """Remembers by name what numbers are of."""

    def __init__(self, schedule: Schedule, tensors: Tensors, contents: Contents) -> None:
        self.tensors = tensors
        self.contents = contents
        self.layouts = schedule.layout_by_name
        self.due = _due(schedule, tensors.ledger.program)
        self._starts: dict[str, list[int]] = {}
        self._spans: dict[str, Spans | None] = {}
        self._names: dict[tuple[tuple[int, int], ...], str] = {}
        self._judged: dict[str, tuple[str, str]] = {}

    def of(self, read: list[Covered]) -> str:
        """The name of what is covered by views."""
        key = tuple((id(view), code) for view, code in read)
        if key not in self._names:
            name = self._names[key] = str(len(self._names))
            self._spans[name] = self._found(read)
        return self._names[key]

    def wrong(self, names: str, *, once: bool) -> str:
        """What a number leaves out or, where that matters, counts twice; nothing if it is right."""
        if names not in self._judged:
            parts = [self._spans.get(name) for name in names.split("+")]
            known = [part for part in parts if part is not None]
            self._judged[names] = self._judge(known) if len(known) == len(parts) else ("", "")
        missing, doubled = self._judged[names]
        return missing or (doubled if once else "")

    def _found(self, read: list[Covered]) -> Spans | None:
        """Which elements of which parameters are in views; nothing where nobody can say."""
        spans: Spans = []
        for view, code in read:
            found = self.tensors.form_of(view, self.contents.where(code))
            if found is None or found[0] not in self.layouts:
                return None
            ranges = self.tensors.forms.elements(*found)
            if ranges is None:
                return None
            for low, high in ranges:
                spans += self._inside(found[0], low, high)
        return spans

    def _judge(self, parts: list[Spans]) -> tuple[str, str]:
        """The first parameter that is left out, and the first that is counted twice."""
        spans: dict[str, list[tuple[int, int]]] = {}
        for parameter, start, end in chain.from_iterable(parts):
            spans.setdefault(parameter, []).append((start, end))
        missing = doubled = ""
        for parameter, size in self.due.items():
            place = 0
            for start, end in sorted(spans.get(parameter, [])):
                if start < place:
                    doubled = doubled or f"counts {parameter} more than once"
                if start > place:
                    break
                place = max(place, end)
            if place < size:
                missing = missing or f"leaves out {parameter}"
        return missing, doubled

    def _inside(self, layout: str, low: int, high: int) -> Spans:
        """Parameters that lie in elements `low` to `high` of a layout, and what of each does."""
        pieces = self.layouts[layout].pieces
        if layout not in self._starts:
            self._starts[layout] = [piece.start for piece in pieces]
        starts = self._starts[layout]
        if starts != sorted(starts):
            inside = list(pieces)
        else:
            inside = list(pieces[max(0, bisect_left(starts, low) - 1) : bisect_right(starts, high)])
        return [
            (
                piece.parameter,
                max(piece.start, low) - piece.start,
                min(piece.end, high) - piece.start,
            )
            for piece in inside
            if piece.start < high and low < piece.end
        ]


def _due(schedule: Schedule, program: Program) -> dict[str, int]:
    """Elements of the contract's parameters of which `program` keeps a part, or what it trains.

    While one role runs everywhere these are all: `partition` finds what nobody keeps.
    """
    promised = {each.name: each.elements for each in schedule.contract.parameters}
    if len(schedule.roles) == 1:
        return promised
    held = {
        piece.parameter
        for name in program.persistent
        if (layout := program.by_name[name].layout) is not None
        for piece in schedule.layout_by_name[layout].pieces
    }
    return {name: size for name, size in promised.items() if name in held}
