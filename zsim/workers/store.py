"""Outcomes of runs in an SQLite file, by a hash of all that each depends on."""

import sqlite3
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from pathlib import Path

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


class Store:
    """An open file. What `put` was told is on the disk when it returns."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def get(self, keys: Sequence[str]) -> dict[str, StudyOutcome]:
        """The outcomes that are known, by key; one that cannot be read is not."""
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

    def put(self, rows: Iterable[tuple[str, str, StudyOutcome, float]]) -> None:
        """Keep runs: key, name, outcome, seconds."""
        lines = [(key, name, encoded(outcome), seconds) for key, name, outcome, seconds in rows]
        with self._connection:
            self._connection.executemany(
                "INSERT OR REPLACE INTO zsim_runs VALUES (?, ?, ?, ?)", lines
            )


@contextmanager
def opened(path: Path) -> Generator[Store]:
    """The store in the file at `path`, which is made if it is not there.

    Raises:
        MistakeError: the file is no such store, or cannot be used.
    """
    connection = None
    try:
        connection = sqlite3.connect(path, timeout=WAIT_S)
        with connection:
            connection.execute(TABLE)
        yield Store(connection)
    except sqlite3.Error as error:
        raise MistakeError(f"--store: {path}: {error}") from None
    finally:
        if connection is not None:
            connection.close()
