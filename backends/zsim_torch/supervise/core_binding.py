"""Bind each local CPU rank to its own share of the cores.

A collective wakes Gloo threads on every rank, and each thread wakes the next. Linux tends to run a
woken thread on the core of its waker. Without binding, the compute threads of two ranks therefore
end up on one core and stay there: on a loaded machine, two ranks on two cores shared a core for 98
% of the time in which both computed. MPI launchers bind ranks for the same reason (Open MPI's
mpirun(1), "--bind-to").
"""

import os
from collections.abc import Iterable


def cores_of(place: int, ranks: int, usable: Iterable[int]) -> tuple[int, ...]:
    """Return the share of the `usable` cores for the rank at `place` among `ranks`.

    Shares are contiguous and of equal size; remaining cores stay unused, so that no rank is faster
    than others. If there are more ranks than cores, every rank gets all cores.
    """
    cores = sorted(usable)
    share = len(cores) // ranks
    return tuple(cores[place * share : (place + 1) * share]) if share else tuple(cores)


def bind(place: int, ranks: int) -> None:
    """Bind this thread, and the threads that it starts, to the cores of a rank.

    Nothing changes if the system does not support or allow it.
    """
    if not hasattr(os, "sched_setaffinity"):  # macOS
        return
    cores = cores_of(place, ranks, os.sched_getaffinity(0))
    try:
        os.sched_setaffinity(0, cores)
    except OSError:  # a core went offline, or a sandbox forbids it
        return
