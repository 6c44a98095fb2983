"""What a value is along each axis of the mesh, what it is of, and the values of buffers.

The words are those of DTensor; `OWN` is a shard that stands at its place in memory for the whole
tensor, of which all else is stale, `SHIFTED` one that was sent on to another rank. `VERDICT` is
what each rank found in its own part; their maximum is the answer, as it is not of summands. `ANY`
is a constant, or what no rule of a schedule can judge.

Behind the axes stands what the value is of, as a negative number: see `zsim.check.content`.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from zsim.operation import View

ANY, REPLICATE, SHARD, PARTIAL, VERDICT, OWN, SHIFTED, MIXED, NOTHING = range(9)

WORDS = {
    ANY: "any",
    REPLICATE: "Replicate",
    SHARD: "Shard",
    PARTIAL: "Partial",
    VERDICT: "each rank's own verdict",
    OWN: "valid only in the rank's own part",
    SHIFTED: "another rank's part",
    MIXED: "Replicate, Shard or Partial in different places",
    NOTHING: "written by nothing",
}
"""How findings call them."""

EVERY = tuple(WORDS)

ZERO = -1
"""The content of the constant 0, which is a sum of nothing."""

Placement = tuple[int, ...]
"""One of them for each axis of more than one rank, and the content."""

Origin = tuple[str, tuple["Source", ...]]
"""The operation that wrote a value, and what it made it of."""

UNTOLD: Origin = ("", ())
"""The origin of a value that nobody will ask for."""

Source = tuple[str, tuple["Piece", ...], int, int]
"""A buffer, the pieces that it held, and which elements of them were read."""

Piece = tuple[int, int, Placement, Origin, View | None]
"""From the first element, up to and without the second: a placement, where it comes from, and
through which view where ranks wrote each to a place of its own."""

Padding = Callable[[int, int, int, int], bool]
"""Whether elements of a buffer, from the first to before the second, hold no parameter, and their
content, the third, may stand in padding of a tensor with the content that is the fourth."""


@dataclass(frozen=True, slots=True)
class Number:
    """A number of the host: how much more it is than updates were made before this step.

    `amount` is nothing where that is not known; `changes` counts how often the step has set it, by
    the operations `by`.
    """

    amount: float | None
    changes: int = 0
    by: tuple[str, ...] = ()


def both(one: int, other: int) -> int:
    """What a view is whose parts are `one` and `other`."""
    if other in (one, ANY):
        return one
    return other if one == ANY else max(MIXED, one, other)


@dataclass(slots=True)
class Values:
    """The pieces that each buffer holds, in ascending order, without overlap.

    `pieces` counts elements of the buffer, `inside` those of the tensor of which it holds a part,
    or all in another order. What `inside` has of a buffer goes before what `pieces` has. `count` is
    the length of a placement, `updated` whether this step has trained something, `scalars` what is
    known of numbers of the host.
    """

    count: int
    updated: bool = False
    scalars: dict[str, Number] = field(default_factory=dict[str, Number])
    pieces: dict[str, tuple[Piece, ...]] = field(default_factory=dict[str, tuple[Piece, ...]])
    inside: dict[str, tuple[Piece, ...]] = field(default_factory=dict[str, tuple[Piece, ...]])

    def copy(self) -> "Values":
        """The same values, to go another way with."""
        return Values(
            self.count, self.updated, dict(self.scalars), dict(self.pieces), dict(self.inside)
        )

    def state(self, buffers: tuple[str, ...], counted: tuple[str, ...]) -> tuple[object, ...]:
        """The placements in `buffers`, to be compared, and how much the numbers `counted` are."""
        known = self.scalars
        return (
            tuple(known[name].amount if name in known else None for name in counted),
            *(
                _bare(found)
                for name in buffers
                for found in (self.pieces.get(name, ()), self.inside.get(name, ()))
            ),
        )

    def read(
        self, pieces: tuple[Piece, ...], start: int, end: int, padding: Padding | None = None
    ) -> Placement:
        """What the elements of `pieces` from `start` to `end` are.

        What stands in padding is what the rest is.
        """
        if len(pieces) == 1 and pieces[0][0] <= start and end <= pieces[0][1]:
            return pieces[0][2]
        if start == end:
            return (ANY,) * self.count
        found: Placement | None = None
        place = start
        begin = bisect_left(pieces, (start + 1,))
        if begin and pieces[begin - 1][1] > start:
            begin -= 1
        for number in range(begin, len(pieces)):
            low, high, placement, _, _ = pieces[number]
            if low > place:
                break
            if found is None:
                found = placement
            elif padding is not None and found[-1] != placement[-1]:
                found = _joined(found, placement, (start, place, min(high, end)), padding)
            else:
                found = tuple(map(both, found, placement))
            place = high
            if place >= end:
                return found
        return (NOTHING,) * self.count


def _joined(
    one: Placement, other: Placement, at: tuple[int, int, int], padding: Padding
) -> Placement:
    """What two pieces are together: `at` is where they begin, meet and end; padding is skipped."""
    start, place, end = at
    axes = tuple(map(both, one[:-1], other[:-1]))
    if padding(place, end, other[-1], one[-1]):
        return (*axes, one[-1])
    if padding(start, place, one[-1], other[-1]):
        return (*axes, other[-1])
    return (*axes, both(one[-1], other[-1]))


def written(pieces: tuple[Piece, ...], piece: Piece) -> tuple[Piece, ...]:
    """`pieces` after the elements of `piece` have become what it says."""
    if not pieces:
        return (piece,)
    start, end, placement, _, slot = piece
    low, high, last, first_writer, last_slot = pieces[-1]
    if high == start and last == placement and last_slot == slot:
        return (*pieces[:-1], (low, end, placement, first_writer, slot))
    if start == end:
        return pieces
    if start <= pieces[0][0] and high <= end:
        return (piece,)
    first, last_place = bisect_left(pieces, (start,)), bisect_left(pieces, (end,))
    if last_place and pieces[last_place - 1][1] > end:
        last_place -= 1
    while last_place < len(pieces) and pieces[last_place][1] <= end:
        last_place += 1
    before, behind = pieces[:first], pieces[last_place:]
    if before and before[-1][1] > start:
        before = (*before[:-1], (before[-1][0], start, *before[-1][2:]))
    if behind and behind[0][0] < end:
        behind = ((end, *behind[0][1:]), *behind[1:])
    if behind and behind[0][0] == end and behind[0][2] == placement and behind[0][4] == slot:
        piece, behind = (start, behind[0][1], *piece[2:]), behind[1:]
    return (*before, piece, *behind)


def _bare(pieces: tuple[Piece, ...]) -> tuple[tuple[object, ...], ...]:
    """`pieces`, without saying where they come from."""
    if all(piece[3] is UNTOLD for piece in pieces):
        return pieces
    return tuple((low, high, placement, UNTOLD, slot) for low, high, placement, _, slot in pieces)


def held(pieces: tuple[Piece, ...], start: int, end: int) -> Placement | None:
    """What the elements from `start` to `end` are, if one piece has them all."""
    piece = pieces[0] if len(pieces) == 1 else None
    if piece is None:
        number = bisect_left(pieces, (start + 1,)) - 1
        if number < 0:
            return None
        piece = pieces[number]
    return piece[2] if piece[0] <= start and end <= piece[1] else None


WHOLE = frozenset({ANY, REPLICATE})
COMPLETE = frozenset({ANY, REPLICATE, SHARD, SHIFTED})
SUMMANDS = frozenset({ANY, PARTIAL})
VERDICTS = frozenset({ANY, REPLICATE, VERDICT})
PARTS = frozenset({ANY, SHARD})
WRITTEN = frozenset({ANY, REPLICATE, SHARD, PARTIAL, VERDICT, SHIFTED})
"""What an operand may be along an axis."""


class Rule:
    """What is allowed along each axis, and in words; remembers what it has let pass."""

    def __init__(self, allowed: Sequence[frozenset[int]], needs: str) -> None:
        self.allowed = allowed
        self.needs = needs
        self.passed: set[Placement] = set()

    def breach(self, placement: Placement) -> int | None:
        """The first axis along which `placement` is not allowed; their number if it is nothing."""
        axes = placement[:-1]
        if axes in self.passed:
            return len(axes) if placement[-1] == NOTHING else None
        for axis, (code, allowed) in enumerate(zip(axes, self.allowed, strict=True)):
            if code not in allowed:
                return axis
        if placement[-1] == NOTHING:
            return len(self.allowed)
        self.passed.add(axes)
        return None
