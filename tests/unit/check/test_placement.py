from dataclasses import replace

import pytest
from mutation import changed, hand, named, the_finding, without

from zsim.builder import COMMUNICATION, ScheduleBuilder
from zsim.check import Finding, check
from zsim.layout import Layout, Piece
from zsim.mesh import Axis
from zsim.operation import Action, AllReduce, Copy, Operand, Previous, Reduction, Role, View
from zsim.rule import SGD, ClipNorm
from zsim.schedule import Kind, Schedule


def placement(schedule: Schedule) -> list[Finding]:
    return [each for each in check(schedule) if each.invariant == "placement"]


def test_an_update_without_its_reduce_scatter_is_found() -> None:
    found = the_finding(without(hand(), "step/layer1/reduce"), "placement")
    assert found.operation == "step/layer1/update"
    assert "layer1/own, which is written by nothing" in found.why


def test_a_gradient_that_is_copied_instead_of_reduced_is_partial_at_the_update() -> None:
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
    other, found = placement(replace(schedule, programs=programs))
    assert found.operation == "step/layer1/update"
    assert "Partial over data" in found.why
    assert "layer1/staging and layer1/own hold different tensors" in other.why
    line, before, *_ = found.witness
    assert line == "step/layer1/reduce wrote layer1/own: Partial over data, a gradient divided by 4"
    assert before.startswith("step/layer1/stage wrote layer1/staging: Partial over data")


def test_a_forward_without_its_gather_is_found() -> None:
    found = the_finding(without(hand(), "step/layer1/gather"), "placement")
    assert found.operation == "step/layer1/forward"


def test_padding_that_nothing_wrote_does_not_reach_a_reduction() -> None:
    found = the_finding(without(hand(), "step/layer1/pad"), "placement")
    assert found.operation == "step/layer1/reduce"


def test_a_gather_of_another_tensor_of_equal_size_is_found() -> None:
    wrong = View(buffer="layer0/shard", size=2)
    found = placement(changed(hand(), "step/layer1/gather", source=wrong))
    assert [each.why for each in found] == ["layer0/shard and layer1/weight hold different tensors"]


def test_an_update_with_the_gradient_of_another_tensor_is_found() -> None:
    operands = (
        Operand(role=Role.PARAMETER, view=View(buffer="layer1/shard", size=2)),
        Operand(role=Role.GRADIENT, view=View(buffer="layer0/own", size=2)),
    )
    found = placement(changed(hand(), "step/layer1/update", operands=operands))
    assert "layer0/own and layer1/shard hold different tensors" in [each.why for each in found]


def test_two_independent_faults_are_both_reported() -> None:
    faulty = without(hand(), "step/layer1/pad", "step/layer0/reduce")
    assert [each.operation for each in placement(faulty)] == [
        "step/layer1/reduce",
        "step/layer0/update",
    ]


def test_with_one_rank_there_is_nothing_to_place() -> None:
    schedule = without(hand(), "step/layer1/reduce")
    mesh = replace(schedule.mesh, axes=(Axis(name="data", size=4),))
    assert placement(replace(schedule, mesh=mesh))
    build = ScheduleBuilder.of("one", data=1)
    x = build.buffer("x", 4, persistent=True)
    build.setup.allocate(x)
    build.setup.fill("x", x.all, 0.0)
    build.step.copy("copy", x[:2], x[2:])
    assert check(build.schedule()) == ()


