"""Built blocks whose tensor ranks hold parts of experts: gathers of rows, sums, memory, faults."""

from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from exact_training import cluster
from faults.findings import families
from faults.schedules import edited
from hypothesis import given, settings
from hypothesis import strategies as st
from small_mixtures import EXPERTS, MEGATRON, SHAPE, model_of, strategy_of

import zsim
from zsim.backend.backend import Job
from zsim.mistake import MistakeError
from zsim.model.architecture import Llama
from zsim.model.experts import ExpertKernels, Experts
from zsim.model.kernel import KernelKind
from zsim.model.model import Model, ModelError
from zsim.model.transformer import transformer
from zsim.proof import check
from zsim.runtimes.registry import make_schedule
from zsim.schedule.bind import bound
from zsim.schedule.binding import Balanced, BindingError, Ratio, Zipf
from zsim.schedule.json import decode_value, encode_value
from zsim.schedule.operation import AllGather, Compute, ReduceScatter, walk
from zsim.schedule.program import ScheduleError
from zsim.schedule.replace import replace as but
from zsim.schedule.schedule import Schedule
from zsim.strategy.activations import Checkpointing
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Strategy, Zero
from zsim_des.simulation import SimBackend
from zsim_runtimes.megatron.options import DispatcherType, Megatron

DEGREES = {"data": 4, "tensor": 2, "expert": 2}
"""Two ranks with parts of the same experts, two ranks with different experts, two with equal ones:
`expert_tensor` is `tensor` by default, as in Megatron-LM."""


@cache
def made(**changes: Any) -> tuple[Schedule, Model]:  # noqa: ANN401 (any field)
    strategy = strategy_of(**DEGREES)
    model = model_of(strategy, replace(EXPERTS, **changes))
    return make_schedule(model, strategy), model


@pytest.mark.parametrize(
    "experts",
    [
        replace(EXPERTS, score_bias=True, shared_intermediate_size=4, shared_gate=True),
        replace(EXPERTS, capacity_factor=1.25),
        replace(EXPERTS, capacity_factor=1.25, pads_to_capacity=True, z_loss=True),
        replace(EXPERTS, kernels=ExpertKernels.LOOP, bias=True),
    ],
)
@pytest.mark.parametrize(
    "strategy",
    [
        strategy_of(**DEGREES),
        strategy_of(data=2, tensor=2, expert=2, context=2),
        strategy_of(data=2, tensor=4, expert=2).but({"train.clip_norm": None}),
        strategy_of(MEGATRON, Checkpointing.FULL, **DEGREES),
        strategy_of(MEGATRON, Checkpointing.NONE, Precision.FP16, **DEGREES),
        strategy_of(**DEGREES, pipeline=2),
        strategy_of(**DEGREES).but({"train.compile": False}),
        strategy_of(Zero(stage=3, sequence_parallel=True), **DEGREES),
        strategy_of(**DEGREES, replicate=2),
    ],
)
def test_parts_of_experts_are_proved(strategy: Strategy, experts: Experts) -> None:
    experts = replace(experts, intermediate_size=8)
    shape = replace(SHAPE, attention_heads=4, intermediate_size=8)
    model = _built(shape, strategy, experts)
    assert check(make_schedule(model, strategy), model) == ()


def _built(shape: Llama, strategy: Strategy, experts: Experts) -> Model:
    if strategy.parallel.pipeline > 1:
        return model_of(strategy, experts)
    return transformer(
        replace(shape, execution=strategy.execution, experts=experts),
        micro_batch_size=1,
        tensor=strategy.parallel.tensor,
        precision=strategy.train.precision,
        sequence=strategy.cuts_tokens,
        keeps_gathered=strategy.keeps_gathered,
        in_place_loss=strategy.in_place_loss,
    )


def test_ranks_with_parts_gather_rows_and_scatter_sums_in_the_format_of_weights() -> None:
    schedule, _ = made()
    found = Counter(
        (type(each).__name__, each.id.split("/")[1], min(each.source.size, each.target.size))
        for each in walk(bound(schedule, Balanced()).schedule.programs[0].step)
        if isinstance(each, AllGather | ReduceScatter)
        and each.group == "tensor"
        and "experts" in each.id
        and "/mb0/block0/" in each.id
    )
    rows = 16 * 2 // 2  # copies of the tokens of a rank
    assert found == {
        ("AllGather", "forward", rows * 8): 1,
        ("AllGather", "forward", rows): 1,
        ("AllGather", "backward", rows * 8): 1,
        ("ReduceScatter", "backward", rows * 8): 1,
        ("ReduceScatter", "backward", rows): 1,
    }
    sums = [
        each
        for each in walk(schedule.programs[0].step)
        if isinstance(each, ReduceScatter) and "mb0/block0/forward" in each.id
    ]
    assert "fp32" in {each.wire.value for each in sums}


