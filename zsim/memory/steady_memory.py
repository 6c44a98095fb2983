"""Whether the memory of a pipeline stage is the same after each turn of micro-batches.

In the steady state a stage frees as much as it allocates in a turn, so more turns have the same
peak. The caching allocator may serve a later turn from other blocks; its reserved bytes are steady
if the last turn has not raised their peak.
"""

import re
from collections.abc import Sequence

from zsim.trace.trace import LedgerEntry, Reservation

MICRO_BATCH = re.compile(r"/mb(\d+)")
SLOT = re.compile(r"@\d+|/\d+$")

_Line = tuple[str, int, int | None]
"""Operation without numbers of micro-batch and slot, change in bytes, and micro-batch."""


def is_steady(
    entries: Sequence[LedgerEntry],
    reservations: Sequence[Reservation],
    *,
    micro_batches: int,
    turn: int,
) -> bool:
    """Return True if more turns leave the peaks of a rank as they are, by its last step."""
    if any(each.shortage is not None or each.waits for each in reservations):
        return False
    begin = next(
        (at for at, each in enumerate(entries) if each.step == entries[-1].step), len(entries)
    )
    found = _last_turn([_line(each) for each in entries[begin:]], micro_batches, turn)
    if found is None:
        return False
    span = range(begin + found[0], begin + found[1])
    return all(_pool_is_steady(entries, each, span) for each in reservations)


def _line(entry: LedgerEntry) -> _Line:
    match = MICRO_BATCH.search(entry.operation)
    if match is None:
        return entry.operation, entry.change_bytes, None
    name = entry.operation[: match.start()] + entry.operation[match.end() :]
    return SLOT.sub("", name), entry.change_bytes, int(match[1])


def _last_turn(lines: Sequence[_Line], micro_batches: int, turn: int) -> tuple[int, int] | None:
    """Return the last turn whose lines repeat those of the turn before, or None."""
    places: dict[int | None, int] = {}
    for place, (_, _, batch) in enumerate(lines):
        places.setdefault(batch, place)
    first, second = places.get(micro_batches - 1 - turn), places.get(micro_batches - 1)
    if first is None or second is None:
        return None
    length, at = second - first, first
    while at + length < len(lines) and _is_next(lines[at], lines[at + length], turn):
        at += 1
    return None if at == first else (at, at + length)


def _is_next(line: _Line, later: _Line, turn: int) -> bool:
    if line[:2] != later[:2] or line[2] is None or later[2] is None:
        return False
    return later[2] - line[2] == turn


def _pool_is_steady(entries: Sequence[LedgerEntry], reserved: Reservation, turn: range) -> bool:
    """Return True if a pool has as much at both ends of `turn`, and no new peak in it."""
    own = [at for at, each in enumerate(entries) if each.pool == reserved.pool]
    if sum(entries[at].change_bytes for at in own if at in turn):
        return False
    course = reserved.course_bytes
    before = max((course[line] for line, at in enumerate(own) if at < turn.start), default=0)
    return all(course[line] <= before for line, at in enumerate(own) if at in turn)
