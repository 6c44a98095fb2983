"""The progress record of a rank, readable from outside even if the rank hangs or has died.

A rank writes one line to a small memory-mapped file, which takes about a microsecond and no system
call. An observer reads a counter that grows with every line, the last line, the collective that the
rank waits for, and the number of collectives issued on each communicator.
"""

import json
import mmap
import os
import struct
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Protocol, Self

_HEADER = struct.Struct("=QIIII")
_HANDED = struct.Struct("=I")
_TEXT_BYTES_MAX = 496
GROUPS_MAX: Final = 128
"""Maximum number of counted communicators of a schedule; later ones are not tracked."""

_PACK_HEADER = _HEADER.pack_into
_TEXT_START = _HEADER.size
_WAIT_START = _HEADER.size + _TEXT_BYTES_MAX
_WAIT_BYTES_MAX = 3072
_NUMBER: Final = b', "number": '
_NUMBER_BYTES_MAX: Final = 21
"""Digits of a 64-bit number, and the closing brace."""
_HANDED_START = _WAIT_START + _WAIT_BYTES_MAX
_SIZE_BYTES = _HANDED_START + GROUPS_MAX * _HANDED.size


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """A collective that a rank waits for: number `number` on communicator `group` of the schedule.

    `ranks` are the members of the communicator. A message has number 0 and the ranks at its other
    end, because members of a communicator send and receive in different orders.
    """

    operation: str
    group: int
    number: int
    ranks: tuple[int, ...]


class HandedCollective(Protocol):
    """A collective, as streams see it; `ranks` are the members of its communicator."""

    @property
    def operation(self) -> str:
        """Id of the operation."""
        ...

    @property
    def group_number(self) -> int:
        """Index of its communicator in the schedule."""
        ...

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks that take part."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LastProgress:
    """The number of lines that a rank has written, the last one, and the awaited collective.

    `handed` are the numbers of collectives issued on each communicator; `steps` is the number of
    finished steps. `pid` is its process id, or 0 before it starts.
    """

    count: int
    text: str
    pid: int = 0
    wait: Wait | None = None
    handed: tuple[int, ...] = ()
    steps: int = 0

    def to_json(self) -> str:
        """Return the record as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the record that `to_json` wrote."""
        found: dict[str, Any] = json.loads(text)
        return cls(
            count=found["count"],
            text=found["text"],
            pid=found["pid"],
            wait=_wait_in(found["wait"]),
            handed=tuple(found["handed"]),
            steps=found["steps"],
        )


