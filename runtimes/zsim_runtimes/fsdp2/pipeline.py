"""FSDP2 in the stages of PyTorch's pipelines, each a role: 1F1B, or several chunks in turn.

Layers are distributed as in torchtitan. Every chunk is wrapped separately, with its own root.

A stage keeps its parameters after each backward and accumulates whole gradients. After the last
backward of a chunk they are reduced group by group, the root first, and compute waits for all
(`perform_reduce_grad`). With one chunk, its first forward gathers them, a block at a time. With
several chunks, each chunk is gathered as a whole, copied in on the compute stream, and at most
three are kept (UNSHARD, RESHARD).

Functions named in comments are from `torch/distributed/pipelining/schedules.py` in torch 2.13.
"""

from collections.abc import Sequence

from zsim.model.model import Model, ModelError
from zsim.model.pipeline_stages import Stage, stages
from zsim.schedule.operation_list import COMPUTE
from zsim.schedule.schedule import Schedule
from zsim.strategy.activations import Checkpointing
from zsim.strategy.strategy import Strategy
from zsim.zero.assemble import assemble, need_fitting, need_single_calls
from zsim.zero.names import PIPELINE
from zsim_runtimes.fsdp2.gather import ALL_GATHER, COPY_IN
from zsim_runtimes.fsdp2.options import FSDP2, OffloadPolicy, PipelineSchedule
from zsim_runtimes.fsdp2.order import (
    Action,
    interleaved,
    interleaved_zero_bubble,
    micro_batches_per_round,
    one_forward_one_backward,
    zero_bubble_in_v,
)
from zsim_runtimes.fsdp2.reduce import ALL_REDUCE, REDUCE_SCATTER
from zsim_runtimes.fsdp2.stage import WITH_NEXT, WITH_PREVIOUS, FSDP2Stage
from zsim_runtimes.fsdp2.volume import VOLUME
from zsim_runtimes.fsdp2.zero_bubble import ZeroBubbleStage
from zsim_runtimes.stage_actions import StagePlace


def need(model: Model, strategy: Strategy) -> None:
    """Raise ModelError unless the micro-batches fit the stages and all options are modeled.

    Raises:
        ModelError: the micro-batches do not fit, or an option is not modeled.
    """
    _need_modelled(model, strategy)
    _need_micro_batches(strategy)


def schedule(model: Model, strategy: Strategy) -> Schedule:
    """Return the schedule of FSDP2 training `model` in pipeline stages.

    Raises:
        ModelError: the model was built for other parallel degrees, there are too few layers,
            micro-batches do not fit the stages, or an option is not modeled with them.
    """
    need_fitting(model, strategy)
    need_single_calls(model, "FSDP2 with a pipeline")
    need(model, strategy)
    made = stages(model, strategy)
    if strategy.options(FSDP2).splits_backward:
        _need_two_parts(made)
    kind = ZeroBubbleStage if strategy.options(FSDP2).splits_backward else FSDP2Stage
    steps = [
        kind(stage, strategy, order) for stage, order in zip(made, orders(strategy), strict=True)
    ]
    for step in steps:
        step.write()
    several = len(made[0].chunks) > 1
    streams: tuple[str, ...] = (COMPUTE, ALL_GATHER, REDUCE_SCATTER)
    streams += () if several else (COPY_IN, PIPELINE)
    streams += (ALL_REDUCE,) if strategy.parallel.replicate > 1 else ()
    streams += (WITH_NEXT,) if strategy.parallel.pipeline == 2 else (WITH_NEXT, WITH_PREVIOUS)
    interleaved = f", {len(made[0].chunks)} chunks each" if several else ""
    layouts = (layout for step in steps for layout in step.layouts)
    return assemble(
        f"FSDP2, {strategy.parallel.pipeline} stages{interleaved}",
        model=model,
        strategy=strategy,
        volume=VOLUME,
        writers=[step.writer for step in steps],
        streams=streams,
        layouts=tuple(dict.fromkeys(layouts)),
    )


def orders(strategy: Strategy) -> list[list[Action]]:
    """Return the actions of every stage."""
    count, options = strategy.parallel.pipeline, strategy.options(FSDP2)
    micro_batches = strategy.train.gradient_accumulation_steps
    if options.pipeline_schedule is PipelineSchedule.INTERLEAVED_ZERO_BUBBLE:
        return interleaved_zero_bubble(count, options.chunks_of_stage, micro_batches)
    if options.stages_in_v:
        return zero_bubble_in_v(count, micro_batches)
    if options.is_interleaved:
        return interleaved(count, options.chunks_of_stage, micro_batches)
    places = (StagePlace(index=index, stages=count) for index in range(count))
    return [list(one_forward_one_backward(place, micro_batches)) for place in places]


