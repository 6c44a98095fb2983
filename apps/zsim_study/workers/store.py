"""Outcomes of runs in an SQLite file, by a hash of all inputs of each run.

Each row has a checksum. A row that was changed or corrupted is ignored, and its run is repeated. A
damaged file is moved away, and its readable rows are kept.
"""

import sqlite3
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path

from zsim.backend.backend import RunFailedError
from zsim.files.input_file import is_there
from zsim.mistake import MistakeError, file_fault
from zsim_study.study.outcome import StudyOutcome, decoded, encoded

TABLE = (
    "CREATE TABLE IF NOT EXISTS zsim_runs "
    "(key TEXT PRIMARY KEY, name TEXT NOT NULL, outcome TEXT NOT NULL, seconds REAL NOT NULL, "
    "checksum TEXT NOT NULL DEFAULT '')"
)
COLUMNS = "key, name, outcome, seconds, checksum"
AT_ONCE = 500
"""Keys per query; older SQLite allows at most 999."""

WAIT_S = 30.0
"""Seconds to wait for another sweep that writes to the same file."""


NO_SPACE = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)
"""Errors of a full disk: SQLite reports a file that cannot grow as an I/O error."""

DAMAGED = ".damaged"
"""Suffix of a damaged file that was moved away."""

Line = tuple[str, str, str, float, str]
"""Key, name, outcome, seconds, checksum."""


def checksum(key: str, name: str, outcome: str, seconds: float) -> str:
    """Return the checksum of a row, which binds its outcome to its key."""
    return sha256("\n".join((key, name, outcome, repr(seconds))).encode()).hexdigest()


class Store:
    """Open file of outcomes. Runs passed to `put` are on disk when it returns.

    On a full disk they wait for the next `put`, which tries to write them again.

    Attributes:
        why_not: why outcomes wait to be written; empty if none do.
        disbelieved: number of rows that `get` found with a wrong checksum.
        damage: the damage of the file, and its repair, in one line each.
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
        """Number of outcomes that are not in the file."""
        return len(self._waiting)

    def get(self, keys: Sequence[str]) -> dict[str, StudyOutcome]:
        """Return the stored outcomes by key; rows with a wrong checksum are skipped."""
        found: dict[str, StudyOutcome] = {}
        for first in range(0, len(keys), AT_ONCE):
            some = keys[first : first + AT_ONCE]
            marks = ",".join("?" * len(some))
            question = f"SELECT {COLUMNS} FROM zsim_runs WHERE key IN ({marks})"
            for row in self._connection.execute(question, some):
                line = _valid_row(row)
                outcome = None if line is None else _outcome(line[2])
                if line is None or outcome is None:
                    self.disbelieved += 1
                else:
                    found[line[0]] = outcome
        return found

    def put(self, rows: Iterable[tuple[str, str, StudyOutcome, float]] = ()) -> None:
        """Store runs (key, name, outcome, seconds), and earlier runs that could not be stored."""
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


def _valid_row(row: Sequence[object]) -> Line | None:
    """Return the row if its checksum is right, else None."""
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
    """Open the store in the file at `path`, which is created if missing.

    Raises:
        MistakeError: the file is not such a store, or cannot be used.
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
    """Return the damage of the file, or ""; create the table first if missing."""
    try:
        with connection:
            connection.execute(TABLE)
            columns = [row[1] for row in connection.execute("PRAGMA table_info(zsim_runs)")]
            if "checksum" not in columns:  # written before rows had one: all are ignored
                connection.execute("ALTER TABLE zsim_runs ADD COLUMN checksum TEXT DEFAULT ''")
        (found,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    except sqlite3.DatabaseError as error:
        if _code(error) != sqlite3.SQLITE_CORRUPT:
            raise
        return str(error)
    return "" if found == "ok" else str(found).replace("\n", " ")


def _readable(connection: sqlite3.Connection) -> Iterator[Line]:
    """Yield the rows of a damaged file with a right checksum, until SQLite fails to read."""
    connection.text_factory = lambda text: text.decode("utf-8", "replace")
    with suppress(sqlite3.Error):
        for row in connection.execute(f"SELECT {COLUMNS} FROM zsim_runs"):
            line = _valid_row(row)
            if line is not None:
                yield line
