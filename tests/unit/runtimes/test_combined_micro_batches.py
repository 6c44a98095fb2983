"""A forward merged with the backward before it: order of nodes, waits, memory, time, refusals."""

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
from zsim.schedule.operation import (
    Allocate,
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
from zsim_des.simulation import SimBackend
from zsim_runtimes.megatron.combined import EXCHANGES
from zsim_runtimes.megatron.options import Megatron

ALL_RUN = replace(EXPERTS, shared_intermediate_size=4)
PARTS = {"data": 4, "tensor": 2, "expert": 2}
TWO = {"data": 4, "expert": 2}


def merging(**options: object) -> Zero:
    asked = {"overlap_moe_expert_parallel_comm": True, **options}
    return Zero(stage=1, emulate=Megatron(sequence_parallel=True).but(**asked))


MERGES = merging()


def batches(strategy: Strategy, count: int) -> Strategy:
    return strategy.but({"train.gradient_accumulation_steps": count})


@cache
def made(count: int = 3, **degrees: int) -> tuple[Schedule, Model]:
    strategy = batches(strategy_of(MERGES, **degrees or TWO), count)
    model = model_of(strategy, ALL_RUN)
    return make_schedule(model, strategy), model


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("strategy", "experts"),
    [
        (strategy_of(MERGES, **TWO), replace(ALL_RUN, shared_gate=True, score_bias=True)),
        (strategy_of(MERGES, data=4, expert=4), replace(ALL_RUN, dense_layers=1)),
        (strategy_of(MERGES, **FOLDED), replace(ALL_RUN, z_loss=True)),
        (strategy_of(MERGES, **SHARED), ALL_RUN),
        (strategy_of(MERGES, Checkpointing.NONE, Precision.FP16, **PARTS), ALL_RUN),
        (strategy_of(merging(moe_token_dispatcher_type="flex"), **TWO), ALL_RUN),
        (
            strategy_of(merging(overlap_grad_reduce=True, overlap_param_gather=True), **PARTS),
            replace(ALL_RUN, capacity_factor=1.25),
        ),
        (
            strategy_of(
                merging(recompute_modules="layernorm,moe_act,shared_experts"),
                Checkpointing.SELECTIVE,
                **TWO,
            ),
            ALL_RUN,
        ),
        (strategy_of(MERGES, **PARTS, replicate=2).but({"train.compile": False}), ALL_RUN),
    ],
)
def test_merged_micro_batches_are_proved(strategy: Strategy, experts: Experts, count: int) -> None:
    strategy = batches(strategy, count)
    model = model_of(strategy, experts)
    assert check(make_schedule(model, strategy), model) == ()


def nodes(schedule: Schedule) -> list[str]:
    """Return way, micro-batch, layer and stream of consecutive operations, in order of issue."""
    found: list[str] = []
    for each in walk(schedule.programs[0].step):
        parts = each.id.split("/")
        if not isinstance(each, Compute | AllToAll) or not parts[3:] or "block" not in parts[3]:
            continue
        stream = "comm" if each.stream == EXCHANGES else "comp"
        name = f"{parts[1]} {parts[2]} {parts[3]} {stream}"
        found += [name] if found[-1:] != [name] else []
    return found


def test_layers_of_both_micro_batches_are_issued_in_the_order_of_megatron() -> None:
    """As in the docstring of TransformerLayerSchedulePlan.run, d98e8a64."""
    found = nodes(made()[0])
    first = found.index("backward mb0 block1 comm")
    assert found[first : first + 8] == [
        "backward mb0 block1 comm",  # results
        "forward mb1 block0 comp",
        "backward mb0 block1 comp",
        "forward mb1 block0 comm",
        "backward mb0 block1 comm",  # tokens
        "forward mb1 block0 comp",
        "forward mb1 block0 comm",
        "backward mb0 block1 comp",
    ]


def test_a_micro_batch_alone_runs_in_the_plain_order() -> None:
    found = [each.removesuffix(" comp").removesuffix(" comm") for each in nodes(made(count=1)[0])]
    assert list(dict.fromkeys(found)) == [
        "forward mb0 block0",
        "forward mb0 block1",
        "backward mb0 block1",
        "backward mb0 block0",
    ]


def test_exchanges_and_the_sums_after_them_are_on_their_stream() -> None:
    schedule, model = made()
    last = len(model.units[1].segments) - 1
    for each in walk(schedule.programs[0].step):
        if isinstance(each, AllToAll):
            assert each.stream == EXCHANGES
        elif isinstance(each, Compute) and each.unit.startswith("block"):
            assert (each.stream == EXCHANGES) is (each.segment == last)


def test_each_node_waits_for_the_one_before_it_of_its_micro_batch_alone() -> None:
    schedule, _ = made()
    streams = {
        each.id: each.stream
        for each in walk(schedule.programs[0].step)
        if isinstance(each, StreamOperation)
    }
    waits = [
        (each.id, one)
        for each in walk(schedule.programs[0].step)
        if isinstance(each, StreamOperation)
        for one in each.after
        if isinstance(one, str) and EXCHANGES in {each.stream, streams.get(one)}
    ]
    assert len(waits) > 3 * 2 * 7  # micro-batches, layers, changes of the stream
    assert all(one.split("/")[2] == other.split("/")[2] for one, other in waits)


