"""Assemble a schedule from its mesh, groups, the programs of all roles, and its contract."""

from collections.abc import Callable, Collection, Sequence, Set

from zsim.closed_form import DataVolume, file_bytes, host_bytes, wire_bytes
from zsim.model.generator import Draws, Generator
from zsim.model.model import Model, ModelError, Parameter
from zsim.schedule.layout import Layout
from zsim.schedule.mesh import Axis, Group, Joined, Mesh
from zsim.schedule.rank_order import refined
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
from zsim.schedule.schedule_writer import (
    CPU,
    HOST_POOL,
    NVME_POOL,
    PAGEABLE_POOL,
    POOL,
    ScheduleWriter,
)
from zsim.strategy.activations import Checkpointing
from zsim.strategy.optimizer_rule import ExpertBias, Optimizer
from zsim.strategy.strategy import Strategy
from zsim.zero.key_exchange import context_streams
from zsim.zero.names import (
    CONTEXT,
    DATA,
    EXPERT,
    EXPERT_DATA,
    EXPERT_TENSOR,
    GENERATOR,
    INNER,
    OUTER,
    PIPELINE,
    REPLICA,
    REPLICATE,
    TENSOR,
    TENSOR_EXPERT,
    WORLD,
)
from zsim.zero.sequence import side_streams, token_streams
from zsim.zero.state import scalars
from zsim.zero.token_exchange import count_streams
from zsim.zero.token_rows import count_of

POOLS = (
    Pool(name=POOL, discipline=Discipline.CACHING),
    Pool(name=HOST_POOL, place=Place.HOST, scope=Scope.NODE),
    Pool(name=PAGEABLE_POOL, place=Place.HOST, scope=Scope.NODE),
    Pool(name=NVME_POOL, place=Place.NVME),
)
"""Memory pools: the GPU; pinned and pageable host memory, shared by a node's ranks; NVMe files."""


def bias_rule(model: Model) -> ExpertBias:
    """Return the rule of biases of experts, with the rate of the model's shape, if any."""
    experts = model.architecture and model.architecture.experts
    return ExpertBias(learning_rate=experts.bias_rate) if experts else ExpertBias()


def need_fitting(model: Model, strategy: Strategy) -> None:
    """Raise ModelError unless `model` was built for the parallel degrees and tiles of `strategy`.

    Raises:
        ModelError: the tensor degree, a degree of experts, the context degree, the exchange or the
            tiles differ.
    """
    if model.tensor != strategy.parallel.tensor:
        tensor = strategy.parallel.tensor
        raise ModelError(f"parallel.tensor: the model is for {model.tensor} ranks, not {tensor}")
    need_fitting_experts(model, strategy)
    shape, asked = model.architecture, strategy.execution
    if shape is not None and (
        shape.execution.context != asked.context
        or (asked.context > 1 and shape.execution.exchange is not asked.exchange)
    ):
        made = f"{shape.execution.context} ({shape.execution.exchange})"
        raise ModelError(
            f"parallel.context: the model is for {made}, not {asked.context} ({asked.exchange})"
        )
    if model.tiles != strategy.zero.tiles:
        cut = "not cut" if model.tiles == 1 else f"cut into {model.tiles}"
        raise ModelError(
            f"zero.tiles: {strategy.zero.tiles} is for models that zsim builds of their shape; "
            f"linear layers of this one are {cut}"
        )


def need_fitting_experts(model: Model, strategy: Strategy) -> None:
    """Raise ModelError unless `model` was built for the degrees of experts of `strategy`.

    Raises:
        ModelError: it was not, or has no experts.
    """
    if not strategy.has_expert_order:
        return
    asked = strategy.parallel.expert, strategy.expert_tensor
    field = "parallel.expert" if asked[0] > 1 else "parallel.expert_tensor"
    if not any(each.expert for each in model.parameters):
        value = asked[0] if asked[0] > 1 else asked[1]
        raise ModelError(f"{field}: {value} needs a model with experts")
    if model.architecture is not None and asked[1] != model.expert_tensor:
        why = f"must be {model.expert_tensor} for the blocks of this model"
        raise ModelError(f"parallel.expert_tensor: {asked[1]} {why}")
    if (model.expert, model.expert_tensor) != asked:
        made = f"{model.expert} x expert_tensor {model.expert_tensor}"
        raise ModelError(
            f"parallel.expert: the model is for {made}, not {asked[0]} x expert_tensor {asked[1]}"
        )