class Gradients:
    """A whole gradient bucket and its shard, after a backward pass, on 4 x 2 ranks."""

    def __init__(self, *, layout: bool = True) -> None:
        self.build = ScheduleBuilder.of("gradients", data=4, tensor=2)
        for name in ("data", "tensor"):
            self.build.group(name, name)
        self.build.group("world", "data", "tensor")
        pieces = (Piece(parameter="w", start=0, size=8, copies=("tensor",)),)
        self.build.layout(Layout(name="cut", pieces=pieces, elements=8, axis="data"))
        self.weight = self.build.buffer(
            "weight", 8, kind=Kind.PARAMETER, layout="cut" if layout else None, persistent=True
        )
        self.whole = self.build.buffer("whole", 8, layout="cut", persistent=True)
        self.shard = self.build.buffer("shard", 2, layout="cut", shard="data", persistent=True)
        self.number = self.build.buffer("number", 1, persistent=True)
        setup = self.build.setup
        setup.allocate(self.weight, self.whole, self.shard, self.number)
        setup.compute("initialize", Action.INITIALIZE, [(Role.PARAMETER, self.weight.all)])
        self.step = self.build.step
        self.backward()

    def backward(self, *partial: str) -> None:
        """Make a gradient of this rank's data."""
        operands = [
            Operand(role=Role.PARAMETER, view=self.weight.all),
            Operand(role=Role.GRADIENT, view=self.whole.all, partial=partial),
        ]
        name = f"backward{len(self.step.operations) or ''}"
        self.step.compute(name, Action.BACKWARD, operands, unit="u")

    def scatter(self) -> None:
        """Each rank gets its shard of the reduced gradient."""
        self.step.reduce_scatter("scatter", "data", self.whole.all, self.shard.all)

    def found(self) -> list[Finding]:
        """What placement says, and nothing of what was found in other families."""
        return placement(self.build.schedule())

    def why(self) -> str:
        """The only finding."""
        (found,) = self.found()
        return found.why


@pytest.mark.parametrize("action", [Action.NORM, Action.FINITE])
def test_a_measure_of_a_partial_gradient_is_found(action: Action) -> None:
    case = Gradients()
    operands = [(Role.GRADIENT, case.whole.all), (Role.OUTPUT, case.number.all)]
    case.step.compute("measure", action, operands)
    assert "measures whole, which is Partial over data" in case.why()


def test_a_norm_of_shards_is_a_summand_until_it_is_reduced_over_all_axes() -> None:
    def clipped(*groups: str) -> list[Finding]:
        case = Gradients()
        case.scatter()
        operands = [(Role.GRADIENT, case.shard.all), (Role.OUTPUT, case.number.all)]
        case.step.compute("norm", Action.NORM, operands)
        for group in groups:
            case.step.all_reduce(f"reduce over {group}", group, case.number.all)
        operands = [(Role.INPUT, case.number.all), (Role.GRADIENT, case.shard.all)]
        case.step.compute("clip", Action.CLIP, operands, rule=ClipNorm(maximum=1.0))
        return case.found()

    assert clipped("world") == []
    assert clipped("data", "tensor") == []
    assert "clips by number, which is Partial over data" in clipped()[0].why
    assert "clips by number, which is Partial over tensor" in clipped("data")[0].why


def test_clipping_a_partial_gradient_is_found_and_unscaling_it_is_not() -> None:
    case = Gradients()
    case.step.compute("unscale", Action.UNSCALE, [(Role.GRADIENT, case.whole.all)])
    assert case.found() == []
    case.step.fill("number", case.number.all, 1.0)
    operands = [(Role.INPUT, case.number.all), (Role.GRADIENT, case.whole.all)]
    case.step.compute("clip", Action.CLIP, operands, rule=ClipNorm(maximum=1.0))
    assert "clips whole, which is Partial over data" in case.why()


def test_a_copy_and_a_division_keep_a_gradient_partial() -> None:
    case = Gradients()
    other = case.build.buffer("other", 8, persistent=True)
    case.build.setup.allocate(other)
    case.step.copy("copy", case.whole.all, other.all, divisor=4)
    operands = [(Role.GRADIENT, other.all), (Role.PARAMETER, case.weight.all)]
    case.step.compute("update", Action.UPDATE, operands, rule=SGD())
    assert "updates with other, which is Partial over data" in case.why()


def test_adding_a_summand_to_what_is_reduced_already_is_found() -> None:
    case = Gradients()
    case.step.all_reduce("reduce", "data", case.whole.all)
    other = case.build.buffer("other", 8, persistent=True)
    case.build.setup.allocate(other)
    case.step.copy("keep", case.whole.all, other.all)
    case.backward()
    case.step.copy("add", case.whole.all, other.all, accumulate=True)
    assert case.why() == "adds Partial whole to what is Replicate over data"


