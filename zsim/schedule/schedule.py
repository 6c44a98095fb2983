"""The schedule: what every rank does in setup and in each step. An immutable, checked value.

Building one checks that it is well formed (names exist, views fit, sizes agree); whether it is
right is for `zsim.proof` to prove. Its parts are in `zsim.schedule.program`, and had from here too.
"""

from copy import copy
from dataclasses import dataclass, replace

from zsim.schedule.program import (
    MODEL_STATE,
    Buffer,
    Contract,
    Discipline,
    FileBytes,
    HostBytes,
    Kind,
    LogicalParameter,
    Place,
    Pool,
    Program,
    RankRole,
    Scalar,
    ScheduleError,
    Scope,
    UncheckedSchedule,
    WireBytes,
)
from zsim.schedule.validate import inspect

__all__ = [
    "MODEL_STATE",
    "Buffer",
    "Contract",
    "Discipline",
    "FileBytes",
    "HostBytes",
    "Kind",
    "LogicalParameter",
    "Place",
    "Pool",
    "Program",
    "RankRole",
    "Scalar",
    "Schedule",
    "ScheduleError",
    "Scope",
    "WireBytes",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule(UncheckedSchedule):
    """Programs of all roles over one mesh, with the groups, pools and layouts they name.

    Raises:
        ScheduleError: it is not well formed; the message names where and what is allowed.
    """

    def __post_init__(self) -> None:
        UncheckedSchedule.__post_init__(self)
        inspect(self)

    def handed_out(self, disciplines: dict[str, Discipline]) -> "Schedule":
        """Return the schedule with pools of these names handed out so.

        Whether it is well formed does not depend on that, and is not looked at again.
        """
        made = copy(self)
        pools = (
            replace(pool, discipline=disciplines.get(pool.name, pool.discipline))
            for pool in self.pools
        )
        object.__setattr__(made, "pools", tuple(pools))
        return made
