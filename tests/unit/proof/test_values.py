"""Steps of zsim's own schedules are those of plain training; other steps are found."""

from collections.abc import Callable, Iterable, Mapping

import pytest
from faults.findings import left, named, the_finding, unwritten
from faults.schedules import changed, edited, hand, twice, without

from zsim.model.architecture import GPT
from zsim.model.gpt import gpt
from zsim.model.model import Model
from zsim.proof import check, prove
from zsim.runtimes.registry import make_schedule
from zsim.schedule.operation import (
    Action,
    AllReduce,
    Compute,
    Copy,
    Operation,
    Reduction,
    Role,
)
from zsim.schedule.replace import replace
from zsim.schedule.schedule import Schedule
from zsim.strategy.activations import Checkpointing
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim.strategy.train import Train

SHAPE = GPT(layers=1, hidden_size=4, attention_heads=2, sequence_length=2, vocab_size=7)
STRATEGY = Strategy(parallel=Parallel(data=2), zero=Zero(stage=3))
MODEL = gpt(
    GPT(layers=2, hidden_size=4, attention_heads=2, sequence_length=2, vocab_size=5),
    micro_batch_size=1,
)
NAME = "step/forward/mb0/block1/forward0"


def job(knobs: Mapping[str, object]) -> tuple[Schedule, Model]:
    """Two micro-batches of a small GPT on two ranks, and the model."""
    chosen = {
        "parallel.data": 2,
        "train.gradient_accumulation_steps": 2,
        "zero.bucket_elements": 60,
    }
    strategy = Strategy.of({**chosen, **knobs})
    model = gpt(
        SHAPE,
        micro_batch_size=1,
        tensor=strategy.parallel.tensor,
        precision=strategy.train.precision,
    )
    return make_schedule(model, strategy), model


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


def test_a_proof_says_what_was_run_and_what_was_assumed() -> None:
    made, model = job({"zero.stage": 3})
    shown = prove(made, model).values
    assert shown is not None
    assert (shown.findings, shown.not_shown, shown.assumed) == ((), "", ())
    assert (shown.ranks, shown.classes) == (2, 2)
    assert shown.error_bits >= 40
    without_model = prove(made).values
    assert without_model is not None
    assert any("the model" in each for each in without_model.assumed)


def test_values_are_not_run_where_the_order_of_operations_is_wrong() -> None:
    made, model = job({"zero.stage": 2})
    reduction = next(name for name in made.programs[0].by_id if "/reduce/" in name)
    proof = prove(changed(made, reduction, after=()), model)
    assert proof.values is None
    assert {each.invariant for each in proof.findings} <= {"lifetime", "races"}


def test_a_cast_that_is_left_out_leaves_parameters_of_the_step_before() -> None:
    made, model = job({"zero.stage": 3, "train.precision": Precision.BF16})
    found = the_finding(without(made, cast_of(made).id), "values", model)
    assert found.operation == "step"
    assert "in bucket0/parameter" in found.why


def test_a_cast_of_all_but_one_element_is_found() -> None:
    made, model = job({"zero.stage": 3, "train.precision": Precision.BF16})
    cast = cast_of(made)
    less = {
        name: replace(view, size=view.size - 1)
        for name, view in (("source", cast.source), ("target", cast.target))
    }
    assert left(changed(made, cast.id, **less), model) == cast.id


@pytest.mark.matrix(4)
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize(
    "spoil",
    [
        without,
        lambda made, name: changed(made, name, accumulate=False),
        twice,
    ],
    ids=["left out", "overwrites", "twice"],
)
def test_a_micro_batch_that_does_not_count_once_is_found_at_the_update(
    spoil: Callable[[Schedule, str], Schedule], stage: int
) -> None:
    made, model = job({"zero.stage": stage})
    name = next(each for each in copies(made, accumulate=True) if "mb1" in each)
    assert left(spoil(made, name), model) in {each.id for each in computes(made, Action.UPDATE)}


