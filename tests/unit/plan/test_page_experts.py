"""The form of `zsim serve` distributes experts over ranks, and a search keeps their degree."""

import pytest

from zsim.api.forecast import forecast
from zsim_plan.page.setting_form import chosen_setting
from zsim_plan.page.setting_search import search_request

MIXTRAL = {"model": "mixtral-8x7b", "gpu": "h100", "count": "16", "runtime": "fsdp2-3"}


def test_the_field_sets_the_expert_ranks_of_the_run_and_of_the_search() -> None:
    chosen = chosen_setting({**MIXTRAL, "expert": "8", "length": "4096"})
    assert chosen.tables()["parallel"]["expert"] == 8
    assert search_request(chosen)["changes"]["parallel.expert"] == 8
    assert "parallel.expert" not in search_request(chosen_setting(MIXTRAL))["changes"]
    assert not isinstance(forecast(chosen.tables()), str)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"model": "llama3.1-8b"}, "parallel.expert: 8 needs a model with experts"),
        ({"expert": "16"}, "parallel.expert: 16 must divide the 8 experts"),
    ],
)
def test_a_wrong_degree_is_one_line(given: dict[str, str], why: str) -> None:
    found = forecast(chosen_setting({**MIXTRAL, "expert": "8", **given}).tables())
    assert isinstance(found, str)
    assert why in found
