"""zsim's own ZeRO stages, composed of the techniques that stand in the files beside this one."""

from collections.abc import Sequence

from zsim.layout import Layout
from zsim.model import Model
from zsim.operation import AllGather
from zsim.schedule import Schedule
from zsim.strategy import Strategy
from zsim.zero.bucket import Buckets, fill
from zsim.zero.draft import COMMUNICATION, COMPUTE, DATA, Draft
from zsim.zero.flow import UnitVisit, visits
from zsim.zero.frame import framed, need_fitting
from zsim.zero.gather import Gathers, Replicas
from zsim.zero.optimizer import Ending, Trained
from zsim.zero.passes import Passes
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


def schedule(model: Model, strategy: Strategy) -> Schedule:
    """The schedule of the stage that `strategy` names.

    Raises:
        ModelError: the model was resolved for another tensor degree, or a checkpoint cannot be
            partitioned.
    """
    need_fitting(model, strategy)
    buckets = fill(model, strategy)
    draft = Draft()
    states = write_setup(draft, buckets, holding(strategy))
    setup, draft.operations = draft.operations, []
    layouts = _write_step(draft, model, strategy, buckets=buckets, states=states)
    return framed(
        f"ZeRO stage {strategy.stage}",
        model=model,
        strategy=strategy,
        draft=draft,
        setup=setup,
        streams=(COMPUTE, COMMUNICATION),
        layouts=(*buckets.layouts, *layouts),
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


def _write_step(
    draft: Draft,
    model: Model,
    strategy: Strategy,
    *,
    buckets: Buckets,
    states: tuple[BucketState, ...],
) -> Sequence[Layout]:
    """Forward and backward of every micro-batch, then the update; layouts beyond the buckets'."""
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
    _write_ending(draft, strategy, buckets=buckets, states=states, reduced=reductions.reduced)
    return gathers.layouts if gathers else ()


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
    """Update every bucket; in stages 1 and 2 gather what was updated."""
    trained: list[Trained] = []
    for bucket, state in zip(buckets.all, states, strict=True):
        gradient = reduced[bucket.index]
        trained.append(
            Trained(
                name=bucket.name,
                gradient=updated_view(draft, bucket, gradient.buffer, strategy),
                measured=own_view(draft, bucket, gradient.buffer),
                after=(gradient.operation,),
                parameter=updated_view(draft, bucket, state.parameter, strategy),
                master=None if state.master is None else draft.all(state.master),
                moments=tuple(draft.all(moment) for moment in state.moments),
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
