"""Delayed updates: one step late in values, beside the next step in time, on the host in bytes."""

from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import product

import pytest
from exact_training import cluster

from zsim.analysis.schedule_plan import plan
from zsim.backend.backend import Job
from zsim.closed_form.offload_formulas import OffloadScheme, tier_bytes
from zsim.config_error import ConfigError
from zsim.model.architecture import GPT
from zsim.model.gpt import gpt
from zsim.model.model import Model
from zsim.proof import check
from zsim.runtimes.registry import make_schedule
from zsim.schedule.issue_order import issued
from zsim.schedule.json import decode_value, encode_value
from zsim.schedule.operation import (
    Action,
    Branch,
    Compute,
    Copy,
    Free,
    FreeMode,
    HostWait,
    Operation,
    SetScalar,
)
from zsim.schedule.replace import replace
from zsim.schedule.schedule import Schedule, ScheduleError
from zsim.strategy.strategy import Strategy
from zsim_des.simulation import SimBackend
from zsim_des.values import train, train_by_schedule

SHAPE = GPT(layers=2, hidden_size=4, attention_heads=2, sequence_length=2, vocab_size=3)


def strategy(stage: object = 2, **said: object) -> Strategy:
    """Two data ranks that update late; `said` are keys, with `__` for the dot."""
    made = Strategy.of({"parallel": {"data": 2}, "zero": {"stage": stage}})
    keys: dict[str, object] = {"offload.optimizer": "host", "offload.delayed_update": True}
    return made.but(keys | {key.replace("__", "."): value for key, value in said.items()})


@lru_cache
def model(precision: str) -> Model:
    return gpt(
        SHAPE, micro_batch_size=1, precision=strategy(train__precision=precision).train.precision
    )


def made(wanted: Strategy) -> Schedule:
    return make_schedule(model(wanted.train.precision), wanted)


def found(schedule: Schedule) -> set[str]:
    """The families that refute a schedule of fp32."""
    return {each.invariant for each in check(schedule, model("fp32"))}


WAYS = [
    way
    for number, way in enumerate(
        product(range(4), ("fp32", "bf16", "fp16"), (None, 1.0), (0, 1, 3))
    )
    if number % 7 == 0
]
"""A seventh of all stages, formats, largest norms and warm-ups."""


@pytest.mark.matrix(24)
@pytest.mark.parametrize(("stage", "precision", "clip", "warm_up"), WAYS)
def test_any_step_is_proved_one_update_late(
    stage: int, precision: str, clip: float | None, warm_up: int
) -> None:
    wanted = strategy(
        stage,
        offload__warm_up_steps=warm_up,
        train__precision=precision,
        train__clip_norm=clip,
        zero__bucket_elements=100,
    )
    schedule = made(wanted)
    assert check(schedule, model(precision)) == ()
    assert decode_value(encode_value(schedule, Schedule), Schedule) == schedule
    overflows = frozenset({1, 2}) if precision == "fp16" else frozenset[int]()
    job = Job(schedule=schedule, model=model(precision), cluster=cluster(2), steps=5)
    late = train(model(precision), wanted, 5, overflows)
    assert train_by_schedule(job, late, overflow_steps=overflows).is_right
    at_once = train(
        model(precision),
        wanted.but({"offload.delayed_update": False, "offload.warm_up_steps": 0}),
        5,
        overflows,
    )
    assert not train_by_schedule(job, at_once, overflow_steps=overflows).is_right


def test_a_contract_that_says_otherwise_refutes_the_values() -> None:
    late = made(strategy())
    at_once = made(strategy(offload__delayed_update=False))
    for schedule, contract in ((late, at_once.contract), (at_once, late.contract)):
        promised = replace(contract, peak_bytes=schedule.contract.peak_bytes)
        assert "values" in found(replace(schedule, contract=promised))


def changed(schedule: Schedule, change: Callable[[Operation], Operation | None]) -> Schedule:
    """The schedule with other operations, or without some, in branches too."""

    def go(operations: tuple[Operation, ...]) -> Iterator[Operation]:
        for operation in operations:
            if isinstance(operation, Branch):
                then, otherwise = tuple(go(operation.then)), tuple(go(operation.otherwise))
                new = change(replace(operation, then=then, otherwise=otherwise))
            else:
                new = change(operation)
            if new is not None:
                yield new

    programs = tuple(replace(each, step=tuple(go(each.step))) for each in schedule.programs)
    assert programs != schedule.programs
    return replace(schedule, programs=programs)


def without_wait(operation: Operation) -> Operation | None:
    return None if isinstance(operation, HostWait) else operation


def too_early(operation: Operation) -> Operation:
    if isinstance(operation, Copy) and operation.id.endswith("/upload"):
        return replace(operation, after=())
    return operation


def too_late(operation: Operation) -> Operation:
    if isinstance(operation, Compute) and operation.action is Action.UPDATE:
        kept = (edge for edge in operation.after if not str(edge).endswith("/upload"))
        return replace(operation, after=tuple(kept))
    return operation


def freed_at_once(operation: Operation) -> Operation:
    if isinstance(operation, Free) and operation.mode is FreeMode.DEFERRED:
        return replace(operation, mode=FreeMode.WAITED, uses=())
    return operation


def counted_twice(operation: Operation) -> Operation:
    if isinstance(operation, SetScalar) and operation.scalar == "warm_up":
        return replace(operation, add=-2.0)
    return operation


