"""Diagnose a lack of progress: who waits for which operation, and which ranks are missing."""

import re
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from torch.distributed import distributed_c10d

from zsim_torch.supervise.progress_record import LastProgress

_NAMED_MAX: Final = 3
"""Maximum number of operations named in a line; the details list every rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """State of one rank as seen from outside.

    Attributes:
        gone: the rank has died or raised.
        stopped: a signal has stopped its process (SIGSTOP, or a debugger).
        in_collective: its stack ends in a wait for other ranks.
    """

    rank: int
    note: LastProgress
    gone: bool = False
    stopped: bool = False
    in_collective: bool = False

    @property
    def where(self) -> str:
        """Return the last line of the rank's progress record."""
        return self.note.text or "its start"


def is_stopped(pid: int) -> bool:
    """Return True if a signal has stopped the process `pid`."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text("utf-8")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] in "Tt"


def missing(one: Seen, seen: Sequence[Seen]) -> tuple[int, ...]:
    """Return the ranks that are gone or have not issued the collective that `one` waits for."""
    wait = one.note.wait
    if wait is None:
        return ()
    return tuple(
        other.rank
        for other in seen
        if other.rank in wait.ranks
        and (other.gone or other.stopped or _handed(other, wait.group) < wait.number)
    )


def _handed(one: Seen, group: int) -> int:
    """Return the number of collectives that `one` has issued on a communicator; huge if unknown."""
    return one.note.handed[group] if group < len(one.note.handed) else sys.maxsize


def blamed(seen: Sequence[Seen]) -> Seen:
    """Return the rank that most likely blocks the others.

    A stopped rank comes first, then a rank that is not in a collective, then the rank that most
    others wait for, then the rank with the least progress.
    """
    misses = Counter(rank for one in seen for rank in missing(one, seen))

    def order(one: Seen) -> tuple[bool, bool, int, int, int]:
        waits = one.note.wait is not None or one.in_collective
        return (not one.stopped, waits, -misses[one.rank], one.note.count, one.rank)

    return min(seen, key=order)


def account(one: Seen, seen: Sequence[Seen]) -> str:
    """Return a short reason why `one` does not progress, or an empty string."""
    if one.stopped:
        return "stopped by a signal, "
    diverged = _other_at_the_same_place(one, seen)
    if diverged is not None and one.note.wait is not None:
        there = diverged.note.wait
        assert there is not None
        return (
            f"the ranks diverge: it waits for {one.note.wait.operation} where rank "
            f"{diverged.rank} waits for {there.operation}, "
        )
    return ""


def _other_at_the_same_place(one: Seen, seen: Sequence[Seen]) -> Seen | None:
    """Return a rank whose same-numbered collective on the communicator is another operation."""
    wait = one.note.wait
    if wait is None or not wait.number:
        return None
    for other in seen:
        there = other.note.wait
        if (
            there is not None
            and other.rank in wait.ranks
            and (there.group, there.number) == (wait.group, wait.number)
            and there.operation != wait.operation
        ):
            return other
    return None


def waiting(seen: Sequence[Seen], *, without: int | None = None) -> str:
    """Describe who waits for which operation, and who is missing; empty if no rank waits."""
    found: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for one in seen:
        if one.note.wait is not None and one.rank != without:
            key = (one.note.wait.operation, missing(one, seen))
            found.setdefault(key, []).append(one.rank)
    lines = [
        f"{named(ranks)} {'wait' if len(ranks) > 1 else 'waits'} for {operation}"
        + (f" where {named(absent)} {'are' if len(absent) > 1 else 'is'} missing" if absent else "")
        for (operation, absent), ranks in found.items()
    ]
    more = len(lines) - _NAMED_MAX
    return "; ".join(lines[:_NAMED_MAX] + ([f"{more} other waits"] if more > 0 else []))


def story(one: Seen, seen: Sequence[Seen]) -> str:
    """Describe in a line where `one` was last seen, and the operation that it waits for."""
    line = f"rank {one.rank} was last seen: {one.where}"
    if one.note.wait is not None:
        line += f", waits for {one.note.wait.operation}"
        absent = missing(one, seen)
        line += f" where {named(absent)} {'are' if absent[1:] else 'is'} missing" if absent else ""
    return line


def named(ranks: Iterable[int]) -> str:
    """Return ranks as text: "rank 1", "ranks 0, 2 and 3"."""
    numbers = [str(rank) for rank in ranks]
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    if len(numbers) > 8:
        numbers = [*numbers[:7], f"{len(numbers) - 7} more"]
    return f"ranks {', '.join(numbers[:-1])} and {numbers[-1]}"


_TOP_FRAME: Final = re.compile(r'^(?:Current thread|Thread) .*\n  File "(.*)", line', re.MULTILINE)
_STREAMS: Final = str(Path(__file__).parents[1] / "execute" / "streams.py")
_WAITS_IN: Final = (_STREAMS, distributed_c10d.__file__)


def shows_wait(log: str) -> bool:
    """Return True if a stack in `log` ends in a wait for a collective."""
    return any(place in _WAITS_IN for place in _TOP_FRAME.findall(log))
