"""What every schedule stands in: the mesh, its groups, and the contract."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from zsim.closed_form import DataVolume, host_bytes, wire_bytes
from zsim.model.generator import Draws, Generator
from zsim.model.model import Model, ModelError
from zsim.schedule.layout import Layout
from zsim.schedule.mesh import Axis, Box, Group, Joined, Mesh
from zsim.schedule.operation import Operation
from zsim.schedule.schedule import (
    Contract,
    Discipline,
    LogicalParameter,
    Place,
    Pool,
    Program,
    RankRole,
    Schedule,
    Scope,
)
from zsim.strategy.strategy import Strategy
from zsim.zero.state import scalars
from zsim.zero.writer import (
    DATA,
    GENERATOR,
    HOST_POOL,
    INNER,
    OUTER,
    PIPELINE,
    POOL,
    REPLICA,
    REPLICATE,
    TENSOR,
    WORLD,
    Draft,
)

ROLE = "all"
POOLS = (
    Pool(name=POOL, discipline=Discipline.CACHING),
    Pool(name=HOST_POOL, place=Place.HOST, scope=Scope.NODE),
)
"""A GPU's memory, and that of a node's host, which its ranks share."""


def need_fitting(model: Model, strategy: Strategy) -> None:
    """Return if `model` was resolved for `strategy`.

    Raises:
        ModelError: it was resolved for another tensor degree.
    """
    if model.tensor != strategy.tensor:
        raise ModelError(f"tensor: the model is for {model.tensor} ranks, not {strategy.tensor}")


def need_single_calls(model: Model, runtime: str) -> None:
    """Return if no unit of `model` is called twice in a forward.

    Raises:
        ModelError: one is, and how `runtime` gathers and reduces it each time is not known.
    """
    for unit in model.units:
        if unit.module:
            raise ModelError(
                f"hidden_groups: {unit.name} calls {unit.module} again, which is not emulated for "
                f"{runtime}"
            )


PeakOf = Callable[[Program], int | None]
"""The peak of device memory that a program promises; None is nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What the ranks of one role do: those of `box`, whose step is in `draft`."""

    role: str
    draft: Draft
    setup: Sequence[Operation]
    box: Box = ()

    def program(self) -> Program:
        """The program that they run."""
        return Program(
            role=self.role,
            buffers=tuple(self.draft.buffers.values()),
            persistent=tuple(self.draft.persistent),
            setup=tuple(self.setup),
            step=tuple(self.draft.operations),
        )

    def peaks(self, program: Program, peak_of: PeakOf | None) -> dict[str, int | None]:
        """What is promised of each pool."""
        peaks: dict[str, int | None] = {**self.draft.peak_bytes}
        if peak_of is not None:
            peaks[POOL] = peak_of(program)
        return peaks


def whole(draft: Draft, setup: Sequence[Operation]) -> tuple[Part, ...]:
    """Return the one role of a schedule whose ranks all do the same."""
    return (Part(role=ROLE, draft=draft, setup=setup),)


def framed(
    name: str,
    *,
    model: Model,
    strategy: Strategy,
    volume: DataVolume,
    parts: Sequence[Part],
    streams: tuple[str, ...],
    layouts: tuple[Layout, ...],
    peak_of: PeakOf | None = None,
) -> Schedule:
    """Return the schedule of all roles, which differ in the units that they run.

    It promises the peaks of each draft's book, or what `peak_of` a program says of the device: None
    is nothing.
    """
    mesh = mesh_of(strategy)
    programs = tuple(part.program() for part in parts)
    peaks = [
        (part.role, pool, peak)
        for part, program in zip(parts, programs, strict=True)
        for pool, peak in part.peaks(program, peak_of).items()
    ]
    used = {pool for _, pool, _ in peaks}
    return Schedule(
        name=f"{model.name}, {name}",
        mesh=mesh,
        roles=tuple(RankRole(name=part.role, boxes=(part.box,)) for part in parts),
        groups=groups_of(strategy),
        streams=streams,
        pools=tuple(pool for pool in POOLS if pool.name in used),
        layouts=layouts,
        scalars=scalars(strategy),
        generators=generators_of(model, mesh),
        programs=programs,
        contract=Contract(
            parameters=tuple(
                LogicalParameter(
                    name=parameter.name,
                    elements=parameter.elements,
                    frozen=parameter.frozen,
                    rule=strategy.rule_of(parameter.name) if strategy.groups else None,
                )
                for parameter in model.parameters
            ),
            strategy=strategy,
            loss_divisor=strategy.replicas * strategy.gradient_accumulation_steps,
            data_axes=tuple(
                axis.name for axis in mesh.axes if axis.name in (REPLICATE, OUTER, INNER, DATA)
            ),
            peak_bytes=tuple((role, pool, peak) for role, pool, peak in peaks if peak is not None),
            wire_bytes=wire_bytes(model, strategy, volume),
            host_bytes=host_bytes(model, strategy),
        ),
    )


def mesh_of(strategy: Strategy) -> Mesh:
    """Ranks as pipeline x replicate x data x tensor; tensor varies fastest.

    There is a pipeline axis if there are several stages (outermost, as nanotron and Megatron-LM
    number ranks), a replicate axis if there are several replicas of the sharded states, and the
    data axis is joined of outer and inner if something is sharded over the inner ranks alone.
    """
    axes = [Axis(name=DATA, size=strategy.data), Axis(name=TENSOR, size=strategy.tensor)]
    joined: tuple[Joined, ...] = ()
    if strategy.inner is not None:
        axes[:1] = [
            Axis(name=OUTER, size=strategy.data // strategy.inner),
            Axis(name=INNER, size=strategy.inner),
        ]
        joined = (Joined(name=DATA, axes=(OUTER, INNER)),)
    if strategy.replicate > 1:
        axes.insert(0, Axis(name=REPLICATE, size=strategy.replicate))
    if strategy.pipeline > 1:
        axes.insert(0, Axis(name=PIPELINE, size=strategy.pipeline))
    return Mesh(axes=tuple(axes), joined=joined)


def generators_of(model: Model, mesh: Mesh) -> tuple[Generator, ...]:
    """Generators that segments draw from, seeded apart on ranks with other data or other units.

    Megatron-LM does so along the data axis with `--data-parallel-random-init`.
    """
    drawn = {segment.draws for unit in model.units for segment in unit.segments}
    every = tuple(axis.name for axis in mesh.axes)
    axes = {
        Draws.ALIKE: tuple(name for name in every if name != TENSOR),
        Draws.APART: every,
    }
    return tuple(
        Generator(name=GENERATOR[draws], axes=axes[draws]) for draws in Draws if draws in drawn
    )


def groups_of(strategy: Strategy) -> tuple[Group, ...]:
    """Groups along the axes of the mesh: what is not there has no group."""
    data = (DATA,) if strategy.inner is None else (OUTER, INNER)
    found = [Group(name=DATA, axes=data), Group(name=TENSOR, axes=(TENSOR,))]
    if strategy.inner is not None:
        found.append(Group(name=INNER, axes=(INNER,)))
    if strategy.pipeline > 1:
        pipeline = Group(name=PIPELINE, axes=(PIPELINE,))
        return (*found, pipeline, Group(name=WORLD, axes=(PIPELINE, *data, TENSOR)))
    if strategy.replicate == 1:
        return (*found, Group(name=WORLD, axes=(*data, TENSOR)))
    return (
        *found,
        Group(name=REPLICATE, axes=(REPLICATE,)),
        Group(name=REPLICA, axes=(*data, TENSOR)),
        Group(name=WORLD, axes=(REPLICATE, *data, TENSOR)),
    )


def replica_group(strategy: Strategy) -> str:
    """The group over which a norm is summed: ranks that hold every gradient once."""
    return WORLD if strategy.replicate == 1 else REPLICA
