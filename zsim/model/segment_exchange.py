"""Exchanges between segments: communication of an axis before or after a segment.

A segment may have an exchange of its inputs (`begins`) and of its outputs (`ends`). The adjoint of
the output exchange runs before the segment's backward, that of the input exchange after it.
"""

from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import TypedDict


class ExchangeAxis(StrEnum):
    """Mesh axes whose ranks exchange values inside a unit."""

    TENSOR = "tensor"
    CONTEXT = "context"
    EXPERT = "expert"


class ExchangeKind(StrEnum):
    """Effect of an exchange on a value.

    SUM adds partial values; each rank keeps the whole sum, or its shard if the value is sharded.
    GATHER concatenates the shards of all ranks; a replicated value is unchanged. OWN keeps a rank's
    shard of a replicated value, without communication. PASS receives the value of the rank `offset`
    places before; its adjoint sends the gradient back. SWAP sends an equal block to each rank, and
    receives one from each, in their order; its adjoint is the same.
    """

    SUM = "sum"
    GATHER = "gather"
    OWN = "own"
    PASS = "pass"
    SWAP = "swap"


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentExchange:
    """One exchange of values over an axis.

    Attributes:
        kind: effect on the value in forward.
        axis: the axis of the ranks that exchange.
        adjoint: effect on the gradient in backward.
        offset: places between sender and receiver of a PASS; 0 for a rank's own value.
        narrow: gathered tokens are first cast to 8-bit floats, in either direction.
        stays: the next segment's forward reads the gathered values, too, without another gather.
    """

    kind: ExchangeKind
    axis: ExchangeAxis
    adjoint: ExchangeKind
    offset: int = 0
    narrow: bool = False
    stays: bool = False

    def over(self, axis: ExchangeAxis, kind: ExchangeKind) -> bool:
        """Return True if the exchange has this axis and kind."""
        return self.axis is axis and self.kind is kind


def gather_tokens(*, narrow: bool = False, stays: bool = False) -> SegmentExchange:
    """Return the gather of a segment's inputs over the tensor axis; their gradients are summed."""
    return SegmentExchange(
        kind=ExchangeKind.GATHER,
        axis=ExchangeAxis.TENSOR,
        adjoint=ExchangeKind.SUM,
        narrow=narrow,
        stays=stays,
    )


def sum_outputs(*, narrow: bool = False) -> SegmentExchange:
    """Return the sum of a segment's outputs over the tensor axis; their gradients are gathered."""
    return SegmentExchange(
        kind=ExchangeKind.SUM,
        axis=ExchangeAxis.TENSOR,
        adjoint=ExchangeKind.GATHER,
        narrow=narrow,
    )


GATHER_ALIKE = SegmentExchange(
    kind=ExchangeKind.GATHER, axis=ExchangeAxis.TENSOR, adjoint=ExchangeKind.OWN
)
"""A gather before a segment that every rank of the tensor axis runs on the same values."""

GATHER_SEQUENCE = SegmentExchange(
    kind=ExchangeKind.GATHER, axis=ExchangeAxis.CONTEXT, adjoint=ExchangeKind.SUM
)
"""A gather of the last input from all ranks that share a sequence."""


SWAP_EXPERTS = SegmentExchange(
    kind=ExchangeKind.SWAP, axis=ExchangeAxis.EXPERT, adjoint=ExchangeKind.SWAP
)
"""The exchange of outputs over expert ranks: tokens to their experts, or back."""

SUM_OF_EXPERTS = SegmentExchange(
    kind=ExchangeKind.SUM, axis=ExchangeAxis.EXPERT, adjoint=ExchangeKind.GATHER
)
"""The sum of outputs over expert ranks; each rank keeps the sums of its tokens."""


def gather_for_experts(*, stays: bool = False) -> SegmentExchange:
    """Return the gather of a segment's inputs from all expert ranks; their gradients are summed."""
    return SegmentExchange(
        kind=ExchangeKind.GATHER,
        axis=ExchangeAxis.EXPERT,
        adjoint=ExchangeKind.SUM,
        stays=stays,
    )


