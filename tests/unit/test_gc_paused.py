"""The collector of cycles waits while a schedule is made or proved, and then is as it was."""

import gc
from contextlib import suppress

import pytest

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
