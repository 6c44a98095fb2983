"""Lower bounds of memory from model and strategy alone, valid for every schedule of them.

They count persistent state, the activations that are kept when a backward starts, and the memory
of the runtime. Searches skip settings whose bound exceeds the memory.
"""

from collections.abc import Iterable
from dataclasses import replace

from zsim.closed_form.by_model import alike_units, kept_by_model
from zsim.dtype import DType
from zsim.model.kernel import FusedPart, parts_of
from zsim.model.model import Model, Parameter
from zsim.model.pipeline_stages import Stage
from zsim.runtimes.lookup import part
from zsim.runtimes.registry import runtime_of
from zsim.runtimes.search import KeptBytes
from zsim.strategy.execution import NarrowWeights, TokenFusion
from zsim.strategy.offload import MemoryTier
from zsim.strategy.strategy import Strategy
from zsim_plan.bounds.backward_bytes import (
    ActivationBytes,
    backward_bytes,
    elements_of,
    gathered_bytes,
    shard_of,
)
from zsim_plan.bounds.in_flight import moments
from zsim_plan.bounds.stage_kinds import kept_by_kinds, stages_of


def device_bytes(model: Model, strategy: Strategy, *, busiest: float = 1.0) -> int:
    """Return a lower bound of the peak bytes of device memory on a rank.

    It is the rank whose experts get `busiest` times the mean of rows.

    Without a pipeline, the bound is the largest of several moments: the end of forward, the
    backward of units of each kind, the first reduction of a full bucket, the end of the last
    backward, and the update. With a pipeline, it is for the start of a backward on a stage. Counted
    are states, activations in flight and recomputed, the working memory of a segment, and the
    memory that the runtime keeps (`KeptBytes`).
    """
    if strategy.parallel.pipeline > 1:
        made = stages_of(model, strategy)
        ends = {0, 1, len(made) - 2, len(made) - 1}  # stages in between need no more
        return max(_of_stage(made[place], strategy, busiest) for place in ends)
    kept, (_, trained) = kept_of(strategy), elements_of(model)
    states = _states(model, strategy, kept)
    activations = _activations(model, strategy, kept, busiest)
    running = states + kept.accumulated * trained + kept.shard * _shard(model, strategy)
    return max(
        running + activations.peak, running + activations.end, states + kept.update * trained
    )


def kept_of(strategy: Strategy) -> KeptBytes:
    """Return the memory that the runtime of a strategy keeps; nothing for zsim's own stages."""
    search = runtime_of(strategy).search
    found = part(search, name="search").kept(strategy)
    if strategy.zero.stage != 3:
        return replace(found, gathered=frozenset())
    return found


def _of_stage(stage: Stage, strategy: Strategy, busiest: float) -> int:
    """Return a lower bound of the bytes that a rank of a stage holds when a backward starts."""
    own = kept_of(strategy)
    stays = len(stage.chunks) <= own.chunks
    own = replace(own, gathered=frozenset({"blocks", "root"} if stays else ()))
    activations = [_activations(each.model, strategy, own, busiest) for each in stage.chunks]
    kept = [each.kept for each in activations]
    states = _states(stage.model, strategy, own)
    if stays:
        states += gathered_bytes(stage.model.parameters, strategy.train.precision.compute)
    gradients = own.collected * elements_of(stage.model)[1]
    beyond = [each.peak - each.kept for each in activations]
    return max(
        states
        + (gradients if moment.has_gradients else 0)
        + sum(times * each for times, each in zip(moment.in_flight, kept, strict=True))
        + (min(beyond) if moment.has_gradients else beyond[-1])
        for moment in moments(stage, strategy)
    )


def _activations(
    model: Model, strategy: Strategy, runtime: KeptBytes, busiest: float
) -> ActivationBytes:
    """Return the activations of a model, or of a chunk of a pipeline stage."""
    moves, away, pipeline = strategy.moves_checkpoints, strategy.layers_on_host, strategy.parallel
    key = "activations", strategy.activations, moves, away, runtime, pipeline.pipeline > 1, busiest
    precision = strategy.train.precision, pipeline.data, strategy.zero.stage
    return kept_by_kinds(
        model, (key, precision), lambda: backward_bytes(model, strategy, runtime, busiest)
    )


