"""Max-min fair rates, against their definition."""

from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

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
