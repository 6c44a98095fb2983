"""Experts with ranks of their own: states, sums of gradients, and what could go wrong with them."""

from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from expert_model import DOWN, UP, expert_model
from faults.findings import families
from faults.schedules import edited
from megatron_pipelines import SHAPE

from zsim.model.model import Model, ModelError
from zsim.proof import check
from zsim.runtimes.config import ConfigQuestion
from zsim.runtimes.registry import make_schedule
from zsim.schedule.json import decode_value, encode_value
from zsim.schedule.mesh import Group
from zsim.schedule.operation import AllReduce, Compute, Operation, Together, walk
from zsim.schedule.replace import replace as but
from zsim.schedule.schedule import Contract, Kind, Schedule
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim.strategy.train import Train
from zsim_runtimes.megatron.config_writer import write
from zsim_runtimes.megatron.options import Megatron

MEGATRON = Megatron(sequence_parallel=True)
OVERLAPPED = Megatron(
    sequence_parallel=True,
    overlap_grad_reduce=True,
    overlap_param_gather=True,
    bucket_size=100,
    grad_reduce_in_fp32=True,
    average_in_collective=True,
)
FOLDED = {"data": 4, "tensor": 2, "expert": 4, "expert_tensor": 1}
"""Expert ranks of two data and two tensor ranks; two ranks hold the same experts."""


def strategy_of(zero: Zero, **degrees: int) -> Strategy:
    return Strategy(
        parallel=Parallel.of(degrees),
        zero=zero,
        train=Train(gradient_accumulation_steps=2, precision=Precision.BF16, clip_norm=1.0),
    )


@cache
def megatron(stage: int = 1, *, averages: bool = False) -> tuple[Schedule, Model]:
    """Return a schedule with folded expert ranks, and its model."""
    options = MEGATRON.but(average_in_collective=averages)
    strategy = strategy_of(Zero(stage=stage, emulate=options), **FOLDED)
    model = expert_model(strategy)
    return make_schedule(model, strategy), model


def changed(schedule: Schedule, name: str, **fields: Any) -> Schedule:  # noqa: ANN401 (any field)
    """Return the schedule with other fields of an operation, or of a member of a group of them."""

    def change(each: Operation) -> Iterable[Operation]:
        if each.id == name:
            return (but(each, **fields),)
        if isinstance(each, Together) and any(member.id == name for member in each.members):
            members = [
                but(member, **fields) if member.id == name else member for member in each.members
            ]
            return (but(each, members=tuple(members)),)
        return (each,)

    return edited(schedule, change)


@pytest.mark.parametrize(
    ("zero", "degrees"),
    [
        (Zero(stage=0), {"data": 4, "expert": 2}),
        (Zero(stage=1), {"data": 4, "expert": 4}),
        (Zero(stage=2), {"data": 4, "expert": 2, "replicate": 2}),
        (Zero(stage=3), {"data": 4, "expert": 2, "context": 2}),
        (Zero(stage=2, reduce_once=True, sequence_parallel=True), FOLDED),
        (Zero(stage=3, sequence_parallel=True), FOLDED),
        (Zero(stage=3, sequence_parallel=True), {"data": 2, "tensor": 2, "expert_tensor": 1}),
        (Zero(stage=0, emulate=MEGATRON), FOLDED),
        (Zero(stage=1, emulate=MEGATRON), {**FOLDED, "replicate": 2}),
        (Zero(stage=1, emulate=MEGATRON), {"data": 4, "tensor": 2, "expert": 2}),
        (Zero(stage=1, emulate=MEGATRON), {**FOLDED, "expert": 8}),
        (Zero(stage=1, emulate=OVERLAPPED), FOLDED),
        (Zero(stage=1, emulate=OVERLAPPED), {**FOLDED, "context": 2, "expert": 2}),
    ],
)
def test_experts_with_ranks_of_their_own_are_proved(zero: Zero, degrees: dict[str, int]) -> None:
    strategy = strategy_of(zero, **degrees)
    model = expert_model(strategy)
    assert check(make_schedule(model, strategy), model) == ()


@pytest.mark.parametrize("chunks", [None, 1])
def test_stages_of_a_pipeline_with_experts_are_proved(chunks: int | None) -> None:
    options = OVERLAPPED.but(num_layers_per_virtual_pipeline_stage=chunks)
    strategy = strategy_of(Zero(stage=1, emulate=options), pipeline=2, **FOLDED)
    model = expert_model(strategy, SHAPE)
    assert check(make_schedule(model, strategy), model) == ()


def test_experts_of_many_ranks_are_proved_by_few_of_them() -> None:
    strategy = strategy_of(Zero(stage=1, emulate=OVERLAPPED), data=512, tensor=2, expert=64)
    model = expert_model(strategy.but({"parallel.expert_tensor": 1}))
    strategy = strategy.but({"parallel.expert_tensor": 1})
    assert check(make_schedule(model, strategy), model) == ()


