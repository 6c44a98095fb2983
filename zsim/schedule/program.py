"""The parts of a schedule: roles, programs, buffers, pools, and the contract. Immutable values.

There is one `Program` per role, so the size of a schedule does not depend on the number of ranks.
"""

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import chain

from msgspec import Struct

from zsim.dtype import DType
from zsim.model.generator import Generator
from zsim.model.tensor_lifetime import AllocationTrace
from zsim.schedule.access import distinct
from zsim.schedule.counts import NamedCount, Rows
from zsim.schedule.layout import Layout
from zsim.schedule.mesh import Box, Coordinates, Group, Mesh
from zsim.schedule.operation import (
    Allocate,
    Branch,
    Communication,
    Free,
    FreeMode,
    Operation,
    Together,
    View,
    walk,
)
from zsim.schedule.view import DIVISOR_MAX
from zsim.strategy.optimizer_rule import Optimizer
from zsim.strategy.strategy import Strategy


class ScheduleError(ValueError):
    """Raised for a malformed schedule; the message starts with the path of the fault."""


class Place(StrEnum):
    """Places of a pool's memory: a GPU, its host, or files on the drives of its node."""

    DEVICE = "device"
    HOST = "host"
    NVME = "nvme"


class Scope(StrEnum):
    """Scopes of a pool: one rank, or the ranks of a node."""

    RANK = "rank"
    NODE = "node"


class Discipline(StrEnum):
    """Allocators of a pool: see `zsim.memory`."""

    EXACT = "exact"
    """A block has exactly the size of the buffer, and no memory is cached."""
    CACHING = "caching"
    """PyTorch's caching allocator with its default settings."""
    EXPANDABLE = "expandable"
    """PyTorch's caching allocator with `expandable_segments`."""


class Kind(StrEnum):
    """Kinds of buffers, by which memory is reported."""

    PARAMETER = "parameter"
    GRADIENT = "gradient"
    MASTER = "master"
    MOMENT = "moment"
    SAVED = "saved"
    COMMUNICATION = "communication"
    WORKSPACE = "workspace"


MODEL_STATE = (Kind.PARAMETER, Kind.GRADIENT, Kind.MASTER, Kind.MOMENT)
"""Kinds that ZeRO calls model states (Rajbhandari et al. 2020, section 3.1)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Memory at one place. Without `capacity_bytes` the cluster's hardware is the limit.

    On NVMe it is a file of each rank, in which a buffer is a range of bytes. A pool with
    `slot_bytes` is divided into slots (the pinned buffers of DeepSpeed's swappers). A buffer
    occupies one slot, even if it is smaller; the capacity is a multiple of the slot size.
    """

    name: str
    place: Place = Place.DEVICE
    scope: Scope = Scope.RANK
    capacity_bytes: int | None = None
    discipline: Discipline = Discipline.EXACT
    slot_bytes: int | None = None


class Buffer(Struct, frozen=True, kw_only=True):
    """`elements` of `dtype` in `pool`, on every rank of the role.

    `home` is the stream on which its memory is reused: that of its first writer. A `produced`
    buffer is made by autograd (outputs, saved tensors, gradients): `Allocate` counts its memory,
    the backend binds it when the operation that writes it returns, and drops it at `Free`. With
    `layout` the buffer holds that flat tensor, or with `shard` only the segment that the rank owns
    along that axis. A buffer that `has_room` may be larger than the tensor, which starts at its
    first element. A buffer with a `course` is the last one allocated before a segment whose
    tensors are known. A `captured` buffer is in the private memory pool of a CUDA graph, whose
    memory serves no other operation. A named count gives the number of rows of a buffer with
    `rows`; its `elements` are the maximum.
    """

    name: str
    pool: str
    elements: int
    dtype: DType
    kind: Kind
    home: str
    produced: bool = False
    layout: str | None = None
    shard: str | None = None
    course: AllocationTrace | None = None
    captured: bool = False
    rows: Rows | None = None

    def __post_init__(self) -> None:
        if self.elements < 0:
            raise ScheduleError(f"buffer {self.name}: elements {self.elements} must be >= 0")

    @property
    def size_bytes(self) -> int:
        """Bytes of the buffer on one rank."""
        return self.dtype.bytes_of(self.elements)

    @property
    def has_room(self) -> bool:
        """Whether it may be larger than its layout: runtimes choose the sizes of buckets."""
        return self.kind is Kind.COMMUNICATION and self.shard is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Scalar:
    """A number that every host keeps from step to step: loss scale, step, skipped steps.

    A `given` scalar is a learning rate with a schedule: the caller sets it before each step.
    """

    name: str
    initial: float
    given: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRole:
    """Ranks that run the same program: those in any of the boxes."""

    name: str
    boxes: tuple[Box, ...] = ((),)

    def holds(self, mesh: Mesh, coordinates: Coordinates) -> bool:
        """Return True if the rank at `coordinates` has this role."""
        return any(mesh.box_holds(box, coordinates) for box in self.boxes)

    def size(self, mesh: Mesh) -> int:
        """Return the number of ranks in the role."""
        return sum(mesh.box_size(box) for box in self.boxes)


