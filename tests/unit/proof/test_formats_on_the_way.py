"""States and gradients are nowhere narrower than where they are read, whatever copies they take."""

import dataclasses
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import pairwise

import pytest
from emulated_strategies import EMULATED, OFFLOADED, strategy
from faults.schedules import edited
from hypothesis import given, settings
from hypothesis import strategies as st

from zsim.dtype import DType
from zsim.model.architecture import GPT
from zsim.model.gpt import gpt
from zsim.model.model import Model
from zsim.proof import check
from zsim.proof.context import Context
from zsim.proof.format_paths import WORDS, BufferEdge, is_narrower
from zsim.proof.formats import examine
from zsim.runtimes.registry import make_schedule
from zsim.schedule.operation import (
    Action,
    Allocate,
    AllReduce,
    Compute,
    Copy,
    Free,
    Operand,
    Operation,
    Reduction,
    Role,
    walk,
)
from zsim.schedule.replace import replace
from zsim.schedule.schedule import Schedule
from zsim.specification.strategy_formats import formats
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim.strategy.train import Train
from zsim_runtimes.megatron.options import Megatron

SHAPE = GPT(layers=1, hidden_size=4, attention_heads=2, sequence_length=2, vocab_size=7)
RUNTIMES = {**EMULATED, **OFFLOADED}
NAMES = (
    "deepspeed 1",
    "deepspeed 3 with its optimizer on the cpu",
    "fsdp2 on the host",
    "megatron",
    *[f"stage {stage}" for stage in (0, 2, 3)],
)


@cache
def job(name: str, precision: Precision) -> tuple[Schedule, Model]:
    """A right schedule without promised peaks, and its model."""
    train = Train(precision=precision, clip_norm=1.0)
    if name.startswith("stage "):
        made = Strategy(
            parallel=Parallel(data=2),
            zero=Zero(stage=int(name.removeprefix("stage "))),
            train=train,
        )
    else:
        emulated = strategy(RUNTIMES[name], data=2, precision=precision, clip_norm=1.0)
        assert emulated is not None
        made = emulated
    model = gpt(SHAPE, micro_batch_size=1, precision=precision)
    schedule = make_schedule(model, made)
    return replace(schedule, contract=replace(schedule.contract, peak_bytes=())), model


def updates(schedule: Schedule) -> list[Compute]:
    return [
        each
        for each in walk(schedule.programs[0].step)
        if isinstance(each, Compute) and each.action is Action.UPDATE
    ]


def carried(
    schedule: Schedule, update: Compute, operand: Operand, hops: Sequence[DType], *, before: bool
) -> Schedule:
    """The schedule in which an operand of an update goes through buffers of formats, and back."""
    (program,) = schedule.programs
    held, view = program.by_name[operand.view.buffer], operand.view
    names = [f"hop{place}" for place in range(len(hops))]
    buffers = [
        replace(held, name=name, dtype=dtype, produced=False, course=None)
        for name, dtype in zip(names, hops, strict=True)
    ]
    views = [view, *[replace(view, buffer=name) for name in names], view]
    copies = [
        Copy(id=f"hop/{place}", stream=update.stream, source=source, target=target)
        for place, (source, target) in enumerate(pairwise(views))
    ]
    if before:
        copies[0] = replace(copies[0], after=update.after)
    hop: list[Operation] = [
        *[Allocate(id=f"hop/{name}/allocate", buffer=name) for name in names],
        *copies,
        *[Free(id=f"hop/{name}/free", buffer=name) for name in names],
    ]

    def edit(each: Operation) -> Iterable[Operation]:
        if each.id != update.id:
            return (each,)
        return (*hop, each) if before else (each, *hop)

    with_buffers = replace(program, buffers=(*program.buffers, *buffers))
    return edited(replace(schedule, programs=(with_buffers,)), edit)


@pytest.mark.one_commit_in(4)
@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(NAMES),
    precision=st.sampled_from([Precision.BF16, Precision.FP16, Precision.FP32]),
    role=st.sampled_from([Role.MASTER, Role.PARAMETER, Role.MOMENT, Role.GRADIENT]),
    which=st.integers(0, 5),
    hops=st.lists(st.sampled_from(list(DType)), min_size=1, max_size=3),
    before=st.booleans(),
)
def test_what_an_update_reads_is_found_where_it_went_through_a_narrower_format(
    name: str,
    precision: Precision,
    role: Role,
    which: int,
    hops: list[DType],
    *,
    before: bool,
) -> None:
    schedule, model = job(name, precision)
    every = updates(schedule)
    update = every[which % len(every)]
    operands = [each for each in update.operands if each.role is role]
    if not operands:
        return
    made = carried(schedule, update, operands[which % len(operands)], hops, before=before)
    strategy_of = schedule.contract.strategy
    assert strategy_of is not None
    wanted = formats(strategy_of)
    least = wanted.optimizer
    if role is Role.GRADIENT:
        if not before:  # nothing reads it any more
            return
        least = min(wanted.compute, wanted.reduction, key=lambda each: each.size_bytes)
    found = [each.operation for each in examine(Context.of(made, model))]
    assert bool(found) == any(is_narrower(each, least) for each in hops)
    assert all(each.startswith("hop/") for each in found)


