"""Max-min fair rates, against their definition."""

from fractions import Fraction
from functools import partial
from math import ceil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zsim.units import PICOSECONDS_PER_SECOND
from zsim_des.clock.ready_queue import Clock
from zsim_des.network.fluid import Network
from zsim_des.network.max_min_fair import Shape, fair_rates

LINKS = 4
capacities = st.lists(st.integers(1, 50), min_size=LINKS, max_size=LINKS)
shapes = st.lists(
    st.dictionaries(
        st.integers(0, LINKS - 1), st.fractions(Fraction(1, 4), 3, max_denominator=4), min_size=1
    ).map(lambda taken: tuple(taken.items())),
    min_size=1,
    max_size=5,
)


@given(shapes, capacities)
def test_no_link_is_overfull_and_every_activity_has_a_bottleneck(
    drawn: list[Shape], given_capacities: list[int]
) -> None:
    rates = fair_rates(drawn, given_capacities)
    used = [Fraction(0)] * LINKS
    fastest = [Fraction(0)] * LINKS
    for shape, rate in zip(drawn, rates, strict=True):
        for link, taken in shape:
            used[link] += taken * rate
            fastest[link] = max(fastest[link], rate)
    assert all(use <= capacity for use, capacity in zip(used, given_capacities, strict=True))
    # The definition: on some full link of each activity nobody is faster than it is.
    for shape, rate in zip(drawn, rates, strict=True):
        assert any(
            used[link] == given_capacities[link] and fastest[link] == rate for link, _ in shape
        )


@given(shapes, capacities)
def test_the_order_of_activities_does_not_matter(drawn: list[Shape], given: list[int]) -> None:
    assert fair_rates(drawn[::-1], given) == fair_rates(drawn, given)[::-1]


def test_two_on_one_link_share_it_and_a_third_elsewhere_keeps_its_own() -> None:
    one = Fraction(1)
    rates = fair_rates([((0, one),), ((0, one),), ((1, one),)], [10, 7, 1, 1])
    assert rates == (Fraction(5), Fraction(5), Fraction(7))


@pytest.mark.one_commit_in(9)
@settings(max_examples=30, deadline=None)
@given(shapes, capacities)
def test_what_shares_no_links_has_no_say_in_a_rate(
    drawn: list[Shape], given_capacities: list[int]
) -> None:
    """The network finds rates apart for those that no chain of shared links joins."""
    network = Network(Clock(), given_capacities)
    told: dict[int, Fraction] = {}
    for index, shape in enumerate(drawn):
        number = network.number((shape,))
        network.join(number, 10**6, 0, lambda: None, moves=partial(told.__setitem__, index))
    assert [told[index] for index in range(len(drawn))] == list(fair_rates(drawn, given_capacities))


@pytest.mark.one_commit_in(6)
@settings(max_examples=30, deadline=None)
@given(shapes, capacities, st.lists(st.integers(1, 10**6), min_size=5, max_size=5))
def test_activities_end_when_their_bytes_have_moved_at_every_rate_they_had(
    drawn: list[Shape], given_capacities: list[int], sizes: list[int]
) -> None:
    """One for one: from each end to the next, all that is left moves on at its fair rate."""
    network = Network(env := Clock(), given_capacities)
    ended: dict[int, int] = {}

    def end(index: int) -> None:
        ended[index] = env.now

    for index, shape in enumerate(drawn):
        network.join(network.number((shape,)), sizes[index], 0, partial(end, index))
    env.ring_all()
    now, left = 0, {index: Fraction(sizes[index]) for index in range(len(drawn))}
    wanted: dict[int, int] = {}
    while left:
        rates = dict(zip(left, fair_rates([drawn[i] for i in left], given_capacities), strict=True))
        taken_ps = min(ceil(left[i] / rates[i] * PICOSECONDS_PER_SECOND) for i in left)
        now += taken_ps
        for index in list(left):
            left[index] -= rates[index] * taken_ps / PICOSECONDS_PER_SECOND
            if left[index] <= 0:
                wanted[index] = now
                del left[index]
    assert ended == wanted
