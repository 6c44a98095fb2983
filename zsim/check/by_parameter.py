"""Copies by parameter: what becomes of placements when parameters go from layout to layout.

What a rank's segment has of a parameter goes into its own part of the whole or of another segment,
and a segment takes its own part out of a whole. Segments that have other parts of a parameter
cannot be copied into one another.
"""

from dataclasses import dataclass

from zsim.check.form import STARTS, Forms
from zsim.check.ledger import Ledger
from zsim.check.origin import told
from zsim.check.placed import ANY, MIXED, NOTHING, OWN, REPLICATE, SHARD, UNTOLD, Rule, Source
from zsim.layout import Layout, Piece
from zsim.operation import Copy, View
from zsim.schedule import Buffer


@dataclass(frozen=True, slots=True)
class _Way:
    """One parameter, or all: where it is in the source, and where in the target."""

    parameter: str
    start: int
    end: int
    target_start: int
    target_end: int
    slot: View | None


_Spot = tuple[int, Piece, int]
"""The number of a piece in ascending order, the piece, and where the next one begins."""


class ByParameter:
    """Takes one copy at a time; remembers what goes where between two buffers."""

    def __init__(self, ledger: Ledger, forms: Forms, needs: Rule) -> None:
        self.ledger = ledger
        self.forms = forms
        self.needs = needs
        self.ways: dict[tuple[str, str], list[_Way]] = {}
        self._spots: dict[str, dict[str, list[_Spot]]] = {}

    def copy(self, copy: Copy) -> None:
        """Take the placements along, and note what cannot be copied so."""
        by_name = self.ledger.program.by_name
        source, target = by_name[copy.source.buffer], by_name[copy.target.buffer]
        ways = self._between(copy.id, source, target)
        pieces = self.ledger.by_element(source)
        whole = self._whole(source, target, ways)
        if whole is not None:
            padding = self.ledger.padding(source.name, inside=True)
            placed = self.ledger.values.read(pieces, whole.start, whole.end, padding)
            if NOTHING not in placed and placed[-1] != MIXED:
                ways = [whole]
        for way in ways:
            self._along(copy, source, target, way)

    def _along(self, copy: Copy, source: Buffer, target: Buffer, way: _Way) -> None:
        ledger = self.ledger
        pieces = ledger.by_element(source)
        padding = ledger.padding(source.name, inside=True)
        placed = ledger.values.read(pieces, way.start, way.end, padding)
        taken: Source = (source.name, pieces, way.start, way.end)
        sources: tuple[Source, ...] = (taken,)
        if (axis := self.needs.breach(placed)) is not None:
            what = f"{way.parameter} out of {source.name}" if way.parameter else source.name
            what, code = f"copies {what}", placed[axis]
            history = told(taken, ledger.says)
            ledger.refuse(copy.id, what, axis, code, rule=self.needs, history=history)
            placed = ledger.anything
        placed = ledger.divided(placed, copy.divisor)
        if source.shard is None and target.shard is not None:
            along = ledger.numbers[target.shard]
            placed = ledger.with_codes(placed, along, (REPLICATE,), SHARD)
        elif source.shard is not None and target.shard is None:
            along = ledger.numbers[source.shard]
            placed = ledger.with_codes(placed, along, (ANY, REPLICATE, SHARD), OWN)
        if copy.accumulate:
            into = ledger.by_element(target)
            padding = ledger.padding(target.name, inside=True)
            before = ledger.values.read(into, way.target_start, way.target_end, padding)
            held: Source = (target.name, into, way.target_start, way.target_end)
            sources = (held, taken)
            placed = ledger.added(copy, before, placed, sources)
        origin = (copy.id, sources) if ledger.tells else UNTOLD
        ledger.put(target, (way.target_start, way.target_end, placed, origin, way.slot))

    def _whole(self, source: Buffer, target: Buffer, ways: list[_Way]) -> _Way | None:
        """All parameters as one, where both hold the same."""
        into, out_of = self._layout(target), self._layout(source)
        if len(ways) != len(into.pieces) or len(ways) != len(out_of.pieces):
            return None
        slots = {way.slot for way in ways}
        if len(slots) > 1:
            return None
        return _Way("", 0, out_of.elements, 0, into.elements, slots.pop() if slots else None)

    def _layout(self, buffer: Buffer) -> Layout:
        assert buffer.layout is not None
        return self.forms.layouts[buffer.layout]

    def _between(self, name: str, source: Buffer, target: Buffer) -> list[_Way]:
        key = (source.name, target.name)
        if key in self.ways:
            return self.ways[key]
        out_of, into = self._layout(source), self._layout(target)
        if source.shard is not None and target.shard is not None and source.shard != target.shard:
            why = f"{source.name} is cut along {source.shard}, {target.name} along {target.shard}"
            self.ledger.note(name, "copies parts of parameters into other parts", (why,))
        pieces = {piece.parameter: piece for piece in out_of.pieces}
        spots = self._spots_of(into)
        shared = [spot for parameter in pieces for spot in spots.get(parameter, ())]
        found: list[_Way] = []
        for index, piece, end in sorted(shared, key=_number):
            taken = pieces[piece.parameter]
            if not taken.size:
                continue
            if source.shard is not None and (into.axis == source.shard or target.shard is not None):
                mine = self.forms.own_part(out_of, taken)
                if mine != self.forms.own_part(into, piece):
                    why = f"ranks own other parts of {piece.parameter} in {target.name}"
                    self.ledger.note(name, why, (f"than in {source.name}",))
            slot = None
            if source.shard is not None and target.shard is None:
                start, size = self.forms.slot(out_of, taken, into, piece)
                slot = View(buffer=target.name, start=start, size=size, axis=source.shard)
            low = piece.start if index else 0
            found.append(_Way(piece.parameter, taken.start, taken.end, low, end, slot))
        if not shared:
            why = f"{source.name} and {target.name} have no parameter in common"
            self.ledger.note(name, why, (f"{source.layout} and {target.layout}",))
        self.ways[key] = found
        return found

    def _spots_of(self, layout: Layout) -> dict[str, list[_Spot]]:
        """Where the parameters of a layout are in it."""
        if layout.name not in self._spots:
            ordered = sorted(layout.pieces, key=STARTS)
            ends = [piece.start for piece in ordered[1:]] + [layout.elements]
            spots: dict[str, list[_Spot]] = {}
            for index, (piece, end) in enumerate(zip(ordered, ends, strict=True)):
                spots.setdefault(piece.parameter, []).append((index, piece, end))
            self._spots[layout.name] = spots
        return self._spots[layout.name]


def _number(spot: _Spot) -> int:
    return spot[0]
