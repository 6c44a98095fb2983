"""Volume over the tensor axis: sums inside units, partitioned checkpoints, token shards.

Also keys and values of ranks that share a sequence, and their gradients.
"""

from collections import Counter
from collections.abc import Iterable

from zsim.closed_form.by_model import alike_units, kept_by_model
from zsim.closed_form.checkpoint import moved, recomputed
from zsim.dtype import DType
from zsim.model.model import Model, Segment, Unit, Value
from zsim.schedule.schedule import WireBytes
from zsim.strategy.strategy import Strategy


def tensor(model: Model, strategy: Strategy) -> list[WireBytes]:
    """Return the volume of all-reduces inside units, and of partitioned checkpoints."""
    key = "all-reduces", strategy.activations
    reduced = kept_by_model(model, key, lambda: _all_reduced(model, strategy))
    gathered = 0
    if strategy.cuts_checkpoints:
        gathered = sum(
            value.size_bytes // strategy.parallel.tensor * (strategy.parallel.tensor - 1)
            for value in moved(model, strategy)
        )
    micro_batches = strategy.train.gradient_accumulation_steps
    return [
        WireBytes(group="tensor", collective="all_reduce", bytes=micro_batches * reduced),
        WireBytes(group="tensor", collective="all_gather", bytes=micro_batches * gathered),
    ]


def _all_reduced(model: Model, strategy: Strategy) -> int:
    """Return the bytes that a rank sends in all-reduces of a micro-batch."""
    again = recomputed(model, strategy)
    return sum(_unit_all_reduce(model, unit, recomputed=unit.name in again) for unit in model.units)


def _unit_all_reduce(model: Model, unit: Unit, *, recomputed: bool) -> int:
    """Return the bytes that a rank sends in the unit's all-reduces for one micro-batch."""
    total = 0
    for segment in unit.segments:
        if segment.sums:
            total += (1 + (recomputed and segment.sums_output(again=True))) * sum(
                _ring(model, value.name) for value in segment.outputs if not value.tensor_sharded
            )
        if segment.sums_gradients and model.runs_backward(segment):
            total += sum(
                _ring(model, name)
                for name in segment.inputs
                if model.values[name].requires_gradient and not model.values[name].tensor_sharded
            )
    return total


def _ring(model: Model, value: str) -> int:
    """Return the bytes that a rank sends when `value` is all-reduced over the tensor axis."""
    whole = model.values[value]
    return 2 * (model.tensor - 1) * -(-whole.elements // model.tensor) * whole.dtype.size_bytes


def sequence(model: Model, strategy: Strategy) -> list[WireBytes]:
    """Return the volume of hidden states sharded by tokens: a rank's own, sent to each other rank.

    A state that is cast before the gather counts one byte per element, and a number for its scale.
    """
    key = "token shards", strategy.activations
    gathered, scattered, scales = kept_by_model(model, key, lambda: _token_shards(model, strategy))
    steps = strategy.train.gradient_accumulation_steps
    times = steps * (model.tensor - 1)
    scales *= strategy.execution.measures_tokens
    return [
        WireBytes(group="tensor", collective="all_gather", bytes=times * gathered),
        WireBytes(group="tensor", collective="reduce_scatter", bytes=times * scattered),
        WireBytes(group="tensor", collective="all_reduce", bytes=2 * times * scales, scalar=True),
    ]


def _token_shards(model: Model, strategy: Strategy) -> tuple[int, int, int]:
    """Return the gathered bytes, scattered bytes and bytes of scales of a micro-batch."""
    gathered = scattered = scales = 0
    again = recomputed(model, strategy)
    alike = ((each, Counter(name in again for name in names)) for each, names in alike_units(model))
    for unit, is_again, many in ((each, *pair) for each, own in alike for pair in own.items()):
        is_left = False
        for segment in unit.segments:
            made, read = _made(model, segment), _read(model, segment)
            sums = segment.reruns or (is_again and segment.sums_output(again=True))
            times = 0 if is_left else 1 + (segment.reruns or (is_again and segment.runs_again))
            scattered += many * (1 + sums) * _bytes(made)
            is_left = segment.leaves_gathered
            back = list[Value]()
            if model.runs_backward(segment):
                scattered += many * _bytes(_read(model, segment, differentiable=True))
                back = [*made, *(read if segment.saves_input else ())]
            moved = [*read * times, *back]
            gathered += many * _bytes(moved, narrow=segment.is_narrow)
            scales += many * _scales(moved) if segment.is_narrow else 0
    return gathered, scattered, scales


def _bytes(values: Iterable[Value], *, narrow: bool = False) -> int:
    """Return the bytes of values on a rank; with `narrow` of 8-bit floats."""
    if narrow:
        return sum(value.elements for value in values) * DType.FP8.size_bytes
    return sum(value.size_bytes for value in values)


def _scales(values: Iterable[Value]) -> int:
    """Return the bytes of one number for each value, in its format."""
    return sum(value.dtype.size_bytes for value in values)


def _made(model: Model, segment: Segment) -> list[Value]:
    """Return the outputs of the segment that are sharded by tokens when they are summed."""
    if not segment.sums:
        return []
    values = [model.values[value.name] for value in segment.outputs]
    return [value for value in values if value.tensor_sharded]


def _read(model: Model, segment: Segment, *, differentiable: bool = False) -> list[Value]:
    """Return sharded inputs to gather; with `differentiable`, those whose gradients are summed."""
    if not (segment.sums_gradients if differentiable else segment.reads_gathered):
        return []
    values = [model.values[name] for name in segment.inputs]
    return [
        value
        for value in values
        if value.tensor_sharded and (value.requires_gradient or not differentiable)
    ]


def shared_sequence(model: Model, strategy: Strategy) -> list[WireBytes]:
    """Return the volume of exchanges: a rank's own keys and values, sent to each other rank.

    They are sent in forward, in recomputation, and in backward. Their gradients return in
    backward: to the rank that owns them, or around a ring in the format of the optimizer.
    """
    ranks = strategy.parallel.context
    if ranks == 1:
        return []
    key = "shared sequence", strategy.activations, strategy.train.precision
    gathered, scattered, passed = kept_by_model(model, key, lambda: _exchanged(model, strategy))
    batches = strategy.train.gradient_accumulation_steps
    others = batches * (ranks - 1)
    return [
        WireBytes(group="context", collective="all_gather", bytes=others * gathered),
        WireBytes(group="context", collective="reduce_scatter", bytes=others * scattered),
        WireBytes(group="context", collective="send", bytes=batches * passed),
    ]


def _exchanged(model: Model, strategy: Strategy) -> tuple[int, int, int]:
    """Return the bytes of a micro-batch that are gathered, scattered, and sent around a ring."""
    again, wide = recomputed(model, strategy), strategy.train.precision.wide.size_bytes
    gathered = scattered = passed = 0
    for unit in model.units:
        for segment in unit.segments:
            name = segment.shared_input or segment.passed_input
            if name is None:
                continue
            value, goes_back = model.values[name], model.runs_backward(segment)
            times = 1 + (unit.name in again) + (goes_back and segment.saves_input)
            comes_back = goes_back and value.requires_gradient
            if segment.shared_input is not None:
                gathered += times * value.size_bytes
                scattered += comes_back * value.size_bytes
            else:
                passed += times * value.size_bytes + comes_back * value.elements * wide
    return gathered, scattered, passed
