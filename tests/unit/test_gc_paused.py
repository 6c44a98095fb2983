"""The collector of cycles waits while a schedule is made or proved, and then is as it was."""

import gc
import weakref
from contextlib import suppress

import pytest

from zsim import gc_paused
from zsim.gc_paused import uncollected


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


def test_what_was_made_meanwhile_is_collected_with_all_old_objects() -> None:
    """Not at once, and at the latest when as much was made as may be kept."""
    made = []
    with uncollected():
        made.append(weakref.ref(Cycle()))
    assert len(gc.get_objects(generation=0)) < 1000
    gc.collect()
    assert made[0]() is None


def test_cycles_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gc_paused, "UNSEEN_MAX", 10_000)
    made: list[weakref.ref[Cycle]] = []
    for _ in range(30):
        with uncollected():
            made += [weakref.ref(each) for each in [Cycle() for _ in range(1000)]]
    assert sum(each() is not None for each in made) <= 11_000


def test_what_others_froze_stays_frozen() -> None:
    gc.freeze()
    try:
        count = gc.get_freeze_count()
        with uncollected():
            pass
        assert gc.get_freeze_count() >= count - 10  # some may be freed
    finally:
        gc.unfreeze()
