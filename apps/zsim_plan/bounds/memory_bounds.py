"""Lower bounds of memory from model and strategy alone, valid for every schedule of them.

They count persistent state, and the activations that are kept when the last backward starts.
Searches skip settings whose bound exceeds the memory.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from zsim.closed_form.by_model import alike_units, elements_of, kept_by_model
from zsim.closed_form.checkpoint import recomputed
from zsim.closed_form.stored_layers import stored
from zsim.dtype import DType
from zsim.model.kernel import FusedPart, parts_of
from zsim.model.model import BATCH, Model, Parameter, Segment, Unit, Value
from zsim.model.pipeline_stages import Stage
from zsim.strategy.execution import NarrowWeights, TokenFusion
from zsim.strategy.offload import MemoryTier
from zsim.strategy.strategy import Strategy
from zsim_plan.bounds.in_flight import moments
from zsim_plan.bounds.stage_kinds import kept_by_kinds, stages_of

COUNTED = 0.99
"""Minimum fraction of the bytes that experts save in proportion to their rows.

Numbers of rows are rounded, and experts also save counts."""


def device_bytes(model: Model, strategy: Strategy, *, busiest: float = 1.0) -> int:
    """Return a lower bound of the peak bytes of device memory on a rank.

    It is the rank whose experts get `busiest` times the mean of rows.

    The bound is for a moment of the last units' backward: parameters unless the stage shards
    them, masters and moments as sharded, activations of the micro-batches in flight, the
    activations that this backward recomputes, and its working memory; tensors that runtimes keep
    whole from forward to backward, or until the last backward; and in stages 2 and 3 the shards of
    gradients of earlier micro-batches. Other gradients, buckets and gathered parameters are not
    counted.
    """
    if strategy.parallel.pipeline > 1:
        made = stages_of(model, strategy)
        ends = {0, 1, len(made) - 2, len(made) - 1}  # stages in between need no more
        return max(_of_stage(made[place], strategy, busiest) for place in ends)
    states = _states(model, strategy) + _whole_gradients(model, strategy)
    activations = _activations(model, strategy, 1, busiest)
    return states + _whole_parameters(model, strategy) + activations.peak


def _whole_parameters(model: Model, strategy: Strategy) -> int:
    """Return the bytes of sharded parameters that stay gathered from forward to backward."""
    runtime = strategy.zero.emulate
    if runtime is None or strategy.zero.stage != 3:
        return 0
    whole = runtime.keeps_whole(strategy.zero.stage)
    kept = {
        parameter.name: parameter
        for unit in model.units
        if ("blocks" if unit.checkpoint else "root") in whole
        for parameter in unit.parameters
    }
    return _gathered(kept.values(), strategy.train.precision.compute)


def _whole_gradients(model: Model, strategy: Strategy) -> int:
    """Return the bytes of whole gradients that accumulate over micro-batches."""
    runtime, precision = strategy.zero.emulate, strategy.train.precision
    once = strategy.train.gradient_accumulation_steps == 1
    if runtime is None or once or "gradients" not in runtime.keeps_whole(strategy.zero.stage):
        return 0
    formats = runtime.formats(
        stage=strategy.zero.stage, compute=precision.compute, optimizer=precision.optimizer
    )
    return elements_of(model)[1] * formats.whole.size_bytes


def _of_stage(stage: Stage, strategy: Strategy, busiest: float) -> int:
    """Return a lower bound of the bytes that a rank of a stage holds when a backward starts."""
    runtime, precision = strategy.zero.emulate, strategy.train.precision
    chunks = len(stage.chunks)
    activations = [_activations(each.model, strategy, chunks, busiest) for each in stage.chunks]
    kept = [each.kept for each in activations]
    states, gradients = _states(stage.model, strategy), 0
    if runtime is not None and runtime.keeps_stage_gathered(chunks=len(kept)):
        states += _gathered(stage.model.parameters, precision.compute)
    if runtime is not None and runtime.collects_stage:
        formats = runtime.formats(
            stage=strategy.zero.stage, compute=precision.compute, optimizer=precision.optimizer
        )
        _, trained = elements_of(stage.model)
        gradients = trained * formats.whole.size_bytes
    beyond = [each.peak - each.kept for each in activations]
    return max(
        states
        + (gradients if moment.has_gradients else 0)
        + sum(times * each for times, each in zip(moment.in_flight, kept, strict=True))
        + (min(beyond) if moment.has_gradients else beyond[-1])
        for moment in moments(stage, strategy)
    )


@dataclass(frozen=True, slots=True)
class _ActivationBytes:
    """Lower bounds of the bytes of a micro-batch: kept for its backward, and while that runs.

    Counted at the `peak` are activations that are kept or recomputed, and the workspace, gradients
    and gathered parameters of one segment. The last unit of each kind is considered.
    """

    kept: int
    peak: int


def _activations(model: Model, strategy: Strategy, chunks: int, busiest: float) -> _ActivationBytes:
    """Return the activations of a model that is one of the `chunks` of a pipeline stage."""
    gathers = _gathered_for_backward(strategy, chunks)
    moves, away = strategy.moves_checkpoints, strategy.layers_on_host
    key = "activations", strategy.activations, moves, away, gathers, busiest
    return kept_by_kinds(model, key, lambda: _new_activations(model, strategy, gathers, busiest))


@dataclass(frozen=True, slots=True)
class _Gathers:
    """Parameters that are gathered for a backward: of blocks, of other units, of the next block."""

    blocks: bool = False
    root: bool = False
    ahead: bool = False


def _gathered_for_backward(strategy: Strategy, chunks: int) -> _Gathers:
    runtime = strategy.zero.emulate
    if strategy.zero.stage != 3:
        return _Gathers()
    if runtime is None:
        return _Gathers(blocks=True, root=True)
    whole = runtime.keeps_whole(strategy.zero.stage)
    blocks, root = "blocks" not in whole, "root" not in whole
    if strategy.parallel.pipeline > 1:
        blocks = root = not runtime.keeps_stage_gathered(chunks=chunks)
    return _Gathers(blocks=blocks, root=root, ahead=blocks and "ahead" in whole)


def _new_activations(
    model: Model, strategy: Strategy, gathers: _Gathers, busiest: float
) -> _ActivationBytes:
    again = recomputed(model, strategy)
    away = {unit.name for unit in stored(model, strategy)}
    last = {
        (id(first), name in again): name for first, names in alike_units(model) for name in names
    }
    chosen = {*last.values()} - away
    most, kept = 0, _KeptActivations(model, strategy, busiest)
    smallest = 0
    for unit in model.units:
        if unit.name in chosen:
            ahead = smallest if gathers.ahead else 0
            own = kept.peak_of(
                unit, is_gathered=gathers.blocks if unit.checkpoint else gathers.root
            )
            most = max(most, kept.size_bytes + own + ahead)
        if unit.checkpoint and gathers.ahead:
            own = _gathered(unit.parameters, strategy.train.precision.compute)
            smallest = min(smallest or own, own)
        if unit.name not in away:
            kept.add(unit, again=unit.name in again)
    return _ActivationBytes(kept.size_bytes, max(most, kept.size_bytes))


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
    parameters += _userbuffers(model, strategy)
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


def _userbuffers(model: Model, strategy: Strategy) -> int:
    """Return the bytes of userbuffers: one for each use by the segments in the same place."""
    if strategy.execution.fuses_tokens is not TokenFusion.USERBUFFERS:
        return 0
    return kept_by_model(model, "userbuffers", lambda: _userbuffer_bytes(model))


def _userbuffer_bytes(model: Model) -> int:
    found: dict[tuple[int, FusedPart], int] = {}
    for unit, _ in alike_units(model):
        for place, segment in enumerate(unit.segments):
            for part in parts_of((*segment.forward, *segment.backward)):
                is_made = part in (FusedPart.SPLIT, FusedPart.GRADIENT)
                of = segment.outputs[0] if is_made else model.values[segment.inputs[0]]
                whole = of.size_bytes * model.tensor
                found[place, part] = min(whole, found.get((place, part), whole))
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
    if "gradients" in runtime.keeps_whole(stage):
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


class _KeptActivations:
    """Activations of a micro-batch that units keep for their backward."""

    def __init__(self, model: Model, strategy: Strategy, busiest: float) -> None:
        self.size_bytes = 0
        self._times = 1 + (busiest - 1) * COUNTED
        self._model = model
        self._compute = strategy.train.precision.compute
        self._moves_checkpoints = strategy.moves_checkpoints
        self._gathers = strategy.execution.fuses_tokens is not TokenFusion.USERBUFFERS
        self._scale = model.tensor if self._gathers else 1
        self._inputs = {BATCH}

    def add(self, unit: Unit, *, again: bool) -> None:
        """Add the activations of a unit; if it is recomputed `again`, only its inputs."""
        if again:
            own = {value.name for segment in unit.segments for value in segment.outputs}
            given = {name for segment in unit.segments for name in segment.inputs} - own
            self._add_inputs(set() if self._moves_checkpoints else given)
            return
        reruns = [each for each in unit.segments if each.reruns]
        dropped = {value.name for each in reruns for value in each.outputs}
        for segment in unit.segments:
            if self._model.runs_backward(segment):
                self.size_bytes += 0 if segment.reruns else self._saved(segment)
                self._add_inputs(set(segment.kept_inputs) - dropped)

    def _saved(self, segment: Segment) -> int:
        """Return the saved bytes of a segment; experts save rows that their rank received."""
        receives = segment.swaps and self._model.values[segment.inputs[0]].copies > 0
        return int(self._times * segment.saved_bytes) if receives else segment.saved_bytes

    def _add_inputs(self, names: set[str]) -> None:
        new = names - self._inputs
        self._inputs |= new
        self.size_bytes += sum(self._model.values[name].size_bytes for name in new)

    def _exchanged_bytes(self, segment: Segment) -> int:
        """Return the bytes of gradients of a segment, and of tensors gathered from tensor ranks.

        Userbuffers hold gathered tensors, and are not counted.
        """
        model, total = self._model, 0
        for value in segment.outputs:
            if value.requires_gradient:
                is_whole = segment.sums and value.tensor_sharded
                total += value.size_bytes + (self._whole_bytes(value, segment) if is_whole else 0)
        for value in map(model.values.__getitem__, segment.inputs):
            is_whole = segment.reads_gathered and value.tensor_sharded
            if value.requires_gradient:
                scale = self._scale if is_whole and segment.sums_gradients else 1
                total += scale * value.size_bytes
            if is_whole and segment.saves_input:
                total += self._whole_bytes(value, segment)
        return total

    def _whole_bytes(self, value: Value, segment: Segment) -> int:
        """Return the bytes of a tensor gathered over the tensor axis; a cast leaves a byte each."""
        own = value.elements if segment.is_narrow else value.size_bytes
        return own * self._model.tensor * self._gathers

    def peak_of(self, unit: Unit, *, is_gathered: bool) -> int:
        """Return the bytes that the backward of a unit needs beyond those kept before it.

        They include gradients of its parameters, and with `is_gathered` parameters of one segment.
        """
        model, saved, inputs, most = self._model, 0, set[str](), 0
        trained = sum(each.elements for each in unit.parameters if not each.frozen)
        gradients = trained * self._compute.size_bytes
        parameters = {each.name: each for each in unit.parameters}
        for segment in unit.segments:
            if not model.runs_backward(segment):
                continue
            saved += self._saved(segment)
            inputs |= set(segment.kept_inputs) - self._inputs
            own = [parameters[name] for name in segment.parameters if name in parameters]
            needed = segment.backward_workspace_bytes
            needed += _gathered(own, self._compute) if is_gathered else 0
            needed += self._exchanged_bytes(segment)
            kept = sum(model.values[name].size_bytes for name in inputs)
            most = max(most, saved + kept + needed + gradients)
        return most


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
