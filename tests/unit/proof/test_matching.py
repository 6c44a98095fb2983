import pytest
from faults.findings import the_finding
from faults.schedules import changed, hand, moved, split, without

from zsim.dtype import DType
from zsim.proof import Finding, check
from zsim.schedule.builder import RoleBuilder, ScheduleBuilder
from zsim.schedule.mesh import Span
from zsim.schedule.operation import Broadcast, Previous, Reduction
from zsim.schedule.replace import replace
from zsim.schedule.schedule import Schedule


def matching(schedule: Schedule) -> list[Finding]:
    return [each for each in check(schedule) if each.invariant == "matching"]


def test_a_role_split_in_two_that_do_the_same_matches() -> None:
    assert check(split(hand(), hand())) == ()


def test_a_collective_that_one_rank_does_not_issue_is_found() -> None:
    (found,) = matching(split(hand(), without(hand(), "step/layer1/gather_again")))
    assert found.role == "first and rest"
    assert found.operation == "step/layer1/gather_again"
    assert found.witness[0].startswith("first: nothing | rest: step/layer1/gather_again")


def test_two_collectives_of_equal_size_swapped_are_found_by_what_they_move() -> None:
    """Both gathers move 2 elements: they match, and the second rank computes with the wrong one."""
    early = moved(hand(), "step/layer1/weight/allocate", before="step/layer0/gather")
    swapped = moved(early, "step/layer1/gather", before="step/layer0/gather")
    (found,) = check(split(hand(), swapped))
    assert (found.invariant, found.operation) == ("values", "step/layer0/forward")
    assert found.why == "reads another parameter in layer0/weight than plain training does"


def test_two_different_collectives_swapped_are_one_finding() -> None:
    late = moved(hand(), "step/loss/reduce", before="step/layer1/backward")
    (found,) = matching(split(hand(), late))
    assert "different sequences" in found.why
    assert found.witness == (
        "first: step/layer1/gather_again, all_gather of 2 fp32 | "
        "rest: step/loss/reduce, reduce_scatter (sum) of 2 fp32 in fp32",
        "first: step/loss/reduce, reduce_scatter (sum) of 2 fp32 in fp32 | "
        "rest: step/layer1/gather_again, all_gather of 2 fp32",
    )


def test_two_independent_differences_are_both_reported() -> None:
    faulty = without(hand(), "step/layer1/gather", "step/layer0/reduce")
    found = matching(split(hand(), faulty))
    # One gather too few before the first reduction, one reduction too few at the end.
    assert len(found) == 2


@pytest.mark.parametrize("mixed", [True, False])
def test_operations_of_several_kinds_issued_as_one_are_found(*, mixed: bool) -> None:
    build = ScheduleBuilder.of("mixed", data=2)
    build.group("data", "data")
    whole, part = (
        build.buffer("whole", 8, persistent=True),
        build.buffer("part", 4, persistent=True),
    )
    build.setup.allocate(whole, part)
    build.setup.fill("whole", whole.all, 0.0)
    build.step.reduce_scatter("scatter", "data", whole.all, part.all)
    if mixed:
        build.step.all_gather("gather", "data", part.all, whole.all)
    else:
        build.step.reduce_scatter("again", "data", whole.all, part.all)
    build.step.together("both", 2)
    found = [each for each in matching(build.schedule()) if "of one kind" in each.why]
    assert [each.operation for each in found] == (["step/both"] if mixed else [])
    if mixed:
        assert found[0].witness == (
            "step/scatter: reduce_scatter",
            "step/gather: all_gather",
        )


def test_sends_and_receives_issued_as_one_are_of_one_kind() -> None:
    build = ScheduleBuilder.of("ring", data=2)
    build.group("data", "data")
    mine, theirs = (
        build.buffer("mine", 8, persistent=True),
        build.buffer("theirs", 8, persistent=True),
    )
    build.setup.allocate(mine, theirs)
    build.setup.fill("mine", mine.all, 0.0)
    build.step.send("send", "data", mine.all, offset=1)
    build.step.receive("receive", "data", theirs.all, offset=-1)
    build.step.together("both", 2)
    assert matching(build.schedule()) == []


