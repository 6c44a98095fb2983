"""What `value` proves: faults are planted in right schedules, and named where they show."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from mutation import changed, edited, moved, twice, without

from zsim.architecture import GPT
from zsim.builder import ScheduleBuilder
from zsim.check import Finding, check
from zsim.gpt import gpt
from zsim.model import Model
from zsim.operation import Action, AllReduce, Compute, Copy, Operation, Reduction, Role, SetScalar
from zsim.rule import Adam
from zsim.schedule import Schedule
from zsim.strategy import Checkpointing, Precision, Strategy
from zsim.zero import schedule

SHAPE = GPT(layers=1, hidden_size=4, attention_heads=2, sequence_length=2, vocab_size=7)


def job(**knobs: object) -> tuple[Schedule, Model]:
    """Two micro-batches of a small GPT on two ranks, and the model."""
    chosen = {"data": 2, "gradient_accumulation_steps": 2, "bucket_elements": 60} | knobs
    strategy = Strategy(**chosen)  # type: ignore[arg-type]  # knobs by name
    model = gpt(SHAPE, micro_batch_size=1, tensor=strategy.tensor, precision=strategy.precision)
    return schedule(model, strategy), model


def value(made: Schedule, model: Model | None) -> list[Finding]:
    return [each for each in check(made, model) if each.invariant == "value"]


def operation(made: Schedule, *words: str) -> str:
    """The first operation of the step with all of `words` in its id."""
    (program,) = made.programs
    return next(
        name
        for name in program.by_id
        if name.startswith("step") and all(word in name for word in words)
    )


def cast_of(made: Schedule) -> Copy:
    """The first copy of an updated master to the parameters."""
    (program,) = made.programs
    return next(
        each
        for each in program.by_id.values()
        if isinstance(each, Copy) and each.source.buffer.endswith("/master")
    )


def copies(made: Schedule, *, accumulate: bool) -> list[str]:
    (program,) = made.programs
    return [
        each.id
        for each in program.by_id.values()
        if isinstance(each, Copy) and each.accumulate is accumulate
    ]


def computes(made: Schedule, action: Action) -> list[Compute]:
    (program,) = made.programs
    return [
        each
        for each in program.by_id.values()
        if isinstance(each, Compute) and each.action is action
    ]


def test_a_cast_that_is_left_out_leaves_parameters_of_the_step_before() -> None:
    made, model = job(stage=3, precision=Precision.BF16)
    found = value(without(made, cast_of(made).id), model)
    assert found[0].why.endswith("which is a parameter of a step before, not a parameter")
    assert found[0].operation.endswith("forward0")
    assert any("bucket0/parameter" in line for line in found[0].witness)


def test_a_cast_of_all_but_one_element_is_found() -> None:
    made, model = job(stage=3, precision=Precision.BF16)
    cast = cast_of(made)
    less = {
        name: replace(view, size=view.size - 1)
        for name, view in (("source", cast.source), ("target", cast.target))
    }
    assert value(changed(made, cast.id, **less), model)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_micro_batch_that_is_not_added_is_missing_at_the_update(stage: int) -> None:
    made, model = job(stage=stage)
    name = next(each for each in copies(made, accumulate=True) if "mb1" in each)
    found = value(without(made, name), model)
    assert found[-1].operation.endswith("update")
    assert "of micro-batch 0, not clipped, not a gradient divided by 4 of micro-batches 0, 1" in (
        found[-1].why
    )


def test_a_micro_batch_that_overwrites_loses_what_came_before() -> None:
    made, model = job(stage=3)
    name = next(each for each in copies(made, accumulate=True) if "mb1" in each)
    found = value(changed(made, name, accumulate=False), model)
    assert "of micro-batch 1, not clipped, not" in found[-1].why
    assert any(line.startswith(name) for line in found[-1].witness)


def test_a_micro_batch_that_is_added_twice_is_found_where_it_is_added() -> None:
    made, model = job(stage=3)
    name = next(each for each in copies(made, accumulate=True) if "mb1" in each)
    (found, *_) = value(twice(made, name), model)
    assert found.operation == f"{name}/again"
    assert found.why.endswith("which has it from micro-batch 1 already")


def test_a_gradient_that_is_clipped_once_more_or_not_at_all_is_found() -> None:
    made, model = job(stage=1, clip_norm=1.0)
    name = computes(made, Action.CLIP)[0].id
    (found,) = value(without(made, name), model)
    assert "not clipped, not a gradient" in found.why
    (found,) = value(twice(made, name), model)
    assert "clipped more than once" in found.why


@pytest.mark.parametrize("action", [Action.NORM, Action.FINITE])
@pytest.mark.parametrize("stage", [0, 3])
def test_a_norm_or_a_finite_test_that_leaves_a_bucket_out_is_found(
    action: Action, stage: int
) -> None:
    made, model = job(stage=stage, clip_norm=1.0, precision=Precision.FP16)
    (measure,) = computes(made, action)
    first = measure.operands[0]
    assert first.role is Role.GRADIENT
    found = value(changed(made, measure.id, operands=measure.operands[1:]), model)
    assert found
    assert all("which leaves out embedding.token.weight" in each.why for each in found)


def test_a_norm_that_counts_a_bucket_twice_is_found() -> None:
    made, model = job(stage=2, clip_norm=1.0)
    (measure,) = computes(made, Action.NORM)
    operands = (measure.operands[0], *measure.operands)
    found = value(changed(made, measure.id, operands=operands), model)
    assert all("counts embedding.token.weight more than once" in each.why for each in found)
    assert found


def test_a_step_count_that_is_not_that_of_the_updates_is_found() -> None:
    made, model = job(stage=1, optimizer=Adam())
    (program,) = made.programs
    (count,) = (each for each in program.step if isinstance(each, SetScalar))
    for faulty in (changed(made, count.id, add=2.0), without(made, count.id)):
        found = value(faulty, model)
        assert found[0].why == "is given step, which is not the number of updates with this one"


def test_a_loss_scale_that_changes_before_gradients_are_freed_of_it_is_found() -> None:
    made, model = job(stage=2, precision=Precision.FP16)
    scale = operation(made, "step/update/loss_scale")
    faulty = moved(made, scale, before=computes(made, Action.UNSCALE)[0].id)
    assert any("divided by loss_scale as set by" in each.why for each in value(faulty, model))


@pytest.mark.parametrize("with_model", [True, False])
def test_activations_in_one_buffer_while_both_are_needed_are_found(with_model: bool) -> None:
    made, model = job(stage=1)

    def edit(each: Operation) -> tuple[Operation, ...]:
        if isinstance(each, Compute):
            operands = tuple(
                replace(operand, view=replace(operand.view, buffer="embedding/output"))
                if operand.view.buffer == "block0/output"
                else operand
                for operand in each.operands
            )
            return (replace(each, operands=operands),)
        return (each,)

    found = value(edited(made, edit), model if with_model else None)
    assert any("which is an activation block0" in each.why for each in found)
    assert any(each.operation.endswith("block0/backward0") for each in found)


def test_a_sum_over_tensor_ranks_that_averages_is_found_in_forward() -> None:
    made, model = job(stage=1, tensor=2, checkpointing=Checkpointing.FULL)
    (program,) = made.programs
    name = next(
        each.id
        for each in program.step
        if isinstance(each, AllReduce) and "forward" in each.id and "block0" in each.id
    )
    found = value(changed(made, name, reduction=Reduction.AVERAGE), model)
    assert any("divided by 2, not an activation" in each.why for each in found)


def test_a_gradient_of_an_activation_that_lacks_a_reader_is_found() -> None:
    made, model = job(stage=1, tensor=2)
    name = next(each for each in copies(made, accumulate=True) if "/add/" in each)
    found = value(without(made, name), model)
    assert any("of use 1 of 2" in each.why or "of use 2 of 2" in each.why for each in found)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda made: without(made, copies(made, accumulate=True)[0]),
        lambda made: without(made, cast_of(made).id),
        lambda made: without(made, computes(made, Action.CLIP)[0].id),
    ],
    ids=["a micro-batch", "a cast", "a clip"],
)
def test_it_is_found_on_one_rank_and_without_the_model_too(
    spoil: Callable[[Schedule], Schedule],
) -> None:
    made, _ = job(stage=2, data=1, precision=Precision.BF16, clip_norm=1.0)
    assert check(made) == ()
    assert value(spoil(made), None)


def handed_on(count: int) -> tuple[Finding, ...]:
    """Each step hands what so many buffers hold to the one before: values go on for that long."""
    build = ScheduleBuilder.of("handed on", data=2)
    held = [build.buffer(f"held{place}", 2, persistent=True) for place in range(count)]
    build.setup.allocate(*held)
    for place, each in enumerate(held):
        build.setup.fill(f"begin{place}", each.all, 0.0)
    for place in range(count - 1):
        build.step.copy(f"hand_on{place}", held[place + 1].all, held[place].all)
    build.step.fill("new", held[-1].all, 1.0)
    return check(build.schedule())


def test_a_step_that_is_not_gone_through_to_the_end_is_no_proof() -> None:
    assert not handed_on(4)
    (finding,) = handed_on(40)
    assert (finding.invariant, finding.operation) == ("value", "step")
    assert "16 steps" in finding.why
