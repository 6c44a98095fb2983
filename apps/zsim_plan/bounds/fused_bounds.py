"""Lower bounds of the time that collectives fused with kernels add to these kernels.

Such a collective overlaps products of the `Compute` with which it is fused, and ends before the
kernels that follow. One that a kernel carries out takes processors from the products, unless they
leave some free (`spared`). With Transformer Engine's userbuffers a rank copies its own tokens to a
userbuffer before a gather, and from one after a scatter.
"""

from collections.abc import Iterable, Sequence

from zsim.model.kernel import FusedPart, Kernel, parts_of
from zsim.model.model import Model, Segment, Value
from zsim.schedule.fusions import BY_KERNEL, MAKES
from zsim.strategy.execution import TokenFusion
from zsim.strategy.strategy import Strategy
from zsim_plan.bounds.rank_speeds import RankSpeeds, tensor_s


def fused_forward_s(
    model: Model, segment: Segment, strategy: Strategy, speeds: RankSpeeds, *, is_left: bool
) -> float:
    """Return the seconds that fused collectives add to the forward of a segment, at least.

    Its inputs are not gathered if the segment before `is_left` them whole.
    """
    parts = parts_of(segment.forward)
    if model.tensor == 1 or not parts:
        return 0.0
    shared_s = 0.0
    if FusedPart.GATHERED in parts and not is_left and _uses_buffers(strategy):
        shared_s = _copied_s(_gathered(model, segment), segment, speeds)
    made = segment.outputs if segment.ends is not None else ()
    scattered_s = sum(_summed_s(model, each, speeds) for each in made)
    return shared_s + _slowed_s(segment.forward, speeds, 0.0, scattered_s)


def fused_backward_s(
    model: Model, segment: Segment, strategy: Strategy, speeds: RankSpeeds
) -> float:
    """Return the seconds that fused collectives add to the backward of a segment, at least."""
    parts = parts_of(segment.backward)
    if model.tensor == 1 or not parts:
        return 0.0
    read = _gathered(model, segment) if segment.saves_input else []
    inputs = [model.values[name] for name in segment.inputs] if segment.sums_gradients else []
    summed = [each for each in inputs if each.requires_gradient]
    copied_s = 0.0
    if _uses_buffers(strategy):
        if FusedPart.BESIDE_GATHER in parts:
            copied_s += _copied_s(read, segment, speeds)
        if FusedPart.BESIDE_SCATTER in parts:
            own = [each for each in summed if each.tensor_sharded]
            copied_s += _copied_s(own, segment, speeds)
        if FusedPart.GRADIENT in parts and segment.ends is not None:
            made = [each for each in segment.outputs if each.tensor_sharded]
            copied_s += _copied_s(made, segment, speeds)
    gathered_s = sum(_gathered_s(model, each, segment, speeds) for each in read)
    scattered_s = sum(_summed_s(model, each, speeds) for each in summed)
    return copied_s + _slowed_s(segment.backward, speeds, gathered_s, scattered_s)


def _uses_buffers(strategy: Strategy) -> bool:
    return strategy.execution.fuses_tokens is TokenFusion.USERBUFFERS


def _gathered(model: Model, segment: Segment) -> list[Value]:
    """Return the inputs that a segment gathers."""
    values = [model.values[name] for name in segment.inputs] if segment.reads_gathered else []
    return [each for each in values if each.tensor_sharded]


def _own_bytes(value: Value, segment: Segment) -> int:
    """Return the bytes of a rank's own tokens; a cast leaves one byte for each element."""
    return value.elements if segment.is_narrow else value.size_bytes


def _copied_s(values: Iterable[Value], segment: Segment, speeds: RankSpeeds) -> float:
    """Return the seconds of copies of a rank's own tokens, which are read and written."""
    return sum(2 * _own_bytes(each, segment) for each in values) / speeds.copied_bytes_per_s


def _gathered_s(model: Model, value: Value, segment: Segment, speeds: RankSpeeds) -> float:
    whole = _own_bytes(value, segment) * model.tensor
    return tensor_s("all_gather", whole, model.tensor, speeds.link_bytes_per_s)


def _summed_s(model: Model, value: Value, speeds: RankSpeeds) -> float:
    if value.tensor_sharded:
        whole = value.size_bytes * model.tensor
        return tensor_s("reduce_scatter", whole, model.tensor, speeds.link_bytes_per_s)
    return tensor_s("all_reduce", value.size_bytes, model.tensor, speeds.link_bytes_per_s)


def _slowed_s(
    kernels: Sequence[Kernel], speeds: RankSpeeds, gathered_s: float, scattered_s: float
) -> float:
    """Return the seconds by which collectives that take processors slow down `kernels`, at least.

    A gather overlaps only products. A scatter starts with the first product that overlaps it, or
    after it if the output is split, and may overlap all later kernels. Kernels that only move
    memory lose nothing.
    """
    parts = parts_of(each for each in kernels if each.part in BY_KERNEL and not each.spared)
    beside_s = 0.0
    if FusedPart.BESIDE_GATHER in parts:
        beside_s += gathered_s
    if MAKES & parts:
        first = next(place for place, each in enumerate(kernels) if each.part in MAKES)
        beside_s += max(0.0, scattered_s - speeds.kernels(tuple(kernels[first:])).moving_s)
    return speeds.collective_share * beside_s
