import pytest
from faults.findings import named, the_finding
from faults.schedules import changed, hand, moved, twice, without

from zsim.proof import Finding, check
from zsim.schedule.builder import COMMUNICATION, ScheduleBuilder
from zsim.schedule.mesh import Axis, Mesh
from zsim.schedule.operation import Free, FreeMode, Previous
from zsim.schedule.schedule import Schedule


def lifetime(schedule: Schedule) -> list[Finding]:
    return [each for each in check(schedule) if each.invariant == "lifetime"]


def small() -> ScheduleBuilder:
    """One rank, so that nothing but lifetime has something to say."""
    return ScheduleBuilder("small", Mesh(axes=(Axis(name="data", size=1),)))


def test_the_schedule_by_hand_is_proved() -> None:
    assert check(hand()) == ()


def test_a_buffer_that_is_freed_early_is_named_where_it_is_used_next() -> None:
    early = moved(hand(), "step/layer1/saved/free", before="step/layer1/gather_again")
    found = the_finding(early, "lifetime")
    assert found.operation == "step/layer1/backward"
    assert found.why == "uses layer1/saved after it was freed"
    assert found.witness[0] == "step/layer1/saved/free frees layer1/saved"


def test_a_buffer_that_is_never_freed_is_named_where_it_is_allocated() -> None:
    found = the_finding(without(hand(), "step/layer1/saved/free"), "lifetime")
    assert found.operation == "step/layer1/saved/allocate"
    assert "not freed" in found.why


def test_a_second_free_is_named() -> None:
    found = the_finding(twice(hand(), "step/layer1/saved/free"), "lifetime")
    assert found.operation == "step/layer1/saved/free/again"
    assert found.why == "frees layer1/saved, which is not alive"


def test_a_second_allocation_is_named() -> None:
    found = the_finding(twice(hand(), "step/layer1/saved/allocate"), "lifetime")
    assert "no free gives the first memory back" in found.why


def test_a_use_before_the_allocation_is_named() -> None:
    late = moved(hand(), "step/layer1/saved/allocate", before="step/layer1/weight/free")
    assert the_finding(late, "lifetime").why == "uses layer1/saved before it is allocated"


def test_a_free_that_does_not_name_a_use_on_another_stream_is_found() -> None:
    found = the_finding(changed(hand(), "step/layer1/weight/free", uses=()), "lifetime")
    assert found.operation == "step/layer1/weight/free"
    assert found.why == "gives layer1/weight back while step/layer1/forward may still use it"


def test_two_independent_faults_are_both_reported() -> None:
    faulty = changed(hand(), "step/layer0/weight/free", uses=())
    faulty = without(faulty, "step/layer1/saved/free")
    assert named(faulty) == [
        ("lifetime", "step/layer0/weight/free"),
        ("lifetime", "step/layer1/saved/allocate"),
    ]


def test_a_first_use_on_another_stream_without_order_is_a_reuse() -> None:
    found = the_finding(changed(hand(), "step/layer1/forward", after=()), "lifetime")
    assert found.operation == "step/layer1/forward"
    assert found.why.startswith("reuse: uses layer1/weight on compute unordered")
    assert "step/layer0/weight/free was on communication by then" in found.witness[1]


def test_a_persistent_buffer_that_is_not_alive_after_setup_is_found() -> None:
    build = small()
    build.buffer("x", 4, persistent=True)
    found = lifetime(build.schedule())
    assert [each.why for each in found][:1] == ["x is persistent, and not alive when setup ends"]


def uses_of_another_stream(mode: FreeMode, *, named_in_uses: bool) -> Schedule:
    build = small()
    build.group("data", "data")
    x = build.buffer("x", 4)
    build.step.allocate(x)
    written = build.step.fill("write", x.all, 0.0)
    read = build.step.all_reduce("read", "data", x.all, after=[written])
    build.step.free(x, mode=mode, uses=[read] if named_in_uses else [])
    return build.schedule()


@pytest.mark.parametrize("mode", FreeMode)
def test_every_mode_of_free_covers_the_uses_it_names(mode: FreeMode) -> None:
    assert lifetime(uses_of_another_stream(mode, named_in_uses=True)) == []


@pytest.mark.parametrize("mode", FreeMode)
def test_no_mode_of_free_covers_what_it_does_not_name(mode: FreeMode) -> None:
    found = lifetime(uses_of_another_stream(mode, named_in_uses=False))
    assert [each.operation for each in found] == ["step/x/free"]


def test_a_use_that_the_home_stream_has_waited_for_need_not_be_named() -> None:
    build = small()
    build.group("data", "data")
    x, y = build.buffer("x", 4), build.buffer("y", 4, persistent=True)
    build.setup.allocate(y)
    build.step.allocate(x)
    written = build.step.fill("write", x.all, 0.0)
    read = build.step.all_reduce("read", "data", x.all, after=[written])
    build.step.fill("other", y.all, 0.0, after=[read])
    build.step.free(x)
    assert lifetime(build.schedule()) == []


def test_a_use_that_the_host_has_waited_for_need_not_be_named() -> None:
    build = small()
    build.group("data", "data")
    x = build.buffer("x", 4)
    build.step.allocate(x)
    written = build.step.fill("write", x.all, 0.0)
    read = build.step.all_reduce("read", "data", x.all, after=[written])
    build.step.host_wait("wait", read)
    build.step.free(x)
    assert lifetime(build.schedule()) == []


