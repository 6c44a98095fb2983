"""Numbers on the way from a gradient to an update are as wide as the strategy says."""

from collections.abc import Iterator
from typing import TypeVar

import pytest
from emulated_strategies import EMULATED, strategy
from faults.findings import the_finding
from faults.of_schedules.gradients import GRADIENTS
from faults.schedules import changed, edited
from runtimes_by_hand import fsdp2

from zsim.dtype import DType
from zsim.model.architecture import GPT
from zsim.model.gpt import gpt
from zsim.model.model import Model
from zsim.proof import check
from zsim.runtimes.registry import make_schedule
from zsim.schedule.operation import (
    Action,
    AllReduce,
    Compute,
    Operation,
    ReduceScatter,
    Role,
    Together,
)
from zsim.schedule.replace import replace
from zsim.schedule.schedule import Kind, Schedule
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim.strategy.train import Train

T = TypeVar("T", bound=Operation)

SHAPE = GPT(layers=1, hidden_size=4, attention_heads=2, sequence_length=2, vocab_size=7)
WIDE = [
    "deepspeed 1 reduced in fp32",
    "deepspeed 2 reduced in fp32",
    "deepspeed 3",
    "fsdp1 reduced in fp32",
    "fsdp2 reduced in fp32",
    "megatron reduced in fp32",
    "nanotron 0",
    "nanotron 1",
]
"""Runtimes that reduce gradients in fp32 although they compute in bf16."""


def job(
    name: str,
    precision: Precision = Precision.BF16,
    *,
    tied: bool = False,
    data: int = 2,
    replicate: int = 1,
) -> tuple[Schedule, Model]:
    """Two micro-batches of a small GPT as a runtime trains it."""
    made = strategy(
        EMULATED[name],
        data=data,
        replicate=replicate,
        micro_batches=2,
        precision=precision,
        clip_norm=1.0,
    )
    assert made is not None
    model = gpt(replace(SHAPE, tied_embeddings=tied), micro_batch_size=1, precision=precision)
    return make_schedule(model, made), model


def reductions(made: Schedule) -> Iterator[AllReduce | ReduceScatter]:
    """Reductions of gradients."""
    for operation in made.programs[0].by_id.values():
        members = operation.members if isinstance(operation, Together) else (operation,)
        for each in members:
            if isinstance(each, AllReduce | ReduceScatter) and each.source.size > 1:
                yield each


def formats(made: Schedule, model: Model) -> list[str]:
    """The operations that are too narrow."""
    return [each.operation for each in check(made, model) if each.invariant == "formats"]


@pytest.mark.matrix(5)
@pytest.mark.parametrize(
    ("precision", "tied"), [(Precision.BF16, True), (Precision.FP64, False)], ids=str
)
@pytest.mark.parametrize("name", EMULATED)
def test_a_runtime_is_as_wide_as_it_says(name: str, precision: Precision, tied: bool) -> None:
    """Uses of a tied parameter are added up by autograd, in the format of the computations."""
    assert formats(*job(name, precision, tied=tied)) == []


@pytest.mark.parametrize("name", ["fsdp2 one all-reduce", "fsdp2 reduced in fp32", "fsdp1"])
def test_sums_before_the_last_of_two_reductions_are_as_wide_as_reductions(name: str) -> None:
    assert formats(*job(name, replicate=2)) == []


@pytest.mark.parametrize("name", ["fsdp1 reduced in fp32", "fsdp2 reduced in fp32"])
def test_one_rank_may_add_gradients_up_as_narrow_as_what_many_had_reduced(name: str) -> None:
    """FSDP casts to `reduce_dtype` and back where there is nobody to reduce with."""
    assert formats(*job(name, Precision.PURE_BF16, data=1)) == []


@pytest.mark.matrix(5)
@pytest.mark.parametrize("name", WIDE)
def test_gradients_of_fp32_that_are_kept_in_bf16_are_found(name: str) -> None:
    made, model = job(name)
    wide = {each.name for each in made.programs[0].buffers if each.dtype is DType.FP32}
    edits = [
        each
        for each in GRADIENTS["gradients kept in bf16"](made)
        if each.text.removesuffix(" in bf16") in wide
    ]
    assert edits
    for edit in edits:
        assert "formats" in {each.invariant for each in check(edit.made, model)}, edit.text


@pytest.mark.matrix(4)
@pytest.mark.parametrize("name", WIDE)
def test_a_reduction_that_adds_in_bf16_is_named(name: str) -> None:
    made, model = job(name)
    name_of_first = next(reductions(made)).id

    def narrow(operation: Operation) -> tuple[Operation, ...]:
        if isinstance(operation, Together):
            members = tuple(narrowed(each) for each in operation.members)
            return (replace(operation, members=members),)
        return (narrowed(operation),)

    def narrowed(operation: T) -> T:
        if operation.id == name_of_first and isinstance(operation, AllReduce | ReduceScatter):
            return replace(operation, accumulate=DType.BF16)
        return operation

    assert name_of_first in formats(edited(made, narrow), model)


