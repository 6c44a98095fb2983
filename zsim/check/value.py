"""What a value is along an axis of the mesh, and the values that a rank's buffers hold.

The words are those of DTensor; `OWN` is a shard that stands at its place in memory for the whole
tensor, of which all else is stale. `VERDICT` is what each rank found in its own part; their maximum
is the answer, as it is not of summands. `ANY` is a constant, or what no rule of a schedule can
judge.
"""

from dataclasses import dataclass, field

from zsim.check.finding import Finding
from zsim.operation import View
from zsim.schedule import Program, Schedule

ANY, REPLICATE, SHARD, PARTIAL, VERDICT, OWN, MIXED, NOTHING = range(8)

WORDS = {
    ANY: "any",
    REPLICATE: "Replicate",
    SHARD: "Shard",
    PARTIAL: "Partial",
    VERDICT: "each rank's own verdict",
    OWN: "valid only in the rank's own part",
    MIXED: "Replicate, Shard or Partial in different places",
    NOTHING: "written by nothing",
}
"""How findings call them."""

Placement = tuple[int, ...]
"""One of them for each axis of more than one rank."""

Piece = tuple[int, int, Placement, str]
"""From the first element, up to and without the second: a placement, and what wrote it."""


def both(one: int, other: int) -> int:
    """What a view is whose parts are `one` and `other`."""
    if other in (one, ANY):
        return one
    return other if one == ANY else max(MIXED, one, other)


@dataclass(slots=True)
class Values:
    """The pieces that each buffer holds, in ascending order, without overlap."""

    axis_count: int
    pieces: dict[str, tuple[Piece, ...]] = field(default_factory=dict[str, tuple[Piece, ...]])

    def copy(self) -> "Values":
        """The same values, to go another way with."""
        return Values(self.axis_count, dict(self.pieces))

    def state(self, buffers: tuple[str, ...]) -> tuple[object, ...]:
        """The placements in `buffers`, to be compared."""
        pieces = self.pieces
        return tuple(tuple(piece[:3] for piece in pieces.get(name, ())) for name in buffers)

    def read(self, buffer: str, start: int, end: int) -> Placement:
        """What the elements from `start` to `end` are."""
        pieces = self.pieces.get(buffer, ())
        if len(pieces) == 1 and pieces[0][0] <= start and end <= pieces[0][1]:
            return pieces[0][2]
        if start == end:
            return (ANY,) * self.axis_count
        found: Placement | None = None
        place = start
        for low, high, placement, _ in pieces:
            if high <= place:
                continue
            if low > place:
                break
            found = placement if found is None else tuple(map(both, found, placement))
            place = high
            if place >= end:
                return found
        return (NOTHING,) * self.axis_count

    def write(self, buffer: str, piece: Piece) -> None:
        """Elements from the first to the second number of `piece` become what it says."""
        start, end, placement, _ = piece
        pieces = self.pieces.get(buffer)
        if not pieces:
            self.pieces[buffer] = (piece,)
            return
        low, high, last, first_writer = pieces[-1]
        if high == start and last == placement:
            self.pieces[buffer] = (*pieces[:-1], (low, end, placement, first_writer))
        elif start == end:
            return
        elif start <= pieces[0][0] and high <= end:
            self.pieces[buffer] = (piece,)
        else:
            before = [(a, min(b, start), p, w) for a, b, p, w in pieces if a < start]
            behind = [(max(a, end), b, p, w) for a, b, p, w in pieces if b > end]
            self.pieces[buffer] = (*before, piece, *behind)

    def writers(self, buffer: str, start: int, end: int) -> list[tuple[str, Placement]]:
        """What wrote the elements from `start` to `end`, and as what."""
        return [
            (writer, placement)
            for low, high, placement, writer in self.pieces.get(buffer, ())
            if low < end and start < high
        ]


WHOLE = frozenset({ANY, REPLICATE})
COMPLETE = frozenset({ANY, REPLICATE, SHARD})
SUMMANDS = frozenset({ANY, PARTIAL})
VERDICTS = frozenset({ANY, REPLICATE, VERDICT})
PARTS = frozenset({ANY, SHARD})
WRITTEN = frozenset({ANY, REPLICATE, SHARD, PARTIAL, VERDICT})
"""What an operand may be along an axis."""


