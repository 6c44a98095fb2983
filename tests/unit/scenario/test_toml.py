"""Settings on top of tables: a key that is set, a key that is taken away."""

from copy import deepcopy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zsim.scenario.tables import Scenario
from zsim.scenario.toml import with_settings
from zsim.strategy.config_table import Table

KEYS = sorted(
    f"{name}.{key}"
    for name, field in Scenario.model_fields.items()
    if isinstance(field.annotation, type) and issubclass(field.annotation, Table)
    for key in field.annotation.model_fields
)
WORDS = {"activations.checkpointing"}
"""Fields of which none is a choice."""


@given(st.sets(st.sampled_from(KEYS), min_size=1), st.data())
def test_a_key_that_is_taken_away_leaves_all_others(keys: set[str], data: st.DataObject) -> None:
    tables = with_settings({}, [f"{key}=1" for key in sorted(keys)])
    before = deepcopy(tables)
    taken = data.draw(st.sampled_from(KEYS).filter(lambda key: key not in WORDS))
    after = with_settings(tables, [f"{taken}=none"])
    assert tables == before
    assert flat(after) == flat(before) - {taken}


def flat(tables: dict[str, Any]) -> set[str]:
    return {f"{name}.{key}" for name, table in tables.items() for key in table}


@pytest.mark.parametrize("key", sorted(WORDS))
@pytest.mark.parametrize("text", ["none", '"none"'])
def test_none_is_a_word_where_a_field_has_that_choice(key: str, text: str) -> None:
    table, name = key.split(".")
    assert with_settings({}, [f"{key}={text}"]) == {table: {name: "none"}}


def test_none_is_a_word_where_an_option_of_a_runtime_has_that_choice() -> None:
    """It once took the key away, and FSDP1 prefetched."""
    made = with_settings({}, ["zero.fsdp1.backward_prefetch=none"])
    assert made == {"zero": {"fsdp1": {"backward_prefetch": "none"}}}
    tables = {"zero": {"fsdp1": {"reduce_dtype": "fp32"}}}
    assert with_settings(tables, ["zero.fsdp1.reduce_dtype=none"]) == {"zero": {"fsdp1": {}}}


def test_none_in_quotes_is_a_string_everywhere() -> None:
    assert with_settings({}, ['zero.emulate="none"']) == {"zero": {"emulate": "none"}}


@pytest.mark.parametrize("setting", ["zero=none", " zero = none "])
def test_a_table_is_taken_away_whole(setting: str) -> None:
    assert with_settings({"zero": {"stage": 3}, "title": "x"}, [setting]) == {"title": "x"}
