"""zsim's own ZeRO stages, composed of the techniques that stand in the files beside this one."""

from collections.abc import Sequence

from zsim.closed_form.zero_stages import VOLUME
from zsim.model.model import Model
from zsim.schedule.operation import AllGather
from zsim.schedule.schedule import Schedule
from zsim.strategy.strategy import Strategy
from zsim.zero.assemble import framed, need_fitting, whole
from zsim.zero.bucket import Buckets, fill
from zsim.zero.checkpoints import Checkpoints, Loose, Shelf
from zsim.zero.contiguous import Slots, allocate_gradients
from zsim.zero.forward_backward import Passes
from zsim.zero.gather import Gathers, Replicas
from zsim.zero.offload import Offloaded
from zsim.zero.optimizer_step import Ending, Trained
from zsim.zero.reduce import Reduced, Reductions
from zsim.zero.state import (
    BucketState,
    Holding,
    gather_path,
    own_view,
    update_path,
    updated_view,
    write_setup,
)
from zsim.zero.visit_order import UnitVisit, visits
from zsim.zero.writer import (
    COMMUNICATION,
    COMPUTE,
    DATA,
    FROM_HOST,
    HOST_POOL,
    POOL,
    TO_HOST,
    Draft,
)


def schedule(model: Model, strategy: Strategy) -> Schedule:
    """The schedule of the stage that `strategy` names.

    Raises:
        ModelError: the model was resolved for another tensor degree, or a checkpoint cannot be
            partitioned.
    """
    need_fitting(model, strategy)
    buckets = fill(model, strategy)
    draft = Draft()
    once = visits(model, strategy)
    states = write_setup(draft, buckets, holding(strategy))
    if strategy.contiguous:
        allocate_gradients(draft, strategy, buckets)
    checkpoints = _checkpoints(draft, model, strategy, once)
    setup, draft.operations = draft.operations, []
    sequence = once * strategy.gradient_accumulation_steps
    parameters: Gathers | Replicas
    if strategy.stage == 3:
        parameters = Gathers(draft, strategy, buckets=buckets, states=states, sequence=sequence)
    else:
        parameters = Replicas(strategy, buckets=buckets, states=states, sequence=sequence)
    passes = Passes(
        draft, model, strategy, buckets=buckets, held=parameters.held, checkpoints=checkpoints
    )
    reductions = Reductions(draft, model, strategy, buckets=buckets, passes=passes)
    _write_passes(once, passes=passes, parameters=parameters, reductions=reductions)
    _write_ending(draft, strategy, buckets=buckets, states=states, reduced=reductions.reduced)
    moving = (TO_HOST, FROM_HOST) if strategy.offload_checkpoints else ()
    return framed(
        f"ZeRO stage {strategy.stage}",
        model=model,
        strategy=strategy,
        volume=VOLUME,
        parts=whole(draft, setup),
        streams=(COMPUTE, COMMUNICATION, *moving),
        layouts=(*buckets.layouts, *parameters.layouts),
    )


def holding(strategy: Strategy) -> Holding:
    """What ranks hold: optimizer state sharded from stage 1 on, parameters in stage 3."""
    precision = strategy.precision
    return Holding(
        parameter=precision.compute,
        parameter_sharded=strategy.stage == 3,
        optimizer=precision.optimizer,
        optimizer_sharded=strategy.stage >= 1,
        has_master=precision.has_master,
        moments=strategy.moments,
    )


def _checkpoints(
    draft: Draft, model: Model, strategy: Strategy, once: Sequence[UnitVisit]
) -> Checkpoints:
    """How checkpoints are put away: on the device or out of it, loose or in a row."""
    pool = HOST_POOL if strategy.offload_checkpoints else POOL
    shelf: Shelf = Loose(draft, model, strategy, pool=pool)
    if strategy.contiguous:
        shelf = Slots(draft, model, strategy, pool=pool, visits=once)
    if strategy.offload_checkpoints:
        return Offloaded(draft, model, strategy, shelf, visits=once)
    return Checkpoints(draft, model, strategy, shelf)


def _write_passes(
    once: tuple[UnitVisit, ...],
    *,
    passes: Passes,
    parameters: Gathers | Replicas,
    reductions: Reductions,
) -> None:
    """Forward and backward of every micro-batch, which visits units as `once` says."""
    draft, model, strategy = passes.draft, passes.model, passes.strategy
    done: list[str] = []
    for index, visit in enumerate(once * strategy.gradient_accumulation_steps):
        micro_batch, position = divmod(index, len(once))
        passes.micro_batch = micro_batch
        if position == 0:
            draft.prefix = f"step/forward/mb{micro_batch}"
            passes.load()
        if position == len(model.units):  # the first backward
            draft.prefix = f"step/backward/mb{micro_batch}"
            passes.seed()
        draft.prefix = _prefix(model, visit, micro_batch)
        _limit_host(draft, strategy, done)
        after = parameters.before(index)
        run = passes.backward if visit.backward else passes.forward
        done.append(run(visit, after))
        parameters.after(index, done[-1])
        if visit.backward:
            reductions.contribute(visit.unit, micro_batch)
    reductions.finish()


def _prefix(model: Model, visit: UnitVisit, micro_batch: int) -> str:
    direction = "backward" if visit.backward else "forward"
    return f"step/{direction}/mb{micro_batch}/{model.units[visit.unit].name}"


def _limit_host(draft: Draft, strategy: Strategy, done: list[str]) -> None:
    """Stop the host while it is `host_ahead_units` visits ahead of the device."""
    ahead = strategy.host_ahead_units
    if ahead is not None and len(done) >= ahead:
        draft.host_wait(done[-ahead])


def _write_ending(
    draft: Draft,
    strategy: Strategy,
    *,
    buckets: Buckets,
    states: tuple[BucketState, ...],
    reduced: dict[int, Reduced],
) -> None:
    """Update every bucket that is trained; in stages 1 and 2 gather what was updated."""
    trained: list[Trained] = []
    for bucket, state in zip(buckets.all, states, strict=True):
        if bucket.frozen:
            continue
        gradient = reduced[bucket.index]
        trained.append(
            Trained(
                name=bucket.name,
                layout=bucket.layout,
                gradient=updated_view(draft, bucket, gradient.buffer, strategy),
                measured=own_view(draft, bucket, gradient.buffer),
                after=(gradient.operation,),
                parameter=updated_view(draft, bucket, state.parameter, strategy),
                master=None if state.master is None else draft.all(state.master),
                moments=tuple(draft.all(moment) for moment in state.moments),
                keeps_gradient=strategy.contiguous,
            )
        )
    numbers = {bucket.name: bucket.index for bucket in buckets.all}

    def gather(draft: Draft, item: Trained, updated: str) -> None:
        number = numbers[item.name]
        bucket, parameter = buckets.all[number], states[number].parameter
        assert updated == update_path(bucket, strategy)
        if strategy.stage in (1, 2):
            path = draft.add(
                AllGather(
                    id=draft.path("gather"),
                    stream=COMMUNICATION,
                    after=(updated,),
                    group=DATA,
                    source=own_view(draft, bucket, parameter),
                    target=draft.all(parameter),
                    wire=strategy.precision.compute,
                )
            )
            assert path == gather_path(bucket)

    # The last reduction: communication runs in order, so it ends after all others.
    last = tuple(item.operation for item in list(reduced.values())[-1:])
    Ending(draft, strategy, trained, measured_after=last, updated=gather).write()
