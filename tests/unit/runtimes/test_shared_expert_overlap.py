"""Shared experts on a side stream during exchanges of tokens: waits, memory, time, wrong edits."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache

import pytest
from exact_training import cluster
from faults.findings import families
from faults.schedules import edited
from hypothesis import given, settings
from hypothesis import strategies as st
from small_mixtures import EXPERTS, FOLDED, SHAPE, SHARED, model_of, strategy_of

from zsim.backend.backend import Job
from zsim.config_error import ConfigError
from zsim.model.experts import Experts
from zsim.model.model import Model, ModelError
from zsim.model.transformer import transformer
from zsim.proof import check
from zsim.runtimes.registry import make_schedule
from zsim.schedule.access import accesses
from zsim.schedule.bind import bound
from zsim.schedule.binding import Balanced
from zsim.schedule.json import decode_value, encode_value
from zsim.schedule.operation import (
    AllToAll,
    Compute,
    Free,
    Operation,
    StreamOperation,
    walk,
)
from zsim.schedule.program import ScheduleError
from zsim.schedule.replace import replace as but
from zsim.schedule.schedule import Schedule
from zsim.strategy.activations import Checkpointing
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Strategy, Zero
from zsim.zero.names import SIDE
from zsim_des.simulation import SimBackend
from zsim_runtimes.megatron.options import Megatron

ALL_RUN = replace(EXPERTS, shared_intermediate_size=4)
GATED = replace(ALL_RUN, shared_gate=True)
PARTS = {"data": 4, "tensor": 2, "expert": 2}


def overlapping(**options: object) -> Zero:
    asked = {"moe_shared_expert_overlap": True, **options}
    return Zero(stage=1, emulate=Megatron(sequence_parallel=True).but(**asked))


OVERLAPS = overlapping()


@cache
def made(experts: Experts = ALL_RUN, **degrees: int) -> tuple[Schedule, Model]:
    strategy = strategy_of(OVERLAPS, **degrees or {"data": 4, "expert": 2})
    model = model_of(strategy, experts)
    return make_schedule(model, strategy), model


@pytest.mark.parametrize("experts", [ALL_RUN, GATED, replace(GATED, capacity_factor=1.25)])
@pytest.mark.parametrize(
    "strategy",
    [
        strategy_of(OVERLAPS, data=4, expert=2),
        strategy_of(OVERLAPS, Checkpointing.FULL, data=4, expert=4),
        strategy_of(overlapping(moe_token_dispatcher_type="flex"), data=4, expert=4),
        strategy_of(OVERLAPS, **FOLDED),
        strategy_of(OVERLAPS, **SHARED),
        strategy_of(OVERLAPS, Checkpointing.NONE, Precision.FP16, **PARTS),
        strategy_of(OVERLAPS, **PARTS, pipeline=2),
        strategy_of(OVERLAPS, **PARTS, replicate=2).but({"train.compile": False}),
    ],
)
def test_shared_experts_on_a_side_stream_are_proved(strategy: Strategy, experts: Experts) -> None:
    model = model_of(strategy, experts)
    assert check(make_schedule(model, strategy), model) == ()


def buffers(operation: Operation, *, written: bool) -> set[str]:
    """Return the buffers that an operation writes, or reads."""
    return {
        each.view.buffer for each in accesses(operation) if (each.writes if written else each.reads)
    }


def on_side(schedule: Schedule) -> Iterator[StreamOperation]:
    for each in walk(schedule.programs[0].step):
        if isinstance(each, StreamOperation) and each.stream == SIDE:
            yield each


def test_each_part_starts_after_the_work_before_an_exchange_and_not_after_the_exchange() -> None:
    schedule, _ = made()
    step = [each for each in walk(schedule.programs[0].step) if isinstance(each, StreamOperation)]
    place = {each.id: number for number, each in enumerate(step)}
    for each in on_side(schedule):
        assert isinstance(each, Compute)
        (before,) = each.after
        assert isinstance(before, str)
        between = step[place[before] + 1 : place[each.id]]
        # backward exchanges gradients after the side segment was issued
        is_forward = "/forward/" in each.id
        assert any(isinstance(one, AllToAll) for one in between) is is_forward


def test_the_compute_stream_waits_once_in_each_direction() -> None:
    schedule, _ = made()
    side = {each.id for each in on_side(schedule)}
    waits = [
        each.id.removeprefix("step/")
        for each in walk(schedule.programs[0].step)
        if isinstance(each, StreamOperation)
        and each.id not in side
        and side.intersection(one for one in each.after if isinstance(one, str))
    ]
    assert len(waits) == 2 * 2 * 2
    assert waits[0] == "forward/mb0/block0/forward6"  # adds the output of shared experts
    assert "backward/mb0/block0/backward1/add/block0/ln2" in waits  # gradients of the tokens


def test_memory_of_a_side_segment_belongs_to_its_stream() -> None:
    schedule, _ = made()
    (program,) = schedule.programs
    homes = {each.name: each.home for each in program.buffers}
    assert homes["block0/shared/product"] == homes["block1/shared/down"] == SIDE
    assert homes["block0/experts/permuted"] != SIDE
    late = {each.buffer for each in walk(program.step) if isinstance(each, Free) and each.uses}
    assert {"block0/shared/down", "block0/shared/down/gradient", "block1/ln2"} <= late


def test_work_and_exchanged_bytes_are_those_without_overlap() -> None:
    strategies = [strategy_of(overlapping(moe_shared_expert_overlap=on)) for on in (False, True)]
    strategies = [each.but({"parallel.data": 4, "parallel.expert": 2}) for each in strategies]
    plain, beside = (model_of(each, GATED) for each in strategies)

    def work(model: Model) -> list[int]:
        every = [each for unit in model.units for each in unit.segments]
        return [
            sum(kernel.flops for each in every for kernel in each.forward),
            sum(kernel.flops for each in every for kernel in each.backward),
            model.parameter_count,
        ]

    assert work(plain) == work(beside)
    wires = [
        make_schedule(model, strategy).contract.wire_bytes
        for model, strategy in zip((plain, beside), strategies, strict=True)
    ]
    assert wires[0] == wires[1]


@settings(max_examples=8, deadline=None)
@given(st.sampled_from([2, 4, 8]), st.sampled_from([64, 256, 1024]))
def test_a_step_is_at_most_as_long_as_without_overlap(ranks: int, width: int) -> None:
    ends: list[int] = []
    for on in (False, True):
        strategy = strategy_of(overlapping(moe_shared_expert_overlap=on), data=8, expert=ranks)
        experts = Experts(count=8, top_k=2, intermediate_size=256, shared_intermediate_size=width)
        shape = replace(
            SHAPE,
            hidden_size=256,
            attention_heads=4,
            sequence_length=1024,
            intermediate_size=64,
            experts=experts,
            execution=strategy.execution,
        )
        model = transformer(shape, micro_batch_size=1, precision=Precision.BF16)
        schedule = bound(make_schedule(model, strategy), Balanced()).schedule
        job = Job(schedule=schedule, model=model, cluster=cluster(8), steps=1)
        ends.append(SimBackend().step_ends_ps(job)[-1])
    assert ends[1] < ends[0]


@settings(max_examples=25, deadline=None)
@given(which=st.integers(0, 2**31), parts=st.booleans())
def test_a_wait_for_results_of_the_other_stream_that_is_left_out_is_found(
    which: int, *, parts: bool
) -> None:
    schedule, model = made(GATED, **(PARTS if parts else {"data": 4, "expert": 2}))
    side = {each.id for each in on_side(schedule)}
    step = [each for each in walk(schedule.programs[0].step) if isinstance(each, StreamOperation)]
    makes = {each.id: buffers(each, written=True) for each in step}
    edges = [
        (each, one)
        for each in step
        for one in each.after
        if isinstance(one, str)
        and (one in side or (each.id in side and makes[one] & buffers(each, written=False)))
    ]
    each, gone = edges[which % len(edges)]
    rest = tuple(one for one in each.after if one != gone)
    faulty = edited(schedule, lambda one: (but(one, after=rest),) if one.id == each.id else (one,))
    assert families(faulty, model), (each.id, gone)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**31))
def test_a_part_that_is_left_out_is_found(which: int) -> None:
    schedule, model = made(GATED)
    every = [each.id for each in on_side(schedule)]
    name = every[which % len(every)]

    def change(each: Operation) -> Iterable[Operation]:
        return () if each.id == name else (each,)

    try:
        faulty = edited(schedule, change)
    except ScheduleError:
        return  # another operation waits for it
    assert families(faulty, model), name


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**31))
def test_memory_that_is_reused_before_the_other_stream_read_it_is_found(which: int) -> None:
    schedule, model = made()
    frees = [
        each
        for each in walk(schedule.programs[0].step)
        if isinstance(each, Free) and each.uses and each.buffer.endswith("shared/down/gradient")
    ]
    free = frees[which % len(frees)]
    faulty = edited(schedule, lambda one: (but(one, uses=()),) if one is free else (one,))
    assert families(faulty, model)


def test_a_schedule_is_read_from_its_file() -> None:
    schedule, model = made()
    assert decode_value(encode_value(schedule, Schedule), Schedule) == schedule
    assert decode_value(encode_value(model, Model), Model) == model


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (
            {"moe_token_dispatcher_type": "allgather"},
            "true needs moe_token_dispatcher_type = alltoall or flex",
        ),
        (
            {"recompute_modules": "shared_experts"},
            "true contradicts shared_experts in recompute_modules: allowed is one of the two",
        ),
    ],
)
def test_options_that_exclude_the_overlap_are_one_line(
    options: dict[str, object], why: str
) -> None:
    with pytest.raises(ConfigError, match=f"moe_shared_expert_overlap: {why}"):
        overlapping(**options)


@pytest.mark.parametrize(
    ("degrees", "experts", "why"),
    [
        ({"data": 4}, ALL_RUN, "parallel.expert above 1, whose exchanges it overlaps"),
        ({"data": 4, "expert": 2}, EXPERTS, "model.experts.shared_intermediate_size"),
    ],
)
def test_an_overlap_without_exchanges_or_shared_experts_is_refused(
    degrees: dict[str, int], experts: Experts, why: str
) -> None:
    strategy = strategy_of(OVERLAPS, **degrees)
    model = model_of(strategy, experts)
    with pytest.raises(ModelError, match=f"moe_shared_expert_overlap: true needs {why}"):
        make_schedule(model, strategy)