@pytest.mark.matrix(4)
@pytest.mark.parametrize("stage", range(4))
def test_gradients_that_are_clipped_once_more_or_not_at_all_are_found(stage: int) -> None:
    made, model = job({"zero.stage": stage, "train.clip_norm": 1.0})
    name = computes(made, Action.CLIP)[0].id
    for faulty in (without(made, name), twice(made, name)):
        assert left(faulty, model).endswith("update")


@pytest.mark.matrix(4)
@pytest.mark.parametrize("stage", [0, 3])
def test_a_norm_that_leaves_a_bucket_out_or_counts_it_twice_is_found(stage: int) -> None:
    made, model = job(
        {"zero.stage": stage, "train.clip_norm": 1.0, "train.precision": Precision.FP16}
    )
    (measure,) = computes(made, Action.NORM)
    assert measure.operands[0].role is Role.GRADIENT
    for operands in (measure.operands[1:], (measure.operands[0], *measure.operands)):
        assert left(changed(made, measure.id, operands=operands), model).endswith("update")


@pytest.mark.matrix(4)
@pytest.mark.parametrize("stage", [0, 3])
def test_a_test_for_overflow_that_leaves_a_bucket_out_is_found_where_it_decides(
    stage: int,
) -> None:
    made, model = job(
        {"zero.stage": stage, "train.clip_norm": 1.0, "train.precision": Precision.FP16}
    )
    (measure,) = computes(made, Action.FINITE)
    found = the_finding(changed(made, measure.id, operands=measure.operands[1:]), "values", model)
    assert found.operation == "step/update/branch"
    assert "overflow of the gradient of" in found.why


@pytest.mark.parametrize("with_model", [True, False])
def test_activations_in_one_buffer_while_both_are_needed_are_found(with_model: bool) -> None:
    made, model = job({"zero.stage": 1})

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

    found = named(edited(made, edit), model if with_model else None)
    assert ("races", "step/forward/mb0/block0/forward0") in found


@pytest.mark.one_commit_in(4)
def test_a_sum_over_tensor_ranks_that_averages_is_found_in_forward() -> None:
    made, model = job(
        {"zero.stage": 1, "parallel.tensor": 2, "activations.checkpointing": Checkpointing.FULL}
    )
    (program,) = made.programs
    name = next(
        each.id
        for each in program.step
        if isinstance(each, AllReduce) and "forward" in each.id and "block0" in each.id
    )
    faulty = changed(made, name, reduction=Reduction.AVERAGE)
    assert left(faulty, model) == "step/forward/mb0/block0/forward2"


@pytest.mark.one_commit_in(4)
def test_a_gradient_of_an_activation_that_lacks_a_reader_is_found() -> None:
    made, model = job({"zero.stage": 1, "parallel.tensor": 2})
    name = next(each for each in copies(made, accumulate=True) if "/add/" in each)
    assert left(without(made, name), model).endswith("update")


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
    made, _ = job(
        {
            "zero.stage": 2,
            "parallel.data": 1,
            "train.precision": Precision.BF16,
            "train.clip_norm": 1.0,
        }
    )
    assert check(made) == ()
    assert named(spoil(made))[0][0] == "values"


def test_what_comes_out_of_a_unit_that_is_not_run_is_found_where_it_is_read() -> None:
    """DS 5828, 3156: what is prefetched is never used, since another branch was taken."""
    assert unwritten(without(hand(), "step/layer1/forward")) == "step/loss/forward"


@pytest.mark.parametrize("stage", range(4))
def test_an_update_that_is_left_out_or_made_twice_is_found(stage: int) -> None:
    model = gpt(SHAPE, micro_batch_size=1, precision=Precision.BF16)
    made = make_schedule(
        model,
        Strategy(
            parallel=Parallel(data=3), zero=Zero(stage=stage), train=Train(precision=Precision.BF16)
        ),
    )
    assert check(made, model) == ()
    for update in computes(made, Action.UPDATE):
        assert {each for each, _ in named(without(made, update.id), model)} & {"values", "lifetime"}
        assert named(twice(made, update.id), model)[0][0] == "values"