def _need_micro_batches(strategy: Strategy) -> None:
    """Raise ModelError unless micro-batches and stages fit together.

    Raises:
        ModelError: they do not; PyTorch rejects them too.
    """
    count, micro_batches = strategy.parallel.pipeline, strategy.train.gradient_accumulation_steps
    name = f"train.gradient_accumulation_steps: {micro_batches} must be"
    if not strategy.options(FSDP2).is_interleaved:
        if micro_batches < count:  # Schedule1F1B.__init__
            raise ModelError(f"{name} at least parallel.pipeline = {count} for 1F1B")
        return
    if strategy.options(FSDP2).stages_in_v:  # any number is valid
        return
    rounds = micro_batches // micro_batches_per_round(micro_batches, count)
    if micro_batches % rounds:  # ScheduleInterleaved1F1B.__init__
        raise ModelError(f"{name} a multiple of {rounds}, its rounds of {count} stages")


def _need_modelled(model: Model, strategy: Strategy) -> None:
    """Raise ModelError unless all options are modeled with a pipeline.

    Raises:
        ModelError: an option is not modeled.
    """
    options = strategy.options(FSDP2)
    reshard = options.reshard_after_forward
    why = f"is not modelled for pipeline = {strategy.parallel.pipeline}"
    if model.frozen:
        raise ModelError(f"model.frozen: {min(model.frozen)}; FSDP2 {why} with frozen parameters")
    if not isinstance(reshard, bool):
        raise ModelError(f"zero.fsdp2.reshard_after_forward: {reshard} {why}, only true and false")
    if reshard and options.is_interleaved:
        raise ModelError(
            f"zero.fsdp2.reshard_after_forward: true {why} with {options.pipeline_schedule}"
        )
    if options.forward_prefetch:
        raise ModelError(f"zero.fsdp2.forward_prefetch: {options.forward_prefetch} {why}")
    if options.splits_backward:
        _need_splittable_segments(strategy)
    if options.offload_policy is not OffloadPolicy.NONE:
        raise ModelError(f"zero.fsdp2.offload_policy: {options.offload_policy} {why}")


def _need_splittable_segments(strategy: Strategy) -> None:
    """Raise ModelError unless backward can be split in two parts.

    Raises:
        ModelError: PyTorch rejects it, or it is not modeled.
    """
    kind = strategy.options(FSDP2).pipeline_schedule
    train, parallel = strategy.train, strategy.parallel
    activations = strategy.activations.checkpointing
    # _check_torch_compile_compatibility
    wrong = [("train.compile", "true", "PyTorch refuses it")] if train.compile else []
    if activations is not Checkpointing.NONE:
        # every graph task recomputes it (_CheckpointFrame of torch/utils/checkpoint.py), and the
        # second part is one task for each parameter
        why = "every parameter would run its block again, which is not modelled"
        wrong.append(("activations.checkpointing", activations, why))
    if parallel.context > 1:
        wrong.append(("parallel.context", str(parallel.context), "is not modelled"))
    if train.recipe is not None:
        wrong.append(("train.float8", train.recipe, "is not modelled"))
    reduced, own = strategy.options(FSDP2).reduce_dtype, train.precision.compute
    if reduced is not None and reduced is not own and reduced.size_bytes == own.size_bytes:
        why = f"sums in it and in {own} are not modelled"
        wrong.append(("zero.fsdp2.reduce_dtype", reduced, why))
    for field, value, why in wrong:
        raise ModelError(f"{field}: {value} with {kind}: {why}")


def _need_two_parts(made: Sequence[Stage]) -> None:
    """Raise ModelError unless the costs of both parts of every split backward are known.

    Raises:
        ModelError: one is unknown, as with modules that zsim has not built.
    """
    for stage in made:
        for chunk in stage.chunks if stage.index else stage.chunks[1:]:
            for unit in chunk.model.units:
                for segment in unit.segments:
                    if segment.split is None and stage.model.trained_of(segment):
                        raise ModelError(
                            f"unit {unit.name}: what a backward in two parts costs is not known"
                        )