def test_a_master_that_passes_through_bf16_is_the_one_finding_where_it_comes_back() -> None:
    schedule, model = job("stage 2", Precision.BF16)
    update = updates(schedule)[0]
    (master,) = (each for each in update.operands if each.role is Role.MASTER)
    made = carried(schedule, update, master, [DType.BF16], before=False)
    (found,) = check(made, model)
    assert (found.invariant, found.operation) == ("formats", "hop/1")
    assert found.why == "passes on a master from hop0 in bf16, and not in fp32"


@pytest.mark.parametrize("role", [Role.MASTER, Role.MOMENT])
@pytest.mark.parametrize("dtype", list(DType))
def test_states_that_ranks_add_up_in_a_narrower_format_are_found(role: Role, dtype: DType) -> None:
    schedule, model = job("stage 0", Precision.BF16)
    update = updates(schedule)[0]
    view = next(each.view for each in update.operands if each.role is role)
    add = AllReduce(
        id="add",
        stream=update.stream,
        group="data",
        source=view,
        target=view,
        reduction=Reduction.AVERAGE,
        wire=DType.FP32,
        accumulate=dtype,
    )
    made = edited(schedule, lambda each: (each, add) if each.id == update.id else (each,))
    found = [(each.operation, each.why) for each in examine(Context.of(made, model))]
    why = f"adds up {WORDS[role]} in {dtype}, and not in fp32"
    assert found == ([("add", why)] if is_narrower(dtype, DType.FP32) else [])


def test_moments_that_are_kept_in_bf16_between_steps_are_found() -> None:
    """The update reads them in fp32, widened before it and cast behind it."""
    schedule, model = job("stage 1", Precision.BF16)
    (program,) = schedule.programs
    update = updates(schedule)[0]
    kept = next(each.view for each in update.operands if each.role is Role.MOMENT)
    staged = replace(program.by_name[kept.buffer], name="staged", dtype=DType.FP32)
    view = replace(kept, buffer="staged")
    buffers = tuple(
        replace(each, dtype=DType.BF16) if each.name == kept.buffer else each
        for each in program.buffers
    )

    def edit(each: Operation) -> Iterable[Operation]:
        if each.id != update.id or not isinstance(each, Compute):
            return (each,)
        operands = tuple(
            replace(one, view=view) if one.view == kept else one for one in each.operands
        )
        return (
            Allocate(id="stage/allocate", buffer="staged"),
            Copy(id="stage/in", stream=each.stream, source=kept, target=view),
            replace(each, operands=operands),
            Copy(id="stage/out", stream=each.stream, source=view, target=kept),
            Free(id="stage/free", buffer="staged"),
        )

    made = replace(schedule, programs=(replace(program, buffers=(*buffers, staged)),))
    found = [each for each in check(edited(made, edit), model) if each.invariant == "formats"]
    assert [(each.operation, each.why) for each in found] == [
        ("stage/in", f"passes on a moment from {kept.buffer} in bf16, and not in fp32")
    ]


def test_gradients_that_are_unscaled_before_they_are_widened_are_found() -> None:
    schedule, model = job("stage 1", Precision.FP16)
    (program,) = schedule.programs
    unscale = next(
        each
        for each in walk(program.step)
        if isinstance(each, Compute) and each.action is Action.UNSCALE
    )
    (widen,) = (
        each
        for each in walk(program.step)
        if isinstance(each, Copy) and each.target.buffer == unscale.operands[0].view.buffer
    )
    early = replace(
        unscale, after=widen.after, operands=(replace(unscale.operands[0], view=widen.source),)
    )

    def edit(each: Operation) -> Iterable[Operation]:
        if each.id == unscale.id:
            return ()
        return (early, each) if each.id == widen.id else (each,)

    made = edited(schedule, edit)
    found = [each for each in examine(Context.of(made, model)) if each.operation == unscale.id]
    assert [each.why for each in found] == ["unscales gradients in fp16, and not in fp32"]


def test_twice_the_micro_batches_of_a_pipeline_take_twice_the_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[object] = []

    def counted(*arguments: object) -> object:
        made.append(arguments)
        return BufferEdge(*arguments)  # type: ignore[arg-type]  # the arguments of its caller

    def work(micro_batches: int) -> int:
        schedule, model = pipeline_of_four_stages(micro_batches)
        made.clear()
        assert examine(Context.of(schedule, model)) == []
        return len(made)

    monkeypatch.setattr("zsim.proof.format_paths.BufferEdge", counted)
    assert work(32) < 2.5 * work(16)


def pipeline_of_four_stages(micro_batches: int) -> tuple[Schedule, Model]:
    """A schedule whose stages send each micro-batch from a buffer of its own."""
    parallel = Parallel(data=1, pipeline=4)
    train = Train(precision=Precision.BF16, gradient_accumulation_steps=micro_batches)
    shape = dataclasses.replace(SHAPE, layers=8)
    model = gpt(shape, micro_batch_size=1, precision=Precision.BF16)
    return make_schedule(
        model, Strategy(parallel=parallel, zero=Zero(stage=1, emulate=Megatron()), train=train)
    ), model
