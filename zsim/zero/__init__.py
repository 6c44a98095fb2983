"""The scheduler: a model and a strategy in, the schedule of zsim's own ZeRO stages out.

Each technique stands in its own file; here they are composed. Nothing here knows a clock, a
cluster or a number of ranks beyond the sizes of the axes.
"""

from zsim.closed_form import wire_bytes
from zsim.mesh import Axis, Group, Mesh
from zsim.model import Model, ModelError
from zsim.operation import Operation
from zsim.schedule import (
    Contract,
    LogicalParameter,
    Pool,
    Program,
    RankRole,
    Schedule,
)
from zsim.strategy import Strategy
from zsim.zero.bucket import Buckets, fill
from zsim.zero.draft import COMMUNICATION, COMPUTE, DATA, POOL, TENSOR, WORLD, Draft
from zsim.zero.flow import UnitVisit, visits
from zsim.zero.gather import Gathers, Replicas
from zsim.zero.optimizer import Ending
from zsim.zero.passes import Passes
from zsim.zero.reduce import Reductions
from zsim.zero.state import BucketState, scalars, write_setup

ROLE = "all"


def schedule(model: Model, strategy: Strategy) -> Schedule:
    """What every rank does to train `model` as `strategy` says.

    Raises:
        ModelError: the model was resolved for another tensor degree, or a checkpoint cannot be
            partitioned.
    """
    if model.tensor != strategy.tensor:
        raise ModelError(f"tensor: the model is for {model.tensor} ranks, not {strategy.tensor}")
    buckets = fill(model, strategy)
    draft = Draft()
    states = write_setup(draft, strategy, buckets)
    setup, draft.operations = draft.operations, []
    _write_step(draft, model, strategy, buckets=buckets, states=states)
    mesh = Mesh(axes=(Axis(name=DATA, size=strategy.data), Axis(name=TENSOR, size=strategy.tensor)))
    return Schedule(
        name=f"{model.name}, ZeRO stage {strategy.stage}",
        mesh=mesh,
        roles=(RankRole(name=ROLE),),
        groups=(
            Group(name=DATA, axes=(DATA,)),
            Group(name=TENSOR, axes=(TENSOR,)),
            Group(name=WORLD, axes=(DATA, TENSOR)),
        ),
        streams=(COMPUTE, COMMUNICATION),
        pools=(Pool(name=POOL),),
        layouts=tuple(bucket.layout for bucket in buckets.all),
        scalars=scalars(strategy),
        programs=(_program(draft, setup),),
        contract=Contract(
            parameters=tuple(
                LogicalParameter(name=parameter.name, elements=parameter.elements)
                for parameter in model.parameters
            ),
            strategy=strategy,
            loss_divisor=strategy.data * strategy.gradient_accumulation_steps,
            peak_bytes=((ROLE, POOL, draft.peak_bytes),),
            wire_bytes=wire_bytes(model, strategy),
        ),
    )


def _program(draft: Draft, setup: list[Operation]) -> Program:
    return Program(
        role=ROLE,
        buffers=tuple(draft.buffers.values()),
        persistent=tuple(draft.persistent),
        setup=tuple(setup),
        step=tuple(draft.operations),
    )


def _write_step(
    draft: Draft,
    model: Model,
    strategy: Strategy,
    *,
    buckets: Buckets,
    states: tuple[BucketState, ...],
) -> None:
    """Forward and backward of every micro-batch, then the update."""
    once = visits(model, strategy)
    sequence = once * strategy.gradient_accumulation_steps
    gathers = None
    if strategy.stage == 3:
        gathers = Gathers(draft, strategy, buckets=buckets, states=states, sequence=sequence)
    replicas = Replicas(strategy, buckets, states)
    held = gathers.held if gathers else replicas.held
    passes = Passes(draft, model, strategy, buckets=buckets, held=held)
    reductions = Reductions(draft, model, strategy, buckets=buckets, passes=passes)
    done: list[str] = []
    for index, visit in enumerate(sequence):
        micro_batch, position = divmod(index, len(once))
        passes.micro_batch = micro_batch
        if position == 0:
            draft.prefix = f"step/forward/mb{micro_batch}"
            passes.load()
        if position == len(model.units):
            draft.prefix = f"step/backward/mb{micro_batch}"
            passes.seed()
        draft.prefix = _prefix(model, visit, micro_batch)
        _limit_host(draft, strategy, done)
        after = gathers.before(index) if gathers else replicas.first_use(visit)
        run = passes.backward if visit.backward else passes.forward
        done.append(run(visit, after))
        if gathers:
            gathers.after(index, done[-1])
        if visit.backward:
            reductions.contribute(visit.unit, micro_batch)
    reductions.finish()
    reduced = reductions.reduced
    Ending(draft, strategy, buckets=buckets, states=states, reduced=reduced).write()


def _prefix(model: Model, visit: UnitVisit, micro_batch: int) -> str:
    direction = "backward" if visit.backward else "forward"
    return f"step/{direction}/mb{micro_batch}/{model.units[visit.unit].name}"


def _limit_host(draft: Draft, strategy: Strategy, done: list[str]) -> None:
    """Stop the host while it is `host_ahead_units` visits ahead of the device."""
    ahead = strategy.host_ahead_units
    if ahead is not None and len(done) >= ahead:
        draft.host_wait(done[-ahead])
