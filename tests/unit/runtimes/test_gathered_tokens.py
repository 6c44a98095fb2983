"""The dispatcher that gathers all tokens: collectives, bytes, memory, counts, wrong edits."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from exact_training import cluster
from faults.findings import families
from faults.schedules import edited
from hypothesis import given, settings
from hypothesis import strategies as st
from small_mixtures import EXPERTS, FOLDED, SHAPE, SHARED, model_of, strategy_of

from zsim.backend.backend import Job
from zsim.closed_form.exchanged_tokens import tokens_of_experts
from zsim.model.experts import DropRule, ExpertKernels, Experts, LoadBalancing, RouterFormat
from zsim.model.kernel import KernelKind
from zsim.model.model import Model
from zsim.model.transformer import transformer
from zsim.proof import check
from zsim.runtimes.registry import make_schedule
from zsim.schedule.bind import bound
from zsim.schedule.binding import BindingError, Ratio, Zipf
from zsim.schedule.json import decode_value, encode_value
from zsim.schedule.operation import (
    Action,
    AllGather,
    AllToAll,
    Communication,
    Compute,
    Operation,
    ReadCounts,
    ReduceScatter,
    walk,
)
from zsim.schedule.program import ScheduleError
from zsim.schedule.replace import replace as but
from zsim.schedule.schedule import Schedule
from zsim.strategy.activations import Checkpointing
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Strategy, Zero
from zsim_des.simulation import SimBackend
from zsim_runtimes.megatron.options import DispatcherType, Megatron

PARTS = {"data": 4, "tensor": 2, "expert": 2}
"""Tensor ranks hold parts of experts, so that all four ranks gather."""


def gathering(sends: DispatcherType = DispatcherType.ALLGATHER) -> Zero:
    options = Megatron(sequence_parallel=True, moe_token_dispatcher_type=sends)
    return Zero(stage=1, emulate=options)


GATHERS = gathering()


@cache
def made(experts: Experts = EXPERTS, **degrees: int) -> tuple[Schedule, Model]:
    strategy = strategy_of(GATHERS, **degrees or {"data": 4, "expert": 2})
    model = model_of(strategy, experts)
    return make_schedule(model, strategy), model


@pytest.mark.parametrize(
    "experts",
    [
        replace(EXPERTS, score_bias=True, shared_intermediate_size=4, shared_gate=True),
        replace(EXPERTS, router_format=RouterFormat.FP32, shared_intermediate_size=4),
        replace(EXPERTS, capacity_factor=1.25, drop_policy=DropRule.POSITION),
        replace(EXPERTS, capacity_factor=1.25, pads_to_capacity=True, z_loss=True),
        replace(EXPERTS, kernels=ExpertKernels.LOOP, bias=True, auxiliary_loss=False),
        replace(EXPERTS, load_balancing_type=LoadBalancing.GLOBAL_AUX_LOSS),
    ],
)
@pytest.mark.parametrize(
    "strategy",
    [
        strategy_of(GATHERS, data=4, expert=2),
        strategy_of(GATHERS, Checkpointing.FULL, data=4, expert=4),
        strategy_of(GATHERS, **FOLDED),
        strategy_of(GATHERS, **SHARED),
        strategy_of(GATHERS, **PARTS),
        strategy_of(GATHERS, Checkpointing.FULL, Precision.FP16, **PARTS),
        strategy_of(GATHERS, **PARTS, pipeline=2),
        strategy_of(GATHERS, **PARTS, replicate=2).but({"train.compile": False}),
    ],
)
def test_gathered_tokens_are_proved(strategy: Strategy, experts: Experts) -> None:
    model = model_of(strategy, experts)
    assert check(make_schedule(model, strategy), model) == ()


def collectives(schedule: Schedule, way: str) -> list[tuple[str, str, int, str]]:
    """Return kind, group, elements of a rank and format of collectives of experts in a block."""
    (program,) = schedule.programs
    return [
        (type(each).__name__, each.group, min(each.source.size, each.target.size), each.wire.value)
        for each in walk(program.step)
        if isinstance(each, AllGather | ReduceScatter)
        and each.id.startswith(f"step/{way}/mb0/block0")
        and each.group in {"expert", "tensor_expert"}
    ]


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize(
    ("degrees", "group"), [({"data": 4, "expert": 2}, "expert"), (PARTS, "tensor_expert")]
)
def test_a_layer_gathers_map_weights_and_tokens_and_scatters_sums(
    degrees: dict[str, int], group: str, *, wide: bool
) -> None:
    router = RouterFormat.FP32 if wide else RouterFormat.COMPUTE
    schedule, _ = made(replace(EXPERTS, router_format=router), **degrees)
    tokens = 16 // degrees.get("tensor", 1)
    form = "fp32" if wide else "bf16"
    assert collectives(schedule, "forward") == [
        ("AllGather", group, tokens * 8, "int8"),
        ("AllGather", group, tokens * 8, form),
        ("AllGather", group, tokens * 8, "bf16"),
        ("ReduceScatter", group, tokens * 8, form),
    ]
    assert collectives(schedule, "backward") == [
        ("AllGather", group, tokens * 8, form),
        ("ReduceScatter", group, tokens * 8, form),
        ("ReduceScatter", group, tokens * 8, "bf16"),
    ]


@settings(max_examples=20, deadline=None)
@given(st.sampled_from([2, 4]), st.sampled_from([1, 2]), st.integers(1, 4))
def test_bytes_do_not_depend_on_the_experts_of_a_token(
    expert: int, tensor: int, top_k: int
) -> None:
    """(EP x ETP - 1) x T x H elements there, and as many back."""
    strategy = strategy_of(GATHERS, data=4, expert=expert, tensor=tensor)
    model = model_of(strategy, replace(EXPERTS, top_k=top_k))
    lines = {each.collective: each.bytes for each in tokens_of_experts(model, strategy)}
    ranks, tokens, hidden, experts = expert * tensor, 16 // tensor, 8, 8
    layers, batches, bf16 = 2, 2, 2
    times = layers * batches * (ranks - 1)
    token, weights = tokens * hidden * bf16, tokens * experts * bf16
    assert lines == {
        "all_gather": times * (tokens * experts + weights + 2 * token),
        "reduce_scatter": times * (weights + 2 * token),
    }


def test_full_recomputation_gathers_and_sums_again_but_reads_no_counts_again() -> None:
    strategy = strategy_of(GATHERS, Checkpointing.FULL, data=4, expert=2)
    schedule = make_schedule(model_of(strategy), strategy)
    assert len(collectives(schedule, "forward")) == 4
    assert len(collectives(schedule, "backward")) == 4 + 3
    reads = [each for each in walk(schedule.programs[0].step) if isinstance(each, ReadCounts)]
    assert Counter((each.layer, each.micro_batch) for each in reads) == dict.fromkeys(
        [(layer, batch) for layer in range(2) for batch in range(2)], 1
    )


def test_no_copy_of_a_token_is_exchanged_and_chunks_are_not_sorted() -> None:
    strategy = strategy_of(gathering(DispatcherType.ALLTOALL), data=4, expert=2)
    sent = make_schedule(model_of(strategy), strategy)
    gathered, model = made()

    def exchanges(schedule: Schedule) -> int:
        return sum(isinstance(each, AllToAll) for each in walk(schedule.programs[0].step))

    assert exchanges(sent) > exchanges(gathered) == 0
    (inside,) = (each for each in model.units[1].segments if each.adds_all)
    moved = [each for each in inside.forward if each.loads and each.kind is KernelKind.ELEMENTWISE]
    assert len(moved) == 3  # copies rows, activation, adds rows up


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_gathered_tokens_are_in_one_buffer_of_all_layers(ranks: int) -> None:
    schedule, _ = made(data=8, expert=ranks)
    (program,) = schedule.programs
    sizes = {each.name: each.size_bytes for each in program.buffers}
    assert sizes["gathered_tokens"] == ranks * 16 * 8 * 2
    targets = {
        each.target.buffer
        for each in walk(program.step)
        if isinstance(each, AllGather) and each.id.endswith("ln2")
    }
    assert targets == {"gathered_tokens"}


def test_saved_rows_are_those_of_the_experts_of_the_rank() -> None:
    """R x (H + 2F + F) elements, as with an all-to-all, and numbers of rows."""
    held: dict[DispatcherType, int] = {}
    for sends in (DispatcherType.ALLGATHER, DispatcherType.ALLTOALL):
        strategy = strategy_of(gathering(sends), data=8, expert=8)
        experts = Experts(count=8, top_k=2, intermediate_size=512, auxiliary_loss=False)
        shape = replace(
            SHAPE,
            hidden_size=128,
            attention_heads=4,
            sequence_length=64,
            intermediate_size=64,
            layers=1,
            experts=experts,
            execution=strategy.execution,
        )
        model = transformer(shape, micro_batch_size=1, precision=Precision.BF16)
        (inside,) = (
            each
            for each in model.units[1].segments
            if any(kernel.kind is KernelKind.GROUPED_MATMUL for kernel in each.forward)
        )
        held[sends] = inside.saved_bytes
    rows, tokens = 64 * 2, 8 * 64
    more = rows * (128 * 2 + 2) + rows * 8 + tokens  # rows, weights, numbers of rows, own map
    assert held[DispatcherType.ALLGATHER] - held[DispatcherType.ALLTOALL] == more


def without(name: str) -> Callable[[Operation], Iterable[Operation]]:
    return lambda each: () if each.id == name else (each,)


EXCHANGES = (
    "step/forward/mb0/block0/forward2/gather/block0/experts/routing_map",
    "step/forward/mb1/block1/forward2/gather/block1/experts/probabilities",
    "step/forward/mb1/block0/forward2/gather/block0/ln2",
    "step/forward/mb0/block1/forward3/scatter/block1/down",
    "step/backward/mb1/block1/backward3/gather/block1/down/gradient",
    "step/backward/mb0/block0/backward3/scatter/block0/experts/probabilities",
    "step/backward/mb0/block1/backward3/scatter/block1/ln2",
)


@pytest.mark.parametrize("name", EXCHANGES)
@pytest.mark.parametrize("group", [None, "data", "expert_data", "world"])
def test_an_exchange_that_is_left_out_or_over_other_ranks_is_found(
    name: str, group: str | None
) -> None:
    schedule, model = made()
    assert name in {each.id for each in walk(schedule.programs[0].step)}

    def change(each: Operation) -> Iterable[Operation]:
        if each.id != name or group is None:
            return without(name)(each)
        assert isinstance(each, Communication)
        return (but(each, group=group),)

    try:
        faulty = edited(schedule, change)
    except ScheduleError:
        assert group is not None
        return
    assert "values" in families(faulty, model)


@pytest.mark.parametrize("name", EXCHANGES)
def test_an_exchange_over_experts_alone_is_found_if_tensor_ranks_have_parts(name: str) -> None:
    strategy = strategy_of(GATHERS, **PARTS)
    model = model_of(strategy)
    schedule = make_schedule(model, strategy)
    end = name.split("/", 4)[-1].partition("/")[2]
    (which, *_) = (
        each.id
        for each in walk(schedule.programs[0].step)
        if each.id.endswith(end) and isinstance(each, AllGather | ReduceScatter)
    )

    def change(each: Operation) -> Iterable[Operation]:
        return (but(each, group="expert"),) if each.id == which else (each,)

    try:
        faulty = edited(schedule, change)
    except ScheduleError:
        return
    assert "values" in families(faulty, model)


@pytest.mark.parametrize("reduction", ["average", "max"])
def test_another_reduction_of_results_is_found(reduction: str) -> None:
    schedule, model = made()
    name = EXCHANGES[3]
    (sums,) = (each for each in walk(schedule.programs[0].step) if each.id == name)
    assert isinstance(sums, ReduceScatter)
    other = type(sums.reduction)(reduction)
    faulty = edited(
        schedule, lambda each: (but(each, reduction=other),) if each.id == name else (each,)
    )
    assert families(faulty, model)


@pytest.mark.parametrize("change", [{}, {"layer": 0}, {"micro_batch": 0}])
def test_counts_of_another_layer_or_micro_batch_or_none_are_found(change: dict[str, int]) -> None:
    schedule, model = made()
    name = "step/forward/mb1/block1/forward2/counts/read"

    def changed(each: Operation) -> Iterable[Operation]:
        if each.id != name:
            return (each,)
        return (but(each, **change),) if change else ()

    assert "counts" in families(edited(schedule, changed), model)


def test_a_router_that_chooses_again_in_backward_is_found() -> None:
    schedule, model = made()
    name = "step/forward/mb0/block0/forward2"
    (chosen,) = (each for each in walk(schedule.programs[0].step) if each.id == name)
    assert isinstance(chosen, Compute)
    again = but(chosen, id=f"{name}/again", action=Action.RECOMPUTE, after=())
    faulty = edited(schedule, lambda each: (each, again) if each is chosen else (each,))
    assert "counts" in families(faulty, model)


@settings(max_examples=6, deadline=None)
@given(busiest=st.floats(1, 2), parts=st.booleans())
def test_two_classes_of_ranks_take_as_long_as_all_of_them(busiest: float, *, parts: bool) -> None:
    schedule, model = made(EXPERTS, **(PARTS if parts else {"data": 4, "expert": 2}))
    numbers = bound(schedule, Ratio(busiest=busiest)).schedule
    job = Job(schedule=numbers, model=model, cluster=cluster(8 if parts else 4), steps=1)
    assert SimBackend().step_ends_ps(job) == SimBackend(unfold=True).step_ends_ps(job)


@pytest.mark.parametrize("parts", [1, 2])
def test_work_of_a_busy_rank_is_that_of_its_rows(parts: int) -> None:
    """Tensor ranks halve the tokens of a rank, and each has the rows of both."""
    mean = 16 * 2
    schedule, _ = made(EXPERTS, **(PARTS if parts > 1 else {"data": 4, "expert": 2}))
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
    assert rows == [{3 * mean // 2}, {mean // 2}]


def test_drawn_counts_are_refused_with_parts() -> None:
    with pytest.raises(BindingError, match=r"binding\.seed: .*; use busiest alone"):
        bound(made(EXPERTS, **PARTS)[0], Zipf(seed=1, busiest=1.3))


def test_a_schedule_is_read_from_its_file() -> None:
    schedule, model = made()
    again: Any = decode_value(encode_value(schedule, Schedule), Schedule)
    assert again == schedule
    assert check(again, model) == ()
    assert decode_value(encode_value(model, Model), Model) == model
