"""Moves of a copy by parameter: which places of its source go to which of its target."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from zsim.schedule.layout import Fragment
from zsim.schedule.mesh import Coordinates
from zsim.schedule.operation import Copy
from zsim.schedule.schedule import Buffer, Program, Schedule


class Rows(NamedTuple):
    """`rows` rows of `size` elements each: row i goes from `source` + i x `source_step`.

    It goes to `target` + i x `target_step`. Of one row both steps are its size.
    """

    source: int
    source_step: int
    target: int
    target_step: int
    size: int
    rows: int


@dataclass(frozen=True, slots=True)
class Rearrangement:
    """Moves, and the padding of the target: (start, size) of what no parameter covers."""

    moves: tuple[Rows, ...]
    padding: tuple[tuple[int, int], ...]


def rearrangement(
    schedule: Schedule, program: Program, copy: Copy, coordinates: Coordinates
) -> Rearrangement:
    """Return what `copy`, which is by parameter, does on the rank at `coordinates`.

    Places are counted in elements from the start of each buffer. Costs as much as there are pieces
    of parameters that lie in one, so it is asked once and kept.
    """
    target = program.by_name[copy.target.buffer]
    there = tuple(held(schedule, target, coordinates))
    here = held(schedule, program.by_name[copy.source.buffer], coordinates)
    return Rearrangement(
        moves=tuple(_joined(_moves(here, there))), padding=tuple(_gaps(there, target.elements))
    )


def held(schedule: Schedule, buffer: Buffer, coordinates: Coordinates) -> Iterator[Fragment]:
    """Return the parts of parameters that `buffer` holds on the rank at `coordinates`."""
    assert buffer.layout is not None
    layout = schedule.layout_by_name[buffer.layout]
    if layout.axis is None:
        return layout.fragments(1)
    coordinate = None if buffer.shard is None else coordinates[buffer.shard]
    return layout.fragments(schedule.mesh.axis_size(layout.axis), coordinate)


def _moves(source: Iterable[Fragment], target: Iterable[Fragment]) -> Iterator[Rows]:
    """Single rows, in the order of the target's fragments."""
    found: dict[str, list[Fragment]] = {}
    for fragment in source:
        found.setdefault(fragment.parameter, []).append(fragment)
    offsets: dict[str, list[int]] = {}
    for name, fragments in found.items():
        fragments.sort(key=lambda each: each.offset)
        offsets[name] = [each.offset for each in fragments]
    for there in target:
        if there.parameter not in found:
            continue
        first = max(0, bisect_right(offsets[there.parameter], there.offset) - 1)
        for here in found[there.parameter][first:]:
            low = max(here.offset, there.offset)
            size = min(here.offset + here.size, there.offset + there.size) - low
            if here.offset >= there.offset + there.size:
                break
            if size > 0:
                start = here.position + low - here.offset
                yield Rows(start, size, there.position + low - there.offset, size, size, 1)


def _joined(moves: Iterable[Rows]) -> Iterator[Rows]:
    """Rows of one size at equal distances as one, and neighbours as one longer row."""
    last: Rows | None = None
    for move in moves:
        if last is None:
            last = move
            continue
        after = (move.source - last.source, move.target - last.target)
        if last.rows == 1 and after == (last.size, last.size):
            size = last.size + move.size
            last = Rows(last.source, size, last.target, size, size, 1)
        elif last.rows == 1 and move.size == last.size and min(after) >= last.size:
            last = Rows(last.source, after[0], last.target, after[1], last.size, 2)
        elif move.size == last.size and after == (
            last.rows * last.source_step,
            last.rows * last.target_step,
        ):
            last = last._replace(rows=last.rows + 1)
        else:
            yield last
            last = move
    if last is not None:
        yield last


def _gaps(fragments: Iterable[Fragment], elements: int) -> Iterator[tuple[int, int]]:
    """(start, size) of what none of `fragments` covers of `elements`."""
    end = 0
    for fragment in sorted(fragments, key=lambda each: each.position):
        if fragment.position > end:
            yield end, fragment.position - end
        end = max(end, fragment.position + fragment.size)
    if end < elements:
        yield end, elements - end