def need_single_calls(model: Model, runtime: str) -> None:
    """Raise ModelError if a unit of `model` is called twice in a forward.

    Raises:
        ModelError: a unit is called again; zsim does not emulate how `runtime` gathers and reduces
            it.
    """
    for unit in model.units:
        if unit.module:
            raise ModelError(
                f"model.hidden_groups: {unit.name} calls {unit.module} again, which is not "
                f"emulated for {runtime}"
            )


PeakOf = Callable[[Program], int | None]
"""Returns the peak device memory in bytes that a program promises, or None for no promise."""


def assemble(
    name: str,
    *,
    model: Model,
    strategy: Strategy,
    volume: DataVolume,
    writers: Sequence[ScheduleWriter],
    streams: tuple[str, ...],
    layouts: tuple[Layout, ...],
    peak_of: PeakOf | None = None,
) -> Schedule:
    """Return the schedule of all roles, one program for each writer.

    The contract promises the peak of each pool in each writer's ledger. With `peak_of`, its result
    replaces the peak of device memory; None promises nothing.
    """
    mesh = mesh_of(strategy)
    programs = tuple(writer.program() for writer in writers)
    peaks: list[tuple[str, str, int | None]] = []
    for writer, program in zip(writers, programs, strict=True):
        own: dict[str, int | None] = {**writer.peak_bytes}
        if peak_of is not None:
            own[POOL] = peak_of(program)
        peaks += [(writer.role, pool, peak) for pool, peak in own.items()]
    return Schedule(
        name=f"{model.name}, {name}",
        mesh=mesh,
        roles=tuple(RankRole(name=each.role, boxes=(each.box,)) for each in writers),
        groups=(
            *groups_of(strategy, mesh),
            *dict.fromkeys(g for each in writers for g in each.groups),
        ),
        streams=(
            *streams,
            *context_streams(strategy),
            *token_streams(strategy),
            *_streams_of(model, streams),
        ),
        host_threads=tuple(each for each in streams if each == CPU),
        pools=_pools(writers, {pool for _, pool, _ in peaks}),
        layouts=layouts,
        scalars=scalars(strategy),
        counts=() if model.routing is None else (count_of(model.routing),),
        generators=generators_of(model, mesh),
        programs=programs,
        contract=Contract(
            parameters=tuple(
                _promised(each, model, strategy) for each in (*model.parameters, *model.biases)
            ),
            strategy=strategy,
            loss_divisor=strategy.replicas * strategy.train.gradient_accumulation_steps,
            data_axes=inside(mesh, (REPLICATE, DATA)),
            expert_axes=inside(mesh, (EXPERT, EXPERT_TENSOR)),
            repeats_routing=_repeats_routing(model, strategy),
            peak_bytes=tuple((role, pool, peak) for role, pool, peak in peaks if peak is not None),
            wire_bytes=wire_bytes(model, strategy, volume),
            host_bytes=host_bytes(model, strategy, volume),
            file_bytes=file_bytes(model, strategy, volume),
        ),
    )


def _streams_of(model: Model, known: Collection[str]) -> tuple[str, ...]:
    """Return the streams of experts that are not known: shared ones, and their counts."""
    return tuple(
        name for name in (*side_streams(model), *count_streams(model)) if name not in known
    )


def _repeats_routing(model: Model, strategy: Strategy) -> bool:
    """Return True if recomputation runs a router again: that of a block, or of its experts."""
    # CheckpointFunction of Megatron-LM core_v0.15.0 (megatron/core/tensor_parallel/random.py) runs
    # the whole block again, with the generators of forward
    full = strategy.activations.checkpointing is Checkpointing.FULL
    return any(
        segment.routes and (segment.reruns or (full and unit.checkpoint and segment.runs_again))
        for unit in model.units
        for segment in unit.segments
    )


def _promised(parameter: Parameter, model: Model, strategy: Strategy) -> LogicalParameter:
    """Return a parameter as the contract names it."""
    return LogicalParameter(
        name=parameter.name,
        elements=parameter.elements,
        frozen=parameter.frozen,
        float8=parameter.float8,
        quantized=parameter.quantized is not None,
        rule=_rule_of(parameter, model, strategy),
        load=parameter.load,
        expert=parameter.expert and strategy.has_expert_order,
    )


def _rule_of(parameter: Parameter, model: Model, strategy: Strategy) -> Optimizer | None:
    """Return the optimizer of a parameter if it is not the strategy's."""
    if parameter.load:
        return bias_rule(model)
    return strategy.rule_of(parameter.name) if strategy.train.groups else None


