"""Outcomes of runs in an SQLite file, by a hash of all that each depends on.

Each row has a checksum: one that was changed, or that a disk has spoilt, is not believed, and its
run is run again. A file that is damaged as a whole is put aside, and what can be read of it is
kept.
"""

import sqlite3
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path

from zsim.backend.backend import RunFailedError
from zsim.files.given import is_there
from zsim.mistake import MistakeError, file_fault
from zsim.study.outcome import StudyOutcome, decoded, encoded

TABLE = (
    "CREATE TABLE IF NOT EXISTS zsim_runs "
    "(key TEXT PRIMARY KEY, name TEXT NOT NULL, outcome TEXT NOT NULL, seconds REAL NOT NULL, "
    "checksum TEXT NOT NULL DEFAULT '')"
)
COLUMNS = "key, name, outcome, seconds, checksum"
AT_ONCE = 500
"""Keys in one question; SQLite of old takes at most 999."""

WAIT_S = 30.0
"""How long to wait for another sweep that writes to the same file."""


NO_SPACE = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)
"""Errors of a disk that takes no more: SQLite calls a file that may not grow an I/O error."""

DAMAGED = ".damaged"
"""Ends the name of a file that was put aside."""

Line = tuple[str, str, str, float, str]
"""Key, name, outcome, seconds, checksum."""


def checksum(key: str, name: str, outcome: str, seconds: float) -> str:
    """Return the checksum of a row, which binds its outcome to its key."""
    return sha256("\n".join((key, name, outcome, repr(seconds))).encode()).hexdigest()


class Store:
    """Open file of outcomes. What `put` was told is on the disk when it returns.

    On a full disk it waits for the next `put`, which tries to write it again.

    Attributes:
        why_not: why outcomes wait to be written; empty if none do.
        disbelieved: rows that `get` found and that are not what was written.
        damage: what was wrong with the file, and what became of it, in a line each.
    """

    def __init__(self, connection: sqlite3.Connection, damage: Sequence[str] = ()) -> None:
        self._connection = connection
        self._connection.text_factory = lambda text: text.decode("utf-8", "replace")
        self._waiting: list[Line] = []
        self.why_not = ""
        self.disbelieved = 0
        self.damage = damage

    @property
    def not_written(self) -> int:
        """Outcomes that are not in the file."""
        return len(self._waiting)

    def get(self, keys: Sequence[str]) -> dict[str, StudyOutcome]:
        """Return the outcomes that are known, by key; a row that is not what was written is not."""
        found: dict[str, StudyOutcome] = {}
        for first in range(0, len(keys), AT_ONCE):
            some = keys[first : first + AT_ONCE]
            marks = ",".join("?" * len(some))
            question = f"SELECT {COLUMNS} FROM zsim_runs WHERE key IN ({marks})"
            for row in self._connection.execute(question, some):
                line = _whole(row)
                outcome = None if line is None else _outcome(line[2])
                if line is None or outcome is None:
                    self.disbelieved += 1
                else:
                    found[line[0]] = outcome
        return found

    def put(self, rows: Iterable[tuple[str, str, StudyOutcome, float]] = ()) -> None:
        """Keep runs: key, name, outcome, seconds; and those that could not be kept before."""
        for key, name, outcome, taken in rows:
            text = encoded(outcome)
            self._waiting.append((key, name, text, taken, checksum(key, name, text, taken)))
        try:
            _insert(self._connection, self._waiting)
        except sqlite3.Error as error:
            if not _is_full(error):
                raise
            self.why_not = str(error)
        else:
            self._waiting, self.why_not = [], ""


def _insert(connection: sqlite3.Connection, lines: Sequence[Line]) -> None:
    with connection:
        connection.executemany(
            f"INSERT OR REPLACE INTO zsim_runs ({COLUMNS}) VALUES (?, ?, ?, ?, ?)", lines
        )


def _whole(row: Sequence[object]) -> Line | None:
    """Return the row if it is what was written."""
    match row:
        case (str(key), str(name), str(outcome), float(seconds), str(said)):
            right = checksum(key, name, outcome, seconds) == said
            return (key, name, outcome, seconds, said) if right else None
        case _:
            return None


def _outcome(text: str) -> StudyOutcome | None:
    try:
        return decoded(text)
    except (ValueError, RecursionError):  # a FieldError is a ValueError
        return None


def _is_full(error: sqlite3.Error) -> bool:
    return _code(error) in NO_SPACE


def _code(error: sqlite3.Error) -> int | None:
    code = getattr(error, "sqlite_errorcode", None)
    return None if code is None else code & 0xFF


@contextmanager
def opened(path: Path) -> Generator[Store]:
    """Open the store in the file at `path`, which is made if it is not there.

    Raises:
        MistakeError: the file is no such store, or cannot be used.
        RunFailedError: there is no space for a new one.
    """
    connection = None
    try:
        if is_there(path) and not path.is_file():
            raise MistakeError(f"--store: {path}: must be a regular file")
        connection = sqlite3.connect(path, timeout=WAIT_S)
        damage = _damage(connection)
        if damage:
            rows = list(_readable(connection))
            connection.close()
            aside = path.with_name(path.name + DAMAGED)
            path.replace(aside)
            connection = sqlite3.connect(path, timeout=WAIT_S)
            damage = f"{path}: {damage}; it is now {aside.name}, {len(rows):,} runs are kept"
            with connection:
                connection.execute(TABLE)
            _insert(connection, rows)
        yield Store(connection, [damage] if damage else [])
    except sqlite3.Error as error:
        if _is_full(error):
            raise RunFailedError(f"--store: {path}: {error}") from None
        raise MistakeError(f"--store: {path}: {error}") from None
    except OSError as error:
        raise file_fault(f"--store: {path}", error) from None
    finally:
        if connection is not None:
            connection.close()


def _damage(connection: sqlite3.Connection) -> str:
    """Return what is wrong with the file, after making the table where there is none."""
    try:
        with connection:
            connection.execute(TABLE)
            columns = [row[1] for row in connection.execute("PRAGMA table_info(zsim_runs)")]
            if "checksum" not in columns:  # written before rows had one: none is believed
                connection.execute("ALTER TABLE zsim_runs ADD COLUMN checksum TEXT DEFAULT ''")
        (found,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    except sqlite3.DatabaseError as error:
        if _code(error) != sqlite3.SQLITE_CORRUPT:
            raise
        return str(error)
    return "" if found == "ok" else str(found).replace("\n", " ")


def _readable(connection: sqlite3.Connection) -> Iterator[Line]:
    """Yield the rows of a damaged file that are what was written, as far as SQLite reads it."""
    connection.text_factory = lambda text: text.decode("utf-8", "replace")
    with suppress(sqlite3.Error):
        for row in connection.execute(f"SELECT {COLUMNS} FROM zsim_runs"):
            line = _whole(row)
            if line is not None:
                yield line