def at_the_start_of_a_step(*, waits: bool) -> Schedule:
    """A buffer of the communication stream whose first use in a step is on the compute stream."""
    build = small()
    build.group("data", "data")
    x = build.buffer("x", 4, home=COMMUNICATION)
    y = build.buffer("y", 4, persistent=True)
    build.setup.allocate(y)
    build.step.allocate(x)
    after = [Previous("step/last")] if waits else []
    written = build.step.fill("write", x.all, 0.0, after=after)
    build.step.free(x, uses=[written])
    build.step.all_reduce("last", "data", y.all)
    return build.schedule()


def test_a_block_that_the_step_before_may_still_use_is_a_reuse() -> None:
    (found,) = lifetime(at_the_start_of_a_step(waits=False))
    assert found.operation == "step/write"
    assert "an operation of an earlier step was on communication by then" in found.witness[1]


def test_an_edge_to_the_last_operation_of_the_step_before_orders_the_reuse() -> None:
    assert lifetime(at_the_start_of_a_step(waits=True)) == []


def test_a_host_that_waits_at_the_end_of_a_step_orders_what_the_next_one_reuses() -> None:
    build = small()
    build.group("data", "data")
    x = build.buffer("x", 4, home=COMMUNICATION)
    y = build.buffer("y", 4, persistent=True)
    build.setup.allocate(y)
    build.step.allocate(x)
    written = build.step.fill("write", x.all, 0.0)
    build.step.free(x, uses=[written])
    build.step.host_wait("wait", build.step.all_reduce("last", "data", y.all, after=[written]))
    assert lifetime(build.schedule()) == []


def persistent_that_moves(uses: list[str]) -> Schedule:
    """A persistent buffer that each step frees, although the step before may still read it."""
    build = small()
    build.group("data", "data")
    x = build.buffer("x", 4, persistent=True)
    build.setup.allocate(x)
    first = build.setup.fill("write", x.all, 0.0)
    build.setup.host_wait("wait", first)
    build.step.fill("other", x.all, 0.0)
    build.step.free(x, uses=uses)
    build.step.allocate(x)
    written = build.step.fill("write", x.all, 0.0)
    build.step.all_reduce("read", "data", x.all, after=[written])
    return build.schedule()


def test_a_persistent_buffer_is_not_freed_while_the_step_before_uses_it() -> None:
    (found,) = lifetime(persistent_that_moves([]))
    assert found.operation == "step/x/free"
    assert "an operation of an earlier step may still use it" in found.why


def test_lists_of_a_branch_that_leave_different_buffers_alive_are_found() -> None:
    build = small()
    flag, x = build.buffer("flag", 1, persistent=True), build.buffer("x", 4)
    build.setup.allocate(flag)
    build.setup.fill("zero", flag.all, 0.0)
    build.step.allocate(x)
    then, otherwise = build.step.side("yes"), build.step.side("no")
    then.free(x)
    build.step.branch("branch", flag.all, then, otherwise, after=[])
    (found,) = lifetime(build.schedule())
    assert found.operation == "step/x/allocate"
    assert found.why == "allocates x, which is alive when step ends and not freed"


def branch_with_a_use_in_one_list(uses: list[str]) -> Schedule:
    build = small()
    build.group("data", "data")
    flag = build.buffer("flag", 1, persistent=True)
    x = build.buffer("x", 4, home=COMMUNICATION)
    build.setup.allocate(flag)
    build.setup.fill("zero", flag.all, 0.0)
    build.step.allocate(x)
    written = build.step.all_reduce("write", "data", x.all)
    then, otherwise = build.step.side("yes"), build.step.side("no")
    then.fill("read", x.all, 0.0, after=[written])
    then.fill("later", flag.all, 0.0)
    otherwise.fill("other", flag.all, 0.0)
    build.step.branch("branch", flag.all, then, otherwise, after=[])
    build.step.free(x, uses=uses)
    return build.schedule()


def test_a_use_in_one_list_of_a_branch_must_be_covered_too() -> None:
    (found,) = lifetime(branch_with_a_use_in_one_list([]))
    assert "while step/yes/read may still use it" in found.why
    (found,) = lifetime(branch_with_a_use_in_one_list(["step/no/other"]))
    assert "while step/yes/read may still use it" in found.why


def test_a_free_after_a_branch_may_name_a_use_in_the_list_that_did_not_run() -> None:
    assert lifetime(branch_with_a_use_in_one_list(["step/yes/read"])) == []


def test_more_outcomes_than_are_gone_through_is_said() -> None:
    build = small()
    flag = build.buffer("flag", 1, persistent=True)
    build.setup.allocate(flag)
    for number in range(7):
        sides = build.step.side(f"{number}/a"), build.step.side(f"{number}/b")
        build.step.branch(f"{number}", flag.all, *sides, after=[])
    assert any("128 outcomes" in each.why for each in lifetime(build.schedule()))


def test_a_free_of_nothing_is_found_once() -> None:
    build = small()
    build.buffer("x", 4)
    build.step.add(Free(id="step/free", buffer="x"))
    assert named(build.schedule()) == [("lifetime", "step/free")]
