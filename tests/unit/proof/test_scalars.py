"""Hosts count updates and move the loss scale as training does, and gradients are freed of it."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
from faults.findings import left, the_finding
from faults.schedules import changed, edited, split, twice, without

from zsim.model.architecture import GPT
from zsim.model.gpt import gpt
from zsim.proof import check
from zsim.runtimes.registry import make_schedule
from zsim.schedule.operation import Action, Branch, Compute, Copy, Fill, Operation, Role, SetScalar
from zsim.schedule.replace import replace
from zsim.schedule.schedule import Schedule
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim.strategy.train import LossScale, Train

LAW = LossScale(interval=3)
STRATEGY = Strategy(
    parallel=Parallel(data=2),
    zero=Zero(stage=2, bucket_elements=400),
    train=Train(precision=Precision.FP16, clip_norm=1.0, loss_scale=LAW),
)
MODEL = gpt(
    GPT(layers=1, hidden_size=4, attention_heads=2, sequence_length=2, vocab_size=5),
    micro_batch_size=1,
    precision=STRATEGY.train.precision,
)


@pytest.fixture(name="made", scope="module")
def _made() -> Schedule:
    return make_schedule(MODEL, STRATEGY)


def first(made: Schedule, action: Action) -> str:
    """The first operation of the step that does `action`."""
    (program,) = made.programs
    return next(
        each.id
        for each in program.by_id.values()
        if isinstance(each, Compute) and each.action is action
    )


def scalars(made: Schedule) -> list[str]:
    """The operations at which scalars are found to be others."""
    return [each.operation for each in check(made, MODEL) if each.invariant == "scalars"]


def on_skip(made: Schedule, *added: Operation) -> Schedule:
    """The schedule with more operations on the way that skips."""

    def edit(operation: Operation) -> tuple[Operation, ...]:
        if isinstance(operation, Branch):
            return (replace(operation, then=(*operation.then, *added)),)
        return (operation,)

    return edited(made, edit)


def beginning(made: Schedule, name: str, value: float) -> Schedule:
    """The schedule in which a scalar begins with another value."""
    assert name in {each.name for each in made.scalars}
    return replace(
        made,
        scalars=tuple(
            replace(each, initial=value) if each.name == name else each for each in made.scalars
        ),
    )


def test_the_scheduler_frees_every_gradient_of_the_loss_scale(made: Schedule) -> None:
    assert check(made, MODEL) == ()
    assert check(split(made, made), MODEL) == ()


@pytest.mark.matrix(4)
@pytest.mark.parametrize(
    "spoil",
    [
        lambda made: without(made, first(made, Action.UNSCALE)),
        lambda made: twice(made, first(made, Action.UNSCALE)),
        lambda made: changed(made, first(made, Action.UNSCALE), scalars=()),
        lambda made: changed(made, first(made, Action.CLIP), scalars=()),
    ],
    ids=["not freed", "freed twice", "freed of nothing", "clipped by a norm that is not freed"],
)
def test_gradients_that_are_not_freed_of_the_loss_scale_once_are_found(
    made: Schedule, spoil: Callable[[Schedule], Schedule]
) -> None:
    assert left(spoil(made), MODEL).endswith("update")


def test_a_seed_that_is_not_scaled_is_found_where_backward_begins(made: Schedule) -> None:
    (program,) = made.programs
    (seed,) = (
        each.id
        for each in program.step
        if isinstance(each, Fill) and each.scalar is not None and "mb0" in each.id
    )
    for value in (1.0, 65536.0):
        (found,) = check(changed(made, seed, scalar=None, value=value), MODEL)
        assert found.operation.startswith("step/backward/mb0/")
        assert found.why == (
            "begins with a gradient of the loss that is not multiplied by the loss scale"
        )


def test_training_in_fp16_that_never_scales_or_tests_is_found_without_a_model(
    made: Schedule,
) -> None:
    def plain(each: Operation) -> Iterable[Operation]:
        if isinstance(each, Fill) and each.scalar is not None:
            return (replace(each, scalar=None),)
        if isinstance(each, Compute) and each.action in (Action.UNSCALE, Action.CLIP):
            return (replace(each, scalars=()),)
        return each.otherwise if isinstance(each, Branch) else (each,)

    found = {each.invariant: each.why for each in check(edited(made, plain))}
    assert found["scalars"] == "reads no loss scale, and the strategy trains in fp16"
    idle = edited(made, lambda each: each.otherwise if isinstance(each, Branch) else (each,))
    constant = edited(idle, without_test)
    assert left(constant, MODEL) == "step"


def without_test(each: Operation) -> Iterable[Operation]:
    """A flag that is always zero, where gradients were tested."""
    if not isinstance(each, Compute) or each.action is not Action.FINITE:
        return (each,)
    (flag,) = (operand.view for operand in each.operands if operand.role is Role.OUTPUT)
    return (Fill(id=each.id, stream=each.stream, after=each.after, target=flag, value=0.0),)


def test_a_bucket_of_which_a_part_is_not_divided_is_found(made: Schedule) -> None:
    (program,) = made.programs
    copies = [each for each in program.by_id.values() if isinstance(each, Copy)]
    name = next(each.id for each in copies if each.divisor == 2)
    assert left(changed(made, name, divisor=1), MODEL).endswith("update")


def test_a_gradient_that_is_freed_of_another_scalar_is_found(made: Schedule) -> None:
    faulty = changed(made, first(made, Action.UNSCALE), scalars=("good_steps",))
    assert scalars(faulty)


def test_a_loss_scale_that_changes_before_gradients_are_freed_of_it_is_found(
    made: Schedule,
) -> None:
    (program,) = made.programs
    unscale, change = first(made, Action.UNSCALE), program.by_id["step/update/loss_scale"]

    def edit(each: Operation) -> tuple[Operation, ...]:
        if each.id == change.id:
            return ()
        return (change, each) if each.id == unscale else (each,)

    assert unscale in scalars(edited(made, edit))


@pytest.mark.matrix(4)
@pytest.mark.parametrize("add", [None, 0.0, 2.0, -1.0])
def test_a_step_number_that_is_not_that_of_the_update_is_found(
    made: Schedule, add: float | None
) -> None:
    name = "step/update/step"
    faulty = without(made, name) if add is None else changed(made, name, add=add)
    assert first(made, Action.UPDATE) in scalars(faulty)


def test_a_step_number_that_begins_with_another_value_is_found(made: Schedule) -> None:
    assert scalars(beginning(made, "step", 1.0)) == [first(made, Action.UPDATE)]


def test_a_step_that_is_counted_though_it_is_skipped_is_found(made: Schedule) -> None:
    count = made.programs[0].by_id["step/update/step"]
    faulty = on_skip(made, replace(count, id="step/skip/step"))
    assert scalars(faulty) == ["step/skip/step"]


def test_a_loss_scale_that_does_not_fall_is_found(made: Schedule) -> None:
    """DS 1599: the scale is handled otherwise in one stage than in the others."""
    found = the_finding(without(made, "step/skip/loss_scale"), "scalars", MODEL)
    assert "loss_scale" in found.why
    assert "after an overflow" in found.why


def change_of(made: Schedule, side: str, scalar: str) -> SetScalar:
    """What changes a scalar on one way of the branch."""
    return next(
        each
        for each in made.programs[0].by_id.values()
        if isinstance(each, SetScalar) and each.scalar == scalar and side in each.id
    )


@pytest.mark.matrix(4)
@pytest.mark.parametrize(
    ("side", "scalar", "fields"),
    [
        ("skip", "loss_scale", {"multiply": 0.25}),
        ("skip", "loss_scale", {"minimum": 0.0}),
        ("update", "loss_scale", {"every": 4}),
        ("update", "loss_scale", {"every": 1}),
        ("update", "loss_scale", {"multiply": 4.0}),
        ("update", "loss_scale", {"multiply": 1.0}),
        ("update", "loss_scale", {"maximum": 2.0**16}),
        ("update", "good_steps", {"add": 2.0}),
        ("skip", "good_steps", {"multiply": 1.0, "add": 0.0}),
    ],
    ids=[
        "backed off too far",
        "without a least",
        "grows later",
        "grows in every step",
        "grows too far",
        "never grows",
        "has a greatest",
        "good steps counted twice",
        "good steps not forgotten",
    ],
)
def test_a_loss_scale_that_moves_otherwise_than_the_strategy_says_is_found(
    made: Schedule, side: str, scalar: str, fields: dict[str, Any]
) -> None:
    faulty = changed(made, change_of(made, side, scalar).id, **fields)
    assert {each.invariant for each in check(faulty, MODEL)} == {"scalars"}


@pytest.mark.parametrize(("name", "value"), [("loss_scale", 2.0**10), ("good_steps", 1.0)])
def test_scalars_that_begin_otherwise_are_found(made: Schedule, name: str, value: float) -> None:
    assert scalars(beginning(made, name, value))


def test_another_law_in_the_contract_is_found(made: Schedule) -> None:
    for law in (LAW.but(interval=4), LAW.but(growth=4.0), LAW.but(backoff=0.25)):
        strategy = STRATEGY.but({"train.loss_scale": law})
        contract = replace(made.contract, strategy=strategy)
        assert scalars(replace(made, contract=contract))


def test_a_host_that_counts_otherwise_than_the_others_is_found(made: Schedule) -> None:
    faulty = split(made, without(made, "step/skip/loss_scale"))
    assert {each.role for each in check(faulty, MODEL) if each.invariant == "scalars"} == {"first"}


def test_a_scalar_that_nothing_reads_may_be_anything(made: Schedule) -> None:
    (scalar, *_) = made.scalars
    more = replace(scalar, name="nobody", initial=5.0)
    change = replace(change_of(made, "skip", "good_steps"), id="step/skip/nobody", scalar="nobody")
    assert check(on_skip(replace(made, scalars=(*made.scalars, more)), change), MODEL) == ()


def test_gradients_are_not_scaled_by_what_the_caller_gives(made: Schedule) -> None:
    scalars_given = tuple(replace(each, given=each.name == "loss_scale") for each in made.scalars)
    found = the_finding(replace(made, scalars=scalars_given), "scalars", MODEL)
    assert "which the caller gives" in found.why