class Rule:
    """What is allowed along each axis, and in words; remembers what it has let pass."""

    def __init__(self, allowed: list[frozenset[int]], needs: str) -> None:
        self.allowed = allowed
        self.needs = needs
        self.passed: set[Placement] = set()

    def breach(self, placement: Placement) -> int | None:
        """The first axis along which `placement` is not allowed."""
        for axis, (code, allowed) in enumerate(zip(placement, self.allowed, strict=True)):
            if code not in allowed:
                return axis
        self.passed.add(placement)
        return None


class Ledger:
    """What the buffers of one program hold while it is gone through, and what was found wrong."""

    def __init__(self, schedule: Schedule, program: Program, invariant: str) -> None:
        self.program = program
        self.invariant = invariant
        axes = [axis for axis in schedule.mesh.axes if axis.size > 1]
        self.axes = [axis.name for axis in axes]
        self.size = {axis.name: axis.size for axis in axes}
        self.number = {axis.name: number for number, axis in enumerate(axes)}
        self.anything: Placement = (ANY,) * len(axes)
        self.values = Values(len(axes))
        self.found: dict[tuple[str, str], Finding] = {}

    def read(self, view: View) -> Placement:
        """What `view` is; the rank's own part of a whole tensor is a shard."""
        axis = view.axis
        if axis is None or axis not in self.number:
            if view.layout is not None:
                return self.values.read(view.buffer, 0, self._elements(view))
            return self.values.read(view.buffer, view.start, view.start + view.size)
        end = view.start + self.size[axis] * view.size
        placement = self.values.read(view.buffer, view.start, end)
        number = self.number[axis]
        if placement[number] in (REPLICATE, OWN):
            placement = (*placement[:number], SHARD, *placement[number + 1 :])
        return placement

    def write(self, writer: str, view: View, placement: Placement) -> None:
        """`view` becomes `placement`; a shard at its place in a whole tensor stays there."""
        axis = view.axis
        start, end = view.start, view.start + view.size
        if view.layout is not None:
            start, end = 0, self._elements(view)
        elif axis is not None and axis in self.number:
            end = start + self.size[axis] * view.size
            number = self.number[axis]
            if placement[number] in (ANY, REPLICATE, SHARD):
                placement = (*placement[:number], OWN, *placement[number + 1 :])
        self.values.write(view.buffer, (start, end, placement, writer))

    def _elements(self, view: View) -> int:
        return self.program.by_name[view.buffer].elements

    def need(self, operation: str, view: View, rule: Rule, verb: str) -> Placement:
        """What `view` is; where `rule` does not allow that, a finding, and then anything."""
        if view.size == 0:
            return self.anything
        placement = self.read(view)
        if placement in rule.passed:
            return placement
        axis = rule.breach(placement)
        if axis is None:
            return placement
        along = self.axes[axis]
        code = placement[axis]
        state = WORDS[NOTHING] if code == NOTHING else f"{WORDS[code]} over {along}"
        self.note(
            operation,
            f"{verb} {view.buffer}, which is {state}: it must be {rule.needs}",
            self.history(view),
        )
        return self.anything

    def history(self, view: View) -> tuple[str, ...]:
        """What wrote `view`, line by line."""
        span = 1 if view.axis is None else self.size.get(view.axis, 1)
        lines: list[str] = []
        for writer, placement in self.values.writers(
            view.buffer, view.start, view.start + span * view.size
        ):
            words = [
                f"{WORDS[code]} over {name}"
                for name, code in zip(self.axes, placement, strict=True)
                if code != ANY
            ]
            lines.append(f"{writer} wrote it: {', '.join(words) or 'a constant'}")
        return tuple(lines) or (f"nothing wrote {view.buffer} since it was allocated",)

    def note(self, operation: str, why: str, witness: tuple[str, ...]) -> None:
        """Keep a finding, once."""
        finding = Finding(
            invariant=self.invariant,
            role=self.program.role,
            operation=operation,
            why=why,
            witness=witness,
        )
        self.found.setdefault((operation, why), finding)
