"""A strategy by keys of a scenario: made, changed, and refused in one line."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zsim.config_error import ConfigError
from zsim.strategy.activations import Activations, Checkpointing
from zsim.strategy.config_table import Table
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim.strategy.train import LossScale, Train
from zsim_runtimes.fsdp2.options import FSDP2

VALUES: dict[str, st.SearchStrategy[object]] = {
    "zero.stage": st.sampled_from([1, 2]),
    "zero.bucket_elements": st.integers(1, 2**40),
    "zero.reduce_once": st.booleans(),
    "zero.host_ahead_units": st.none() | st.integers(1, 9),
    "parallel.data": st.integers(1, 64),
    "parallel.tensor": st.integers(1, 8),
    "activations.early_stop": st.booleans(),
    "train.precision": st.sampled_from(Precision),
    "train.clip_norm": st.none() | st.floats(0.5, 2.0),
    "train.loss_scale.interval": st.integers(1, 100),
}
BASE = Strategy(zero=Zero(stage=1))
keys = st.fixed_dictionaries({}, optional=VALUES)


def at(strategy: Strategy, key: str) -> object:
    found: object = strategy
    for name in key.split("."):
        found = getattr(found, name)
    return found


@given(keys)
def test_changed_keys_have_their_value_and_the_others_keep_theirs(
    changes: dict[str, object],
) -> None:
    changed = BASE.but(changes)
    for key in VALUES:
        assert at(changed, key) == changes.get(key, at(BASE, key))


@given(keys, keys)
def test_changes_in_a_row_are_one_change(first: dict[str, object], then: dict[str, object]) -> None:
    both = BASE.but(first).but(then)
    assert both == BASE.but({**first, **then})
    assert hash(both) == hash(BASE.but({**first, **then}))
    assert both == Strategy.of({"zero.stage": 1, **first, **then})


def test_a_key_that_is_taken_away_has_its_default_again() -> None:
    changed = BASE.but({"zero.bucket_elements": 7, "train.clip_norm": 1.0})
    assert changed.but({"zero.bucket_elements": None, "train.clip_norm": None}) == BASE


def test_tables_say_the_same_as_keys() -> None:
    tables = Strategy(
        parallel=Parallel(data=4),
        zero=Zero(stage=3, emulate=FSDP2()),
        activations=Activations(checkpointing=Checkpointing.FULL),
        train=Train(loss_scale=LossScale(interval=5)),
    )
    assert tables == Strategy.of(
        {
            "parallel.data": 4,
            "zero.stage": 3,
            "zero.emulate": FSDP2(),
            "activations.checkpointing": "full",
            "train.loss_scale.interval": 5,
        }
    )


WRONG: dict[str, dict[str, object]] = {
    "parallel.data: 0 must be at least 1; also zero.stage: 7 must be 0, 1, 2 or 3": {
        "zero.stage": 7,
        "parallel.data": 0,
    },
    "zero.stge: unknown key; did you mean stage? allowed: ": {"zero.stge": 3},
    "zero.secondary: 3 must divide data = 4; also activations.partition: true needs": {
        "zero.stage": 3,
        "zero.secondary": 3,
        "parallel.data": 4,
        "activations.partition": True,
    },
    "zero.stage: 2 must be 3 for FSDP2; also zero.contiguous: true is for zsim's own stages": {
        "zero.stage": 2,
        "zero.emulate": FSDP2(),
        "zero.contiguous": True,
    },
    "train.loss_scale.initial: 0.5 must be at least minimum 1.0": {
        "zero.stage": 1,
        "train.loss_scale.initial": 0.5,
    },
    "zero: missing": {},
}


@pytest.mark.parametrize("why", WRONG)
def test_all_that_is_wrong_is_one_line(why: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Strategy.of(WRONG[why])
    assert str(caught.value).startswith(why)
    assert "\n" not in str(caught.value)


def test_a_table_is_an_immutable_value() -> None:
    for table in (BASE, BASE.zero, BASE.train.loss_scale):
        assert isinstance(table, Table)
        name = next(iter(type(table).model_fields))
        with pytest.raises(ValueError, match="frozen"):
            setattr(table, name, getattr(table, name))
