import pytest
from mutation import changed, hand, twice, without

from zsim.architecture import GPT
from zsim.builder import ScheduleBuilder
from zsim.check import Finding, check
from zsim.gpt import gpt
from zsim.layout import Layout, Piece
from zsim.operation import Action, AllGather, Compute, Role, View
from zsim.rule import SGD
from zsim.schedule import Kind, Schedule
from zsim.strategy import Precision, Strategy
from zsim.zero import schedule

SHAPE = GPT(layers=1, hidden_size=4, attention_heads=2, sequence_length=3, vocab_size=7)


def completeness(made: Schedule) -> list[Finding]:
    return [each for each in check(made) if each.invariant == "completeness"]


def test_a_gather_that_nothing_uses_is_found() -> None:
    """DS 5828, 3156: what is prefetched is never used, since another branch was taken."""
    (found,) = completeness(without(hand(), "step/layer1/forward"))
    assert found.operation == "step/layer1/gather"
    assert found.why == "brings into layer1/weight what nothing reads"
    assert found.witness[1] == "step/layer1/weight/free frees it"


def test_a_gather_of_what_is_gathered_already_is_found() -> None:
    """PT 144800: the first one is for nothing."""
    (found,) = completeness(twice(hand(), "step/layer1/gather"))
    assert found.operation == "step/layer1/gather"
    assert found.witness[1] == "step/layer1/gather/again writes all of it"


def test_a_gradient_that_is_reduced_for_nothing_is_found() -> None:
    found = completeness(without(hand(), "step/layer1/update"))
    assert [each.operation for each in found] == ["step/layer1/reduce", "step"]
    assert "updates no elements of layer1/shard" in found[1].why


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_update_that_is_left_out_or_made_twice_is_found(stage: int) -> None:
    model = gpt(SHAPE, micro_batch_size=1, precision=Precision.BF16)
    made = schedule(model, Strategy(stage=stage, data=3, precision=Precision.BF16))
    assert completeness(made) == []
    updates = [
        each.id
        for each in made.programs[0].by_id.values()
        if isinstance(each, Compute) and each.action is Action.UPDATE
    ]
    for update in updates:
        assert any(
            "updates no elements" in each.why for each in completeness(without(made, update))
        )
        assert any(
            each.operation == f"{update}/again" for each in completeness(twice(made, update))
        )


def test_an_update_of_a_part_is_found() -> None:
    made = hand()
    update = made.programs[0].by_id["step/layer1/update"]
    assert isinstance(update, Compute)
    half = [View(buffer=each.view.buffer, size=1) for each in update.operands]
    operands = tuple(
        type(each)(role=each.role, view=view)
        for each, view in zip(update.operands, half, strict=True)
    )
    (found,) = completeness(changed(made, update.id, operands=operands))
    assert found.why == "updates 4 elements of layer1/shard, which has 6 to train"


@pytest.mark.parametrize(("start", "size", "parameter"), [(0, 1, None), (1, 2, "first")])
def test_what_an_update_leaves_out_may_be_padding_and_no_parameter(
    start: int, size: int, parameter: str | None
) -> None:
    """Two shards of 3; the second one ends with 2 elements of padding."""
    build = ScheduleBuilder.of("padded", data=2)
    pieces = (Piece(parameter="first", start=0, size=1), Piece(parameter="last", start=3, size=1))
    build.layout(Layout(name="cut", pieces=pieces, elements=6, axis="data"))
    weight, gradient = (
        build.buffer(name, 3, kind=kind, layout="cut", shard="data", persistent=True)
        for name, kind in (("weight", Kind.PARAMETER), ("gradient", Kind.GRADIENT))
    )
    build.setup.allocate(weight, gradient)
    for buffer in (weight, gradient):
        build.setup.fill(buffer.name, buffer.all, 0.0)
    operands = [
        (role, View(buffer=buffer.name, start=start, size=size))
        for role, buffer in ((Role.PARAMETER, weight), (Role.GRADIENT, gradient))
    ]
    build.step.compute("update", Action.UPDATE, operands, rule=SGD())
    found = [each.why for each in completeness(build.schedule())]
    why = f"does not update {parameter}, which lies in weight"
    assert found == ([] if parameter is None else [why])


def test_every_gather_of_every_stage_is_used() -> None:
    model = gpt(SHAPE, micro_batch_size=1)
    made = schedule(model, Strategy(stage=3, data=2, prefetch_units=3))
    gathers = [each for each in made.programs[0].step if isinstance(each, AllGather)]
    assert gathers
    assert completeness(made) == []
