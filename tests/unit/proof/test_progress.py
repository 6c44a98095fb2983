from faults.findings import named, the_finding
from faults.schedules import changed, hand

from zsim.proof import check
from zsim.schedule.builder import ScheduleBuilder
from zsim.schedule.mesh import Span
from zsim.schedule.operation import Previous
from zsim.schedule.schedule import Schedule


def progress(schedule: Schedule) -> list[str]:
    return [each.operation for each in check(schedule) if each.invariant == "progress"]


def ring(ranks: int, order: str) -> Schedule:
    """Every rank sends to the next and receives from the one before, in the given order."""
    build = ScheduleBuilder.of("ring", pipe=ranks)
    build.group("pipe", "pipe")
    x, y = build.buffer("x", 4, persistent=True), build.buffer("y", 4, persistent=True)
    build.setup.allocate(x, y)
    build.setup.fill("x", x.all, 0.0)
    for letter in order:
        if letter == "s":
            build.step.send("send", "pipe", x.all, 1)
        elif letter == "r":
            build.step.receive("receive", "pipe", y.all, -1)
        else:
            build.step.together("together", 2)
    return build.schedule()


def test_everyone_sends_first_is_a_deadlock() -> None:
    found = the_finding(ring(4, "sr"), "progress")
    assert found.why == "deadlock: it waits for operations that wait for it"
    assert any("earlier on stream communication" in line for line in found.witness)
    assert any("partner" in line for line in found.witness)


def test_everyone_receives_first_is_a_deadlock() -> None:
    assert len(progress(ring(4, "rs"))) == 1


def test_sending_and_receiving_together_is_none() -> None:
    assert check(ring(4, "srt")) == ()


def test_the_answer_does_not_depend_on_the_number_of_ranks() -> None:
    assert check(ring(400_000, "sr")) == check(ring(4, "sr"))
    assert check(ring(400_000, "srt")) == ()


def test_two_deadlocks_on_two_groups_are_both_reported() -> None:
    build = ScheduleBuilder.of("two", pipe=2)
    build.stream("other")
    x, y = build.buffer("x", 4, persistent=True), build.buffer("y", 4, persistent=True)
    build.setup.allocate(x, y)
    build.setup.fill("x", x.all, 0.0)
    for group, stream in (("one", "compute"), ("two", "other")):
        build.group(group, "pipe")
        build.step.send(f"{group}/send", group, x.all, 1, stream=stream)
        build.step.receive(f"{group}/receive", group, y.all, 1, stream=stream)
    assert progress(build.schedule()) == ["step/one/receive", "step/two/receive"]


def test_an_edge_to_what_the_step_issues_later_is_found() -> None:
    late = changed(hand(), "step/layer0/forward", after=("step/layer1/gather",))
    found = the_finding(late, "progress")
    assert found.operation == "step/layer0/forward"
    assert found.why == "waits for step/layer1/gather, which the same step does not issue before it"


def test_an_edge_to_oneself_is_found() -> None:
    late = changed(hand(), "step/layer0/forward", after=("step/layer0/forward",))
    assert progress(late) == ["step/layer0/forward"]


def test_an_edge_to_the_previous_instance_of_what_comes_later_is_fine() -> None:
    late = changed(hand(), "step/layer0/gather", after=(Previous("step/layer1/update"),))
    assert named(late) == []


def test_an_edge_to_the_other_list_of_a_branch_is_satisfied() -> None:
    build = ScheduleBuilder.of("branch", data=1)
    flag = build.buffer("flag", 1, persistent=True)
    build.setup.allocate(flag)
    build.setup.fill("flag", flag.all, 0.0)
    then, otherwise = build.step.side("yes"), build.step.side("no")
    then.fill("one", flag.all, 0.0, after=["step/no/other"])
    otherwise.fill("other", flag.all, 0.0, after=["step/yes/one"])
    last = [Previous("step/yes/one"), Previous("step/no/other")]
    build.step.branch("branch", flag.all, then, otherwise, after=last)
    assert check(build.schedule()) == ()


def pipeline(ranks: int, *, sends_first: bool = False) -> Schedule:
    """Data goes from the first rank to the last and back: a first, middle ranks, a last."""
    build = ScheduleBuilder.of("pipeline", pipe=ranks)
    build.group("pipe", "pipe")

    for name, start, end in (("first", 0, 1), ("middle", 1, ranks - 1), ("last", ranks - 1, ranks)):
        role = build.role(name, Span(axis="pipe", start=start, end=end))
        x = role.buffer("x", 4, persistent=True)
        role.setup.allocate(x)
        role.setup.fill("x", x.all, 0.0)
        if name != "first" and not sends_first:
            role.step.receive("forth/receive", "pipe", x.all, -1)
        if name != "last":
            role.step.send("forth/send", "pipe", x.all, 1)
        if name != "first" and sends_first:
            role.step.receive("forth/receive", "pipe", x.all, -1)
        if name != "last":
            role.step.receive("back/receive", "pipe", x.all, 1)
        if name != "first":
            role.step.send("back/send", "pipe", x.all, -1)
    return build.schedule()


def test_a_pipeline_passes_although_its_middle_ranks_wait_for_each_other() -> None:
    assert check(pipeline(3)) == ()
    assert check(pipeline(7)) == ()


