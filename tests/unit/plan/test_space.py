"""Settings that a search considers: ranks share long sequences only, and one at a time."""

from dataclasses import replace
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zsim.runtimes.lookup import search_of
from zsim.runtimes.search import SearchedAxes
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim.strategy.train import Train
from zsim_plan.search.fleet import Changes, Fleet
from zsim_plan.search.space import (
    LEAST_PART,
    RefusedSettings,
    RuntimeSpace,
    SettingGroup,
    SettingSpace,
)
from zsim_runtimes.fsdp2.options import FSDP2
from zsim_runtimes.fsdp2.search import SEARCH

GPUS = 16


def groups(
    length: int, *, sequences: int = GPUS, has_context: bool = True, **fixed: int
) -> list[SettingGroup]:
    """Return the groups of FSDP2 on two nodes; `fixed` says keys of `parallel`."""
    space = SettingSpace(
        runtimes=[RuntimeSpace(name="fsdp2", stages=(3,), has_context=has_context)],
        fleets=[Fleet(gpus=GPUS, gpus_per_node=8)],
        sequences=sequences,
        sequence_length=length,
        layers=8,
        fixed={f"parallel.{axis}": degree for axis, degree in fixed.items()},
    )
    return [each for each in space.groups() if isinstance(each, SettingGroup)]


def contexts(found: list[SettingGroup]) -> set[object]:
    return {each.changes.get("parallel.context", 1) for each in found}


@given(st.integers(1, 2 * LEAST_PART - 1))
def test_ranks_share_no_sequence_that_is_not_long(length: int) -> None:
    assert contexts(groups(length)) == {1}


def test_as_many_ranks_share_a_sequence_as_have_a_part_that_is_worth_it() -> None:
    found = [contexts(groups(ranks * LEAST_PART)) for ranks in (2, 4, 8)]
    assert found == [{1, 2}, {1, 2, 4}, {1, 2, 4, 8}]


def test_a_runtime_without_such_ranks_is_not_asked_for_them() -> None:
    assert contexts(groups(8 * LEAST_PART, has_context=False)) == {1}


@given(st.integers(2 * LEAST_PART, 2**17), st.sampled_from((2, 4, 8, 16)))
def test_ranks_that_share_a_sequence_divide_it_and_the_data_axis(
    length: int, sequences: int
) -> None:
    found = groups(length, sequences=sequences)
    known = {each for each in (1, 2, 4, 8) if each == 1 or length % (2 * each) == 0}
    assert contexts(found) <= known
    for each in found:
        data, context = (
            int(str(each.changes.get(f"parallel.{axis}", 1))) for axis in ("data", "context")
        )
        micro, times = (
            int(str(each.changes[f"train.{key}"]))
            for key in ("micro_batch_size", "gradient_accumulation_steps")
        )
        assert data % context == 0
        assert data // context * micro * times == sequences
        assert context == 1 or micro == 1
        # No knob splits a data axis that is split.
        reshards = {
            each.setting(number).get("zero.fsdp2.reshard_after_forward")
            for number in range(len(each.knobs))
        }
        assert context == 1 or reshards <= {None, False}


def test_fewer_sequences_than_ranks_are_trained_by_sharing_them() -> None:
    assert contexts(groups(8 * LEAST_PART, sequences=2, tensor=1)) == {8}


@pytest.mark.parametrize(
    ("fixed", "refused"),
    [
        ({}, False),
        ({"tensor": 8}, False),
        ({"context": 3}, True),
        ({"tensor": 8, "pipeline": 4}, True),
    ],
)
def test_degrees_that_a_setting_says_and_that_fill_no_gpus_are_refused_by_name(
    fixed: dict[str, int], refused: bool
) -> None:
    space = SettingSpace(
        runtimes=[RuntimeSpace(name="fsdp2", stages=(3,), has_pipeline=True, has_replicas=True)],
        fleets=[Fleet(gpus=GPUS, gpus_per_node=8)],
        sequences=GPUS,
        sequence_length=1024,
        layers=8,
        fixed={f"parallel.{axis}": degree for axis, degree in fixed.items()},
    )
    found = list(space.groups())
    assert {isinstance(each, RefusedSettings) for each in found} == {refused}
    said = ", ".join(f"{axis} {degree}" for axis, degree in fixed.items())
    if refused:
        whys = {each.why for each in found if isinstance(each, RefusedSettings)}
        assert whys == {f"16 GPUs cannot be dealt out to {said}"}


def test_a_degree_that_a_setting_says_is_not_sought() -> None:
    found = groups(8 * LEAST_PART, context=2)
    assert contexts(found) == {1}  # it is in the scenario already
    assert {each.changes["train.micro_batch_size"] for each in found} > {1}


@pytest.mark.parametrize("runtime", ["fsdp1", "fsdp2", "deepspeed"])
def test_checkpoints_go_to_the_host_once_for_each_group_that_has_some_and_no_pipeline(
    runtime: str,
) -> None:
    (moved,) = (f"zero.{runtime}.{name}" for name in search_of(runtime).checkpoints_on_host)
    space = SettingSpace(
        runtimes=[RuntimeSpace(name=runtime, stages=(3,), has_pipeline=runtime == "fsdp2")],
        fleets=[Fleet(gpus=GPUS, gpus_per_node=8)],
        sequences=GPUS,
        sequence_length=1024,
        layers=8,
        fixed={},
    )
    found = [each for each in space.groups() if isinstance(each, SettingGroup)]
    on_host = [each.changes for each in found if moved in each.changes]
    kept = [
        each.changes
        for each in found
        if each.changes["activations.checkpointing"] == "full"
        and each.changes["parallel.pipeline"] == 1
        and moved not in each.changes
    ]
    assert on_host == [{**each, moved: True} for each in kept]
    assert all(each.knobs == ({},) for each in found if moved in each.changes)
    said = replace(space, fixed={moved: False})
    groups = [each for each in said.groups() if isinstance(each, SettingGroup)]
    assert not any(moved in each.changes for each in groups)