def pass_along(offset: int) -> SegmentExchange:
    """Return the pass of the last input from the rank `offset` places before in the sequence."""
    return SegmentExchange(
        kind=ExchangeKind.PASS,
        axis=ExchangeAxis.CONTEXT,
        adjoint=ExchangeKind.PASS,
        offset=offset,
    )


def sums_gradients(begins: SegmentExchange | None) -> bool:
    """Return True if input gradients of a segment are partial sums over the tensor axis."""
    if begins is None or begins.axis is not ExchangeAxis.TENSOR:
        return False
    return begins.adjoint is ExchangeKind.SUM


def is_narrow(*exchanges: SegmentExchange | None) -> bool:
    """Return True if one of the exchanges casts gathered tokens to 8-bit floats."""
    return any(each is not None and each.narrow for each in exchanges)


class ExchangeFlags(TypedDict):
    """Both exchanges of a segment as the fields of a segment in a file (`zsim.model.model`)."""

    reduces_output: bool
    reduces_input_gradient: bool
    gathers_input: bool
    leaves_whole: bool
    casts_tokens: bool
    gathers_context: bool
    context_offset: int | None
    swaps_output: bool
    joins_experts: bool
    adds_experts: bool


def flags_of(begins: SegmentExchange | None, ends: SegmentExchange | None) -> ExchangeFlags:
    """Return the fields that describe both exchanges of a segment in a file."""
    context = None
    if begins is not None and begins.axis is ExchangeAxis.CONTEXT:
        context = begins
    passes = context is not None and context.kind is ExchangeKind.PASS
    return ExchangeFlags(
        reduces_output=ends is not None and ends.over(ExchangeAxis.TENSOR, ExchangeKind.SUM),
        reduces_input_gradient=sums_gradients(begins),
        gathers_input=begins is not None and begins.adjoint is ExchangeKind.OWN,
        leaves_whole=begins is not None and begins.stays,
        casts_tokens=is_narrow(begins, ends),
        gathers_context=context is not None and not passes,
        context_offset=context.offset if context is not None and passes else None,
        swaps_output=ends is not None and ends.kind is ExchangeKind.SWAP,
        joins_experts=begins is not None and begins.axis is ExchangeAxis.EXPERT,
        adds_experts=ends is not None and ends.over(ExchangeAxis.EXPERT, ExchangeKind.SUM),
    )


@cache  # models have thousands of segments with a few exchanges
def exchanges_of(
    flags: tuple[bool, bool, bool, bool, bool, bool, int | None, bool, bool, bool],
) -> tuple[SegmentExchange | None, SegmentExchange | None]:
    """Return the input and output exchange of a segment, from the values of `ExchangeFlags`.

    Raises:
        ValueError: the values describe more than one input exchange, or output exchange.
    """
    sums_output, sums_gradient, alike, stays, narrow, shared, offset, *of_experts = flags
    swaps, joins, adds = of_experts
    found: list[SegmentExchange] = []
    if sums_gradient:
        found.append(gather_tokens(narrow=narrow, stays=stays))
    if alike:
        found.append(GATHER_ALIKE)
    if shared:
        found.append(GATHER_SEQUENCE)
    if offset is not None:
        found.append(pass_along(offset))
    if joins:
        found.append(gather_for_experts(stays=stays))
    if len(found) > 1:
        words = " and ".join(f"{each.kind} over {each.axis}" for each in found)
        raise ValueError(f"segment: begins with {words}, must begin with one exchange")
    ends = [sum_outputs(narrow=narrow)] * sums_output
    ends += [SWAP_EXPERTS] * swaps + [SUM_OF_EXPERTS] * adds
    if len(ends) > 1:
        words = " and ".join(str(each.kind) for each in ends)
        raise ValueError(f"segment: ends with {words}, must end with one exchange")
    return found[0] if found else None, ends[0] if ends else None
