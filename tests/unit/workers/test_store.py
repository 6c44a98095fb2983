"""Outcomes in SQLite: what is put is kept, and what a full disk refuses waits."""

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from study_summary import SUMMARY

from zsim_study.study.outcome import Status, StudyOutcome
from zsim_study.workers.store import TABLE, Store, opened

PAGES = 12


def outcome(number: int) -> StudyOutcome:
    return StudyOutcome(status=Status.FAILED, reason=f"{number}: " + "because " * 100)


@pytest.fixture
def connection() -> Iterator[sqlite3.Connection]:
    made = sqlite3.connect(":memory:")
    made.execute(TABLE)
    made.execute(f"PRAGMA max_page_count = {PAGES}")
    yield made
    made.close()


def test_what_a_full_disk_does_not_take_is_written_when_there_is_space(
    connection: sqlite3.Connection,
) -> None:
    store = Store(connection)
    outcomes = {str(number): outcome(number) for number in range(100)}
    for key, each in outcomes.items():
        store.put([(key, key, each, 0.0)])
    waiting = store.not_written
    assert 0 < waiting < 100
    assert "full" in store.why_not
    kept = store.get(tuple(outcomes))
    assert len(kept) == 100 - waiting
    assert kept.items() <= outcomes.items()
    connection.execute("PRAGMA max_page_count = 1000")
    store.put()
    assert (store.not_written, store.why_not) == (0, "")
    assert store.get(tuple(outcomes)) == outcomes


def test_another_error_than_a_full_disk_is_raised(connection: sqlite3.Connection) -> None:
    connection.execute("DROP TABLE zsim_runs")
    with pytest.raises(sqlite3.OperationalError, match="no such table"):
        Store(connection).put([("key", "name", outcome(0), 0.0)])


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """A file with ten outcomes."""
    path = tmp_path / "runs.sqlite"
    with opened(path) as store:
        store.put((str(number), f"run {number}", outcome(number), 0.5) for number in range(10))
    return path


ROT = {
    "an outcome": "UPDATE zsim_runs SET outcome = replace(outcome, 'because', 'why') WHERE key = 3",
    "a key": "UPDATE zsim_runs SET key = '3b' WHERE key = 3",
    "bytes": "UPDATE zsim_runs SET outcome = x'ff00fe' WHERE key = 3",
    "text that is not UTF-8": "UPDATE zsim_runs SET outcome = CAST(x'ff' AS TEXT) WHERE key = 3",
    "0": "UPDATE zsim_runs SET outcome = 0 WHERE key = 3",
    "inf": "UPDATE zsim_runs SET seconds = 9e999 WHERE key = 3",
    "text for a number": "UPDATE zsim_runs SET seconds = 'soon' WHERE key = 3",
    "nesting": "UPDATE zsim_runs SET outcome = replace(hex(zeroblob(50000)), 0, '[') WHERE key = 3",
    "a checksum": "UPDATE zsim_runs SET checksum = '' WHERE key = 3",
}


@pytest.mark.parametrize("change", ROT.values(), ids=ROT.keys())
def test_a_row_that_was_changed_is_not_believed(kept: Path, change: str) -> None:
    with closing(sqlite3.connect(kept)) as connection, connection:
        connection.execute(change)
    with opened(kept) as store:
        keys = [*map(str, range(10)), "3b"]
        assert store.get(keys) == {key: outcome(int(key)) for key in keys if key not in {"3", "3b"}}
        assert store.disbelieved == 1
        store.put([("3", "run 3", outcome(3), 0.5)])
        assert store.get(["3"]) == {"3": outcome(3)}


@pytest.mark.parametrize("wrong", [-1.0, float("inf"), float("nan")])
def test_figures_out_of_range_are_not_believed_whatever_the_checksum(
    tmp_path: Path, wrong: float
) -> None:
    with opened(tmp_path / "runs.sqlite") as store:
        right = StudyOutcome(status=Status.DONE, summary=SUMMARY)
        figures = replace(SUMMARY, tokens_per_s=wrong)
        store.put([("1", "run", right, 0.5)])
        store.put([("2", "run", StudyOutcome(status=Status.DONE, summary=figures), 0.5)])
        store.put([("3", "run", StudyOutcome(status=Status.DONE), 0.5)])
        assert store.get(["1", "2", "3"]) == {"1": right}
        assert store.disbelieved == 2


def test_a_damaged_file_is_put_aside_and_what_can_be_read_is_kept(kept: Path) -> None:
    content = bytearray(kept.read_bytes())
    assert len(content) > 3 * 4096
    content[-4096:] = os.urandom(4096)
    kept.write_bytes(content)
    with opened(kept) as store:
        (line,) = store.damage
        assert line.startswith(f"{kept}: ")
        assert "it is now runs.sqlite.damaged, " in line
        found = store.get([*map(str, range(10))])
        assert all(each == outcome(int(key)) for key, each in found.items())
        store.put([("11", "run", outcome(11), 0.5)])
    with opened(kept) as store:
        assert not store.damage
        assert store.get(["11"]) == {"11": outcome(11)}
    assert kept.with_name("runs.sqlite.damaged").read_bytes() == content


def test_a_file_that_was_written_before_rows_had_checksums_can_be_used(tmp_path: Path) -> None:
    path = tmp_path / "old.sqlite"
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE zsim_runs (key TEXT PRIMARY KEY, name, outcome, seconds)")
        connection.execute("INSERT INTO zsim_runs VALUES ('1', 'run', '{}', 0.5)")
    with opened(path) as store:
        assert store.get(["1"]) == {}
        store.put([("1", "run", outcome(1), 0.5)])
        assert store.get(["1"]) == {"1": outcome(1)}