@pytest.mark.parametrize("kind", [Kind.MASTER, Kind.MOMENT])
@pytest.mark.parametrize("stage", range(4))
def test_masters_and_moments_in_bf16_are_found_at_the_update(stage: int, kind: Kind) -> None:
    model = gpt(SHAPE, micro_batch_size=1, precision=Precision.BF16)
    made = make_schedule(
        model,
        Strategy(
            parallel=Parallel(data=2), zero=Zero(stage=stage), train=Train(precision=Precision.BF16)
        ),
    )
    (program,) = made.programs
    buffers = tuple(
        replace(each, dtype=DType.BF16) if each.kind is kind else each for each in program.buffers
    )
    narrow = replace(made, programs=(replace(program, buffers=buffers),))
    updates = {
        each.id
        for each in program.by_id.values()
        if isinstance(each, Compute) and each.action is Action.UPDATE
    }
    assert set(formats(narrow, model)) == updates


def test_gradients_that_are_not_widened_before_the_update_are_found() -> None:
    model = gpt(SHAPE, micro_batch_size=1, precision=Precision.BF16)
    made = make_schedule(
        model,
        Strategy(
            parallel=Parallel(data=2), zero=Zero(stage=1), train=Train(precision=Precision.BF16)
        ),
    )
    (program,) = made.programs
    update = next(
        each
        for each in program.by_id.values()
        if isinstance(each, Compute) and each.action is Action.UPDATE
    )
    read = next(each.view.buffer for each in update.operands if each.role is Role.GRADIENT)
    buffers = tuple(
        replace(each, dtype=DType.BF16) if each.name == read else each for each in program.buffers
    )
    narrow = replace(made, programs=(replace(program, buffers=buffers),))
    found = the_finding(narrow, "formats", model)
    assert found.operation == update.id
    assert "gradient in bf16" in found.why


@pytest.mark.parametrize("stage", range(4))
def test_gradients_that_are_integers_for_a_while_are_found(stage: int) -> None:
    """As wide as any number is, and without its exponent."""
    model = gpt(SHAPE, micro_batch_size=1, precision=Precision.FP16)
    made = make_schedule(
        model,
        Strategy(
            parallel=Parallel(data=2), zero=Zero(stage=stage), train=Train(precision=Precision.FP16)
        ),
    )
    (program,) = made.programs
    casts = {each.name for each in program.buffers if each.name.endswith("/cast")}
    assert casts
    for name in casts:
        buffers = tuple(
            replace(each, dtype=DType.INT64) if each.name == name else each
            for each in program.buffers
        )
        whole = replace(made, programs=(replace(program, buffers=buffers),))
        assert formats(whole, model), name


def test_a_norm_that_is_added_up_in_bf16_is_found() -> None:
    model = gpt(SHAPE, micro_batch_size=1)
    made = make_schedule(
        model, Strategy(parallel=Parallel(data=2), zero=Zero(stage=2), train=Train(clip_norm=1.0))
    )
    narrow = changed(made, "step/update/norm/reduce", accumulate=DType.BF16)
    assert formats(narrow, model) == ["step/update/norm/reduce"]


def test_what_is_wider_than_the_strategy_says_is_fine() -> None:
    made, model = job("deepspeed 1")
    wide = made
    for each in reductions(made):
        wide = changed(wide, each.id, accumulate=DType.FP32)
    assert formats(wide, model) == []


def test_nothing_is_said_of_a_schedule_without_a_strategy() -> None:
    narrow = changed(fsdp2(), "step/all_reduce", accumulate=DType.FP16)
    assert check(narrow) == ()


@pytest.mark.parametrize("stage", [0, 1])
def test_parameters_that_are_kept_in_fp8_are_found_though_nothing_updates_them(stage: int) -> None:
    """Frozen ones: no update reads them, and what is gathered may be wide again."""
    shape = replace(SHAPE, frozen=("block0.*",))
    model = gpt(shape, micro_batch_size=1, precision=Precision.BF16)
    made = make_schedule(
        model,
        Strategy(
            parallel=Parallel(data=2),
            zero=Zero(stage=stage),
            train=Train(precision=Precision.BF16),
        ),
    )
    (program,) = made.programs
    kept = [name for name in program.persistent if name.startswith("frozen")]
    assert kept
    buffers = tuple(
        replace(each, dtype=DType.FP8) if each.name in kept else each for each in program.buffers
    )
    poorer = replace(made, programs=(replace(program, buffers=buffers),))
    found = [each.why for each in check(poorer, model) if each.operation == f"persistent/{kept[0]}"]
    assert found == ["keeps parameters in fp8, and not in bf16"]