MEMORY = frozenset({Allocate, Free})
"""Operations that allocate or free memory."""


@dataclass(frozen=True, slots=True, kw_only=True, weakref_slot=True)
class Program:
    """The program of the ranks of one role: `setup` once, then `step` repeatedly.

    Exactly the `persistent` buffers are alive before and after every step. `groups` are the groups
    it uses. `defers` is True if some free is deferred; then lifetimes depend on time. `branches`
    is True if the host decides which operations it issues. `setup_work` and `step_work` are the
    operations of each part, with both lists of a branch after it, except allocations and frees,
    two thirds of all.
    """

    role: str
    buffers: tuple[Buffer, ...]
    persistent: tuple[str, ...]
    setup: tuple[Operation, ...]
    step: tuple[Operation, ...]
    by_name: dict[str, Buffer] = field(init=False, repr=False, compare=False)
    by_id: dict[str, Operation] = field(init=False, repr=False, compare=False)
    groups: frozenset[str] = field(init=False, repr=False, compare=False)
    defers: bool = field(init=False, repr=False, compare=False)
    branches: bool = field(init=False, repr=False, compare=False)
    setup_work: tuple[Operation, ...] = field(init=False, repr=False, compare=False)
    step_work: tuple[Operation, ...] = field(init=False, repr=False, compare=False)
    _patterns: tuple[Operation, ...] | None = field(init=False, repr=False, compare=False)
    _step_patterns: tuple[Operation, ...] | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        by_name = {buffer.name: buffer for buffer in self.buffers}
        if len(by_name) != len(self.buffers):
            raise ScheduleError(f"program {self.role}: two buffers have one name")
        for buffer in self.buffers:
            for name in buffer.course.buffers if buffer.course is not None else ():
                if name and (name not in by_name or by_name[name].pool != buffer.pool):
                    raise ScheduleError(
                        f"buffer {buffer.name}: course: {name} must be a buffer of its pool"
                    )
        setup, step = list(walk(self.setup)), list(walk(self.step))
        every = setup + step
        by_id: dict[str, Operation] = {operation.id: operation for operation in every}
        if len(by_id) != len(every):
            ((twice, _),) = Counter([operation.id for operation in every]).most_common(1)
            raise ScheduleError(f"program {self.role}: id {twice} is used twice")
        members: set[str] = set()
        groups: set[str] = set()
        defers = any(type(each) is Free and each.mode is FreeMode.DEFERRED for each in every)
        setup_work = [each for each in setup if type(each) not in MEMORY]
        step_work = [each for each in step if type(each) not in MEMORY]
        branches = False
        for operation in chain(setup_work, step_work):
            if isinstance(operation, Communication):
                groups.add(operation.group)
            elif type(operation) is Branch:
                branches = True
            elif type(operation) is Together:
                groups.add(operation.group)
                for member in operation.members:
                    if member.id in by_id or member.id in members:
                        raise ScheduleError(f"program {self.role}: id {member.id} is used twice")
                    members.add(member.id)
        object.__setattr__(self, "by_name", by_name)
        object.__setattr__(self, "by_id", by_id)
        object.__setattr__(self, "groups", frozenset(groups))
        object.__setattr__(self, "defers", defers)
        object.__setattr__(self, "branches", branches)
        object.__setattr__(self, "setup_work", tuple(setup_work))
        object.__setattr__(self, "step_work", tuple(step_work))
        object.__setattr__(self, "_patterns", None)
        object.__setattr__(self, "_step_patterns", None)

    @property
    def patterns(self) -> tuple[Operation, ...]:
        """Operations of setup and step that access buffers; of equal ones only the first."""
        found = self._patterns
        if found is None:
            found = (*distinct(self.setup_work), *self.step_patterns)
            object.__setattr__(self, "_patterns", found)
        return found

    @property
    def step_patterns(self) -> tuple[Operation, ...]:
        """Operations of the step that touch buffers, without repetitions."""
        found = self._step_patterns
        if found is None:
            found = tuple(distinct(self.step_work))
            object.__setattr__(self, "_step_patterns", found)
        return found


