"""Segments read the parameters that they are about; contracts promise what the closed forms say."""

from collections.abc import Iterable
from dataclasses import replace

from mutation import edited

from zsim.architecture import GPT
from zsim.check import check
from zsim.gpt import gpt
from zsim.operation import Compute, Operand, Operation, Role
from zsim.schedule import Schedule
from zsim.strategy import Strategy
from zsim.zero import schedule

STRATEGY = Strategy(stage=3, data=2)
MODEL = gpt(
    GPT(layers=2, hidden_size=4, attention_heads=2, sequence_length=2, vocab_size=5),
    micro_batch_size=1,
)
NAME = "step/forward/mb0/block1/forward0"


def reading(change: "list[int]", shift: int = 0) -> Schedule:
    """Block 1 reads its parameters in the order `change`, each `shift` elements further on."""

    def edit(operation: Operation) -> Iterable[Operation]:
        if operation.id != NAME or not isinstance(operation, Compute):
            return (operation,)
        read = [each for each in operation.operands if each.role is Role.PARAMETER]
        rest = [each for each in operation.operands if each.role is not Role.PARAMETER]
        moved = [
            Operand(role=Role.PARAMETER, view=replace(view, start=view.start + shift))
            for view in (read[index].view for index in change)
        ]
        return (replace(operation, operands=(*rest, *moved)),)

    return edited(schedule(MODEL, STRATEGY), edit)


def test_the_parameters_of_a_segment_in_the_order_of_its_unit_are_fine() -> None:
    assert check(reading(list(range(12))), MODEL) == ()


def test_a_view_shifted_by_one_element_is_no_parameter() -> None:
    (first, *_) = check(reading([0], shift=1))
    assert (first.invariant, first.operation) == ("partition", NAME)
    assert "a part of bucket2/gathered that is no parameter" in first.why


def test_two_parameters_of_one_size_swapped_are_found_with_the_model() -> None:
    swapped = [1, 0, *range(2, 12)]
    assert check(reading(swapped)) == ()
    (finding,) = check(reading(swapped), MODEL)
    assert finding.why == "computes with other parameters than segment 0 of block1 has"
    assert finding.witness[0].startswith("its views: block1.ln1.bias, block1.ln1.weight, ")
    assert finding.witness[2:] == (
        "block1.ln1.bias, in bucket2/gathered, where block1.ln1.weight is needed",
        "block1.ln1.weight, in bucket2/gathered, where block1.ln1.bias is needed",
    )


def test_a_parameter_left_out_is_found_with_the_model() -> None:
    (finding,) = check(reading(list(range(11))), MODEL)
    assert (finding.invariant, finding.operation) == ("partition", NAME)


def promising(strategy: Strategy, loss_divisor: int) -> Schedule:
    made = schedule(MODEL, STRATEGY)
    contract = replace(made.contract, strategy=strategy, loss_divisor=loss_divisor)
    return replace(made, contract=contract)


def test_a_contract_that_names_another_strategy_is_found() -> None:
    found = check(promising(Strategy(stage=2, data=2), 2), MODEL)
    assert [(finding.invariant, finding.operation) for finding in found] == [
        ("memory", "persistent/parameter"),
        ("volume", "contract/wire_bytes"),
    ]


def test_a_contract_that_divides_by_something_else_is_found_and_so_is_each_update() -> None:
    first, *others = check(promising(STRATEGY, 99), MODEL)
    assert {each.invariant for each in (first, *others[:-1])} == {"value"}
    assert first.operation == "step/update/bucket0/update"
    assert first.why.endswith("is a gradient divided by 2, not a gradient divided by 99")
    assert (others[-1].invariant, others[-1].operation) == ("volume", "contract/loss_divisor")
    assert others[-1].witness == ("promised: 99", "by closed form: 2")
