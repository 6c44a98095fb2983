"""The expected number of places that a token has experts on."""

from fractions import Fraction
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zsim.model.expert_transport import ExpertChoice


@pytest.mark.parametrize(
    ("experts", "top_k", "groups", "top_groups"),
    [(8, 1, 1, 1), (8, 2, 1, 1), (8, 3, 1, 1), (8, 2, 4, 2), (8, 3, 4, 3), (12, 2, 2, 1)],
)
@pytest.mark.parametrize("places", [1, 2, 4])
def test_it_is_the_mean_over_all_choices(
    experts: int, top_k: int, groups: int, top_groups: int, places: int
) -> None:
    choice = ExpertChoice(experts=experts, top_k=top_k, groups=groups, top_groups=top_groups)
    each = experts // groups
    total, count = 0, 0
    for chosen in combinations(range(groups), top_groups):
        open_to = [expert for expert in range(experts) if expert // each in chosen]
        for own in combinations(open_to, top_k):
            total += len({expert // (experts // places) for expert in own})
            count += 1
    nests = groups % places == 0 or places % groups == 0
    assert nests
    assert choice.places(places) == pytest.approx(float(Fraction(total, count)))


@given(
    parts=st.sampled_from((1, 2, 4, 8, 16)),
    top_k=st.integers(1, 8),
    limit=st.sampled_from((1, 2, 4, 8)),
)
def test_a_token_reaches_no_more_places_than_experts_or_places(
    parts: int, top_k: int, limit: int
) -> None:
    free = ExpertChoice(experts=64, top_k=top_k)
    limited = ExpertChoice(experts=64, top_k=top_k, groups=8, top_groups=limit)
    found = free.places(parts)
    assert 1 - 1e-9 <= found <= min(parts, top_k) + 1e-9
    assert found <= free.places(2 * parts) + 1e-9
    assert limited.places(8) <= min(limit, found if parts == 8 else 8) + 1e-9


def test_eight_of_256_experts_are_on_5_places_of_8_and_on_4_at_most_with_groups() -> None:
    assert ExpertChoice(experts=256, top_k=8).places(8) == pytest.approx(5.3, abs=0.1)
    grouped = ExpertChoice(experts=256, top_k=8, groups=8, top_groups=4)
    assert grouped.places(8) == pytest.approx(3.62, abs=0.03)


def test_a_choice_of_more_experts_than_there_are_is_refused() -> None:
    with pytest.raises(ValueError, match="top_k 9 must be 1 to 8"):
        ExpertChoice(experts=8, top_k=9)
    with pytest.raises(ValueError, match="top_groups 3 and groups 2 do not fit 8 experts"):
        ExpertChoice(experts=8, top_k=1, groups=2, top_groups=3)
    with pytest.raises(ValueError, match="3 must divide the 8 experts"):
        ExpertChoice(experts=8, top_k=1).places(3)
