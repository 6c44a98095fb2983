"""Sizes of buffers with copies of tokens for experts: counted rows, whose number depends on data.

Before a segment's exchange of its outputs (`swaps`), copies of tokens are the rows that the rank
sends, and results are the rows that it received; after the exchange it is the reverse. What a
segment of experts saves and holds while it runs grows with the rows that it received.
"""

from msgspec.structs import replace

from zsim.model.model import Model, Segment, Value
from zsim.model.token_loads import ROUTED, Routing
from zsim.schedule.counts import NamedCount, RowIndex, Rows, rows_at_most
from zsim.zero.names import EXPERT

Sized = tuple[int, Rows | None]
"""Elements of a buffer, and its counted rows; None if its size does not depend on data."""


def count_of(routing: Routing) -> NamedCount:
    """Return the count of the copies of tokens that expert ranks exchange."""
    return NamedCount(
        name=ROUTED,
        group=EXPERT,
        experts=routing.experts,
        sent=routing.sent,
        maximum=routing.maximum,
        capacity=0 if routing.padded else routing.capacity,
        padded=routing.padded,
        drops=routing.drops,
    )


class TokenRows:
    """Rows of the values and segments of `model`.

    Attributes:
        count: the count of rows; None if expert ranks exchange none.
        swapped: values that segments end in exchanging, or in adding up over expert ranks.
    """

    def __init__(self, model: Model) -> None:
        self.count = None if model.routing is None else count_of(model.routing)
        self._arrived: dict[str, RowIndex] = {}
        self._layers: dict[str, int] = {}
        self._of_experts: dict[tuple[str, int], int] = {}
        self._gathered: set[tuple[str, int]] = set()
        for unit in model.units:
            for place, segment in enumerate(unit.segments):
                meets = segment.swaps or segment.reads_all
                if meets or any(name in self._arrived for name in segment.inputs):
                    layer = 0 if model.routing is None else model.routing.layers.index(unit.name)
                    self._note((unit.name, place), segment, layer)
        self.swapped = frozenset(
            value.name
            for unit in model.units
            for segment in unit.segments
            for value in segment.outputs
            if segment.exchanges_rows(value) or segment.adds_all
        )
        self._parts = model.expert_tensor

    def _note(self, which: tuple[str, int], segment: Segment, layer: int) -> None:
        """Record the rows that a segment exchanges in block `layer`, and the rows that it reads."""
        runs = any(self._arrived.get(name) is RowIndex.EXPERT for name in segment.inputs)
        if runs or segment.adds_all:
            self._of_experts[which] = layer
        if segment.adds_all:
            self._gathered.add(which)
        for value in segment.outputs:
            self._layers[value.name] = layer
            if value.copies:
                goes_back = runs and segment.swaps
                self._arrived[value.name] = RowIndex.SOURCE if goes_back else RowIndex.EXPERT

    def layer(self, value: str) -> int:
        """Return the number of the block with experts that exchanges `value`."""
        return self._layers[value]

    def of_value(self, value: Value, *, sent: bool = False) -> Sized:
        """Return the size of a value, or of its gradient: after its exchange, or as `sent`."""
        arrived = self._arrived.get(value.name)
        if self.count is None or arrived is None:
            return value.elements, None
        own = arrived
        if sent:
            own = RowIndex.SOURCE if arrived is RowIndex.EXPERT else RowIndex.EXPERT
        return self._rows(own, self._layers[value.name], value.elements // value.copies)

    def of_all(self, value: Value, ranks: int) -> Sized:
        """Return the size of a value, or of its gradient, of `ranks` with parts of experts."""
        elements, rows = self.of_value(value)
        if rows is None or self.count is None:
            return elements * ranks, None
        every = replace(rows, parts=ranks)
        return rows_at_most(self.count, every), every

    def of_segment(self, unit: str, place: int, elements: int) -> Sized:
        """Return the size of memory of a segment that has `elements` if tokens are balanced."""
        layer = self._of_experts.get((unit, place))
        if self.count is None or layer is None or not elements:
            return elements, None
        parts = self._parts if (unit, place) in self._gathered else 1
        width = -(-elements // max(1, self.count.sent * parts))
        rows = Rows(
            count=self.count.name, layer=layer, own=RowIndex.EXPERT, width=width, parts=parts
        )
        return rows_at_most(self.count, rows), rows

    def _rows(self, own: RowIndex, layer: int, width: int) -> Sized:
        assert self.count is not None
        rows = Rows(count=self.count.name, layer=layer, own=own, width=width)
        return rows_at_most(self.count, rows), rows
