"""Megatron-LM: the schedule with and without a pipeline, its checks and its volume."""

from zsim.closed_form import DataVolume
from zsim.closed_form.by_model import kept_stages
from zsim.model.model import Model, ModelError
from zsim.schedule.schedule import Schedule
from zsim.strategy.strategy import Strategy
from zsim_runtimes.megatron import pipeline, recomputed_modules
from zsim_runtimes.megatron import schedule as megatron
from zsim_runtimes.megatron.options import Megatron
from zsim_runtimes.megatron.volume import VOLUME


def need(model: Model, strategy: Strategy) -> None:
    """Raise ModelError unless chunks, micro-batches and pipeline stages fit together.

    Raises:
        ModelError: they do not, or an option needs a pipeline.
    """
    recomputed_modules.need(model, strategy)
    options = strategy.options(Megatron)
    _need_shared_experts(model, strategy, options)
    if options.overlap_moe_expert_parallel_comm:
        from zsim_runtimes.megatron import combined  # noqa: PLC0415 (only merged micro-batches)

        combined.need(model, strategy)
    if strategy.parallel.pipeline > 1:
        pipeline.need(kept_stages(model, strategy), strategy)
        return
    for name in options.split_options:
        value = str(getattr(options, name)).lower()
        raise ModelError(f"zero.megatron.{name}: {value} needs parallel.pipeline > 1")


def _need_shared_experts(model: Model, strategy: Strategy, options: Megatron) -> None:
    """Raise ModelError if shared experts are to overlap exchanges, without the one or the other."""
    if not options.moe_shared_expert_overlap:
        return
    shape, field = model.architecture, "zero.megatron.moe_shared_expert_overlap: true needs"
    if strategy.parallel.expert == 1:
        raise ModelError(f"{field} parallel.expert above 1, whose exchanges it overlaps")
    if shape is None or shape.experts is None or not shape.experts.shared_intermediate_size:
        raise ModelError(f"{field} model.experts.shared_intermediate_size")


def schedule(model: Model, strategy: Strategy) -> Schedule:
    """Return the schedule of all pipeline stages, or of the single stage.

    Raises:
        ModelError: the model does not fit the strategy.
    """
    if strategy.options(Megatron).overlap_moe_expert_parallel_comm:
        from zsim_runtimes.megatron import combined  # noqa: PLC0415 (only merged micro-batches)

        kind, streams = combined.CombinedStep, (combined.EXCHANGES,)
        return megatron.schedule(model, strategy, kind=kind, more_streams=streams)
    of_stages = strategy.parallel.pipeline > 1
    return (pipeline.schedule if of_stages else megatron.schedule)(model, strategy)


def volume(strategy: Strategy) -> DataVolume:
    """Return the data volumes of every schedule."""
    del strategy
    return VOLUME
