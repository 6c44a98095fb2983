"""The peak of a program whose memory comes back later than it is freed."""

from zsim.memory.ledger import book
from zsim.memory.peak import peak_bytes
from zsim.schedule.schedule import Program
from zsim.schedule.schedule_writer import POOL

STEPS = 2
"""Steps after which the ledger repeats: what a step leaves to be freed, the next one frees."""


def worst_case(program: Program) -> int | None:
    """Return the peak if memory returns as late as waits of the host allow.

    Where a host never waits it may be any number of steps ahead, and no peak can be promised.
    """
    twice = book(program, 2 * STEPS)  # first: the book of fewer steps is its beginning
    peak = peak_bytes(book(program, STEPS), POOL)
    return peak if peak_bytes(twice, POOL) == peak else None
