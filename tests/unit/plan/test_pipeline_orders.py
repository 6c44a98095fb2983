"""Orders of a pipeline that a search tries, and what settings that are said leave of them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zsim_plan.search.fleet import Changes, Fleet
from zsim_plan.search.space import RuntimeSpace, SettingGroup, SettingSpace
from zsim_runtimes.fsdp2.options import FSDP2, PipelineSchedule

FSDP2_SCHEDULE = "zero.fsdp2.pipeline_schedule"
MEGATRON_CHUNK = "zero.megatron.num_layers_per_virtual_pipeline_stage"
MEGATRON_MODES = {
    f"zero.megatron.{name}"
    for name in ("async_tensor_model_parallel_allreduce", "sequence_parallel", "tp_comm_overlap")
}
KEPT = {"zero.fsdp2.reshard_after_forward": False}


def orders(
    runtime: str, *, pipeline: int, layers: int, fixed: Changes
) -> tuple[dict[str, object], ...]:
    """Return the options of each order that groups of a model of `layers` layers have."""
    space = SettingSpace(
        runtimes=[RuntimeSpace(name=runtime, stages=(1,), has_pipeline=True)],
        fleets=[Fleet(gpus=2 * pipeline, gpus_per_node=1)],
        sequences=2,
        sequence_length=1024,
        layers=layers,
        fixed={
            "parallel.tensor": 1,
            "parallel.pipeline": pipeline,
            "activations.checkpointing": "none",
            "train.micro_batch_size": 1,
            **fixed,
        },
    )
    of_order = ("zero.fsdp2.reshard_after_forward", FSDP2_SCHEDULE, MEGATRON_CHUNK)
    return tuple(
        {key: value for key, value in each.changes.items() if key in of_order}
        for each in space.groups()
        if isinstance(each, SettingGroup)
    )


def of_fsdp2(**fixed: object) -> list[object]:
    """Return the orders of FSDP2; `fixed` says its options."""
    said = {f"zero.fsdp2.{key}": value for key, value in fixed.items()}
    found = orders("fsdp2", pipeline=4, layers=16, fixed=said)
    return [each.get(FSDP2_SCHEDULE) for each in found]


def test_every_order_of_fsdp2_is_tried_that_of_the_default_first() -> None:
    first, *others = of_fsdp2()
    assert first is None
    assert {FSDP2().pipeline_schedule, *others} == set(PipelineSchedule)


def test_an_order_that_a_setting_says_is_the_only_one() -> None:
    assert of_fsdp2(pipeline_schedule="ZBVZeroBubble") == ["ZBVZeroBubble"]
    assert of_fsdp2(pipeline_schedule="1F1B") == [None]


def test_an_order_that_needs_another_value_than_a_setting_says_is_not_tried() -> None:
    assert of_fsdp2(reshard_after_forward=True) == [None]
    assert len(of_fsdp2(reshard_after_forward=False)) == len(PipelineSchedule)


@given(pipeline=st.integers(2, 16), layers=st.integers(1, 200))
def test_chunks_of_megatron_divide_the_layers_of_a_stage(pipeline: int, layers: int) -> None:
    first, *others = orders("megatron", pipeline=pipeline, layers=layers, fixed={})
    assert first == {}
    sizes = [int(str(each[MEGATRON_CHUNK])) for each in others]
    assert all(layers % (pipeline * size) == 0 for size in sizes)
    assert sizes == sorted({*sizes}, reverse=True)
    several = layers % pipeline == 0 and layers > pipeline
    assert (sizes[-1:] == [1]) == several


@pytest.mark.parametrize(("runtime", "pipeline"), [("nanotron", 4), ("fsdp2", 1), ("megatron", 1)])
def test_where_there_is_one_order_nothing_is_changed(runtime: str, pipeline: int) -> None:
    assert orders(runtime, pipeline=pipeline, layers=16, fixed={}) == ({},)


def groups(runtime: str, fixed: Changes, *, compiles: bool = False) -> list[SettingGroup]:
    space = SettingSpace(
        runtimes=[RuntimeSpace(name=runtime, stages=(1, 3), has_pipeline=True)],
        fleets=[Fleet(gpus=16, gpus_per_node=8)],
        sequences=64,
        sequence_length=1024,
        layers=16,
        compiles=compiles,
        fixed=fixed,
    )
    return [each for each in space.groups() if isinstance(each, SettingGroup)]


def test_an_order_is_of_groups_whose_knobs_leave_it_what_it_needs() -> None:
    found = groups("fsdp2", {})
    ordered = [each for each in found if FSDP2_SCHEDULE in each.changes]
    assert ordered
    assert all(KEPT.items() <= each.setting(0).items() for each in ordered)
    assert all(each.knobs == ({},) for each in ordered)
    assert all(each.changes["parallel.pipeline"] != 1 for each in ordered)
    parted = [each for each in ordered if each.changes[FSDP2_SCHEDULE] != "Interleaved1F1B"]
    assert {each.changes["activations.checkpointing"] for each in parted} == {"none"}
    plain = [each for each in found if each not in ordered]
    assert not {each.family for each in ordered} & {each.family for each in plain}


@pytest.mark.parametrize("compiles", [False, True])
def test_products_are_fused_with_collectives_where_blocks_are_compiled(*, compiles: bool) -> None:
    name = "zero.fsdp2.enable_async_tensor_parallel"
    found = groups("fsdp2", {}, compiles=compiles)
    fused = [each for each in found if name in each.changes]
    assert bool(fused) == compiles
    assert all(each.changes["parallel.tensor"] != 1 for each in fused)
    assert not any(name in each.changes for each in groups("fsdp2", {name: False}, compiles=True))


def test_products_of_megatron_run_beside_collectives_in_three_ways() -> None:
    found = groups("megatron", {})
    modes = {
        tuple(key.rpartition(".")[2] for key in each.changes if key in MEGATRON_MODES)
        for each in found
        if each.changes["parallel.tensor"] != 1
    }
    beside = "async_tensor_model_parallel_allreduce"
    cut = "sequence_parallel"
    assert modes == {(beside,), (cut, beside), (cut, "tp_comm_overlap")}
    said = groups("megatron", {"zero.megatron.sequence_parallel": True})
    assert not any(MEGATRON_MODES & each.changes.keys() for each in said)