def test_a_chain_in_which_everyone_sends_first_ends_at_its_last_rank() -> None:
    assert check(pipeline(5, sends_first=True)) == ()


def test_a_ring_with_one_rank_that_receives_first_is_no_deadlock() -> None:
    build = ScheduleBuilder.of("ring", pipe=4)
    build.group("pipe", "pipe")
    for name, start, end in (("first", 0, 1), ("rest", 1, 4)):
        role = build.role(name, Span(axis="pipe", start=start, end=end))
        x, y = role.buffer("x", 4, persistent=True), role.buffer("y", 4, persistent=True)
        role.setup.allocate(x, y)
        role.setup.fill("x", x.all, 0.0)
        if name == "first":
            role.step.receive("receive", "pipe", y.all, -1)
        role.step.send("send", "pipe", x.all, 1)
        if name == "rest":
            role.step.receive("receive", "pipe", y.all, -1)
    assert check(build.schedule()) == ()


def two_groups(*, crossed: bool) -> Schedule:
    """Two collectives on two communicators, on one stream; crossed: in another order on a rank."""
    build = ScheduleBuilder.of("two", data=2)
    build.group("one", "data")
    build.group("two", "data")
    for name, start in (("first", 0), ("second", 1)):
        role = build.role(name, Span(axis="data", start=start, end=start + 1))
        x, y = role.buffer("x", 4, persistent=True), role.buffer("y", 4, persistent=True)
        role.setup.allocate(x, y)
        role.setup.fill("x", x.all, 0.0)
        role.setup.fill("y", y.all, 0.0)
        order = ("one", "two") if name == "first" or not crossed else ("two", "one")
        for group in order:
            role.step.all_reduce(group, group, (x if group == "one" else y).all)
    return build.schedule()


def test_two_communicators_in_different_orders_on_two_ranks_are_a_deadlock() -> None:
    found = the_finding(two_groups(crossed=True), "progress")
    assert found.role == "first and second"
    assert found.witness == (
        "second: step/one waits for step/two: earlier on stream communication",
        "first: step/two waits for step/one: earlier on stream communication",
    )


def test_two_communicators_in_one_order_are_none() -> None:
    assert progress(two_groups(crossed=False)) == []


def test_a_host_that_waits_for_its_send_before_it_issues_the_receive_is_a_deadlock() -> None:
    build = ScheduleBuilder.of("ring", pipe=3)
    build.group("pipe", "pipe")
    build.group("back", "pipe")
    build.stream("other")
    x, y = build.buffer("x", 4, persistent=True), build.buffer("y", 4, persistent=True)
    build.setup.allocate(x, y)
    build.setup.fill("x", x.all, 0.0)
    sent = build.step.send("send", "pipe", x.all, 1)
    build.step.host_wait("wait", sent)
    build.step.receive("receive", "pipe", y.all, -1, stream="other")
    found = the_finding(build.schedule(), "progress")
    assert any("the host waits for it" in line for line in found.witness)


def test_one_communicator_runs_one_operation_at_a_time_whatever_the_streams() -> None:
    build = ScheduleBuilder.of("ring", pipe=3)
    build.group("pipe", "pipe")
    build.stream("other")
    x, y = build.buffer("x", 4, persistent=True), build.buffer("y", 4, persistent=True)
    build.setup.allocate(x, y)
    build.setup.fill("x", x.all, 0.0)
    build.step.send("send", "pipe", x.all, 1)
    build.step.receive("receive", "pipe", y.all, -1, stream="other")
    found = the_finding(build.schedule(), "progress")
    assert any("earlier on the communicator of pipe" in line for line in found.witness)


def test_a_deadlock_in_one_list_of_a_branch_is_found() -> None:
    build = ScheduleBuilder.of("ring", pipe=3)
    build.group("pipe", "pipe")
    x, y = build.buffer("x", 4, persistent=True), build.buffer("y", 4, persistent=True)
    flag = build.buffer("flag", 1, persistent=True)
    build.setup.allocate(x, y, flag)
    build.setup.fill("zero", flag.all, 0.0)
    then, otherwise = build.step.side("yes"), build.step.side("no")
    otherwise.send("send", "pipe", x.all, 1)
    otherwise.receive("receive", "pipe", y.all, -1)
    build.step.branch("branch", flag.all, then, otherwise, after=[])
    assert progress(build.schedule()) == ["step/no/receive"]


def test_a_waited_free_that_waits_for_a_send_holds_what_comes_after_it_on_its_stream() -> None:
    build = ScheduleBuilder.of("ring", pipe=3)
    build.group("pipe", "pipe")
    build.group("back", "pipe")
    build.stream("other")
    x, y = build.buffer("x", 4), build.buffer("y", 4, persistent=True)
    build.setup.allocate(y)
    build.step.allocate(x)
    written = build.step.fill("write", x.all, 0.0)
    sent = build.step.send("send", "pipe", x.all, 1, stream="other", after=[written])
    build.step.free(x, uses=[sent])
    build.step.receive("receive", "back", y.all, -1, stream="compute")
    build.step.send("answer", "back", y.all, 1, stream="other")
    build.step.receive("late", "pipe", y.all, -1, stream="compute")
    assert progress(build.schedule()) != []
