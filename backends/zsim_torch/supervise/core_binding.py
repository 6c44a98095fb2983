"""Cores of a local rank that computes on processors: a part of this program's, for it alone.

A collective wakes threads of Gloo on every rank, one after the other, and each of them the next.
Linux likes to run who is woken where its waker runs. So without binding the threads that compute of
two ranks come to stand on one core, and stay: beside other work, two ranks on two cores were on the
same one for 98 % of the time in which both computed. Launchers of MPI bind ranks for the same
reason (Open MPI's mpirun(1), "--bind-to").
"""

import os
from collections.abc import Iterable


def cores_of(place: int, ranks: int, usable: Iterable[int]) -> tuple[int, ...]:
    """Return the part of the `usable` cores of the rank at `place` among so many.

    Parts have equal numbers of cores that follow each other; what is left over belongs to nobody,
    for no rank to be faster than others. All ranks get all cores where they are more than these.
    """
    cores = sorted(usable)
    share = len(cores) // ranks
    return tuple(cores[place * share : (place + 1) * share]) if share else tuple(cores)


def bind(place: int, ranks: int) -> None:
    """Bind this thread, and those that it starts, to the cores of a rank.

    Where the system has no such thing, or refuses, nothing changes.
    """
    if not hasattr(os, "sched_setaffinity"):  # macOS
        return
    cores = cores_of(place, ranks, os.sched_getaffinity(0))
    try:
        os.sched_setaffinity(0, cores)
    except OSError:  # a core has just gone, or a sandbox forbids it
        return
