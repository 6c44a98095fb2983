"""Plain settings come first: no offload, the smallest micro-batch, common degrees."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zsim_plan.search.fleet import Fleet
from zsim_plan.search.plain_settings import CHECKPOINTING, STAGES, plain_settings
from zsim_plan.search.space import RuntimeSpace, SettingGroup, SettingSpace

RUNTIMES = (
    RuntimeSpace(name="deepspeed", stages=(1, 2, 3), has_replicas=True),
    RuntimeSpace(name="fsdp2", stages=(3,), has_replicas=True, has_pipeline=True, has_context=True),
    RuntimeSpace(name="megatron", stages=(0, 1), has_pipeline=True, has_context=True),
)


def groups(gpus: int = 16, /, **fixed: object) -> list[SettingGroup]:
    space = SettingSpace(
        runtimes=RUNTIMES,
        fleets=[Fleet(gpus=each, gpus_per_node=min(each, 8)) for each in (gpus // 2, gpus)],
        sequences=64,
        sequence_length=8192,
        layers=8,
        fixed={key.replace("__", "."): value for key, value in fixed.items()},
    )
    return [each for each in space.groups() if isinstance(each, SettingGroup)]


def test_plain_settings_of_each_runtime_stage_and_checkpointing_come_first() -> None:
    known = groups()
    always, of_node, with_stages = plain_settings(known)
    found = [
        (
            known[place].changes["zero.emulate"],
            known[place].changes["zero.stage"],
            known[place].changes["activations.checkpointing"],
        )
        for place in always
    ]
    assert found[:2] == [("fsdp2", 3, "full"), ("fsdp2", 3, "none")]
    assert {*found} == {
        (each.name, stage, mode)
        for each in RUNTIMES
        for stage in STAGES.intersection(each.stages)
        for mode in CHECKPOINTING
    }
    for place in always:
        changes = known[place].changes
        assert known[place].fleet.gpus == changes["parallel.data"] == 16
        assert changes["train.micro_batch_size"] == 1
        assert not known[place].moves_states
        assert known[place].order is None
    assert {known[place].changes["parallel.tensor"] for place in of_node} == {8}
    assert {known[place].changes["parallel.pipeline"] for place in of_node} == {1}
    degrees = {
        (known[place].changes["parallel.tensor"], known[place].changes["parallel.pipeline"])
        for place in with_stages
    }
    assert degrees <= {(8, 4)}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("zero__stage", 2),
        ("activations__checkpointing", "selective"),
        ("train__micro_batch_size", 2),
        ("parallel__tensor", 4),
        ("parallel__replicate", 2),
    ],
)
def test_values_that_a_question_fixes_are_plain(key: str, value: object) -> None:
    known = groups(16, **{key: value})
    always, *_ = plain_settings(known)
    assert always
    assert {known[place].changes[key.replace("__", ".")] for place in always} == {value}


@pytest.mark.one_commit_in(9)
@settings(max_examples=20)
@given(st.data())
def test_whatever_is_left_of_a_space_has_plain_settings_once_each(data: st.DataObject) -> None:
    known = groups()
    kept = data.draw(st.lists(st.sampled_from(range(len(known))), max_size=12, unique=True))
    some = [known[place] for place in sorted(kept)]
    places = [place for each in plain_settings(some) for place in each]
    assert len(places) == len(set(places))
    assert bool(places) is any(
        not each.moves_states and each.fleet.gpus == max(one.fleet.gpus for one in some)
        for each in some
    )