def test_parts_have_the_parameters_and_work_of_whole_experts() -> None:
    _, model = made()
    whole = model_of(strategy_of(data=4, expert=2))
    assert model.parameter_count == whole.parameter_count
    assert (model.forward_flops, model.backward_flops) == (
        whole.forward_flops,
        whole.backward_flops,
    )
    shapes = {each.name.split(".")[-2]: each.shape for each in model.parameters if each.expert}
    assert shapes == {"gate_up": (4, 6, 8), "down": (4, 8, 3)}  # of 2 x 6 and 6 columns


def test_counts_are_gathered_by_all_ranks_that_run_the_rows() -> None:
    schedule, model = made()
    counts = [
        each
        for each in walk(schedule.programs[0].step)
        if isinstance(each, AllGather) and each.id.endswith("counts/gather")
    ]
    assert {(each.group, each.source.size, each.target.size) for each in counts} == {
        ("tensor_expert", 8, 4 * 8)
    }
    assert check(schedule, model) == ()


@pytest.mark.parametrize("parts", [2, 4])
def test_inputs_grow_with_the_parts_and_the_width_inside_experts_stays(parts: int) -> None:
    """Held of a layer: R x ETP rows of the hidden state, and R x ETP x F / ETP inside experts."""
    experts = Experts(count=8, top_k=2, intermediate_size=512, auxiliary_loss=False)
    held: dict[int, dict[str, int]] = {}
    for ranks in (1, parts):
        degrees = {"data": 8, "expert": 8} | ({"tensor": ranks} if ranks > 1 else {})
        strategy = strategy_of(**degrees)
        shape = replace(
            SHAPE,
            hidden_size=128,
            attention_heads=4,
            sequence_length=64 * ranks,
            intermediate_size=64,
            layers=1,
            experts=experts,
            execution=strategy.execution,
        )
        model = _built(shape, strategy, experts)
        (inside,) = (
            each
            for each in model.units[1].segments
            if any(kernel.kind is KernelKind.GROUPED_MATMUL for kernel in each.forward)
        )
        rows = 64 * 2  # of a rank
        products = [each for each in inside.forward if each.kind is KernelKind.GROUPED_MATMUL]
        assert {each.shape[1] for each in products} == {rows * ranks}
        assert sum(each.flops for each in products) == 6 * rows * 128 * 512
        held[ranks] = {"saved": inside.saved_bytes, "inside": rows * 3 * 512 * 2}
    kept = {
        ranks: each["saved"] - each["inside"] - 4 * 8  # first rows of experts
        for ranks, each in held.items()
    }
    assert kept[1] == 0  # inputs are values
    assert kept[parts] == parts * rows * (128 * 2 + 4)  # gathered rows and their weights


@pytest.mark.parametrize(
    "which",
    [
        "forward6/gather/block0/experts/permuted",
        "forward6/gather/block0/experts/weights",
        "forward6/scatter",
        "backward6/gather/block0/experts/partial/gradient",
        "backward6/scatter/block0/experts/permuted",
        "backward6/scatter/block0/experts/weights",
    ],
)
def test_a_gather_or_sum_of_parts_that_is_left_out_is_found(which: str) -> None:
    schedule, model = made()
    way = "backward" if which.startswith("backward") else "forward"
    name = f"step/{way}/mb1/block0/{which}"
    left = edited(schedule, lambda each: () if each.id == name else (each,))
    assert left != schedule
    assert "values" in families(left, model)


@pytest.mark.parametrize("group", ["expert", "expert_data", "data", "tensor_expert"])
def test_rows_that_are_gathered_by_other_ranks_are_found_or_refused(group: str) -> None:
    schedule, model = made()
    name = "step/forward/mb0/block1/forward6/gather/block1/experts/permuted"

    def change(each: Any) -> Any:  # noqa: ANN401 (any operation)
        return (but(each, group=group),) if each.id == name else (each,)

    try:
        faulty = edited(schedule, change)
    except ScheduleError:
        return
    assert "values" in families(faulty, model)


def test_a_mean_instead_of_a_sum_of_parts_is_found() -> None:
    schedule, model = made()
    name = "step/forward/mb0/block0/forward6/scatter"
    (sums,) = (each for each in walk(schedule.programs[0].step) if each.id == name)
    assert isinstance(sums, ReduceScatter)
    mean = type(sums.reduction)("average")
    faulty = edited(
        schedule, lambda each: (but(each, reduction=mean),) if each.id == name else (each,)
    )
    assert "values" in families(faulty, model)


