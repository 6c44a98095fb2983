"""The collector of cycles waits while a schedule is made or proved, and then is as it was."""

import gc
import weakref
from collections.abc import Generator
from contextlib import suppress

import pytest

from zsim import gc_paused
from zsim.gc_paused import uncollected


@pytest.fixture
def nothing_frozen(monkeypatch: pytest.MonkeyPatch) -> Generator[None]:
    """A process that has paused the collector never yet, and in which nobody has frozen objects."""
    was_frozen, thresholds = gc.get_freeze_count() > 0, gc.get_threshold()
    gc.unfreeze()
    gc.set_threshold(700, 10, 10)  # as Python has it
    old_objects = vars(gc_paused)["_old_objects"]
    monkeypatch.setattr(old_objects, "unseen", 0)
    monkeypatch.setattr(old_objects, "others_froze", False)
    yield
    gc.set_threshold(*thresholds)
    gc.unfreeze()
    if was_frozen:
        gc.freeze()


@pytest.mark.parametrize("was_on", [True, False])
@pytest.mark.parametrize("parts", [1, 0])
def test_the_collector_waits_and_is_as_it_was_afterwards(*, was_on: bool, parts: int) -> None:
    before = gc.isenabled()
    try:
        (gc.enable if was_on else gc.disable)()
        with suppress(ZeroDivisionError), uncollected():
            assert not gc.isenabled()
            assert 1 / parts  # also if the proof fails
        assert gc.isenabled() is was_on
    finally:
        (gc.enable if before else gc.disable)()


class Cycle:
    """An object that only the collector frees."""

    def __init__(self) -> None:
        self.own = self


@pytest.mark.one_commit_in(9)
@pytest.mark.usefixtures("nothing_frozen")
def test_what_was_made_meanwhile_is_collected_with_all_old_objects() -> None:
    """Not at once, and at the latest when as much was made as may be kept."""
    made = []
    with uncollected():
        made.append(weakref.ref(Cycle()))
    assert len(gc.get_objects(generation=0)) < 1000
    gc.collect()
    assert made[0]() is None


@pytest.mark.matrix(24)
@pytest.mark.usefixtures("nothing_frozen")
@pytest.mark.parametrize("frozen", [False, True])
def test_cycles_do_not_pile_up(monkeypatch: pytest.MonkeyPatch, *, frozen: bool) -> None:
    monkeypatch.setattr(gc_paused, "UNSEEN_MAX", 10_000)
    if frozen:
        gc.freeze()
    made: list[weakref.ref[Cycle]] = []
    for _ in range(30):
        with uncollected():
            made += [weakref.ref(each) for each in [Cycle() for _ in range(1000)]]
    assert sum(each() is not None for each in made) <= 11_000


@pytest.mark.usefixtures("nothing_frozen")
def test_frozen_objects_are_counted_once_however_often_the_collector_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A count walks through all of them, which may be millions."""
    counts: list[int] = []

    def counted() -> int:
        counts.append(1)
        return 1

    monkeypatch.setattr(gc, "get_freeze_count", counted)
    for _ in range(5):
        with uncollected():
            pass
    assert len(counts) == 1


@pytest.mark.one_commit_in(6)
@pytest.mark.usefixtures("nothing_frozen")
def test_what_others_froze_stays_frozen() -> None:
    gc.freeze()
    try:
        count = gc.get_freeze_count()
        with uncollected():
            pass
        assert gc.get_freeze_count() >= count - 10  # some may be freed
    finally:
        gc.unfreeze()
