"""Lower bounds of memory from model and strategy alone, valid for every schedule of them.

They count persistent state, and the activations that are kept when the last backward starts.
Searches skip settings whose bound exceeds the memory.
"""

from collections.abc import Iterable

from zsim.closed_form.by_model import elements_of, kept_by_model, kept_stages
from zsim.closed_form.checkpoint import recomputed
from zsim.closed_form.in_flight import moments
from zsim.closed_form.stored_layers import stored
from zsim.dtype import DType
from zsim.model.model import BATCH, Model, Parameter, Unit
from zsim.model.pipeline_stages import Stage
from zsim.strategy.execution import NarrowWeights
from zsim.strategy.offload import MemoryTier
from zsim.strategy.strategy import Strategy


def device_bytes(model: Model, strategy: Strategy) -> int:
    """Return a lower bound of the peak bytes of device memory on a rank.

    The bound is for the start of the last unit's backward: parameters unless the stage shards
    them, masters and moments as sharded, activations of the micro-batches in flight, and the
    working memory of the last unit; in a pipeline also tensors that runtimes keep whole until the
    last backward, and in stages 2 and 3 the shards of gradients of earlier micro-batches. Other
    gradients, buckets and gathered parameters are not counted.
    """
    if strategy.parallel.pipeline == 1:
        working = _working(model, model.units[-1], strategy)
        return _states(model, strategy) + kept_activations(model, strategy) + working
    return max(_of_stage(stage, strategy) for stage in kept_stages(model, strategy))


def _of_stage(stage: Stage, strategy: Strategy) -> int:
    """Return a lower bound of the bytes that a rank of a stage holds when a backward starts."""
    runtime, precision = strategy.zero.emulate, strategy.train.precision
    kept = [kept_activations(chunk.model, strategy) for chunk in stage.chunks]
    states, gradients = _states(stage.model, strategy), 0
    if runtime is not None and runtime.keeps_stage_gathered(chunks=len(kept)):
        states += _gathered(stage.model.parameters, precision.compute)
    if runtime is not None and runtime.collects_stage:
        formats = runtime.formats(
            stage=strategy.zero.stage, compute=precision.compute, optimizer=precision.optimizer
        )
        _, trained = elements_of(stage.model)
        gradients = trained * formats.whole.size_bytes
    return max(
        states
        + (gradients if moment.has_gradients else 0)
        + sum(times * each for times, each in zip(moment.in_flight, kept, strict=True))
        for moment in moments(stage, strategy)
    )


def _working(model: Model, unit: Unit, strategy: Strategy) -> int:
    """Return the working bytes of a unit's last segment, with its gathered parameters."""
    last = unit.segments[-1]
    gathered = 0
    if strategy.zero.stage == 3:
        read = set(last.parameters)
        own = [each for each in unit.parameters if each.name in read]
        gathered = _gathered(own, strategy.train.precision.compute)
    return last.backward_workspace_bytes + gathered


def _gathered(parameters: Iterable[Parameter], compute: DType) -> int:
    """Return the bytes of gathered parameters."""
    return sum(
        each.elements * (DType.FP8 if each.float8 else compute).size_bytes for each in parameters
    )


def _held_bytes(model: Model, compute: DType) -> int:
    """Return the bytes of all parameters: frozen ones may be in 4 bits."""
    return sum(
        (compute if each.quantized is None else DType.NF4).bytes_of(each.elements)
        for each in model.parameters
    )