def _pools(writers: Sequence[ScheduleWriter], used: Set[str]) -> tuple[Pool, ...]:
    """Return the pools in `used` and the slot pools that the writers declared."""
    slots = (pool for writer in writers for pool in writer.slot_pools)
    return (*(pool for pool in POOLS if pool.name in used), *slots)


def mesh_of(strategy: Strategy) -> Mesh:
    """Return the mesh with axes pipeline x replicate x data x tensor; tensor varies fastest.

    The pipeline axis exists only with several stages (outermost, as nanotron and Megatron-LM number
    ranks), the replicate axis only with several replicas of the sharded states. The data axis is
    joined from outer and inner if something is sharded over the inner ranks only, and from outer
    and context if neighboring ranks share each sequence (torchtitan's order, `ParallelDims`).
    In a separate rank order, experts have axes expert_data x expert x expert_tensor over the data
    and tensor axes of one replica; all of these are then cut where others start or end.
    """
    axes = [
        Axis(name=DATA, size=strategy.parallel.data),
        Axis(name=TENSOR, size=strategy.parallel.tensor),
    ]
    joined: tuple[Joined, ...] = ()
    if (part := _part_of_data(strategy)) is not None:
        axes[:1] = [Axis(name=OUTER, size=strategy.parallel.data // part.size), part]
        joined = (Joined(name=DATA, axes=(OUTER, part.name)),)
    if strategy.has_expert_order:
        experts = [
            Axis(name=EXPERT_DATA, size=strategy.expert_data),
            Axis(name=EXPERT, size=strategy.parallel.expert),
            Axis(name=EXPERT_TENSOR, size=strategy.expert_tensor),
        ]
        both = refined(Mesh(axes=tuple(axes), joined=joined), experts)
        axes, joined = [*both.axes], both.joined
    if strategy.parallel.replicate > 1:
        axes.insert(0, Axis(name=REPLICATE, size=strategy.parallel.replicate))
    if strategy.parallel.pipeline > 1:
        axes.insert(0, Axis(name=PIPELINE, size=strategy.parallel.pipeline))
    return Mesh(axes=tuple(axes), joined=joined)


def _part_of_data(strategy: Strategy) -> Axis | None:
    """Return the faster-varying part of the data axis; None if the axis is not split."""
    if strategy.inner is not None:
        return Axis(name=INNER, size=strategy.inner)
    if strategy.parallel.context > 1:
        return Axis(name=CONTEXT, size=strategy.parallel.context)
    return None


def generators_of(model: Model, mesh: Mesh) -> tuple[Generator, ...]:
    """Return the random generators that segments draw from, and the axes that vary their seeds.

    Megatron-LM seeds differently along the data axis with `--data-parallel-random-init`.
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


def inside(mesh: Mesh, names: Sequence[str]) -> tuple[str, ...]:
    """Return the single axes of the named axes, in the order of the mesh; some may not exist."""
    known = {*(axis.name for axis in mesh.axes), *(each.name for each in mesh.joined)}
    parts = {part for name in names if name in known for part in mesh.parts(name)}
    return tuple(axis.name for axis in mesh.axes if axis.name in parts)


def groups_of(strategy: Strategy, mesh: Mesh) -> tuple[Group, ...]:
    """Return one group for each axis in use, the group of all ranks, and that of one replica."""

    def over(name: str, *axes: str) -> Group:
        return Group(name=name, axes=inside(mesh, axes or (name,)))

    part = _part_of_data(strategy)
    found = [over(DATA), over(TENSOR)]
    if part is not None:
        found.append(over(part.name))
    if strategy.has_expert_order:
        found += [over(EXPERT_DATA), over(EXPERT), over(EXPERT_TENSOR)]
        found.append(over(TENSOR_EXPERT, EXPERT, EXPERT_TENSOR))
    if strategy.parallel.pipeline > 1:
        found.append(over(PIPELINE))
    if strategy.parallel.replicate == 1:
        return (*found, over(WORLD, PIPELINE, DATA, TENSOR))
    return (
        *found,
        over(REPLICATE),
        over(REPLICA, PIPELINE, DATA, TENSOR),
        over(WORLD, PIPELINE, REPLICATE, DATA, TENSOR),
    )


def replica_group(strategy: Strategy) -> str:
    """Return the group over which a norm is summed: its ranks hold every gradient exactly once."""
    return WORLD if strategy.parallel.replicate == 1 else REPLICA
