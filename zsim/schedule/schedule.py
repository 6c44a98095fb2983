"""The schedule: the operations of every rank in setup and each step. An immutable, checked value.

The constructor checks that it is well formed (names exist, views fit, sizes agree); `zsim.proof`
proves that it is correct. Its parts are defined in `zsim.schedule.program` and exported here too.
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
        ScheduleError: it is not well formed; the message names the place and the allowed values.
    """

    def __post_init__(self) -> None:
        UncheckedSchedule.__post_init__(self)
        inspect(self)

    def handed_out(self, disciplines: dict[str, Discipline]) -> "Schedule":
        """Return the schedule with other disciplines for the pools named in `disciplines`.

        It is not validated again, since that does not depend on disciplines.
        """
        made = copy(self)
        pools = (
            replace(pool, discipline=disciplines.get(pool.name, pool.discipline))
            for pool in self.pools
        )
        object.__setattr__(made, "pools", tuple(pools))
        return made