def test_an_update_that_is_left_out_leaves_the_parameters_of_the_step_before() -> None:
    found = the_finding(without(hand(), "step/layer1/update"), "values")
    assert "layer1/shard" in found.why


def test_an_update_of_a_part_is_found() -> None:
    made = hand()
    update = made.programs[0].by_id["step/layer1/update"]
    assert isinstance(update, Compute)
    operands = tuple(replace(each, view=replace(each.view, size=1)) for each in update.operands)
    assert left(changed(made, update.id, operands=operands)) == update.id


def test_padding_that_nothing_wrote_does_not_reach_a_reduction() -> None:
    faulty = without(hand(), "step/layer1/pad")
    waits = changed(faulty, "step/layer1/reduce", after=("step/layer1/stage",))
    assert unwritten(waits) == "step/layer1/reduce"


def reading(change: "list[int]", shift: int = 0) -> Schedule:
    """Block 1 reads its parameters in the order `change`, the first `shift` elements further."""

    def edit(operation: Operation) -> Iterable[Operation]:
        if operation.id != NAME or not isinstance(operation, Compute):
            return (operation,)
        read = [each for each in operation.operands if each.role is Role.PARAMETER]
        rest = [each for each in operation.operands if each.role is not Role.PARAMETER]
        moved = [
            replace(read[index], view=replace(read[index].view, start=read[index].view.start + by))
            for by, index in zip((shift, *(0 for _ in change)), change, strict=False)
        ]
        return (replace(operation, operands=(*rest, *moved)),)

    return edited(make_schedule(MODEL, STRATEGY), edit)


def test_the_parameters_of_a_segment_in_the_order_of_its_unit_are_fine() -> None:
    assert check(reading(list(range(12))), MODEL) == ()


def test_a_view_shifted_by_one_element_is_no_parameter() -> None:
    assert left(reading(list(range(12)), shift=1), MODEL) == NAME


def test_parameters_of_one_size_swapped_are_found() -> None:
    swapped = reading([1, 0, *range(2, 12)])
    assert left(swapped, MODEL) == NAME
    # Without the model the first forward says what is read, and backward reads something else.
    assert left(swapped) == "step/backward/mb0/block1/backward0"


def test_a_parameter_left_out_is_found_where_the_output_is_read() -> None:
    assert left(reading(list(range(11))), MODEL) == "step/forward/mb0/head/forward0"


def promising(strategy: Strategy, loss_divisor: int) -> Schedule:
    made = make_schedule(MODEL, STRATEGY)
    contract = replace(made.contract, strategy=strategy, loss_divisor=loss_divisor)
    return replace(made, contract=contract)


def test_a_contract_that_names_another_strategy_is_found() -> None:
    assert named(promising(Strategy(parallel=Parallel(data=2), zero=Zero(stage=2)), 2), MODEL) == [
        ("memory", "persistent/parameter"),
        ("volume", "contract/wire_bytes"),
    ]


def test_a_contract_that_divides_by_something_else_is_found_and_so_is_the_update() -> None:
    assert named(promising(STRATEGY, 99), MODEL) == [
        ("values", "step/update/bucket0/update"),
        ("volume", "contract/loss_divisor"),
    ]
    volume = the_finding(promising(STRATEGY, 99), "volume", MODEL)
    assert volume.witness == ("promised: 99", "by closed form: 2")


def test_a_segment_that_the_model_does_not_have_is_found() -> None:
    made = edited(
        make_schedule(MODEL, STRATEGY),
        lambda each: (
            (replace(each, segment=9),)
            if isinstance(each, Compute) and each.id == NAME
            else (each,)
        ),
    )
    assert named(made, MODEL) == [("values", NAME)]
