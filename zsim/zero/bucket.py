"""Buckets: which parameters are gathered and reduced as one, and where each lies.

A bucket of zsim's own stages holds whole parameters and is padded to a multiple of the data axis,
so that every rank owns an equal shard. It is of a constant size (ZeRO-R CB, Rajbhandari et al.
2020, section 6.2), or takes everything; the first that backward completes may be smaller, as that
of DistributedDataParallel is. In stage 3 a bucket never crosses a unit; in the others it
may, and is filled in the order of backward, so that it is complete as early as can be. A parameter
that several units use is a bucket of its own; a unit that is called again is one unit here, whose
gradients are complete with its first call. Frozen parameters have buckets of their own. Other
runtimes fill and pad in their own way: `numbered` makes buckets of any groups of parameters.
"""

from collections import Counter
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise

from zsim.dtype import DType
from zsim.model.model import Model, Parameter
from zsim.schedule.layout import Layout, Piece
from zsim.schedule.operation_list import COMPUTE
from zsim.schedule.schedule import Kind
from zsim.schedule.schedule_writer import POOL, ScheduleWriter
from zsim.strategy.strategy import Strategy
from zsim.zero.names import DATA, INNER, PIPELINE, TENSOR


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitRun:
    """The parameters that one unit has in one bucket.

    Attributes:
        bucket: number of the bucket.
        parameters: in the order of the unit.
        starts: where each begins in the bucket, seen as whole parameters one after the other.
        layout: of the unit's gradients, one after the other, where they do not lie so in the
            bucket: they are then copied by parameter.
        trained: those of which backward makes gradients.
        size: elements of these, without padding.
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
        """Start of the first parameter."""
        return self.starts[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """One flat tensor: `elements` of parameters, and padding up to `padded`.

    `layout` is how ranks own it; `plain` the layout of whole parameters one after the other, the
    same but where ranks own a part of each of its blocks. One whose parameters are all `frozen` is
    neither reduced nor updated.
    """

    index: int
    layout: Layout
    plain: Layout
    elements: int
    shard: int
    units: tuple[int, ...]
    frozen: bool = False

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
        """Declare a buffer of the whole bucket, as `layout` has it; return its name."""
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
        """Declare a buffer of what one rank of the data axis owns; return its name."""
        return writer.buffer(
            f"{self.name}/{name}",
            self.shard,
            dtype,
            kind,
            home=home,
            layout=self.layout.name,
            shard=DATA,
            pool=pool,
        )

    def inner_buffer(
        self, writer: ScheduleWriter, inner: Layout, ranks: int, dtype: DType, *, home: str
    ) -> str:
        """Declare a buffer of what one of the inner ranks owns; return its name."""
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
        """Return the layout of the bucket cut over the inner ranks alone."""
        return Layout(
            name=f"{self.name}/{name}",
            pieces=self.layout.pieces,
            elements=self.padded,
            axis=INNER,
            blocks=self.layout.blocks if by_block else None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Buckets:
    """All buckets, in the order of their first use in forward, and each unit's runs in them."""

    all: tuple[Bucket, ...]
    runs: tuple[tuple[UnitRun, ...], ...]

    @property
    def trained(self) -> tuple[Bucket, ...]:
        """Those that are reduced and updated."""
        return tuple(bucket for bucket in self.all if not bucket.frozen)

    def trained_runs(self, unit: int) -> tuple[tuple[int, UnitRun], ...]:
        """Return runs of a unit of which backward makes gradients, with their positions."""
        return tuple((at, run) for at, run in enumerate(self.runs[unit]) if run.trained)

    @property
    def uses(self) -> Counter[int]:
        """By number of a bucket, how many units make gradients of its parameters."""
        return Counter(run.bucket for runs in self.runs for run in runs if run.trained)

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """Every layout that buckets and runs name, each once."""
        found = {layout.name: layout for each in self.all for layout in (each.layout, each.plain)}
        for runs in self.runs:
            found |= {run.layout.name: run.layout for run in runs if run.layout is not None}
        return tuple(found.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """Starts of a bucket's parameters, its elements with padding, and its blocks if any.

    Shards begin at multiples of `alignment` elements.
    """

    starts: tuple[int, ...]
    elements: int
    blocks: tuple[int, ...] | None = None
    alignment: int = 1


Packing = Callable[[Sequence[Parameter]], Packed]
"""The way of a runtime to pack the parameters of a bucket."""


def one_after_the_other(ranks: int, *, alignment: int = 1) -> Packing:
    """Return a packing without gaps, padded at the end to equal shards that are multiples."""

    def place(parameters: Sequence[Parameter]) -> Packed:
        starts = (0, *accumulate(parameter.elements for parameter in parameters))
        multiple = ranks * alignment
        elements = -(-starts[-1] // multiple) * multiple
        return Packed(starts=starts[:-1], elements=elements, alignment=alignment)

    return place


def fill(model: Model, strategy: Strategy) -> Buckets:
    """Distribute the parameters of `model` over buckets; frozen ones have buckets of their own."""
    uses = Counter(parameter.name for unit in model.modules for parameter in unit.parameters)
    limit, first = strategy.bucket_limit, strategy.first_bucket_limit
    groups: list[list[Parameter]] = []
    open_groups: dict[bool, list[Parameter]] = {}
    begun = 0
    for unit in reversed(model.modules):
        if strategy.zero.stage == 3:
            open_groups = {}
        for parameter in unit.parameters:
            if uses[parameter.name] > 1:
                if all(parameter not in group for group in groups):
                    groups.append([parameter])
                continue
            group = open_groups.get(parameter.frozen, [])
            size = sum(member.elements for member in group)
            most = first if begun == 1 and not parameter.frozen else limit
            full = most is not None and size + parameter.elements > most
            if full or not group:
                group = open_groups[parameter.frozen] = []
                groups.append(group)
                begun += not parameter.frozen
            group.append(parameter)
    return numbered(
        model,
        groups,
        place=one_after_the_other(strategy.parallel.data),
        ranks=strategy.parallel.data,
    )


def numbered(
    model: Model,
    groups: Sequence[Sequence[Parameter]],
    *,
    place: Packing,
    ranks: int,
    name: str = "bucket",
    tied: Set[str] = frozenset(),
) -> Buckets:
    """Return buckets of `groups`, numbered in the order of their first use in forward.

    Args:
        model: whose parameters they are, each in one group.
        groups: the parameters of each bucket, in their order in it.
        place: how they are laid out.
        ranks: along the data axis, over which every bucket is cut.
        name: what buckets are called; their numbers follow it.
        tied: parameters of which ranks along a pipeline hold copies.
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
        packed = place(groups[number])
        starts |= zip((each.name for each in groups[number]), packed.starts, strict=True)
        found = bucket_of(
            model,
            len(made),
            groups[number],
            packed,
            ranks=ranks,
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
                _run(f"{unit.name}/gradient{number}", made[bucket], own, starts)
                for number, (bucket, own) in enumerate(members.items())
            )
        )
    return Buckets(all=tuple(made), runs=tuple(runs))


def bucket_of(
    model: Model,
    index: int,
    members: Sequence[Parameter],
    packed: Packed,
    *,
    ranks: int,
    units: tuple[int, ...],
    name: str,
    tied: Set[str] = frozenset(),
) -> Bucket:
    """Return the bucket of `members`, called `name` and its number, after "frozen_" if all are."""
    frozen = bool(members) and all(member.frozen for member in members)
    name = f"{'frozen_' if frozen else ''}{name}{index}"
    pieces = tuple(
        Piece(
            parameter=member.name,
            start=start,
            size=member.elements,
            copies=(
                *((TENSOR,) if model.tensor > 1 and not member.tensor_sharded else ()),
                *((PIPELINE,) if member.name in tied else ()),
            ),
        )
        for member, start in zip(members, packed.starts, strict=True)
    )
    layout = Layout(
        name=name,
        pieces=pieces,
        elements=packed.elements,
        axis=DATA,
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
        shard=packed.elements // ranks,
        units=units,
        frozen=frozen,
    )


def _run(name: str, bucket: Bucket, members: list[Parameter], starts: dict[str, int]) -> UnitRun:
    """Return what a unit has in `bucket`; `name` is that of the layout of its gradients."""
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