def test_a_rank_keeps_states_of_experts_that_its_expert_data_ranks_share() -> None:
    strategy = strategy_of(Zero(stage=1), data=8, expert=4)
    (program,) = make_schedule(expert_model(strategy), strategy).programs
    held = {
        buffer.kind: buffer.elements
        for buffer in program.buffers
        if buffer.name in program.persistent and buffer.shard == "expert_data"
    }
    assert held[Kind.MASTER] == held[Kind.MOMENT] == 2 * (UP + DOWN) // 2  # two blocks, EDP = 2


@pytest.mark.parametrize(
    ("divisor", "why"),
    [(2, "1 / EP missing"), (16, "1 / EP twice"), (1, "not divided"), (8, "by all ranks")],
)
def test_another_divisor_of_gradients_of_experts_is_found(divisor: int, why: str) -> None:
    schedule, model = megatron()
    name = "step/backward/end/scale/bucket1/gradient"
    assert "values" in families(changed(schedule, name, divisor=divisor), model), why
    assert check(changed(schedule, name, divisor=4), model) == ()


def test_a_mean_over_expert_data_ranks_without_their_share_is_found() -> None:
    schedule, model = megatron(averages=True)
    name = "step/backward/end/scale/bucket1/gradient"
    assert check(changed(schedule, name, divisor=2), model) == ()
    for divisor in (1, 4):
        assert "values" in families(changed(schedule, name, divisor=divisor), model)


@pytest.mark.parametrize("group", ["data", "expert", "tensor_expert", "tensor", "world"])
def test_gradients_of_experts_that_are_summed_over_another_group_are_found(group: str) -> None:
    schedule, model = megatron(0)
    name = "step/backward/end/reduce/bucket1/member"
    faulty = edited(
        schedule,
        lambda each: (
            [
                but(
                    each,
                    members=tuple(but(member, group=group) for member in each.members),
                )
            ]
            if isinstance(each, Together) and name in [member.id for member in each.members]
            else [each]
        ),
    )
    assert "values" in families(faulty, model)


def test_gradients_of_dense_layers_that_are_summed_over_expert_data_ranks_are_found() -> None:
    schedule, model = megatron(0)
    faulty = edited(
        schedule,
        lambda each: (
            [
                but(
                    each,
                    members=tuple(but(member, group="expert_data") for member in each.members),
                )
            ]
            if each.id == "step/backward/end/reduce/bucket0" and isinstance(each, Together)
            else [each]
        ),
    )
    assert "values" in families(faulty, model)


def test_gradients_of_experts_that_are_not_summed_or_summed_twice_are_found() -> None:
    schedule, model = megatron(0)
    name = "step/backward/end/reduce/bucket1"
    (done,) = (each for each in walk(schedule.programs[0].step) if each.id == name)
    assert isinstance(done, Together)
    scale = "step/backward/end/scale/bucket1/gradient"
    left_out = edited(
        schedule, lambda each: () if each.id == name else (_without(each, name, scale),)
    )
    assert "values" in families(left_out, model)
    again = but(
        done,
        id=f"{name}/again",
        after=(name,),
        members=tuple(but(each, id=f"{each.id}/again") for each in done.members),
    )
    twice = edited(
        schedule,
        lambda each: (each, again) if each.id == name else (_without(each, name, again.id),),
    )
    assert "values" in families(twice, model)


def _without(operation: Operation, name: str, instead: str) -> Operation:
    """Return an operation that waits for another one in place of `name`."""
    edges = getattr(operation, "after", ())
    if name not in edges:
        return operation
    return but(operation, after=tuple(instead if each == name else each for each in edges))


@pytest.mark.parametrize("group", ["expert_data", "data", "tensor"])
def test_a_norm_that_leaves_out_ranks_of_experts_is_found(group: str) -> None:
    schedule, model = megatron()
    assert "values" in families(changed(schedule, "step/update/norm/reduce", group=group), model)


def test_a_norm_that_counts_the_experts_of_every_copy_is_found() -> None:
    schedule, model = megatron(0)
    (measure,) = (
        each
        for each in walk(schedule.programs[0].step)
        if isinstance(each, Compute) and each.id == "step/update/norm/measure"
    )
    operands = tuple(
        but(each, view=but(each.view, axis=None, size=schedule.layout_by_name["bucket1"].elements))
        if each.view.buffer.startswith("bucket1")
        else each
        for each in measure.operands
    )
    assert "values" in families(changed(schedule, measure.id, operands=operands), model)


def test_a_norm_without_experts_is_found() -> None:
    schedule, model = megatron()
    (measure,) = (
        each
        for each in walk(schedule.programs[0].step)
        if isinstance(each, Compute) and each.id == "step/update/norm/measure"
    )
    operands = tuple(each for each in measure.operands if "bucket1" not in each.view.buffer)
    assert "values" in families(changed(schedule, measure.id, operands=operands), model)