def never_counted(operation: Operation) -> Operation | None:
    return operation if counted_twice(operation) is operation else None


def the_other_way(operation: Operation) -> Operation:
    if isinstance(operation, Branch):
        return replace(operation, then=operation.otherwise, otherwise=operation.then)
    return operation


@pytest.mark.matrix(6)
@pytest.mark.parametrize(
    ("change", "family"),
    [
        (without_wait, "races"),
        (too_early, "races"),
        (too_late, "races"),
        (freed_at_once, "lifetime"),
        (counted_twice, "scalars"),
        (never_counted, "scalars"),
        (the_other_way, "values"),
    ],
)
def test_what_a_delay_needs_is_found_where_it_is_missing(
    change: Callable[[Operation], Operation | None], family: str
) -> None:
    schedule = made(strategy(offload__warm_up_steps=2))
    assert found(schedule) == set()
    assert family in found(changed(schedule, change))


def test_a_warm_up_that_begins_elsewhere_is_found() -> None:
    schedule = made(strategy(offload__warm_up_steps=2))
    scalars = tuple(
        replace(each, initial=3.0) if each.name == "warm_up" else each for each in schedule.scalars
    )
    assert found(replace(schedule, scalars=scalars)) == {"scalars"}


def test_a_branch_on_a_scalar_that_no_delay_counts_is_refused() -> None:
    schedule = made(strategy(offload__warm_up_steps=2))
    plain = strategy(offload__delayed_update=False)
    contract = replace(schedule.contract, strategy=plain)
    whys = [each.why for each in check(replace(schedule, contract=contract), model("fp32"))]
    assert any("which no warm-up of delayed updates counts" in why for why in whys)


def test_a_branch_reads_a_value_or_a_scalar() -> None:
    schedule = made(strategy(offload__warm_up_steps=2))
    with pytest.raises(ScheduleError, match="a branch reads either a value or a scalar"):
        changed(
            schedule,
            lambda each: replace(each, scalar=None) if isinstance(each, Branch) else each,
        )


def test_issue_order_follows_the_warm_up_and_without_one_shows_delayed_steps() -> None:
    (program,) = made(strategy(offload__warm_up_steps=2)).programs
    late = {
        (step, operation.id.startswith("step/at_once"))
        for step, operation in issued(program, 4, scalars={"warm_up": 2.0})
        if isinstance(operation, Compute) and operation.action is Action.UPDATE
    }
    assert late == {(0, True), (1, True), (2, False), (3, False)}
    steady = [operation.id for _, operation in issued(program, 1)]
    assert not any(name.startswith("step/at_once") for name in steady)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_delay_moves_no_byte_more_and_keeps_two_gradients_and_new_parameters_on_the_host(
    stage: int,
) -> None:
    wanted = strategy(stage, train__precision="bf16", zero__bucket_elements=1)
    at_once = wanted.but({"offload.delayed_update": False})
    schedules = [made(each) for each in (wanted, at_once)]
    moved = [plan(each, model("bf16")).host_bytes for each in schedules]
    assert moved[0] == moved[1]
    ranks = 1 if stage == 0 else 2
    elements = sum(layout.elements for layout in schedules[0].layouts)
    kept = tier_bytes(OffloadScheme.PAPER_DELAYED, parameters=elements, ranks=ranks).host
    peaks = {pool: size for _, pool, size in schedules[0].contract.peak_bytes}
    assert peaks["host"] == kept


def test_updates_run_beside_the_next_step() -> None:
    """A step takes as long as its updates or as all else, whichever is longer, and the copies."""
    took: dict[bool, int] = {}
    for late in (False, True):
        schedule = made(strategy(offload__delayed_update=late))
        job = Job(schedule=schedule, model=model("fp32"), cluster=cluster(2), steps=4)
        ends = SimBackend().step_ends_ps(job)
        took[late] = ends[-1] - ends[-2]
        if late:
            trace = SimBackend().run(job, seed=0)
            updates = [e for e in trace.ranks[0].events if e.stream == "cpu" and e.step == 2]
            forward = [e for e in trace.ranks[0].events if e.stream == "compute" and e.step == 3]
            assert min(e.start_ps for e in forward) < max(e.end_ps for e in updates)
            summary = SimBackend().last_step(job, seed=0)
            assert summary.end_ps - summary.begin_ps == took[late]
            (rank, *_) = summary.ranks
            busy = sum(end - start for start, end in rank.computing)
            ran = sum(
                e.end_ps - e.start_ps
                for e in trace.ranks[0].events
                if e.stream == "compute" and e.step == 3
            )
            assert busy <= ran
            threads = sum(end - start for start, end in rank.on_host["kernels on the host"])
            assert max(busy, threads) <= took[late] < busy + threads
    assert took[True] < took[False]


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (
            {"offload__optimizer": "nvme"},
            "offload.delayed_update: true needs optimizer = host: threads of the host update",
        ),
        (
            {"zero__stage": 3, "offload__parameters": "host"},
            "offload.delayed_update: true needs parameters = device: forward would fetch",
        ),
        (
            {"offload__delayed_update": False, "offload__warm_up_steps": 40},
            "offload.warm_up_steps: 40 is for delayed_update = true",
        ),
    ],
)
def test_what_has_no_delay_is_refused_in_one_line(said: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        strategy(**said)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
