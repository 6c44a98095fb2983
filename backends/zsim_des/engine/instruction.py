"""Instructions of the engine: the actions of a host for the operations of a program."""

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

    During `moving_ps` of its `time_ps`, its kernels only move memory; 0 if collectives do not slow
    kernels down.
    `members` are the operations of a communicator, each with the bytes that a rank sends.
    `taken_ps` is the time that they cost kernels on a host that runs kernels itself. `carries`
    describes traffic on the host side of the node: a copy to or from it, or a kernel on its
    threads.
    An operation can have several entries. The last one lists the slots of the others in `parts`;
    the others have `is_part` set. Slot `begins` ends when bytes begin to flow. `share` are the
    multiprocessors that a communication takes, in thousandths: 0 if copy engines move the bytes,
    None for NCCL's share.
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
    share: int | None = None

    @property
    def is_recorded(self) -> bool:
        """True if its time was recorded: it stays the same while other work shares the GPU."""
        operation = self.operation
        return isinstance(operation, Compute) and any(k.recorded_ps for k in operation.kernels)


@dataclass(slots=True)
class Stop:
    """The host spends `launch_ps`, then waits."""

    name: str
    after: After
    launch_ps: int


@dataclass(slots=True)
class Choose:
    """The host waits, then runs one of two lists; the slots of the other count as finished."""

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
    """The host acts: the run notes the time, for deferred frees, and calls its watcher."""

    name: str
    operation: Operation


NOTHING = After((), ())


@dataclass(slots=True)
class AllocateRequest:
    """The host allocates memory, for which it may have to wait."""

    name: str
    operation: Allocate
    after: After = field(default_factory=lambda: NOTHING)
    launch_ps: int = 0


Instruction = Enqueue | Stop | Choose | AllocateRequest | HostNote


@dataclass(slots=True)
class Lowered:
    """The instructions of one role.

    `slots` numbers the operations that others can wait for, `awaited` are the slots that some
    operation does wait for. `scalars` are the scalars that branches read, at the start of setup.
    """

    streams: tuple[str, ...]
    slots: dict[str, int]
    setup: tuple[Instruction, ...]
    step: tuple[Instruction, ...]
    awaited: frozenset[int]
    scalars: Mapping[str, float]
