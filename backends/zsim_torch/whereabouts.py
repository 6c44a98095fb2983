"""What a rank is doing, readable from outside even when the rank hangs or has died.

A rank writes one line into a small file that it maps into memory: about a microsecond, no system
call. Whoever watches sees a counter that grows with every line (progress), and the last line.
"""

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_HEADER = struct.Struct("=QI")
_SIZE_BYTES = 512
_TEXT_BYTES_MAX = _SIZE_BYTES - _HEADER.size
assert _TEXT_BYTES_MAX > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """How many lines a rank has written, and the last one."""

    count: int
    text: str


class Whereabouts:
    """The file of one rank, open for writing and reading."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(bytes(_SIZE_BYTES))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _SIZE_BYTES)
        self._count = self.read().count

    def write(self, text: str) -> None:
        """The last line is `text`, and the counter has grown."""
        line = text.encode("utf-8", "replace")[:_TEXT_BYTES_MAX]
        self._count += 1
        self._map[_HEADER.size : _HEADER.size + len(line)] = line
        _HEADER.pack_into(self._map, 0, self._count, len(line))

    def read(self) -> Note:
        """What was written last. A line that is being written may be seen torn."""
        count, length = _HEADER.unpack_from(self._map, 0)
        line = self._map[_HEADER.size : _HEADER.size + min(length, _TEXT_BYTES_MAX)]
        return Note(count=count, text=line.decode("utf-8", "replace"))

    def close(self) -> None:
        """The mapping is gone; the file stays."""
        self._map.close()


_own: Final[list[Whereabouts]] = []


def note(text: str) -> None:
    """Say what this rank does next; it counts as progress. Nothing happens outside of a rank."""
    if _own:
        _own[0].write(text)


def note_to(path: Path) -> None:
    """From here on `note` writes to the file at `path`."""
    _own[:] = [Whereabouts(path)]
