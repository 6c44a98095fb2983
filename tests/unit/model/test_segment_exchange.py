"""Exchanges that begin and end segments, and their form in files."""

import re
from itertools import product
from pathlib import Path

import pytest

from zsim.dtype import DType
from zsim.model.model import Segment, Value
from zsim.model.segment_exchange import (
    GATHER_ALIKE,
    GATHER_SEQUENCE,
    SUM_OF_EXPERTS,
    SWAP_EXPERTS,
    ExchangeFlags,
    SegmentExchange,
    exchanges_of,
    flags_of,
    gather_for_experts,
    gather_tokens,
    is_narrow,
    pass_along,
    sum_outputs,
    sums_gradients,
)

BEGINS: tuple[SegmentExchange | None, ...] = (
    None,
    *(gather_tokens(narrow=n, stays=s) for n, s in product((False, True), repeat=2)),
    GATHER_ALIKE,
    GATHER_SEQUENCE,
    *map(pass_along, range(3)),
    *(gather_for_experts(stays=stays) for stays in (False, True)),
)
ENDS = (None, sum_outputs(), sum_outputs(narrow=True), SWAP_EXPERTS, SUM_OF_EXPERTS)
ROOT = Path(__file__).parents[3]
IN_FILES = ("zsim/model/model.py", "zsim/model/segment_exchange.py")
STRATEGY = "casts_tokens"
"""A flag whose name a strategy has, too."""

MADE = (Value(name="made", elements=1, dtype=DType.BF16),)


PAIRS = [
    (begins, ends)
    for begins, ends in product(BEGINS, ENDS)
    if ends is None or not sums_gradients(begins) or is_narrow(begins) == ends.narrow
]
"""A file has one flag for whether a segment's tokens are cast."""


@pytest.mark.parametrize(("begins", "ends"), PAIRS)
def test_exchanges_of_a_segment_are_read_as_they_were_written(
    begins: SegmentExchange | None, ends: SegmentExchange | None
) -> None:
    segment = Segment(inputs=("read",), outputs=MADE, **flags_of(begins, ends))
    assert (segment.begins, segment.ends) == (begins, ends)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (gather_tokens(), GATHER_ALIKE),
        (gather_tokens(), GATHER_SEQUENCE),
        (GATHER_ALIKE, pass_along(0)),
        (GATHER_SEQUENCE, pass_along(1)),
        (gather_tokens(), gather_for_experts()),
    ],
)
def test_a_segment_that_begins_with_two_exchanges_is_refused(
    one: SegmentExchange, other: SegmentExchange
) -> None:
    both = {**flags_of(one, None)}
    both |= {
        name: flag
        for name, flag in flags_of(other, None).items()
        if flag is not False and flag is not None
    }
    flags = (
        both["reduces_output"],
        both["reduces_input_gradient"],
        both["gathers_input"],
        both["leaves_whole"],
        both["casts_tokens"],
        both["gathers_context"],
        both["context_offset"],
        both["swaps_output"],
        both["joins_experts"],
        both["adds_experts"],
    )
    with pytest.raises(ValueError, match=r"segment: begins with .* must begin with one exchange"):
        exchanges_of(flags)


@pytest.mark.parametrize(
    ("sums", "swaps", "adds", "words"),
    [
        (True, True, False, "sum and swap"),
        (True, False, True, "sum and sum"),
        (False, True, True, "swap and sum"),
    ],
)
def test_a_segment_that_ends_with_two_exchanges_is_refused(
    *, sums: bool, swaps: bool, adds: bool, words: str
) -> None:
    with pytest.raises(ValueError, match=f"ends with {words}, must end with one exchange"):
        exchanges_of((sums, False, False, False, False, False, None, swaps, False, adds))


def test_nothing_but_the_form_in_files_reads_flags_of_segments() -> None:
    words = "|".join(name for name in ExchangeFlags.__annotations__ if name != STRATEGY)
    flags = re.compile(rf"\b({words})\b")
    sources = [each for top in ("zsim", "backends") for each in (ROOT / top).rglob("*.py")]
    naming = {
        str(each.relative_to(ROOT)) for each in sources if flags.search(each.read_text("utf-8"))
    }
    assert naming == set(IN_FILES)
