"""The schedule: what every rank does in setup and in each step. An immutable, checked value.

Building one checks that it is well formed (names exist, views fit, sizes agree); whether it is
right is for `zsim.proof` to prove. Its parts are in `zsim.schedule.program`, and had from here too.
"""

from dataclasses import dataclass

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
