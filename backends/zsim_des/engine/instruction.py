"""Instructions of the engine: what a host does with the operations of a program."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from zsim.schedule.operation import (
    Allocate,
    Branch,
    Communication,
    Compute,
    Operation,
    StreamOperation,
)
from zsim_des.network.carried import Carried


@dataclass(slots=True)
class After:
    """Dependencies: slots of this run of the part, and of the latest earlier one."""

    here: tuple[int, ...]
    earlier: tuple[int, ...]


@dataclass(slots=True)
class Enqueue:
    """Put an entry on a stream. `operation` is None for the entry of a waited free.

    In `moving_ps` of its `time_ps` kernels run that only move memory; 0 where no collective can
    take anything from them.
    `members` are the operations of a communicator, with the bytes that each rank sends; `taken_ps`
    is what they take from kernels of a host that runs these itself. `carries` is what passes the
    host side of the node: a copy to or from it, a kernel on its threads.
    One operation may be several entries, the last of which has the slots of the others in `parts`;
    each of these `is_part`. Slot `begins` ends when bytes begin to flow. Where it `is_copied`, copy
    engines move its bytes, which take no multiprocessor.
    """

    slot: int
    name: str
    stream: int
    after: After
    time_ps: int
    moving_ps: int
    launch_ps: int
    operation: StreamOperation | None
    members: tuple[tuple[Communication, int], ...]
    carries: Carried | None = None
    taken_ps: int = 0
    parts: tuple[int, ...] = ()
    is_part: bool = False
    begins: int | None = None
    is_copied: bool = False

    @property
    def is_recorded(self) -> bool:
        """True if its time was recorded: it takes that, whatever runs beside it."""
        operation = self.operation
        return isinstance(operation, Compute) and any(k.recorded_ps for k in operation.kernels)


@dataclass(slots=True)
class Stop:
    """The host waits, after it has spent `launch_ps`."""

    name: str
    after: After
    launch_ps: int


@dataclass(slots=True)
class Choose:
    """The host waits, then runs one of two lists; `slots` of the other count as finished."""

    name: str
    after: After
    launch_ps: int
    operation: Branch
    then: tuple["Instruction", ...]
    otherwise: tuple["Instruction", ...]
    then_slots: tuple[int, ...]
    otherwise_slots: tuple[int, ...]


@dataclass(slots=True)
class HostNote:
    """The host acts: its time is noted, for deferred frees, and who watches the run is told."""

    name: str
    operation: Operation


NOTHING = After((), ())


@dataclass(slots=True)
class Ask:
    """The host asks for memory, for which it may have to wait."""

    name: str
    operation: Allocate
    after: After = field(default_factory=lambda: NOTHING)
    launch_ps: int = 0


Instruction = Enqueue | Stop | Choose | Ask | HostNote


@dataclass(slots=True)
class Lowered:
    """The instructions of one role; `slots` numbers what may be waited for, `awaited` what is.

    `scalars` are what branches decide on, as it is when setup begins.
    """

    streams: tuple[str, ...]
    slots: dict[str, int]
    setup: tuple[Instruction, ...]
    step: tuple[Instruction, ...]
    awaited: frozenset[int]
    scalars: Mapping[str, float]