class ProgressRecord:
    """The progress record of one rank; in a file, or in the memory of this process."""

    def __init__(self, path: Path | None = None) -> None:
        if path is None:
            self._map = mmap.mmap(-1, _SIZE_BYTES)
        else:
            if not path.exists():
                path.write_bytes(bytes(_SIZE_BYTES))
            with path.open("r+b") as file:
                self._map = mmap.mmap(file.fileno(), _SIZE_BYTES)
        self._count = self.read().count
        self._told: dict[tuple[str, int], tuple[HandedCollective, bytes]] = {}
        self._pid = self._length = self._waits = self._steps = 0

    def claim(self) -> None:
        """Write this process's id as that of the rank."""
        self._pid = os.getpid()
        self._publish()

    def write(self, text: str) -> None:
        """Write `text` as the last line, and increment the counter."""
        self.write_line(text.encode("utf-8", "replace"))

    def write_line(self, line: bytes) -> None:
        """Write an encoded line, like `write`."""
        line = line[:_TEXT_BYTES_MAX]
        self._count = count = self._count + 1
        self._length = length = len(line)
        self._map[_TEXT_START : _TEXT_START + length] = line
        # The same as `_publish`, inlined because it runs for every operation.
        _PACK_HEADER(self._map, 0, count, self._pid, length, self._waits, self._steps)

    def progress(self) -> None:
        """Increment the counter; the last line stays."""
        self._count += 1
        self._publish()

    def _publish(self) -> None:
        fields = self._count, self._pid, self._length, self._waits, self._steps
        _HEADER.pack_into(self._map, 0, *fields)

    def finish_step(self, done: int) -> None:
        """Record that `done` steps are finished; increment the counter."""
        self._count += 1
        self._steps = done
        self._publish()

    def wait_for(self, collective: "HandedCollective", number: int) -> None:
        """Record the collective that the rank now waits for; increment the counter."""
        key = collective.operation, collective.group_number
        known = self._told.get(key)
        if known is None or known[0] is not collective:
            known = self._told[key] = collective, _start_of(collective)
        text = b"%s%d}" % (known[1], number)
        self._map[_WAIT_START : _WAIT_START + len(text)] = text
        self._count += 1
        self._waits = len(text)
        self._publish()

    def go_on(self) -> None:
        """Record that the rank no longer waits; increment the counter."""
        self._count += 1
        self._waits = 0
        self._publish()

    def hand_over(self, group: int, number: int) -> None:
        """Record that `number` collectives were issued on communicator `group`."""
        if group < GROUPS_MAX:
            _HANDED.pack_into(self._map, _HANDED_START + group * _HANDED.size, number)

    def read(self) -> LastProgress:
        """Return the current record; a line that is being written may be inconsistent."""
        count, pid, length, waits, steps = _HEADER.unpack_from(self._map, 0)
        line = self._map[_HEADER.size : _HEADER.size + min(length, _TEXT_BYTES_MAX)]
        return LastProgress(
            count=count,
            pid=pid,
            steps=steps,
            text=line.decode("utf-8", "replace"),
            wait=_wait(self._map[_WAIT_START : _WAIT_START + min(waits, _WAIT_BYTES_MAX)]),
            handed=tuple(
                number for (number,) in _HANDED.iter_unpack(self._map[_HANDED_START:_SIZE_BYTES])
            ),
        )

    def close(self) -> None:
        """Close the mapping; the file stays."""
        self._map.close()


def _start_of(collective: HandedCollective) -> bytes:
    """Return the JSON of a wait for `collective`, up to its number."""
    fields = {"operation": collective.operation, "group": collective.group_number}
    room = _WAIT_BYTES_MAX - len(_NUMBER) - _NUMBER_BYTES_MAX
    text = json.dumps({**fields, "ranks": collective.ranks}).encode()
    if len(text) > room:  # too many members to list: then no rank is reported missing
        text = json.dumps({**fields, "ranks": ()}).encode()[:room]
    return text[:-1] + _NUMBER


def _wait(text: bytes) -> Wait | None:
    try:
        return _wait_in(json.loads(text) if text else None)
    except ValueError:  # read while it was being written
        return None


def _wait_in(fields: dict[str, Any] | None) -> Wait | None:
    if fields is None:
        return None
    return Wait(
        operation=fields["operation"],
        group=fields["group"],
        number=fields["number"],
        ranks=tuple(fields["ranks"]),
    )


_own: Final[list[ProgressRecord]] = []


def note(text: str) -> None:
    """Record the next action of this rank, which counts as progress; a no-op outside a rank."""
    if _own:
        _own[0].write(text)


def noting() -> Callable[[bytes], None] | None:
    """Return the function that `note` calls, for encoded lines; None outside a rank."""
    return _own[0].write_line if _own else None


def step_done(done: int) -> None:
    """Record that `done` steps are finished on this rank."""
    if _own:
        _own[0].finish_step(done)


def progressed() -> None:
    """Record progress of a thread of this rank, without changing the last line."""
    if _own:
        _own[0].progress()


def handed_over(group: int, number: int) -> None:
    """Record that this rank has issued collective `number` on communicator `group`."""
    if _own:
        _own[0].hand_over(group, number)


class waiting_for:  # noqa: N801  (used as a function; a generator takes three times as long)
    """Record, inside the context, that this rank waits for a collective of its communicator."""

    __slots__ = ("_collective", "_number")

    def __init__(self, collective: HandedCollective, number: int) -> None:
        self._collective = collective
        self._number = number

    def __enter__(self) -> None:
        if _own:
            _own[0].wait_for(self._collective, self._number)

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        """Keep the record after an error: it shows where the rank was."""
        if _own and error is None:
            _own[0].go_on()


def note_to(record: ProgressRecord) -> None:
    """Make `record` the target of `note` in this process."""
    record.claim()
    _own[:] = [record]