@pytest.mark.parametrize("runtime", ["fsdp1", "fsdp2", "megatron"])
def test_a_group_names_the_order_of_its_pipeline_and_no_knob_sets_it_again(runtime: str) -> None:
    option = search_of(runtime).order_option
    key = f"zero.{runtime}.{option}"
    stages = (1,) if runtime == "megatron" else (3,)
    space = SettingSpace(
        runtimes=[RuntimeSpace(name=runtime, stages=stages, has_pipeline=option is not None)],
        fleets=[Fleet(gpus=4, gpus_per_node=4)],
        sequences=4,
        sequence_length=1024,
        layers=8,
        fixed={"parallel.tensor": 1},
    )
    found = [each for each in space.groups() if isinstance(each, SettingGroup)]
    assert [each.order for each in found] == [each.changes.get(key) for each in found]
    assert {each.order for each in found} > {None} or option is None
    for each in found:
        assert not any(knobs.keys() & each.changes.keys() for knobs in each.knobs)
        assert each.changes["parallel.pipeline"] != 1 or each.order is None
    for pipeline in {each.changes["parallel.pipeline"] for each in found}:
        alike = [each for each in found if each.changes["parallel.pipeline"] == pipeline]
        assert alike[0].order is None, "the default order is tried first"


def expert_groups(
    *, experts: int = 8, has_experts: bool = True, fixed: Changes | None = None
) -> list[SettingGroup]:
    """Return the groups of a model with experts on 16 GPUs of two nodes."""
    space = SettingSpace(
        runtimes=[
            RuntimeSpace(
                name="megatron",
                stages=(1,),
                has_pipeline=True,
                has_context=True,
                has_experts=has_experts,
            )
        ],
        fleets=[Fleet(gpus=16, gpus_per_node=8)],
        sequences=64,
        sequence_length=8192,
        layers=8,
        experts=experts,
        fixed=fixed or {},
    )
    return [each for each in space.groups() if isinstance(each, SettingGroup)]


@given(experts=st.sampled_from((6, 8, 128)))
def test_expert_ranks_divide_experts_and_ranks_and_cut_no_axis(experts: int) -> None:
    degrees: set[int] = set()
    for group in expert_groups(experts=experts):
        changes = group.changes
        sizes = [changes.get(f"parallel.{axis}", 1) for axis in ("tensor", "context", "data")]
        tensor, context, data, expert = (
            cast("int", each) for each in (*sizes, changes.get("parallel.expert", 1))
        )
        assert experts % expert == 0
        assert tensor * data % expert == 0
        assert expert in (1, tensor) or expert % (tensor * context) == 0
        assert changes.get("parallel.expert_tensor", 1) == 1
        degrees.add(expert)
    assert degrees == {each for each in (1, 2, 4, 8, 16) if experts % each == 0}


def test_the_busiest_expert_rank_gets_more_than_the_mean_unless_a_setting_says_how_many() -> None:
    for group in expert_groups():
        shares = group.changes.get("parallel.expert", 1) != 1
        assert ("experts.busiest" in group.changes) is shares
    said = expert_groups(fixed={"experts.busiest": 1.3})
    assert any("parallel.expert" in each.changes for each in said)
    assert not any("experts.busiest" in each.changes for each in said)


def test_a_tensor_axis_of_a_model_with_experts_shards_tokens() -> None:
    groups = [each for each in expert_groups() if each.changes["parallel.tensor"] != 1]
    assert groups
    assert all(each.changes["zero.megatron.sequence_parallel"] for each in groups)


def test_a_runtime_without_expert_ranks_gets_neither_them_nor_tensor_ranks() -> None:
    for group in expert_groups(has_experts=False):
        assert group.changes["parallel.tensor"] == 1
        assert "parallel.expert" not in group.changes


def test_fsdp2_searches_only_settings_that_its_strategy_takes() -> None:
    axes = SearchedAxes(stage=3, nodes=2, gpus_per_node=8, experts=8, expert=4)
    for knobs in (SEARCH.knobs(axes), SEARCH.knobs(replace(axes, expert=1))):
        expert = axes.expert if 8 not in knobs["reshard_after_forward"] else 1
        for name, values in knobs.items():
            for value in values:
                Strategy(
                    parallel=Parallel(data=16, expert=expert),
                    zero=Zero(stage=3, emulate=FSDP2().but(**{name: value})),
                    train=Train(gradient_accumulation_steps=2),
                )
    assert 8 in SEARCH.knobs(replace(axes, expert=1))["reshard_after_forward"]
    assert 8 not in SEARCH.knobs(axes)["reshard_after_forward"]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_deepspeed_has_expert_ranks_in_stages_1_and_2_without_tensor_ranks(stage: int) -> None:
    is_modeled = search_of("deepspeed").is_modeled
    axes = SearchedAxes(stage=stage, nodes=2, gpus_per_node=8, experts=8, expert=4)
    assert is_modeled({}, "none", axes) is (stage in (1, 2))
    assert not is_modeled({}, "none", replace(axes, tensor=2))
    assert not is_modeled({"offload_optimizer.device": "cpu"}, "none", axes)
    assert is_modeled({"offload_optimizer.device": "cpu"}, "none", replace(axes, expert=1))


def test_a_dense_model_has_no_expert_ranks() -> None:
    assert not any("expert" in key for each in expert_groups(experts=0) for key in each.changes)
