"""Outcomes in SQLite: what is put is kept, and what a full disk refuses waits."""

import sqlite3
from collections.abc import Iterator

import pytest

from zsim.study.outcome import Status, StudyOutcome
from zsim.workers.store import TABLE, Store

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
