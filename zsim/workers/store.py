"""Outcomes of runs in an SQLite file, by a hash of all that each depends on."""

import sqlite3
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from pathlib import Path

from zsim.backend.backend import RunFailedError
from zsim.mistake import MistakeError
from zsim.schedule.json import FieldError
from zsim.study.outcome import StudyOutcome, decoded, encoded

TABLE = (
    "CREATE TABLE IF NOT EXISTS zsim_runs "
    "(key TEXT PRIMARY KEY, name TEXT NOT NULL, outcome TEXT NOT NULL, seconds REAL NOT NULL)"
)
AT_ONCE = 500
"""Keys in one question; SQLite of old takes at most 999."""

WAIT_S = 30.0
"""How long to wait for another sweep that writes to the same file."""


NO_SPACE = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)
"""Errors of a disk that takes no more: SQLite calls a file that may not grow an I/O error."""

Line = tuple[str, str, str, float]
"""Key, name, outcome, seconds."""


class Store:
    """Open file of outcomes. What `put` was told is on the disk when it returns.

    On a full disk it waits for the next `put`, which tries to write it again.

    Attributes:
        why_not: why outcomes wait to be written; empty if none do.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._waiting: list[Line] = []
        self.why_not = ""

    @property
    def not_written(self) -> int:
        """Outcomes that are not in the file."""
        return len(self._waiting)

    def get(self, keys: Sequence[str]) -> dict[str, StudyOutcome]:
        """Return the outcomes that are known, by key; one that cannot be read is not."""
        found: dict[str, StudyOutcome] = {}
        for first in range(0, len(keys), AT_ONCE):
            some = keys[first : first + AT_ONCE]
            marks = ",".join("?" * len(some))
            question = f"SELECT key, outcome FROM zsim_runs WHERE key IN ({marks})"
            for key, text in self._connection.execute(question, some):
                try:
                    found[key] = decoded(text)
                except FieldError:
                    continue
        return found

    def put(self, rows: Iterable[tuple[str, str, StudyOutcome, float]] = ()) -> None:
        """Keep runs: key, name, outcome, seconds; and those that could not be kept before."""
        self._waiting += [(key, name, encoded(found), taken) for key, name, found, taken in rows]
        try:
            with self._connection:
                self._connection.executemany(
                    "INSERT OR REPLACE INTO zsim_runs VALUES (?, ?, ?, ?)", self._waiting
                )
        except sqlite3.Error as error:
            if not _is_full(error):
                raise
            self.why_not = str(error)
        else:
            self._waiting, self.why_not = [], ""


def _is_full(error: sqlite3.Error) -> bool:
    code = getattr(error, "sqlite_errorcode", None)
    return code is not None and code & 0xFF in NO_SPACE


@contextmanager
def opened(path: Path) -> Generator[Store]:
    """Open the store in the file at `path`, which is made if it is not there.

    Raises:
        MistakeError: the file is no such store, or cannot be used.
        RunFailedError: there is no space for a new one.
    """
    connection = None
    if path.exists() and not path.is_file():
        raise MistakeError(f"--store: {path}: must be a regular file")
    try:
        connection = sqlite3.connect(path, timeout=WAIT_S)
        with connection:
            connection.execute(TABLE)
        yield Store(connection)
    except sqlite3.Error as error:
        if _is_full(error):
            raise RunFailedError(f"--store: {path}: {error}") from None
        raise MistakeError(f"--store: {path}: {error}") from None
    finally:
        if connection is not None:
            connection.close()
