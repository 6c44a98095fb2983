"""Shards and slots that do not begin where a layout promises are found."""

from dataclasses import replace
from itertools import pairwise

import pytest
from emulated_strategies import EMULATED
from emulated_strategies import strategy as emulating
from faults.schedules import changed
from hypothesis import given
from hypothesis import strategies as st

from zsim.model.architecture import GPT
from zsim.model.gpt import gpt
from zsim.proof import Finding, prove
from zsim.proof.alignment import examine
from zsim.proof.context import Context
from zsim.runtimes.registry import make_schedule
from zsim.schedule.builder import ScheduleBuilder
from zsim.schedule.layout import Layout, LayoutError
from zsim.schedule.operation import AllGather, View
from zsim.schedule.schedule import Schedule

SHAPE = GPT(layers=1, hidden_size=2, attention_heads=2, sequence_length=2, vocab_size=3)


def found(made: Schedule) -> list[Finding]:
    return examine(Context.of(made))


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Layout, int]:
    """Cut in any way, for up to four ranks, with a promise that is kept or not."""
    ranks, least = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    sizes = st.sampled_from([0, least, 2 * least, 3])
    if draw(st.booleans()):
        ends = [0]
        for size in draw(st.lists(sizes, min_size=ranks, max_size=ranks)):
            ends.append(ends[-1] + size)
        cuts, blocks = tuple(ends), None
    else:
        ends = [0]
        for part in draw(st.lists(sizes, min_size=1, max_size=3)):
            ends.append(ends[-1] + part * ranks)
        cuts, blocks = None, tuple(ends[:-1])
    return Layout(
        name="cut",
        pieces=(),
        elements=ends[-1],
        axis="data",
        cuts=cuts,
        blocks=blocks,
        alignment=least,
    ), ranks


@given(layouts())
def test_a_layout_is_found_if_some_rank_begins_elsewhere(case: tuple[Layout, int]) -> None:
    layout, ranks = case
    build = ScheduleBuilder.of("cut", data=ranks)
    build.layout(layout)
    ends = (*(layout.blocks or (0,)), layout.elements)
    begins = [
        low + rank * (high - low) // ranks for low, high in pairwise(ends) for rank in range(ranks)
    ]
    if layout.cuts is not None:
        begins = [layout.segment(rank, ranks)[0] for rank in range(ranks)]
    assert bool(found(build.schedule())) == any(place % layout.alignment for place in begins)


def runtime(name: str) -> Schedule:
    strategy = emulating(EMULATED[name], data=2, micro_batches=1)
    assert strategy is not None
    return make_schedule(
        gpt(SHAPE, micro_batch_size=1, precision=strategy.train.precision), strategy
    )


@pytest.mark.parametrize("name", ["deepspeed 1", "deepspeed 2", "megatron"])
def test_what_a_runtime_says_of_itself_is_promised_and_proved(name: str) -> None:
    made = runtime(name)
    assert "alignment" in prove(made).proved
    less = tuple(replace(layout, alignment=1) for layout in made.layouts)
    (finding, *_) = found(replace(made, layouts=less))
    assert (finding.invariant, finding.operation) == ("alignment", "bucket0")
    assert finding.why.startswith("promises multiples of 1 elements, its runtime of ")


def test_a_promise_that_shards_do_not_keep_is_found() -> None:
    made = runtime("deepspeed 1")
    more = tuple(replace(layout, alignment=layout.alignment * 5) for layout in made.layouts)
    finding, *_ = found(replace(made, layouts=more))
    assert finding.why == "promises multiples of 10 elements, rank 1 begins at 48"


def gathered(start: int, shard: int, least: int) -> Schedule:
    """A gather into slots of a buffer with room."""
    build = ScheduleBuilder.of("gathered", data=2)
    data = build.group("data", "data")
    build.layout(Layout(name="cut", pieces=(), elements=16, axis="data", alignment=least))
    x = build.buffer("x", 16, layout="cut")
    build.step.allocate(x)
    whole = x[start : start + 2 * shard]
    build.step.all_gather("gather", data, x.own("data", shard, start), whole)
    return build.schedule()


@pytest.mark.parametrize(("start", "shard", "kept"), [(0, 4, True), (4, 4, True), (0, 6, False)])
def test_slots_of_a_gather_begin_where_its_layout_says(
    start: int, shard: int, *, kept: bool
) -> None:
    assert bool(found(gathered(start, shard, 4))) is not kept


def test_a_collective_on_a_part_that_begins_elsewhere_is_found() -> None:
    made = gathered(0, 4, 4)
    operation = made.programs[0].by_id["step/gather"]
    assert isinstance(operation, AllGather)
    source = View(buffer="x", start=2, size=4, axis="data")
    (finding,) = found(changed(made, "step/gather", source=source))
    assert finding.operation == "step/gather"
    assert finding.why == "x begins at 2, cut promises multiples of 4 elements"


def test_an_alignment_below_one_is_refused() -> None:
    with pytest.raises(LayoutError, match="layout cut: alignment 0 must be >= 1"):
        Layout(name="cut", pieces=(), elements=4, alignment=0)
