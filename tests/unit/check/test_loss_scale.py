"""Gradients are freed of the loss scale once, and so is the norm by which they are clipped."""

from dataclasses import replace

import pytest
from mutation import changed, edited, twice, without

from zsim.architecture import GPT
from zsim.check import Finding, check
from zsim.gpt import gpt
from zsim.operation import Action, Branch, Compute, Copy, Fill, Operation, Role
from zsim.runtime.deepspeed import DeepSpeed
from zsim.schedule import Schedule
from zsim.strategy import Precision, Strategy
from zsim.zero import schedule

STRATEGY = Strategy(stage=2, data=2, precision=Precision.FP16, clip_norm=1.0, bucket_elements=400)
MODEL = gpt(
    GPT(layers=1, hidden_size=4, attention_heads=2, sequence_length=2, vocab_size=5),
    micro_batch_size=1,
    precision=STRATEGY.precision,
)


@pytest.fixture(name="made", scope="module")
def _made() -> Schedule:
    return schedule(MODEL, STRATEGY)


def first(made: Schedule, action: Action) -> str:
    """The first operation of the step that does `action`."""
    (program,) = made.programs
    return next(
        each.id
        for each in program.by_id.values()
        if isinstance(each, Compute) and each.action is action
    )


def value(made: Schedule) -> list[Finding]:
    return [each for each in check(made, MODEL) if each.invariant == "value"]


def test_the_scheduler_frees_every_gradient_of_the_loss_scale(made: Schedule) -> None:
    assert check(made, MODEL) == ()


def test_a_gradient_that_keeps_the_loss_scale_is_found_where_it_is_clipped(made: Schedule) -> None:
    (found,) = value(without(made, first(made, Action.UNSCALE)))[:1]
    assert found.operation == first(made, Action.CLIP)
    assert "a gradient divided by 2 multiplied by loss_scale, by what is the norm" in found.why


def test_a_gradient_that_is_freed_twice_is_found(made: Schedule) -> None:
    faulty = value(twice(made, first(made, Action.UNSCALE)))
    assert "a gradient divided by 2 divided by loss_scale" in faulty[0].why


def test_a_norm_that_keeps_the_loss_scale_is_found(made: Schedule) -> None:
    name = first(made, Action.CLIP)
    (found,) = value(changed(made, name, scalars=()))
    assert found.operation == name
    assert found.why.endswith(
        "by what is the norm of a gradient divided by 2 multiplied by loss_scale"
    )


def test_a_seed_that_is_not_scaled_is_found_at_every_update(made: Schedule) -> None:
    (program,) = made.programs
    (seed,) = (
        each.id
        for each in program.step
        if isinstance(each, Fill) and each.scalar is not None and "mb0" in each.id
    )
    found = value(changed(made, seed, scalar=None))
    assert {each.operation.rsplit("/", 1)[-1] for each in found} == {"update"}
    assert "a gradient divided by 2 divided by loss_scale" in found[0].why


def test_a_bucket_of_which_a_part_is_not_divided_is_found(made: Schedule) -> None:
    (program,) = made.programs
    copies = [each for each in program.by_id.values() if isinstance(each, Copy)]
    name = next(each.id for each in copies if each.divisor == 2)
    found = value(changed(made, name, divisor=1))
    assert found[-1].operation.endswith("update")
    assert "which is a mixture, not a gradient divided by 2" in found[-1].why


def test_what_a_skipped_step_leaves_is_looked_at_although_it_counts_skipped_steps() -> None:
    made = schedule(MODEL, Strategy(stage=2, data=2, precision=Precision.FP16, emulate=DeepSpeed()))
    parameter = next(
        operand.view
        for each in made.programs[0].step
        if isinstance(each, Compute) and each.action is Action.FORWARD
        for operand in each.operands
        if operand.role is Role.PARAMETER
    )

    def edit(operation: Operation) -> tuple[Operation, ...]:
        if not isinstance(operation, Branch):
            return (operation,)
        wrong = Fill(id="step/wrong", stream="compute", target=parameter, value=0.0)
        return (replace(operation, then=(*operation.then, wrong)),)

    assert check(made, MODEL) == ()
    found = value(edited(made, edit))
    assert found[0].why.endswith("which is a mixture, not a parameter")
