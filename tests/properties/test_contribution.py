"""What a sum was made of, as intervals, is what it is as a set of contributions."""

from functools import reduce

from hypothesis import given, settings
from hypothesis import strategies as st

from zsim.check.contribution import Part, Parts, alone, batches_of, repeated, summed, whole

PARTS = st.one_of(
    st.tuples(st.integers(0, 9), st.just(0), st.just(1)),
    st.tuples(st.integers(0, 9), st.integers(0, 1), st.just(2)),
    st.tuples(st.integers(0, 9), st.integers(0, 2), st.just(3)),
    st.tuples(st.integers(0, 9), st.just(0), st.just(0)),
)
SETS = st.frozensets(PARTS, max_size=14)


def as_parts(found: frozenset[Part]) -> Parts:
    return reduce(summed, map(alone, sorted(found)), ())


def as_set(parts: Parts) -> set[Part]:
    return {
        (batch, use, uses)
        for (use, uses), spans in parts
        for low, high in spans
        for batch in range(low, high)
    }


def complete(found: set[Part]) -> set[Part]:
    """Of each micro-batch whose uses are all there one whole instead."""
    for batch, _, uses in sorted(found):
        own = {(batch, use, uses) for use in range(uses)}
        if uses > 1 and own <= found:
            found = (found - own) | {(batch, 0, 1)}
    return found


@settings(max_examples=60)
@given(SETS, SETS)
def test_a_sum_has_what_both_summands_have(one: frozenset[Part], other: frozenset[Part]) -> None:
    mine, its = as_parts(one), as_parts(other)
    due = complete(as_set(mine) | as_set(its))
    assert as_set(summed(mine, its)) == due
    assert summed(mine, its) == summed(its, mine)
    assert batches_of(summed(mine, its)) == sorted({batch for batch, _, _ in due})


@settings(max_examples=60)
@given(SETS, SETS)
def test_what_is_in_both_is_told_by_its_first_micro_batch(
    one: frozenset[Part], other: frozenset[Part]
) -> None:
    mine, its = as_parts(one), as_parts(other)
    twice = {
        part[0]
        for part in as_set(mine)
        for also in as_set(its)
        if part[2] and (part == also or (part[0] == also[0] and 1 in (part[2], also[2])))
    }
    assert repeated(mine, its) == min(twice, default=None)


def test_very_many_micro_batches_are_one_interval() -> None:
    found: Parts = ()
    for batch in range(5000):
        found = summed(found, alone((batch, 0, 2)))
        found = summed(found, alone((batch, 1, 2)))
    assert found == whole(range(5000)) == (((0, 1), ((0, 5000),)),)
