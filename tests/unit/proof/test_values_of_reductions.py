"""Gradients of a weight on 4 x 2 ranks, reduced, measured and applied in any way."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from faults.findings import left, named, unwritten
from faults.schedules import changed, hand, without
from trained_weight import STREAM, Trained

from zsim.proof import check
from zsim.schedule.builder import COMMUNICATION, BufferHandle
from zsim.schedule.mesh import Axis
from zsim.schedule.operation import Action, Copy, Operand, Previous, Reduction, Role, View
from zsim.schedule.schedule import Schedule
from zsim.strategy.optimizer_rule import ClipNorm

Way = Callable[[Trained], None]


def scattered(case: Trained) -> None:
    case.backward()
    case.scatter()
    case.update(case.shard.all)


def reduced(case: Trained) -> None:
    case.backward()
    case.reduce("reduce", "data")
    case.update(case.whole.own("data", 2))


def in_place(case: Trained) -> None:
    case.backward()
    own = case.whole.own("data", 2)
    case.step.reduce_scatter("scatter", "data", case.whole.all, own, stream=STREAM)
    case.update(own)


def maximum_of_copies(case: Trained) -> None:
    case.backward()
    case.reduce("reduce", "data")
    case.reduce("again", "data", Reduction.MAX)
    case.update(case.whole.own("data", 2))


def average_of_copies(case: Trained) -> None:
    case.backward()
    case.reduce("mean", "tensor", Reduction.AVERAGE)
    case.scatter()
    case.update(case.shard.all)


def pass_on(
    case: Trained, name: str, source: BufferHandle, target: BufferHandle, offset: int
) -> None:
    """Send to the rank `offset` further on, and take what comes from the other side."""
    case.step.send(f"send {name}", "data", source.all, offset, stream=STREAM)
    case.step.receive(f"receive {name}", "data", target.all, -offset, stream=STREAM)
    case.step.together(name, 2)


def sent_on(case: Trained) -> None:
    """Each rank hands its shard to the next and takes it back."""
    other = case.made("other", 2, layout="cut", shard="data")
    case.backward()
    case.scatter()
    pass_on(case, "there", case.shard, other, 1)
    pass_on(case, "back", other, case.shard, -1)
    case.update(case.shard.all)
    case.step.free(other)


RIGHT: dict[str, Way] = {
    "reduce-scatter": scattered,
    "all-reduce": reduced,
    "in place": in_place,
    "a maximum of copies": maximum_of_copies,
    "an average of copies": average_of_copies,
    "sent there and back": sent_on,
}


@pytest.mark.parametrize("way", RIGHT.values(), ids=RIGHT.keys())
def test_a_reduction_over_the_ranks_that_see_data_is_proved(way: Way) -> None:
    case = Trained()
    way(case)
    assert check(case.schedule()) == ()


def not_reduced(case: Trained) -> None:
    case.backward()
    case.update(case.whole.own("data", 2))


def reduced_over_others(case: Trained) -> None:
    case.backward()
    case.reduce("reduce", "tensor")
    case.update(case.whole.own("data", 2))


def reduced_over_all(case: Trained) -> None:
    """Ranks that share the work on the same data count twice."""
    case.backward()
    case.reduce("reduce", "world")
    case.update(case.whole.own("data", 2))


def reduced_twice(case: Trained) -> None:
    case.backward()
    case.reduce("reduce", "data")
    case.reduce("again", "data")
    case.update(case.whole.own("data", 2))


def averaged(case: Trained) -> None:
    case.backward()
    case.reduce("reduce", "data", Reduction.AVERAGE)
    case.update(case.whole.own("data", 2))


def scattered_after_a_sum_in_the_own_slot(case: Trained) -> None:
    """As when ranks reduce over replicas before they have reduced inside: the rest has no sum."""
    case.backward()
    own = case.whole.own("data", 2)
    case.step.all_reduce("slot", "tensor", own, stream=STREAM)
    case.scatter()
    case.update(case.shard.all)


def of_the_neighbour(case: Trained) -> None:
    other = case.made("other", 2, layout="cut", shard="data")
    case.backward()
    case.scatter()
    pass_on(case, "there", case.shard, other, 1)
    case.update(other.all)
    case.step.free(other)


def sent_for_a_sum(case: Trained) -> None:
    other = case.made("other", 8, layout="cut")
    case.backward()
    pass_on(case, "there", case.whole, other, 1)
    case.step.copy("add", other.all, case.whole.all, accumulate=True)
    case.update(case.whole.own("data", 2))
    case.step.free(other)


def of_the_first_rank(case: Trained) -> None:
    case.backward()
    case.reduce("reduce", "data")
    case.update(case.whole[:2])


def added_when_one_is_reduced(case: Trained) -> None:
    """The second micro-batch is added to the sum of the first, and all of it reduced again."""
    other = case.made("other", 8, layout="cut")
    case.backward()
    case.reduce("reduce", "data")
    case.step.copy("keep", case.whole.all, other.all)
    case.backward()
    case.step.copy("add", other.all, case.whole.all, accumulate=True)
    case.step.free(other)
    case.scatter()
    case.update(case.shard.all)


WRONG: dict[str, Way] = {
    "not at all": not_reduced,
    "over the tensor ranks": reduced_over_others,
    "over all ranks": reduced_over_all,
    "twice": reduced_twice,
    "as an average": averaged,
    "after a sum in a slot": scattered_after_a_sum_in_the_own_slot,
    "and sent to the neighbour": of_the_neighbour,
    "sent instead": sent_for_a_sum,
    "and the part of the first taken": of_the_first_rank,
    "before the other micro-batch": added_when_one_is_reduced,
}


@pytest.mark.matrix(4)
@pytest.mark.parametrize("way", WRONG.values(), ids=WRONG.keys())
def test_a_gradient_that_is_reduced_otherwise_is_found_at_the_update(way: Way) -> None:
    case = Trained()
    way(case)
    assert named(case.schedule()) == [("values", "step/update")]


def test_a_maximum_of_summands_is_not_their_sum() -> None:
    case = Trained()
    case.backward()
    case.reduce("reduce", "data", Reduction.MAX)
    case.update(case.whole.own("data", 2))
    assert named(case.schedule()) == [("values", "step/reduce")]


def test_a_division_is_that_of_the_contract() -> None:
    def divided(divisor: int, promised: int) -> Schedule:
        case = Trained()
        case.backward()
        case.step.copy("divide", case.whole.all, case.whole.all, divisor=divisor)
        case.scatter()
        case.update(case.shard.all)
        return case.schedule(divisor=promised)

    assert check(divided(4, 4)) == ()
    assert left(divided(4, 8)) == "step/update"


def test_parameters_that_are_not_gathered_after_their_update_are_found() -> None:
    case = Trained()
    case.backward()
    case.scatter()
    case.update(case.shard.all, gathers=False)
    assert left(case.schedule()) == "step/put"


def test_copies_are_not_gathered() -> None:
    case = Trained()
    case.backward()
    case.reduce("reduce", "data")
    other = case.made("other", 8, layout="cut")
    case.step.all_gather("wrong", "data", case.whole[:2], other.all, stream=STREAM)
    case.update(other.own("data", 2))
    case.step.free(other)
    assert left(case.schedule()) == "step/update"


def clipped(*groups: str, measures: str = "shard") -> Schedule:
    """A norm of shards or of the whole gradient, reduced over groups, by which both are clipped."""
    case = Trained()
    number = case.made("number", 1)
    case.backward()
    case.scatter()
    measured = case.shard if measures == "shard" else case.whole
    operands = [(Role.GRADIENT, measured.all), (Role.OUTPUT, number.all)]
    case.step.compute("norm", Action.NORM, operands)
    for group in groups:
        case.step.all_reduce(f"reduce over {group}", group, number.all, stream=STREAM)
    operands = [(Role.INPUT, number.all), (Role.GRADIENT, case.shard.all)]
    case.step.compute("clip", Action.CLIP, operands, rule=ClipNorm(maximum=1.0))
    case.update(case.shard.all)
    case.step.free(number)
    return case.schedule()


@pytest.mark.parametrize("groups", [("world",), ("data", "tensor"), ("tensor", "data")])
def test_a_norm_of_shards_is_reduced_over_all_ranks(groups: tuple[str, ...]) -> None:
    assert check(clipped(*groups)) == ()


@pytest.mark.parametrize(
    "groups",
    [
        (),
        ("tensor",),
        ("world", "data"),
        ("data",),
    ],
)
def test_a_norm_that_is_reduced_over_other_ranks_is_found(groups: tuple[str, ...]) -> None:
    assert named(clipped(*groups))[0] == ("values", "step/update")


def test_a_norm_of_what_is_not_reduced_is_found() -> None:
    assert named(clipped("world", measures="whole"))[0] == ("values", "step/update")


def test_an_update_without_its_reduce_scatter_is_found() -> None:
    assert unwritten(without(hand(), "step/layer1/reduce")) == "step/layer1/update"


def test_a_gradient_that_is_copied_instead_of_reduced_is_found_at_the_update() -> None:
    schedule = hand()
    reduce = schedule.programs[0].by_id["step/layer1/reduce"]
    copied = Copy(
        id=reduce.id,
        stream=COMMUNICATION,
        after=("step/layer1/pad",),
        source=View(buffer="layer1/staging", size=2),
        target=View(buffer="layer1/own", size=2),
    )
    programs = tuple(
        replace(program, step=tuple(copied if each == reduce else each for each in program.step))
        for program in schedule.programs
    )
    assert left(replace(schedule, programs=programs)) == "step/layer1/update"


def test_a_forward_that_reads_what_is_not_gathered_is_found() -> None:
    gather = hand().programs[0].by_id["step/layer1/gather"]
    shorter = changed(hand(), gather.id, source=View(buffer="layer0/shard", size=2))
    assert left(shorter) == "step/layer1/forward"


def test_an_update_with_the_gradient_of_another_tensor_is_found() -> None:
    operands = (
        Operand(role=Role.PARAMETER, view=View(buffer="layer0/shard", size=2)),
        Operand(role=Role.GRADIENT, view=View(buffer="layer1/own", size=2)),
    )
    wrong = changed(hand(), "step/layer0/update", operands=operands)
    wrong = changed(wrong, "step/layer0/own/free", uses=("step/layer0/reduce",))
    assert left(wrong) == "step/layer0/update"


def test_with_one_rank_there_is_nothing_to_reduce() -> None:
    schedule = hand()
    mesh = replace(schedule.mesh, axes=(Axis(name="data", size=4),))
    assert check(replace(schedule, mesh=mesh)) == ()


def test_the_schedule_by_hand_passes_with_edges_to_the_step_before() -> None:
    schedule = hand()
    for name in ("layer0", "layer1", "loss"):
        edge = (Previous(f"step/{name}/update"),)
        schedule = changed(schedule, f"step/{name}/gather", after=edge)
    assert named(schedule) == []