def _held_bytes(parameters: Iterable[Parameter], compute: DType) -> int:
    """Return the bytes of parameters: frozen ones may be in 4 bits."""
    return sum(
        (compute if each.quantized is None else DType.NF4).bytes_of(each.elements)
        for each in parameters
    )


def _states(model: Model, strategy: Strategy, runtime: KeptBytes) -> int:
    compute = strategy.train.precision.compute
    _, trained = elements_of(model)
    held = kept_by_model(
        model, ("held bytes", compute), lambda: _held_bytes(model.parameters, compute)
    )
    stage = strategy.zero.stage
    parameters = 0 if stage == 3 else held
    if stage != 3 and strategy.narrow_weights is not NarrowWeights.CAST:
        narrow = sum(each.elements for each in model.parameters if each.float8)
        parameters -= narrow * compute.size_bytes
    parameters += trained * runtime.permanent + _userbuffers(model, strategy)
    if _leaves_device(strategy):
        return parameters
    is_quantized = strategy.train.optimizer.quantized
    kept = sum(
        DType.INT8.size_bytes if is_quantized else each.size_bytes
        for each in strategy.kept_formats.moments
    )
    if strategy.keeps_master or stage == 3:
        kept += strategy.kept_formats.master.size_bytes
    shard = _shard(model, strategy) if stage else trained
    if stage == 3:
        frozen = [each for each in model.parameters if each.frozen]
        parameters += _held_bytes(frozen, compute) // strategy.parallel.data
    return parameters + kept * shard + _cast_weights(model, strategy)


def _userbuffers(model: Model, strategy: Strategy) -> int:
    """Return the bytes of userbuffers: one for each use by the segments in the same place."""
    if strategy.execution.fuses_tokens is not TokenFusion.USERBUFFERS:
        return 0
    return kept_by_model(model, "userbuffers", lambda: _userbuffer_bytes(model))


def _userbuffer_bytes(model: Model) -> int:
    found: dict[tuple[int, FusedPart], int] = {}
    for unit, _ in alike_units(model):
        for place, segment in enumerate(unit.segments):
            for fused in parts_of((*segment.forward, *segment.backward)):
                is_made = fused in (FusedPart.SPLIT, FusedPart.GRADIENT)
                of = segment.outputs[0] if is_made else model.values[segment.inputs[0]]
                whole = of.size_bytes * model.tensor
                found[place, fused] = min(whole, found.get((place, fused), whole))
    return sum(found.values())


def _cast_weights(model: Model, strategy: Strategy) -> int:
    """Return a lower bound of the bytes of weights of narrow GEMMs that persist as cast copies."""
    if not strategy.execution.keeps_cast_weights:
        return 0
    return sum(each.elements for each in model.parameters if each.float8)


def _shard(model: Model, strategy: Strategy) -> int:
    """Return a lower bound of a rank's elements of trained parameters, if they are sharded."""
    if not strategy.has_expert_order:
        return elements_of(model)[1] // strategy.parallel.data
    return shard_of(model.parameters, strategy)


def _leaves_device(strategy: Strategy) -> bool:
    """Return True if some states are not kept on the device."""
    runtime, offload = strategy.zero.emulate, strategy.offload
    if runtime is not None:
        return bool(runtime.tiers(stage=strategy.zero.stage))
    return offload.optimizer is not MemoryTier.DEVICE


def host_state_bytes(model: Model, strategy: Strategy) -> int:
    """Return a lower bound of the bytes of masters and moments that a rank keeps in host memory."""
    if strategy.zero.emulate is None:
        on_host = strategy.offload.optimizer is MemoryTier.HOST
    else:
        tiers = strategy.zero.emulate.tiers(stage=strategy.zero.stage)
        of_states = [tier for option, tier in tiers.items() if "param" not in option]
        on_host = bool(of_states) and all(tier is MemoryTier.HOST for tier in of_states)
    if not on_host:
        return 0
    _, trained = elements_of(model)
    shard = _shard(model, strategy) if strategy.zero.stage else trained
    kept = strategy.moments + (1 if strategy.keeps_master else 0)
    return kept * shard * strategy.train.precision.optimizer.size_bytes
