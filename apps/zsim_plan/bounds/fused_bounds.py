"""Lower bounds of the time that collectives fused with kernels add to these kernels.

Such a collective overlaps products of the `Compute` with which it is fused, and ends before the
kernels that follow; if it takes longer than these products, the kernels wait for it. One that a
kernel carries out takes processors from the products, unless they leave some free (`spared`). With
Transformer Engine's userbuffers a rank copies its own tokens to a userbuffer before a gather, and
from one after a scatter.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from math import isinf

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
    read = [] if is_left else _gathered(model, segment)
    waited_s = _waited_s(
        segment.forward,
        speeds,
        ranks=model.tensor,
        gathers={
            FusedPart.GATHERED: sum(_gather_alone_s(model, each, segment, speeds) for each in read)
        },
        scattered_s=sum(_sum_alone_s(model, each, speeds) for each in made),
    )
    return shared_s + max(waited_s, _slowed_s(segment.forward, speeds, 0.0, scattered_s))


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
    ended = segment.outputs if segment.ends is not None else ()
    graded = [each for each in ended if each.tensor_sharded]
    gathers = {FusedPart.BESIDE_GATHER: read, FusedPart.GRADIENT: graded}
    waited_s = _waited_s(
        segment.backward,
        speeds,
        ranks=model.tensor,
        gathers={
            part: sum(_gather_alone_s(model, each, segment, speeds) for each in values)
            for part, values in gathers.items()
        },
        scattered_s=sum(_sum_alone_s(model, each, speeds) for each in summed),
    )
    return copied_s + max(waited_s, _slowed_s(segment.backward, speeds, gathered_s, scattered_s))


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


def _gather_alone_s(model: Model, value: Value, segment: Segment, speeds: RankSpeeds) -> float:
    """Return the seconds of a gather that has the links alone, by parts or as a whole."""
    whole = _own_bytes(value, segment) * model.tensor
    return _least_alone_s(("all_gather", "all_to_all"), whole, model.tensor, speeds)


def _sum_alone_s(model: Model, value: Value, speeds: RankSpeeds) -> float:
    """Return the seconds of a sum over ranks that has the links alone, by parts or as a whole."""
    if value.tensor_sharded:
        whole, names = value.size_bytes * model.tensor, ("reduce_scatter", "all_to_all")
        return _least_alone_s(names, whole, model.tensor, speeds)
    return _least_alone_s(("all_reduce",), value.size_bytes, model.tensor, speeds)


def _least_alone_s(names: Iterable[str], size: int, ranks: int, speeds: RankSpeeds) -> float:
    if isinf(speeds.link_bytes_per_s):  # collectives were measured
        return 0.0
    return min(speeds.tensor(name, size, ranks) for name in names)


def _waited_s(
    kernels: Sequence[Kernel],
    speeds: RankSpeeds,
    *,
    ranks: int,
    gathers: Mapping[FusedPart, float],
    scattered_s: float,
) -> float:
    """Return the seconds that `kernels` wait for collectives that take longer than their products.

    A scatter starts after the first product that makes its input, or with it if it overlaps the
    scatter, and ends before the kernels that sum its parts.
    """
    summed = [each for each in kernels if each.part is not FusedPart.SUM]
    ends = list(accumulate((speeds.kernels((each,)).seconds for each in summed), initial=0.0))
    spans = [
        (_span(summed, ends, part, ranks), took)
        for part, took in gathers.items()
        if took and part in parts_of(summed)
    ]
    makers = [place for place, each in enumerate(summed) if each.part in MAKES]
    if scattered_s and makers:
        beside = summed[makers[0]].part is FusedPart.BESIDE_SCATTER
        spans.append(((ends[makers[0] if beside else makers[0] + 1], ends[-1]), scattered_s))
    waited_s = {0.0: 0.0}  # until the end of a span, by its place in the time of kernels
    for (begin, end), took in sorted(spans, key=lambda each: each[0][1]):
        before = max(known for at, known in waited_s.items() if at <= begin)
        so_far = max(known for at, known in waited_s.items() if at <= end)
        waited_s[end] = max(so_far, before + took - (end - begin))
    return max(waited_s.values())


def _span(
    kernels: Sequence[Kernel], ends: Sequence[float], part: FusedPart, ranks: int
) -> tuple[float, float]:
    """Return the time of kernels at which a gather starts, and that at which it must have ended.

    It starts with the first product of its part. The product of the tokens that arrive last waits
    for it, or the kernels after the products if these do not read its result.
    """
    places = [place for place, each in enumerate(kernels) if each.part is part]
    end = ends[places[-1] + 1]
    if part is not FusedPart.BESIDE_GATHER:
        taken = sum(ends[place + 1] - ends[place] for place in places)
        end -= taken / min(ranks, len(places))
    return ends[places[0]], end