def test_reducing_twice_is_found() -> None:
    case = Gradients()
    case.step.all_reduce("reduce", "data", case.whole.all)
    case.step.all_reduce("again", "data", case.whole.all)
    assert "reduces whole, which is Replicate over data: it must be Partial" in case.why()


def test_a_sum_that_stands_in_the_own_slot_alone_is_not_of_the_whole() -> None:
    """As when ranks reduce over replicas before they have reduced inside: the rest has no sum."""
    case = Gradients()
    case.backward("tensor")
    case.step.all_reduce("slot", "tensor", case.whole.own("data", 2))
    case.scatter()
    assert case.why() == (
        "reduces whole, which is Replicate, Shard or Partial in different places over data: "
        "it must be Partial over data"
    )


def test_a_maximum_may_be_taken_of_copies() -> None:
    case = Gradients()
    case.step.all_reduce("reduce", "data", case.whole.all)
    case.step.all_reduce("again", "data", case.whole.all, reduction=Reduction.MAX)
    assert case.found() == []


def test_a_maximum_of_summands_is_not_their_sum() -> None:
    case = Gradients()
    case.step.all_reduce("reduce", "data", case.whole.all, reduction=Reduction.MAX)
    assert "takes the maximum of whole, which is Partial over data" in case.found()[0].why


def test_an_update_whose_state_is_placed_otherwise_is_found() -> None:
    case = Gradients()
    case.scatter()
    part = case.weight[:2]
    operands = [(Role.GRADIENT, case.shard.all), (Role.PARAMETER, part)]
    case.step.compute("update", Action.UPDATE, operands, rule=SGD())
    assert "updates weight over data with a gradient that is placed differently" in {
        each.why for each in case.found()
    }


def update_of_the_own_part(*, gathers: bool) -> list[Finding]:
    case = Gradients()
    case.scatter()
    own = case.weight.own("data", 2)
    operands = [(Role.GRADIENT, case.shard.all), (Role.PARAMETER, own)]
    case.step.compute("update", Action.UPDATE, operands, rule=SGD())
    if gathers:
        case.step.all_gather("gather", "data", own, case.weight.all)
    return case.found()


def test_parameters_that_are_not_gathered_after_their_update_are_found_in_the_next_step() -> None:
    (found,) = update_of_the_own_part(gathers=False)
    assert found.operation == "step/backward"
    assert "weight, which is valid only in the rank's own part over data" in found.why
    assert update_of_the_own_part(gathers=True) == []


def test_a_gradient_that_is_partial_over_the_tensor_axis_is_reduced_there_too() -> None:
    def reduced(*groups: str) -> list[Finding]:
        case = Gradients()
        case.backward("tensor")
        for group in groups:
            case.step.all_reduce(f"reduce over {group}", group, case.whole.all)
        operands = [(Role.GRADIENT, case.whole.all), (Role.PARAMETER, case.weight.all)]
        case.step.compute("update", Action.UPDATE, operands, rule=SGD())
        return case.found()

    assert reduced("data", "tensor") == []
    assert reduced("world") == []
    assert "Partial over tensor" in reduced("data")[0].why


def test_an_output_that_is_a_summand_is_not_read_before_it_is_summed() -> None:
    def forward(*, sums: bool) -> list[Finding]:
        case = Gradients()
        x = case.build.buffer("x", 4, persistent=True)
        y = case.build.buffer("y", 4, persistent=True)
        case.build.setup.allocate(x, y)
        operands = [
            Operand(role=Role.PARAMETER, view=case.weight.all),
            Operand(role=Role.OUTPUT, view=x.all, partial=("tensor",)),
        ]
        case.step.compute("one", Action.FORWARD, operands, unit="u")
        if sums:
            case.step.all_reduce("sum", "tensor", x.all)
        case.step.compute("two", Action.FORWARD, [(Role.INPUT, x.all), (Role.OUTPUT, y.all)])
        return case.found()

    assert forward(sums=True) == []
    assert "computes with x, which is Partial over tensor" in forward(sums=False)[0].why


