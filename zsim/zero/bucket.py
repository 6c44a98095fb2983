"""Buckets: which parameters are gathered and reduced together, and the offset of each.

A bucket of zsim's own stages holds whole parameters and is padded to a multiple of the data axis,
so that every rank owns an equal shard. Its size is constant (ZeRO-R CB, Rajbhandari et al. 2020,
section 6.2) or unlimited. The first bucket that backward completes may be smaller, as in
DistributedDataParallel. In stage 3 a bucket never crosses a unit. In other stages it may, and is
filled in backward order so that it completes as early as possible. A parameter used by several
units has its own bucket. A unit that is called again counts once; its gradients are complete with
its first call. Frozen parameters have separate buckets. For the packing of other runtimes,
`numbered` builds buckets from any groups of parameters.
"""

from collections import Counter
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import NamedTuple

from zsim.dtype import DType, Quantization
from zsim.model.model import Model, Parameter
from zsim.schedule.layout import Layout, Piece
from zsim.schedule.operation_list import COMPUTE
from zsim.schedule.schedule import Kind
from zsim.schedule.schedule_writer import POOL, ScheduleWriter
from zsim.strategy.strategy import Strategy
from zsim.zero.names import DATA, EXPERT_DATA, INNER, PIPELINE, TENSOR


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitRun:
    """The parameters of one unit in one bucket.

    Attributes:
        bucket: number of the bucket.
        parameters: in the order of the unit.
        starts: offset of each whole parameter in the bucket's `plain` layout, in elements.
        layout: layout of the unit's concatenated gradients if they are not contiguous in the
            bucket; they are then copied by parameter. None if contiguous.
        trained: parameters that are not frozen.
        size: elements of `trained`, without padding.
    """

    bucket: int
    parameters: tuple[Parameter, ...]
    starts: tuple[int, ...]
    layout: Layout | None = None
    trained: tuple[Parameter, ...] = field(init=False, repr=False, compare=False)
    size: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        trained = tuple(each for each in self.parameters if not each.frozen)
        object.__setattr__(self, "trained", trained)
        object.__setattr__(self, "size", sum(each.elements for each in trained))

    @property
    def start(self) -> int:
        """Offset of the first parameter."""
        return self.starts[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """One flat tensor: `elements` of parameters, and padding up to `padded`.

    `layout` describes how ranks own the bucket. `plain` is the layout of the whole parameters in
    order; it differs from `layout` only if each rank owns a part of every block. If all parameters
    are `frozen`, the bucket is neither reduced nor updated; it may be `quantized`, with all its
    parameters in 4 bits. It is sharded over the ranks of `axis`, or reduced over the group of that
    name: the data axis, or that of ranks with the same experts.
    """

    index: int
    layout: Layout
    plain: Layout
    elements: int
    shard: int
    units: tuple[int, ...]
    frozen: bool = False
    quantized: Quantization | None = None
    axis: str = DATA

    @property
    def padded(self) -> int:
        """Elements with padding."""
        return self.layout.elements

    @property
    def name(self) -> str:
        """Prefix of its buffers and operations."""
        return self.layout.name

    def buffer(
        self,
        writer: ScheduleWriter,
        name: str,
        dtype: DType,
        kind: Kind = Kind.COMMUNICATION,
        *,
        home: str = COMPUTE,
        layout: Layout | None = None,
        pool: str = POOL,
    ) -> str:
        """Declare a buffer of the whole bucket in `layout` (default: its own); return its name."""
        path, cut = f"{self.name}/{name}", (layout or self.layout).name
        return writer.buffer(path, self.padded, dtype, kind, home=home, layout=cut, pool=pool)

    def shard_buffer(
        self,
        writer: ScheduleWriter,
        name: str,
        dtype: DType,
        kind: Kind = Kind.COMMUNICATION,
        *,
        home: str = COMPUTE,
        pool: str = POOL,
    ) -> str:
        """Declare a buffer for the shard of one data rank; return its name."""
        return writer.buffer(
            f"{self.name}/{name}",
            self.shard,
            dtype,
            kind,
            home=home,
            layout=self.layout.name,
            shard=self.axis,
            pool=pool,
        )

    def inner_buffer(
        self, writer: ScheduleWriter, inner: Layout, ranks: int, dtype: DType, *, home: str
    ) -> str:
        """Declare a buffer for the shard of one inner rank; return its name."""
        return writer.buffer(
            inner.name,
            self.padded // ranks,
            dtype,
            Kind.COMMUNICATION,
            home=home,
            layout=inner.name,
            shard=INNER,
        )

    def over_inner(self, name: str, *, by_block: bool = False) -> Layout:
        """Return the layout of the bucket sharded over the inner ranks only."""
        return Layout(
            name=f"{self.name}/{name}",
            pieces=self.layout.pieces,
            elements=self.padded,
            axis=INNER,
            blocks=self.layout.blocks if by_block else None,
        )


class ShardAxis(NamedTuple):
    """The axis over which a bucket is sharded, and its ranks."""

    axis: str
    ranks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Buckets:
    """All buckets, in the order of first use in forward, and the runs of each unit in them."""

    all: tuple[Bucket, ...]
    runs: tuple[tuple[UnitRun, ...], ...]

    @property
    def trained(self) -> tuple[Bucket, ...]:
        """Buckets that are reduced and updated."""
        return tuple(bucket for bucket in self.all if not bucket.frozen)

    def trained_runs(self, unit: int) -> tuple[tuple[int, UnitRun], ...]:
        """Return (position, run) of the unit's runs that have trainable parameters."""
        return tuple((at, run) for at, run in enumerate(self.runs[unit]) if run.trained)

    @property
    def uses(self) -> Counter[int]:
        """Number of units that contribute gradients to each bucket, by bucket number."""
        return Counter(run.bucket for runs in self.runs for run in runs if run.trained)

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """Every layout that buckets and runs refer to, each once."""
        found = {layout.name: layout for each in self.all for layout in (each.layout, each.plain)}
        for runs in self.runs:
            found |= {run.layout.name: run.layout for run in runs if run.layout is not None}
        return tuple(found.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """A packed bucket: offsets of its parameters, its elements with padding, and any blocks.

    Shards start at multiples of `alignment` elements.
    """

    starts: tuple[int, ...]
    elements: int
    blocks: tuple[int, ...] | None = None
    alignment: int = 1


Packing = Callable[[Sequence[Parameter]], Packed]
"""Lays out the parameters of a bucket as a runtime does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertPacking:
    """The packing of buckets of experts, and the number of ranks that hold the same experts."""

    place: Packing
    ranks: int

    @classmethod
    def of(cls, strategy: Strategy, packing: Callable[[int], Packing]) -> "ExpertPacking | None":
        """Return the packing for experts in a separate rank order; None without such an order."""
        if not strategy.has_expert_order:
            return None
        return cls(place=packing(strategy.expert_data), ranks=strategy.expert_data)


def one_after_the_other(ranks: int, *, alignment: int = 1) -> Packing:
    """Return a packing without gaps, padded to equal shards that are multiples of `alignment`."""

    def place(parameters: Sequence[Parameter]) -> Packed:
        starts = (0, *accumulate(parameter.elements for parameter in parameters))
        multiple = ranks * alignment
        elements = -(-starts[-1] // multiple) * multiple
        return Packed(starts=starts[:-1], elements=elements, alignment=alignment)

    return place


def fill(model: Model, strategy: Strategy) -> Buckets:
    """Distribute the parameters of `model` over buckets, frozen ones over separate buckets."""
    uses = Counter(parameter.name for unit in model.modules for parameter in unit.parameters)
    limit, first = strategy.bucket_limit, strategy.first_bucket_limit
    groups: list[list[Parameter]] = []
    open_groups: dict[tuple[bool, bool], list[Parameter]] = {}
    dense = False, False
    begun = 0
    for unit in reversed(model.modules):
        if strategy.zero.stage == 3:
            open_groups = {}
        for parameter in unit.parameters:
            if uses[parameter.name] > 1:
                if all(parameter not in group for group in groups):
                    groups.append([parameter])
                continue
            kind = parameter.frozen, parameter.expert and strategy.has_expert_order
            group = open_groups.get(kind, [])
            size = sum(member.elements for member in group)
            most = first if begun == 1 and kind == dense else limit
            full = most is not None and size + parameter.elements > most
            if full or not group:
                group = open_groups[kind] = []
                groups.append(group)
                begun += kind == dense
            group.append(parameter)
    return numbered(
        model,
        groups,
        place=one_after_the_other(strategy.parallel.data),
        ranks=strategy.parallel.data,
        experts=ExpertPacking.of(strategy, one_after_the_other),
    )


def frozen_groups(model: Model) -> list[list[Parameter]]:
    """Return frozen parameters by format, compute dtype and 4 bits, without empty groups."""
    frozen = [each for each in model.parameters if each.frozen]
    groups = (
        [each for each in frozen if (each.quantized is None) is whole] for whole in (True, False)
    )
    return [group for group in groups if group]


def numbered(
    model: Model,
    groups: Sequence[Sequence[Parameter]],
    *,
    place: Packing,
    ranks: int,
    name: str = "bucket",
    tied: Set[str] = frozenset(),
    experts: ExpertPacking | None = None,
) -> Buckets:
    """Return buckets of `groups`, numbered in the order of their first use in forward.

    Args:
        model: the model that has the parameters; each is in one group.
        groups: the parameters of each bucket, in their order in it.
        place: lays out the parameters of a bucket.
        ranks: size of the data axis, over which every bucket is sharded.
        name: prefix of the buckets' names; their number follows.
        tied: names of parameters that several pipeline stages hold.
        experts: the same for groups of experts, if these have a separate rank order.
    """
    owner = {member.name: number for number, group in enumerate(groups) for member in group}
    users: dict[int, dict[int, None]] = {}
    for index, unit in enumerate(model.units):
        for parameter in unit.parameters:
            users.setdefault(owner[parameter.name], {})[index] = None
    position = {number: index for index, number in enumerate(users)}
    starts: dict[str, int] = {}
    made: list[Bucket] = []
    for number, units in users.items():
        own = experts if experts is not None and groups[number][0].expert else None
        packed = (place if own is None else own.place)(groups[number])
        starts |= zip((each.name for each in groups[number]), packed.starts, strict=True)
        found = bucket_of(
            model,
            len(made),
            groups[number],
            packed,
            over=ShardAxis(DATA, ranks) if own is None else ShardAxis(EXPERT_DATA, own.ranks),
            units=tuple(units),
            name=name,
            tied=tied,
        )
        made.append(found)
    runs: list[tuple[UnitRun, ...]] = []
    for unit in model.units:
        members: dict[int, list[Parameter]] = {}
        for parameter in unit.parameters:
            members.setdefault(position[owner[parameter.name]], []).append(parameter)
        runs.append(
            tuple(
                _run(f"{unit.name}/gradient{number}", made[bucket], inside, starts)
                for number, (bucket, inside) in enumerate(members.items())
            )
        )
    return Buckets(all=tuple(made), runs=tuple(runs))


def bucket_of(
    model: Model,
    index: int,
    members: Sequence[Parameter],
    packed: Packed,
    *,
    over: ShardAxis,
    units: tuple[int, ...],
    name: str,
    tied: Set[str] = frozenset(),
) -> Bucket:
    """Return the bucket of `members`, called `name` and its number ("frozen_" first if all are)."""
    frozen = bool(members) and all(member.frozen for member in members)
    name = f"{'frozen_' if frozen else ''}{name}{index}"
    copied = model.tensor > 1 and over.axis == DATA
    pieces = tuple(
        Piece(
            parameter=member.name,
            start=start,
            size=member.elements,
            copies=(
                *((TENSOR,) if copied and not member.tensor_sharded else ()),
                *((PIPELINE,) if member.name in tied else ()),
            ),
        )
        for member, start in zip(members, packed.starts, strict=True)
    )
    layout = Layout(
        name=name,
        pieces=pieces,
        elements=packed.elements,
        axis=over.axis,
        blocks=packed.blocks,
        alignment=packed.alignment,
    )
    plain = layout
    if packed.blocks is not None:
        plain = Layout(name=f"{name}/whole", pieces=pieces, elements=packed.elements)
    return Bucket(
        index=index,
        layout=layout,
        plain=plain,
        elements=sum(member.elements for member in members),
        shard=packed.elements // over.ranks,
        units=units,
        frozen=frozen,
        quantized=members[0].quantized if frozen else None,
        axis=over.axis,
    )


def _run(name: str, bucket: Bucket, members: list[Parameter], starts: dict[str, int]) -> UnitRun:
    """Return a unit's run in `bucket`; `name` names the layout of its gradients if it needs one."""
    at = tuple(starts[member.name] for member in members)
    run = UnitRun(bucket=bucket.index, parameters=tuple(members), starts=at)
    trained = run.trained
    if not trained:
        return run
    ends = [start + member.elements for start, member in zip(at, members, strict=True)]
    if (
        len(trained) == len(members)
        and bucket.plain is bucket.layout
        and all(end == start for end, start in zip(ends, at[1:], strict=False))
    ):
        return run
    alone = (0, *accumulate(member.elements for member in trained))
    pieces = [
        Piece(parameter=member.name, start=low, size=high - low)
        for member, (low, high) in zip(trained, pairwise(alone), strict=True)
    ]
    layout = Layout(name=name, pieces=tuple(pieces), elements=alone[-1])
    return replace(run, layout=layout)