def test_gradients_of_experts_of_replicas_that_are_not_summed_are_found() -> None:
    strategy = strategy_of(Zero(stage=1, emulate=MEGATRON), replicate=2, **FOLDED)
    model = expert_model(strategy)
    name = "step/backward/end/all_reduce/bucket1"
    faulty = edited(
        make_schedule(model, strategy),
        lambda each: (
            () if each.id == name else (_without(each, name, "step/backward/end/reduce/bucket1"),)
        ),
    )
    assert "values" in families(faulty, model)


def with_contract(schedule: Schedule, **fields: Any) -> Schedule:  # noqa: ANN401 (any field)
    return replace(schedule, contract=replace(schedule.contract, **fields))


def test_a_contract_that_calls_experts_copies_of_all_ranks_is_found() -> None:
    schedule, model = megatron()
    parameters = tuple(but(each, expert=False) for each in schedule.contract.parameters)
    assert "values" in families(with_contract(schedule, parameters=parameters), model)


@pytest.mark.parametrize("axes", [("data1",), ("data0", "data1"), ("data0", "tensor"), ()])
def test_a_contract_with_other_expert_axes_is_found(axes: tuple[str, ...]) -> None:
    schedule, model = megatron()
    assert families(with_contract(schedule, expert_axes=axes), model)


def test_expert_axes_are_single_axes_of_the_mesh() -> None:
    schedule, _ = megatron()
    with pytest.raises(ValueError, match=r"contract\.expert_axes: no single axis 'expert'"):
        with_contract(schedule, expert_axes=("expert",))


def test_a_schedule_with_experts_is_proved_from_its_file_without_a_model() -> None:
    schedule, _ = megatron()
    again = decode_value(encode_value(schedule, Schedule), Schedule)
    assert isinstance(again, Schedule)
    assert again == schedule
    assert check(again) == ()


def test_a_contract_without_experts_has_no_key_for_them() -> None:
    strategy = strategy_of(Zero(stage=1), data=2)
    made = encode_value(Contract(strategy=strategy), Contract)
    assert isinstance(made, dict)
    assert "expert" not in str(made)


def test_groups_of_experts_are_those_of_megatron() -> None:
    schedule, _ = megatron()
    found = {group.name: group for group in schedule.groups}
    assert {"expert_data", "expert", "expert_tensor", "tensor_expert"} <= found.keys()

    def ranks(group: Group, rank: int) -> tuple[int, ...]:
        return group.members(schedule.mesh, schedule.mesh.coordinates(rank))

    assert ranks(found["expert"], 0) == (0, 1, 2, 3)
    assert ranks(found["tensor_expert"], 5) == (4, 5, 6, 7)
    assert ranks(found["expert_data"], 1) == (1, 5)
    assert ranks(found["data"], 1) == (1, 3, 5, 7)


def test_collectives_of_experts_have_a_stream_of_their_own_in_megatron() -> None:
    schedule, _ = megatron()
    streams = {
        each.group: each.stream
        for each in walk(schedule.programs[0].step)
        if isinstance(each, Together)
    }
    assert streams == {"data": "communication", "expert_data": "expert_data"}
    assert not any(
        isinstance(each, AllReduce) and each.group == "expert_data"
        for each in walk(schedule.programs[0].step)
    )


def test_expert_ranks_without_experts_are_refused() -> None:
    strategy = strategy_of(Zero(stage=1), data=4, expert=2)
    model = expert_model(strategy)
    plain = replace(
        model,
        units=tuple(
            replace(
                unit,
                parameters=tuple(replace(each, experts=0) for each in unit.parameters),
            )
            for unit in model.units
        ),
    )
    with pytest.raises(ModelError, match=r"parallel\.expert: 2 needs a model with experts"):
        make_schedule(plain, strategy)


def test_degrees_of_experts_are_written_as_arguments_of_megatron() -> None:
    changes = {
        "zero.emulate": "megatron",
        "zero.stage": 1,
        "parallel.expert": 8,
        "parallel.expert_tensor": 1,
        "train.micro_batch_size": 1,
        "activations.checkpointing": "none",
    }
    asked = ConfigQuestion(changes=changes, precision="bf16", sequences=8, sequence_length=16)
    lines = write(asked).split(" \\\n")
    assert "--expert-model-parallel-size 8" in lines
    assert "--expert-tensor-parallel-size 1" in lines
    assert "--moe-token-dispatcher-type alltoall" in lines
    plain = {key: value for key, value in changes.items() if "expert" not in key}
    asked = ConfigQuestion(changes=plain, precision="bf16", sequences=8, sequence_length=16)
    assert "expert" not in write(asked)


def test_a_model_for_other_expert_ranks_is_refused() -> None:
    strategy = strategy_of(Zero(stage=1), data=4, expert=2)
    model = replace(expert_model(strategy), expert=4)
    with pytest.raises(ModelError, match="the model is for 4 x expert_tensor 1, not 2 x expert"):
        make_schedule(model, strategy)