def test_a_branch_decides_on_what_all_ranks_have() -> None:
    def branch(*, reduces: bool) -> list[Finding]:
        case = Gradients()
        case.scatter()
        operands = [(Role.GRADIENT, case.shard.all), (Role.OUTPUT, case.number.all)]
        case.step.compute("finite", Action.FINITE, operands)
        if reduces:
            case.step.all_reduce("reduce", "world", case.number.all, reduction=Reduction.MAX)
        sides = case.step.side("yes"), case.step.side("no")
        case.step.branch("branch", case.number.all, *sides, after=[])
        return case.found()

    assert branch(reduces=True) == []
    verdict = "decides on number, which is each rank's own verdict over data"
    assert verdict in branch(reduces=False)[0].why


def test_both_lists_of_a_branch_are_gone_through() -> None:
    case = Gradients()
    case.step.fill("flag", case.number.all, 0.0)
    then, otherwise = case.step.side("yes"), case.step.side("no")
    then.all_reduce("reduce", "data", case.whole.all)
    case.step.branch("branch", case.number.all, then, otherwise, after=[])
    operands = [(Role.GRADIENT, case.whole.all), (Role.PARAMETER, case.weight.all)]
    case.step.compute("update", Action.UPDATE, operands, rule=SGD())
    assert "updates with whole, which is Partial over data" in case.why()


def passed_on(case: Gradients) -> None:
    """Send what the shard is to the next rank and take that of the one before."""
    case.step.send("send", "data", case.shard.all, 1)
    case.step.receive("receive", "data", case.shard.all, -1)


def test_a_summand_that_is_received_is_one_still() -> None:
    case = Gradients()
    case.step.send("send", "data", case.whole.all, 1)
    case.step.receive("receive", "data", case.whole.all, -1)
    operands = [(Role.GRADIENT, case.whole.all), (Role.PARAMETER, case.weight.all)]
    case.step.compute("update", Action.UPDATE, operands, rule=SGD())
    assert "updates with whole, which is Partial over data" in case.why()


def test_a_shard_that_is_received_is_not_the_own_one() -> None:
    case = Gradients()
    case.scatter()
    passed_on(case)
    case.step.all_gather("gather", "data", case.shard.all, case.whole.all)
    assert "gathers shard, which is another rank's part over data: it must be Shard" in case.why()


def test_nothing_that_was_written_by_nothing_is_sent() -> None:
    case = Gradients()
    passed_on(case)
    assert [each.operation for each in case.found()] == ["step/send"]


def test_what_is_received_may_depend_on_what_was_sent_before() -> None:
    """Three stages in a row: the second sends on what it received."""
    case = Gradients()
    case.step.send("send", "data", case.whole.all, 1)
    case.step.receive("receive", "data", case.whole.all, -1)
    case.step.send("send_on", "data", case.whole.all, 1)
    case.step.receive("receive_on", "data", case.whole.all, -1)
    case.step.all_reduce("reduce", "data", case.whole.all)
    case.step.all_reduce("again", "data", case.whole.all)
    assert "reduces whole, which is Replicate over data: it must be Partial" in case.why()


def test_copies_are_not_gathered() -> None:
    case = Gradients()
    case.step.all_reduce("reduce", "data", case.whole.all)
    case.step.all_gather("gather", "data", case.whole[:2], case.whole.all)
    assert "gathers whole, which is Replicate over data: it must be Shard" in case.why()


def test_the_schedule_by_hand_passes_with_edges_to_the_step_before() -> None:
    schedule = hand()
    for name in ("layer0", "layer1", "loss"):
        edge = (Previous(f"step/{name}/update"),)
        schedule = changed(schedule, f"step/{name}/gather", after=edge)
    assert named(schedule) == []


def test_an_all_reduce_is_what_the_test_says() -> None:
    case = Gradients()
    case.step.all_reduce("reduce", "data", case.whole.all)
    assert isinstance(case.step.operations[-1], AllReduce)
    assert case.found() == []