def _states(model: Model, strategy: Strategy) -> int:
    compute = strategy.train.precision.compute
    _, trained = elements_of(model)
    held = kept_by_model(model, ("held bytes", compute), lambda: _held_bytes(model, compute))
    precision, stage = strategy.train.precision, strategy.zero.stage
    parameters = 0 if stage == 3 else held
    if stage != 3 and strategy.narrow_weights is not NarrowWeights.CAST:
        narrow = sum(each.elements for each in model.parameters if each.float8)
        parameters -= narrow * compute.size_bytes
    runtime = strategy.zero.emulate
    if runtime is not None:
        parameters += trained * runtime.gradient_bytes(
            stage=stage, compute=precision.compute, data=strategy.parallel.data
        )
    if _leaves_device(strategy):
        return parameters
    shard = _shard(model, strategy)
    parameters += shard * _sharded_gradient(strategy)
    is_quantized = strategy.train.optimizer.quantized
    kept = sum(
        DType.INT8.size_bytes if is_quantized else each.size_bytes
        for each in strategy.kept_formats.moments
    )
    if strategy.keeps_master or stage == 3:
        kept += strategy.kept_formats.master.size_bytes
    shard = shard if stage else trained
    return parameters + kept * shard + _cast_weights(model, strategy)


def _cast_weights(model: Model, strategy: Strategy) -> int:
    """Return a lower bound of the bytes of weights of narrow GEMMs that persist as cast copies."""
    if not strategy.execution.keeps_cast_weights:
        return 0
    return sum(each.elements for each in model.parameters if each.float8)


def _shard(model: Model, strategy: Strategy) -> int:
    """Return a lower bound of a rank's elements of trained parameters, if they are sharded."""
    if not strategy.has_expert_order:
        return elements_of(model)[1] // strategy.parallel.data
    trained = [each for each in model.parameters if not each.frozen]
    dense = sum(each.elements for each in trained if not each.expert)
    experts = sum(each.elements for each in trained if each.expert)
    return dense // strategy.parallel.data + experts // strategy.expert_data


def _sharded_gradient(strategy: Strategy) -> int:
    """Return the bytes of an element of gradients that earlier micro-batches have left.

    In stages 2 and 3 a rank keeps at least its shard of the sums until the update.
    """
    runtime, stage, precision = strategy.zero.emulate, strategy.zero.stage, strategy.train.precision
    once = strategy.train.gradient_accumulation_steps == 1
    if runtime is None or stage < 2 or once or strategy.parallel.pipeline > 1:
        return 0
    if runtime.gradient_bytes(stage=stage, compute=precision.compute, data=strategy.parallel.data):
        return 0
    formats = runtime.formats(stage=stage, compute=precision.compute, optimizer=precision.optimizer)
    return min(formats.whole.size_bytes, formats.reduced.size_bytes)


def _leaves_device(strategy: Strategy) -> bool:
    """Return True if some states are not kept on the device."""
    runtime, offload = strategy.zero.emulate, strategy.offload
    if runtime is not None:
        return bool(runtime.tiers(stage=strategy.zero.stage))
    return offload.optimizer is not MemoryTier.DEVICE


def kept_activations(model: Model, strategy: Strategy) -> int:
    """Return a lower bound of the bytes that a micro-batch keeps for its backward.

    It is computed once while the model is alive. Counted are the saved tensors of segments, and
    the inputs that backward reads; of recomputed blocks, their inputs. Layers that keep activations
    in host memory count zero.
    """
    moves, away = strategy.moves_checkpoints, strategy.layers_on_host
    key = "kept activations", strategy.activations, moves, away
    return kept_by_model(model, key, lambda: _kept_activations(model, strategy))


def _kept_activations(model: Model, strategy: Strategy) -> int:
    total, inputs, again = 0, set[str](), recomputed(model, strategy)
    away = {unit.name for unit in stored(model, strategy)}
    for unit in model.units:
        if unit.name in away:
            continue
        if unit.name in again:
            own = {value.name for segment in unit.segments for value in segment.outputs}
            given = {name for segment in unit.segments for name in segment.inputs} - own
            inputs |= set() if strategy.moves_checkpoints else given
            continue
        for segment in unit.segments:
            if model.runs_backward(segment):
                total += segment.saved_bytes
                inputs |= set(segment.kept_inputs)
    return total + sum(model.values[name].size_bytes for name in inputs - {BATCH})


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