def reducing(role: RoleBuilder, **fields: object) -> None:
    x = role.buffer("x", 8, persistent=True)
    role.setup.allocate(x)
    role.setup.fill("x", x.all, 0.0)
    role.step.all_reduce("reduce", "data", x.all)
    role.step.broadcast("broadcast", "data", x.all, root=0)
    for name, value in fields.items():
        position = 1 if name == "root" else 0
        role.step.operations[position] = replace(role.step.operations[position], **{name: value})


@pytest.mark.parametrize(
    ("fields", "operation"),
    [
        ({"reduction": Reduction.MAX}, "step/reduce"),
        ({"accumulate": DType.FP64}, "step/reduce"),
        ({"root": 1}, "step/broadcast"),
    ],
)
def test_roles_must_agree_on_how_they_reduce_and_from_whom(
    fields: dict[str, object], operation: str
) -> None:
    build = ScheduleBuilder.of("roles", data=4)
    build.group("data", "data")
    reducing(build.role("first", Span(axis="data", start=0, end=1)), **fields)
    reducing(build.role("rest", Span(axis="data", start=1, end=4)))
    (found,) = matching(build.schedule())
    assert found.operation == operation


@pytest.mark.parametrize("same", [True, False])
def test_what_is_issued_together_must_be_so_for_all(same: bool) -> None:
    build = ScheduleBuilder.of("roles", data=2)
    build.group("data", "data")
    for name, start in (("first", 0), ("second", 1)):
        role = build.role(name, Span(axis="data", start=start, end=start + 1))
        x, y = role.buffer("x", 8, persistent=True), role.buffer("y", 8, persistent=True)
        role.setup.allocate(x, y)
        role.setup.fill("x", x.all, 0.0)
        role.setup.fill("y", y.all, 0.0)
        role.step.all_reduce("one", "data", x.all)
        role.step.all_reduce("other", "data", y.all)
        if same or name == "first":
            role.step.together("both", 2)
    assert len(matching(build.schedule())) == (0 if same else 1)


def test_roles_that_share_no_communicator_may_do_different_things() -> None:
    build = ScheduleBuilder.of("rows", data=2, tensor=2)
    build.group("data", "data")
    for name, start, size in (("left", 0, 8), ("right", 1, 4)):
        role = build.role(name, Span(axis="tensor", start=start, end=start + 1))
        x = role.buffer("x", size, persistent=True)
        role.setup.allocate(x)
        filled = role.step.fill("x", x.all, 0.0, after=[Previous("step/reduce")])
        role.step.all_reduce("reduce", "data", x.all, after=[filled])
    assert check(build.schedule()) == ()


def test_a_rank_outside_a_group_may_not_issue_on_it() -> None:
    build = ScheduleBuilder.of("part", data=4)
    build.group("late", "data", where=(Span(axis="data", start=2, end=4),))
    x = build.buffer("x", 8, persistent=True)
    build.setup.allocate(x)
    build.setup.fill("x", x.all, 0.0)
    build.step.all_reduce("reduce", "late", x.all)
    (found,) = matching(build.schedule())
    assert found.operation == "step/reduce"
    assert found.why == "some ranks of the role are outside group late and issue on it"


@pytest.mark.parametrize(("size", "offset", "faults"), [(4, -1, 0), (4, 1, 2), (2, -1, 1)])
def test_a_send_meets_a_receive_from_where_it_went(size: int, offset: int, faults: int) -> None:
    build = ScheduleBuilder.of("ring", pipe=4)
    build.group("pipe", "pipe")
    x = build.buffer("x", 8, persistent=True)
    build.setup.allocate(x)
    build.setup.fill("x", x.all, 0.0)
    build.step.send("send", "pipe", x[:4], 1)
    build.step.receive("receive", "pipe", x[4 : 4 + size], offset)
    build.step.together("both", 2)
    assert len(matching(build.schedule())) == faults


