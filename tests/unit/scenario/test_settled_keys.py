"""Every key of a scenario that ran is told once, with what set it."""

from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zsim.api.scenario import load
from zsim.scenario.settled_keys import Origin

CHANGES: Mapping[str, list[object]] = {
    "zero.stage": [1, 2, 3],
    "zero.bucket_elements": [1000, 2000],
    "train.clip_norm": [0.5, 1.0],
    "train.micro_batch_size": [1, 2],
    "activations.checkpointing": ["none", "full"],
}

FSDP2 = {"zero.emulate": "fsdp2", "zero.bucket_elements": None}


@pytest.mark.one_commit_in(9)
@settings(max_examples=25, deadline=None)
@given(st.fixed_dictionaries({}, optional={key: st.sampled_from(CHANGES[key]) for key in CHANGES}))
def test_a_change_is_told_with_its_value_unless_the_scenario_says_the_same(
    changes: dict[str, object],
) -> None:
    before = {each.key: each for each in load("tiny").settled_keys()}
    found = load("tiny", changes).settled_keys()
    after = {each.key: each for each in found}
    assert len(after) == len(found)
    for key, value in changes.items():
        said = before.get(key)
        same = said is not None and said.origin is Origin.SCENARIO and said.value == value
        assert after[key].value == value
        assert after[key].origin is (Origin.SCENARIO if same else Origin.CHANGED)
    assert {key for key, each in after.items() if each.origin is Origin.CHANGED} <= changes.keys()


def test_knobs_that_say_nothing_about_a_run_are_left_out() -> None:
    own = {each.key for each in load("tiny").settled_keys()}
    assert "zero.prefetch_units" in own
    assert not any(key.startswith("offload.") for key in own)
    fsdp = {each.key for each in load("tiny", FSDP2).settled_keys()}
    assert "zero.prefetch_units" not in fsdp
    assert any(key.startswith("zero.fsdp2.") for key in fsdp)
    moved = load("tiny", {"offload.optimizer": "host"}).settled_keys()
    assert "offload.sub_group_elements" in {each.key for each in moved}
    assert "train.loss_scale.initial" not in {each.key for each in load("llama2_7b").settled_keys()}


def test_the_command_of_a_scenario_is_what_a_shell_takes() -> None:
    loaded = load("tiny", ["title=two words", "zero.stage=3"], ranks=2, steps=5)
    assert (
        loaded.command("run", ["--seed", "7"])
        == "zsim run tiny --set 'title=two words' --set zero.stage=3 --ranks 2 --steps 5 --seed 7"
    )
