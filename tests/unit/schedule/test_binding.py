"""Numbers for named counts: sums, the busiest member, seeds, recorded counts."""

import numpy as np
import pytest
from drawn_examples import examples
from hypothesis import given
from hypothesis import strategies as st

from zsim.model.experts import Drops
from zsim.schedule.binding import (
    Balanced,
    Binding,
    BindingError,
    CountPlace,
    CountTrace,
    Ratio,
    Zipf,
    by_member,
)
from zsim.schedule.counts import NamedCount
from zsim.schedule.json import FieldError, decode_value, encode_value


@st.composite
def counts(draw: st.DrawFn) -> tuple[NamedCount, CountPlace]:
    members = draw(st.sampled_from((1, 2, 3, 8)))
    experts = members * draw(st.integers(1, 4))
    sent = draw(st.integers(0, 4096))
    count = NamedCount(name="routed", group="ep", experts=experts, sent=sent, maximum=sent * 8)
    micro_batch, layer, group = (draw(st.integers(0, 3)) for _ in range(3))
    place = CountPlace(micro_batch, layer, group, members)
    return count, place


@st.composite
def bindings(draw: st.DrawFn, members: int) -> Binding:
    busiest = draw(st.floats(1, members))
    seed = draw(st.integers(0, 99))
    found: tuple[Binding, ...] = (
        Balanced(),
        Ratio(busiest=busiest),
        Zipf(seed=seed, busiest=busiest),
    )
    return draw(st.sampled_from(found))


@given(st.data())
@examples(60)
def test_every_source_sends_as_many_rows_as_declared(data: st.DataObject) -> None:
    count, place = data.draw(counts())
    found = data.draw(bindings(place.members)).counts(count, place)
    assert found.shape == (place.members, count.experts)
    assert (found >= 0).all()
    assert (found.sum(axis=1) == count.sent).all()


@given(counts())
@examples(40)
def test_balanced_counts_differ_by_one_row(drawn: tuple[NamedCount, CountPlace]) -> None:
    count, place = drawn
    found = Balanced().counts(count, place)
    blocks = by_member(found, place.members)
    assert blocks.max() - blocks.min() <= 1
    received = blocks.sum(axis=0)
    assert received.max() - received.min() <= 1


@given(counts(), st.floats(0, 1))
@examples(40)
def test_the_busiest_member_receives_its_ratio_to_the_mean(
    drawn: tuple[NamedCount, CountPlace], part: float
) -> None:
    count, place = drawn
    busiest = 1 + part * (place.members - 1)
    received = by_member(Ratio(busiest=busiest).counts(count, place), place.members).sum(axis=0)
    assert abs(received[0] - busiest * count.sent) <= place.members
    assert received[0] >= received.max() - place.members


def test_drawn_counts_depend_on_seed_layer_and_micro_batch_alone() -> None:
    count = NamedCount(name="routed", group="ep", experts=16, sent=4096, maximum=2**20)
    place = CountPlace(0, 3, 0, 4)
    binding = Zipf(seed=7, busiest=1.5)
    first = binding.counts(count, place)
    assert (first == binding.counts(count, place)).all()
    assert (first != Zipf(seed=8, busiest=1.5).counts(count, place)).any()
    assert (first != binding.counts(count, CountPlace(1, 3, 0, 4))).any()
    loads = [
        by_member(binding.counts(count, CountPlace(batch, 3, 0, 4)), 4).sum(axis=0)
        for batch in range(8)
    ]
    mean = np.mean(loads, axis=0) / 4096
    assert mean.max() == pytest.approx(1.5, rel=0.02)


def test_a_ratio_above_the_members_or_below_the_mean_is_refused() -> None:
    count = NamedCount(name="routed", group="ep", experts=4, sent=8, maximum=32)
    with pytest.raises(
        BindingError, match=r"^binding.busiest: 3 must be at most 2, the members of group ep$"
    ):
        Ratio(busiest=3).counts(count, CountPlace(0, 0, 0, 2))
    with pytest.raises(ValueError, match=r"^busiest 0.5 must be at least 1, the mean$"):
        Ratio(busiest=0.5)


def test_recorded_counts_are_read_as_they_are_and_have_to_sum() -> None:
    count = NamedCount(name="routed", group="ep", experts=4, sent=3, maximum=9)
    place = CountPlace(1, 2, 0, 2)
    rows = ((1, 2, 0, 0, 3, 3), (1, 2, 0, 1, 0, 1), (1, 2, 0, 1, 2, 2))
    found = CountTrace(rows=rows).counts(count, place)
    assert found.tolist() == [[0, 0, 0, 3], [1, 0, 2, 0]]
    why = "micro-batch 1, layer 2, group 0, source 1: counts sum to 2, must be 3"
    with pytest.raises(BindingError, match=f"^binding.rows: {why}, the rows that a member sends"):
        CountTrace(rows=(rows[0], rows[2])).counts(count, place)
    with pytest.raises(BindingError, match="source 2 with expert 0 is outside the 2 members"):
        CountTrace(rows=((1, 2, 0, 2, 0, 3),)).counts(count, place)


@pytest.mark.parametrize(
    "binding",
    [
        Balanced(),
        Ratio(busiest=1.1),
        Zipf(seed=7, busiest=1.3),
        CountTrace(rows=((0, 3, 0, 1, 2, 17),)),
    ],
)
def test_a_binding_is_read_as_it_was_written(binding: Binding) -> None:
    hint = Balanced | Ratio | Zipf | CountTrace
    assert decode_value(encode_value(binding, hint), hint) == binding


def test_a_negative_count_in_a_file_is_refused() -> None:
    with pytest.raises(FieldError, match=r"^rows\[0\]: -1 must be at least 0$"):
        decode_value({"rows": [[0, 0, 0, 0, 0, -1]]}, CountTrace)


def test_recorded_counts_of_rows_that_are_dropped_may_be_fewer_and_fit_the_capacity() -> None:
    count = NamedCount(
        name="routed", group="ep", experts=2, sent=8, maximum=16, drops=Drops(capacity=5)
    )
    place = CountPlace(0, 0, 0, 2)
    rows = ((0, 0, 0, 0, 0, 3), (0, 0, 0, 1, 1, 5))
    assert CountTrace(rows=rows).counts(count, place).tolist() == [[3, 0], [0, 5]]
    many = ((0, 0, 0, 0, 0, 6),)
    with pytest.raises(BindingError) as caught:
        CountTrace(rows=many).counts(count, place)
    assert str(caught.value) == (
        "binding.rows: source 0 with expert 0: 6 must be at most 5, the capacity of routed"
    )
    full = ((0, 0, 0, 0, 0, 5), (0, 0, 0, 0, 1, 5))
    with pytest.raises(BindingError, match="counts sum to 10, must be at most 8"):
        CountTrace(rows=full).counts(count, place)
