"""No garbage collection while a schedule is made, proved or simulated.

All of these make many small values that last until the end, and next to no cycles: the collector
would go through all of them, and through schedule and model, again and again, and find nothing. Of
a proof of 1,000 layers that is a fifth of the time, of making and proving 1,000 micro-batches a
tenth, and of simulating 16,000 operations a third.
"""

import gc
from collections.abc import Generator
from contextlib import contextmanager

UNSEEN_MAX = 2_000_000
"""Objects that are kept before the collector goes through all there are: some 200 MB at most are of
cycles that nobody uses any more. The largest schedules that people ask about keep a million, and
to go through them takes as long as a quarter of making them.
"""


class _OldObjects:
    """Objects kept since the collector went through all of them, unless others froze some."""

    def __init__(self) -> None:
        self.unseen = 0
        self.others_froze = False

    def add(self) -> None:
        """Count what is alive now among the old objects, without a look at it.

        When the collector is let go on it would first go through all that was made meanwhile, which
        is a tenth of the time that it takes to make a schedule. Whoever has frozen objects wants
        them to stay so: there the collector does that. To count what is frozen takes a walk through
        all of it (54 ms for two million), as long as a small proof: it is found out once.
        """
        self.others_froze = self.others_froze or gc.get_freeze_count() > 0
        if self.others_froze:
            return
        self.unseen += gc.get_count()[0]
        if self.unseen > UNSEEN_MAX:
            self.unseen = 0
            gc.collect()
        else:
            gc.freeze()
            gc.unfreeze()


_old_objects = _OldObjects()


@contextmanager
def uncollected() -> Generator[None]:
    """Pause the collector of cycles, and let it go on afterwards if it was on before.

    What was made meanwhile counts as old then. The collector is one for the process: other threads
    wait for it too, and of two at a time the first that ends lets it go on.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            _old_objects.add()
            gc.enable()