class LogicalParameter(Struct, frozen=True, kw_only=True):
    """A tensor of weights: its name, and its elements on one rank of the tensor axis.

    A `frozen` parameter is not trained: it keeps its value from setup. `rule` is its optimizer if
    that differs from the one of the contract's strategy. A `float8` parameter may be gathered and
    read in 8-bit floats, a `quantized` one is kept and read in 4 bits. An `expert` parameter
    differs between ranks along `Contract.expert_axes`, instead of the tensor axis, and its elements
    count one of these ranks. A bias of experts is frozen; `load` names the value from whose sum
    it is updated after every step.
    """

    name: str
    elements: int
    frozen: bool = False
    float8: bool = False
    quantized: bool = False
    rule: Optimizer | None = None
    expert: bool = False
    load: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WireBytes:
    """Ring-equivalent bytes that one rank sends in a step, by group and collective.

    `scalar` marks collectives of one element per rank (norm, overflow), which are listed
    separately. Without a `role` they are those of any rank.
    """

    group: str
    collective: str
    bytes: int
    scalar: bool = False
    role: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostBytes:
    """Bytes that one rank of a role copies in a step from its device to the host, and back."""

    to_host: int = 0
    from_host: int = 0
    role: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileBytes:
    """Bytes that one rank reads from its files on NVMe in a step, and writes to them."""

    read: int = 0
    written: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Contract:
    """Promises of a schedule, against which it is checked.

    `loss_divisor` divides the sum of gradients over ranks and micro-batches. Ranks that differ
    along `data_axes`, which are single axes of the mesh, see different data. Ranks that differ
    along `expert_axes`, single axes too, hold different experts or parts of them. `peak_bytes`
    promises the peak of each pool, as (role, pool, bytes). `wire_bytes` promises the volume that a
    step sends, for every role that it names or for all, `host_bytes` the volume copied between
    device and host, and `file_bytes` the volume read and written on NVMe. A branch counts with its
    list `otherwise`. None and empty fields promise nothing. If `repeats_routing`, recomputation
    runs the routers of experts again, which are assumed to choose as in forward; else the experts
    of tokens are saved.
    """

    parameters: tuple[LogicalParameter, ...] = ()
    strategy: Strategy | None = None
    loss_divisor: int = 1
    data_axes: tuple[str, ...] = ("data",)
    expert_axes: tuple[str, ...] = ()
    repeats_routing: bool = False
    peak_bytes: tuple[tuple[str, str, int], ...] = ()
    wire_bytes: tuple[WireBytes, ...] | None = None
    host_bytes: tuple[HostBytes, ...] | None = None
    file_bytes: FileBytes | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.loss_divisor <= DIVISOR_MAX:
            why = f"loss_divisor {self.loss_divisor} must be from 1 to {DIVISOR_MAX}"
            raise ScheduleError(f"contract: {why}")

    @property
    def rules(self) -> dict[str, Optimizer]:
        """The optimizer of each parameter by name; parameters without one are omitted."""
        default = None if self.strategy is None else self.strategy.train.optimizer
        rules = {each.name: each.rule or default for each in self.parameters}
        return {name: rule for name, rule in rules.items() if rule is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class UncheckedSchedule:
    """Programs of all roles over one mesh, with the groups, pools and layouts they name.

    `counts` are named sizes. It is not validated; `Schedule` is. Streams in `host_threads` run
    their operations on the processors of the host, the others on the device. In a schedule
    `with_host_time` the host's work is part of the operations, so that issuing them takes no
    further time.
    """

    name: str
    mesh: Mesh
    roles: tuple[RankRole, ...]
    groups: tuple[Group, ...]
    streams: tuple[str, ...]
    host_threads: tuple[str, ...] = ()
    pools: tuple[Pool, ...]
    layouts: tuple[Layout, ...] = ()
    scalars: tuple[Scalar, ...] = ()
    generators: tuple[Generator, ...] = ()
    counts: tuple[NamedCount, ...] = ()
    programs: tuple[Program, ...]
    contract: Contract = Contract()
    with_host_time: bool = False
    group_by_name: dict[str, Group] = field(init=False, repr=False, compare=False)
    layout_by_name: dict[str, Layout] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "group_by_name", {group.name: group for group in self.groups})
        object.__setattr__(self, "layout_by_name", {lay.name: lay for lay in self.layouts})

    @property
    def delays_updates(self) -> bool:
        """True if the gradients of a step are applied while the next one runs."""
        strategy = self.contract.strategy
        return strategy is not None and strategy.delays_updates

    def role_of(self, rank: int) -> RankRole:
        """Return the role of `rank`."""
        coordinates = self.mesh.coordinates(rank)
        return next(role for role in self.roles if role.holds(self.mesh, coordinates))

    def program_of(self, rank: int) -> Program:
        """Return the program that `rank` runs."""
        name = self.role_of(rank).name
        return next(program for program in self.programs if program.role == name)

    def extent(self, view: View, coordinates: Coordinates) -> tuple[int, int]:
        """Return start and size, in elements, of `view` in its buffer on the rank at `coordinates`.

        `coordinates` include those along joined axes, as returned by `Mesh.coordinates`.
        """
        if view.layout is not None:
            layout = self.layout_by_name[view.layout]
            assert layout.axis is not None
            count, own = self.mesh.axis_size(layout.axis), coordinates[layout.axis]
            start, size = layout.window(view.start, view.size, own, count)
            if view.origin is not None and size:
                start += view.origin + layout.segment(own, count)[0] - view.start
            return start, size
        if view.axis is not None:
            return view.start + coordinates[view.axis] * view.size, view.size
        return view.start, view.size
