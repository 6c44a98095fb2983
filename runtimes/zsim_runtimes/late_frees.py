"""The peak of a program whose memory returns later than it is freed."""

from zsim.memory.ledger import memory_ledger
from zsim.memory.peak import peak_bytes
from zsim.schedule.schedule import Program
from zsim.schedule.schedule_writer import POOL

STEPS = 2
"""Steps after which the ledger repeats: a step returns the memory that the previous one left."""


def worst_case(program: Program) -> int | None:
    """Return the peak bytes if memory returns as late as host waits allow, or None.

    If the host never waits, it may be any number of steps ahead, and no peak can be promised: None.
    """
    twice = memory_ledger(program, 2 * STEPS)  # first: the ledger of fewer steps is a prefix of it
    peak = peak_bytes(memory_ledger(program, STEPS), POOL)
    return peak if peak_bytes(twice, POOL) == peak else None
