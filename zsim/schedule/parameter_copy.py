"""Moves of a copy by parameter: which places of the source are copied to which of the target."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from zsim.schedule.layout import Fragment
from zsim.schedule.mesh import Coordinates
from zsim.schedule.operation import Copy
from zsim.schedule.schedule import Buffer, Program, Schedule


class RowCopy(NamedTuple):
    """`rows` rows of `size` elements: row i is copied from `source` + i * `source_step`.

    Its target is `target` + i * `target_step`. If there is one row, both steps are its size.
    """

    source: int
    source_step: int
    target: int
    target_step: int
    size: int
    rows: int


@dataclass(frozen=True, slots=True)
class Rearrangement:
    """Moves, and the target's padding: (start, size) of ranges that belong to no parameter."""

    moves: tuple[RowCopy, ...]
    padding: tuple[tuple[int, int], ...]


def rearrangement(
    schedule: Schedule, program: Program, copy: Copy, coordinates: Coordinates
) -> Rearrangement:
    """Return the moves and padding of `copy`, by parameter, on the rank at `coordinates`.

    Places are in elements from the start of each buffer. The cost is linear in the number of
    pieces of parameters in a buffer, so callers keep the result.
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


def _moves(source: Iterable[Fragment], target: Iterable[Fragment]) -> Iterator[RowCopy]:
    """Yield single rows, in the order of the target's fragments."""
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
                yield RowCopy(start, size, there.position + low - there.offset, size, size, 1)


def _joined(moves: Iterable[RowCopy]) -> Iterator[RowCopy]:
    """Merge rows of one size at equal distances, and adjacent rows into one longer row."""
    last: RowCopy | None = None
    for move in moves:
        if last is None:
            last = move
            continue
        after = (move.source - last.source, move.target - last.target)
        if last.rows == 1 and after == (last.size, last.size):
            size = last.size + move.size
            last = RowCopy(last.source, size, last.target, size, size, 1)
        elif last.rows == 1 and move.size == last.size and min(after) >= last.size:
            last = RowCopy(last.source, after[0], last.target, after[1], last.size, 2)
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
    """Yield (start, size) of each range of `elements` that no fragment covers."""
    end = 0
    for fragment in sorted(fragments, key=lambda each: each.position):
        if fragment.position > end:
            yield end, fragment.position - end
        end = max(end, fragment.position + fragment.size)
    if end < elements:
        yield end, elements - end
