"""What is done between two views again and again: worked out once, looked up from then on.

A parameter is gathered in every micro-batch, and its gradient is added to the same sum. What comes
of that follows from what the source holds, and for a sum what the target holds. Between the same
two views it is remembered; where layouts describe both, it is the same between any two of them.
Only what nothing is wrong with is remembered, so each fault is found wherever it is.
"""

from dataclasses import dataclass, field

from zsim.check.ledger import Ledger
from zsim.check.placed import MIXED, UNTOLD, ZERO, Placement, held
from zsim.operation import View

Given = Placement | tuple[Placement, Placement]
"""What a result follows from: what the source holds, and what the target held if it is a sum."""

Made = dict[Given, Placement]
"""What became of it, for all that is done in one manner."""


@dataclass(slots=True)
class Routine:
    """Two views, and what is done between them.

    Attributes:
        source: what is read.
        target: what is written.
        made: what became of what was given, shared by all that is done in the same manner.
        described: whether layouts say what both views hold.
        fits: whether nothing was found wrong with the two views as such.
        moves: the place in a tensor that comes of each, where no layout says it.
    """

    source: View
    target: View
    made: Made
    described: bool
    fits: bool = False
    moves: dict[int, int] = field(default_factory=dict[int, int])


class Routines:
    """The routines of one program."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self._known: dict[tuple[str, int, int, str, int, int], Routine] = {}

    def between(self, source: View, target: View, made: Made) -> Routine | None:
        """The routine of two views; nothing if they depend on the rank, or witnesses are asked."""
        if source.axis or source.layout or target.axis or target.layout:
            return None
        name, into = source.buffer, target.buffer
        key = (name, source.start, source.size, into, target.start, target.size)
        routine = self._known.get(key)
        if routine is not None and routine.made is made:
            return routine
        if self.ledger.tells or not source.size or not target.size:
            return None
        by_name = self.ledger.program.by_name
        described = by_name[name].layout is not None and by_name[into].layout is not None
        routine = self._known[key] = Routine(source, target, made, described)
        return routine

    def again(self, routine: Routine, *, adds: bool = False) -> bool:
        """Do what is known already; whether it is."""
        if not routine.fits:
            return False
        values, source, target = self.ledger.values, routine.source, routine.target
        inside = values.inside
        if inside and (source.buffer in inside or target.buffer in inside):
            return False
        given = held(values.pieces.get(source.buffer, ()), source.start, source.start + source.size)
        if given is None:
            return False
        before = None
        if adds:
            end = target.start + target.size
            before = held(values.pieces.get(target.buffer, ()), target.start, end)
            if before is None:
                return False
        if routine.described:
            after = routine.made.get(given if before is None else (given, before))
        else:
            after = self._moved(routine, given, before)
        if after is None:
            return False
        self.ledger.write(UNTOLD, target, after)
        return True

    def _moved(
        self, routine: Routine, given: Placement, before: Placement | None
    ) -> Placement | None:
        """What becomes of elements that no layout tells: those of another place are no others."""
        contents = self.ledger.contents
        place = routine.moves.get(contents.place(given[-1]))
        if place is None or (before is not None and contents.place(before[-1]) != place):
            return None
        after = routine.made.get(self._bare(given, before))
        return after and (*after[:-1], contents.at(after[-1], place))

    def learn(
        self, routine: Routine, given: Placement, after: Placement, before: Placement | None = None
    ) -> None:
        """Remember what became of `given`, and of what the target held before, if it was added."""
        contents = self.ledger.contents
        if given[-1] == MIXED or (before is not None and before[-1] == MIXED):
            return
        routine.fits = True
        if routine.described:
            routine.made[given if before is None else (given, before)] = after
            return
        place, comes_to = contents.place(given[-1]), contents.place(after[-1])
        if given[-1] < ZERO and not contents.is_constant(given[-1]):
            routine.moves.setdefault(place, comes_to)
        if routine.moves.get(place) == comes_to and (
            before is None or contents.place(before[-1]) == comes_to
        ):
            made = (*after[:-1], contents.bare(after[-1]))
            routine.made[self._bare(given, before)] = made

    def _bare(self, given: Placement, before: Placement | None) -> Given:
        """What the result follows from, if it is not told of which elements it is."""
        contents = self.ledger.contents
        key = (*given[:-1], contents.bare(given[-1]))
        return key if before is None else (key, (*before[:-1], contents.bare(before[-1])))