def test_a_sum_of_rows_of_one_member_is_refused() -> None:
    schedule, _ = made()
    name = "step/forward/mb0/block0/forward6/gather/block0/experts/permuted"
    by_id = {each.id: each for each in walk(schedule.programs[0].step)}
    gather = by_id[name]
    assert isinstance(gather, AllGather)
    other = by_id["step/forward/mb0/block0/forward6/gather/block0/experts/weights"]
    assert isinstance(other, AllGather)
    with pytest.raises(ScheduleError):
        edited(
            schedule, lambda each: (but(each, source=other.source),) if each is gather else (each,)
        )


@settings(max_examples=6, deadline=None)
@given(st.floats(1, 2))
def test_two_classes_of_ranks_take_as_long_as_all_of_them(busiest: float) -> None:
    schedule, model = made()
    numbers = bound(schedule, Ratio(busiest=busiest)).schedule
    job = Job(schedule=numbers, model=model, cluster=cluster(8), steps=1)
    assert SimBackend().step_ends_ps(job) == SimBackend(unfold=True).step_ends_ps(job)


def test_work_of_a_busy_rank_is_that_of_the_rows_of_all_parts() -> None:
    schedule, _ = made()
    found = bound(schedule, Ratio(busiest=1.5)).schedule
    rows = [
        {
            kernel.shape[1]
            for operation in walk(program.step)
            if isinstance(operation, Compute)
            for kernel in operation.kernels
            if kernel.kind is KernelKind.GROUPED_MATMUL
        }
        for program in found.programs
    ]
    assert rows == [{2 * 24}, {2 * 8}]  # 1.5 and 0.5 times 16, of two ranks


def test_drawn_counts_are_refused_with_parts() -> None:
    schedule, _ = made()
    with pytest.raises(BindingError, match=r"binding\.seed: .*; use busiest alone"):
        bound(schedule, Zipf(seed=1, busiest=1.3))


def test_a_schedule_with_parts_is_read_from_its_file() -> None:
    schedule, model = made()
    again = decode_value(encode_value(schedule, Schedule), Schedule)
    assert again == schedule
    assert isinstance(again, Schedule)
    assert check(again, model) == ()


@pytest.mark.parametrize(
    ("degrees", "experts", "line"),
    [
        (
            {"data": 4, "expert": 2, "expert_tensor": 2},
            EXPERTS,
            "parallel.expert_tensor: 2 is not modelled with tensor 1 in built blocks; use 1",
        ),
        (
            {"data": 2, "tensor": 2, "expert": 2},
            replace(EXPERTS, intermediate_size=5),
            "parallel.expert_tensor: 2 must divide intermediate_size 5 of experts",
        ),
    ],
)
def test_parts_that_do_not_fit_are_one_line(
    degrees: dict[str, int], experts: Experts, line: str
) -> None:
    with pytest.raises(ModelError) as caught:
        model_of(strategy_of(**degrees), experts)
    assert str(caught.value) == line


def test_a_library_does_not_exchange_parts() -> None:
    options = Megatron(sequence_parallel=True, moe_token_dispatcher_type=DispatcherType.FLEX)
    strategy = strategy_of(Zero(stage=1, emulate=options), **DEGREES)
    with pytest.raises(ModelError, match=r"parallel\.expert_tensor: 2 is not modelled with a libr"):
        model_of(strategy)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_default_ranks_of_parts_are_simulated_and_proved_from_a_scenario(
    checkpointing: str, compiled: bool
) -> None:
    settings_ = {
        "activations.checkpointing": checkpointing,
        "train.compile": compiled,
        "cluster.nodes": 1,
        "train.gradient_accumulation_steps": 2,
        "model.experts.count": 4,
        "model.experts.top_k": 2,
        "model.experts.intermediate_size": 48,
        "parallel.expert": 2,
        "parallel.tensor": 2,
        "zero.stage": 1,
        "zero.emulate": "megatron",
        "zero.megatron.sequence_parallel": True,
        "zero.bucket_elements": 500_000_000,
    }
    loaded = zsim.load("tiny_llama", settings_)
    assert not zsim.check(loaded).findings
    assert zsim.run(loaded, check=False).step_time_s > 0
    with pytest.raises(MistakeError) as caught:
        zsim.run(zsim.load("tiny_llama", settings_ | {"experts.busiest": 1.5, "experts.seed": 1}))
    assert "experts.seed: counts that differ between groups" in str(caught.value)