def test_two_micro_batches_are_alive() -> None:
    """Twice the activations of a block, and never three times."""
    for count, most in ((1, 1), (2, 2), (4, 2)):
        schedule, _ = made(count=count)
        alive: set[str] = set()
        seen = 0
        for each in walk(schedule.programs[0].step):
            if isinstance(each, Allocate):
                alive.add(each.buffer)
            elif isinstance(each, Free):
                alive.discard(each.buffer)
            seen = max(seen, sum(name.startswith("block0/saved0") for name in alive))
        assert seen == most


def test_memory_that_both_streams_use_returns_late() -> None:
    schedule, _ = made()
    (program,) = schedule.programs
    homes = {each.name: each.home for each in program.buffers}
    assert homes["block0/experts/permuted"] == EXCHANGES
    assert homes["block0/experts/permuted/sent"] != EXCHANGES
    late = {each.buffer for each in walk(program.step) if isinstance(each, Free) and each.uses}
    assert {"block0/experts/permuted", "block0/experts/permuted/sent"} <= late


def step_ps(strategy: Strategy, nodes_: int) -> int:
    experts = Experts(count=16, top_k=4, intermediate_size=1024, auxiliary_loss=False)
    shape = replace(
        SHAPE,
        layers=4,
        hidden_size=1024,
        attention_heads=8,
        sequence_length=2048,
        intermediate_size=1024,
        experts=experts,
        execution=strategy.execution,
    )
    model = transformer(shape, micro_batch_size=1, precision=Precision.BF16)
    schedule = bound(make_schedule(model, strategy), Balanced()).schedule
    job = Job(schedule=schedule, model=model, cluster=cluster(8 * nodes_), steps=1)
    return SimBackend().step_ends_ps(job)[-1]


def test_exchanges_are_hidden_by_the_other_micro_batch() -> None:
    """But not with one micro-batch, which has no other."""
    times: dict[tuple[int, bool], int] = {}
    for count in (1, 4):
        for merges in (False, True):
            zero = merging(overlap_moe_expert_parallel_comm=merges)
            strategy = batches(strategy_of(zero, data=8, expert=8), count)
            times[count, merges] = step_ps(strategy, 1)
    assert times[4, True] < times[4, False]
    assert times[1, True] == pytest.approx(times[1, False], rel=0.02)


@settings(max_examples=30, deadline=None)
@given(which=st.integers(0, 2**31), parts=st.booleans())
def test_a_wait_that_is_left_out_is_found(which: int, *, parts: bool) -> None:
    schedule, model = made(**(PARTS if parts else TWO))
    step = [each for each in walk(schedule.programs[0].step) if isinstance(each, StreamOperation)]
    by_id = {each.id: each for each in step}

    def writes(name: str) -> set[str]:
        return {each.view.buffer for each in accesses(by_id[name]) if each.writes}

    edges = [
        (each, one)
        for each in step
        for one in each.after
        if isinstance(one, str)
        and EXCHANGES in {each.stream, by_id[one].stream}
        and writes(one).intersection(own.view.buffer for own in accesses(each))
    ]
    each, gone = edges[which % len(edges)]
    rest = tuple(one for one in each.after if one != gone)
    faulty = edited(schedule, lambda one: (but(one, after=rest),) if one.id == each.id else (one,))
    assert families(faulty, model), (each.id, gone)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**31))
def test_an_exchange_that_is_left_out_or_of_the_other_micro_batch_is_found(which: int) -> None:
    schedule, model = made()
    every = [each for each in walk(schedule.programs[0].step) if isinstance(each, AllToAll)]
    one = every[which % len(every)]
    names = {each.name for each in schedule.programs[0].buffers}
    other = one.source.buffer.replace("@1", "") if "@1" in one.source.buffer else ""
    if other not in names or other == one.source.buffer:
        other = ""

    def change(each: Operation) -> tuple[Operation, ...]:
        if each.id != one.id:
            return (each,)
        return (but(one, source=but(one.source, buffer=other)),) if other else ()

    try:
        faulty = edited(schedule, change)
    except ScheduleError:
        return  # its memory is not alive then, or another operation waits for it
    assert families(faulty, model), one.id


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (
            {"moe_token_dispatcher_type": "allgather"},
            "true excludes moe_token_dispatcher_type = allgather",
        ),
        ({"moe_shared_expert_overlap": True}, "true excludes moe_shared_expert_overlap = true"),
    ],
)
def test_options_that_exclude_merging_are_one_line(options: dict[str, object], why: str) -> None:
    with pytest.raises(ConfigError, match=f"overlap_moe_expert_parallel_comm: {why}"):
        merging(**options)


@pytest.mark.parametrize(
    ("strategy", "why"),
    [
        (strategy_of(MERGES, data=4), "needs parallel.expert above 1"),
        (strategy_of(MERGES, **TWO, pipeline=2), "is not modelled with parallel.pipeline = 2"),
        (
            strategy_of(MERGES, Checkpointing.FULL, **TWO),
            'excludes activations.checkpointing = "full"',
        ),
        (
            strategy_of(merging(recompute_modules="moe"), Checkpointing.SELECTIVE, **TWO),
            "excludes moe in recompute_modules",
        ),
        (
            strategy_of(MERGES, Checkpointing.NONE, Precision.FP32, **TWO),
            "needs train.precision bf16 or fp16",
        ),
    ],
)
def test_what_excludes_merging_is_one_line(strategy: Strategy, why: str) -> None:
    model = model_of(strategy)
    with pytest.raises(ModelError) as caught:
        make_schedule(model, strategy)
    assert str(caught.value) == f"zero.megatron.overlap_moe_expert_parallel_comm: true {why}"