def test_offsets_count_cyclically() -> None:
    build = ScheduleBuilder.of("ring", pipe=4)
    build.group("pipe", "pipe")
    x = build.buffer("x", 8, persistent=True)
    build.setup.allocate(x)
    build.setup.fill("x", x.all, 0.0)
    build.step.send("send", "pipe", x[:4], 1)
    build.step.receive("receive", "pipe", x[4:], 3)
    build.step.together("both", 2)
    assert check(build.schedule()) == ()


def test_the_end_of_a_pipeline_that_does_not_receive_is_found() -> None:
    build = ScheduleBuilder.of("pipeline", pipe=3)
    build.group("pipe", "pipe")
    for name, start, end in (("front", 0, 2), ("last", 2, 3)):
        role = build.role(name, Span(axis="pipe", start=start, end=end))
        x = role.buffer("x", 4, persistent=True)
        role.setup.allocate(x)
        role.setup.fill("x", x.all, 0.0)
        if name == "front":
            role.step.send("send", "pipe", x.all, 1)
    found = matching(build.schedule())
    assert {each.role for each in found} == {"front", "front and last"}


def test_a_group_over_two_axes_is_split_where_the_roles_are() -> None:
    build = ScheduleBuilder.of("grid", data=3, tensor=2)
    build.group("world", "data", "tensor")
    # Index in the world is 2 x data + tensor: from tensor 0 the next member is tensor 1.
    for name, start in (("even", 0), ("odd", 1)):
        role = build.role(name, Span(axis="tensor", start=start, end=start + 1))
        x = role.buffer("x", 4, persistent=True)
        role.setup.allocate(x)
        role.setup.fill("x", x.all, 0.0)
        if name == "even":
            role.step.send("send", "world", x.all, 1)
        else:
            role.step.receive("receive", "world", x.all, -1)
    assert check(build.schedule()) == ()


def branching(role: RoleBuilder, *, swapped: bool) -> None:
    flag = role.buffer("flag", 1, persistent=True)
    x = role.buffer("x", 8, persistent=True)
    role.setup.allocate(flag, x)
    role.setup.fill("zero", flag.all, 0.0)
    role.setup.fill("x", x.all, 0.0)
    sides = role.step.side("one"), role.step.side("other")
    sides[1 if swapped else 0].all_reduce("reduce", "data", x.all)
    role.step.branch("branch", flag.all, *sides, after=[])


@pytest.mark.parametrize("swapped", [True, False])
def test_lists_of_branches_are_compared_list_by_list(swapped: bool) -> None:
    build = ScheduleBuilder.of("branches", data=2)
    build.group("data", "data")
    branching(build.role("first", Span(axis="data", start=0, end=1)), swapped=swapped)
    branching(build.role("second", Span(axis="data", start=1, end=2)), swapped=False)
    assert bool(matching(build.schedule())) is swapped


def test_a_changed_root_needs_a_member() -> None:
    build = ScheduleBuilder.of("roles", data=2)
    build.group("data", "data")
    reducing(build, root=1)
    assert isinstance(build.step.operations[1], Broadcast)
    assert matching(build.schedule()) == []


def test_the_answer_does_not_depend_on_the_number_of_ranks() -> None:
    def roles(ranks: int) -> Schedule:
        build = ScheduleBuilder.of("roles", data=ranks)
        build.group("data", "data")
        reducing(build.role("first", Span(axis="data", start=0, end=1)), root=1)
        reducing(build.role("rest", Span(axis="data", start=1, end=ranks)))
        return build.schedule()

    assert check(roles(400_000)) == check(roles(4))


def test_a_reduction_that_averages_in_one_role_alone_is_found() -> None:
    faulty = changed(hand(), "step/loss/reduce", reduction=Reduction.AVERAGE)
    assert the_finding(split(hand(), faulty), "matching").operation == "step/loss/reduce"
