"""Exchanges by libraries whose kernels take multiprocessors of their own."""

from collections.abc import Iterable

from zsim.network.volume import communications
from zsim.schedule.operation import AllToAll, Communication
from zsim.schedule.schedule import Program


def library_sms(members: Iterable[Communication]) -> int:
    """Return the multiprocessors of the largest library kernel of `members`; 0 if there is none."""
    transports = (each.by for each in members if isinstance(each, AllToAll))
    return max((each.num_sms for each in transports if each is not None), default=0)


def uses_libraries(program: Program) -> bool:
    """Return True if a library executes an exchange of `program`."""
    return any(library_sms(communications(each)) for each in program.step_patterns)
