import pytest
from faults.schedules import changed, hand, twice, without

from zsim.model.architecture import GPT
from zsim.model.gpt import gpt
from zsim.proof import Finding, check
from zsim.runtimes.registry import make_schedule as zero
from zsim.schedule.builder import COMMUNICATION, BufferHandle, ScheduleBuilder
from zsim.schedule.operation import Action, AllGather, Compute, Previous, View
from zsim.schedule.replace import replace
from zsim.schedule.schedule import Schedule
from zsim.strategy.optimizer_rule import SGD
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim.strategy.train import Train


def races(schedule: Schedule) -> list[Finding]:
    return [each for each in check(schedule) if each.invariant == "races"]


def filled(ranks: int, *sizes: int) -> tuple[ScheduleBuilder, list[BufferHandle]]:
    """A builder with persistent buffers x0, x1 ... that setup has filled."""
    build = ScheduleBuilder.of("small", data=ranks)
    build.group("data", "data")
    buffers = [
        build.buffer(f"x{number}", size, persistent=True) for number, size in enumerate(sizes)
    ]
    build.setup.allocate(*buffers)
    for buffer in buffers:
        build.setup.fill(buffer.name, buffer.all, 0.0)
    return build, buffers


def test_a_computation_that_does_not_wait_for_its_gather_is_named_with_the_missing_edge() -> None:
    (found,) = races(changed(hand(), "step/layer1/forward", after=()))
    assert found.operation == "step/layer1/forward"
    assert found.why == "reads layer1/weight while step/layer1/gather may still write it"
    assert found.witness == (
        "step/layer1/gather, on communication, writes elements 0 to 8 of layer1/weight",
        "step/layer1/forward, on compute, reads elements 0 to 6",
        "what step/layer1/forward has waited for on communication ends with step/layer0/gather",
        "missing: step/layer1/forward after step/layer1/gather",
    )


def test_a_reduction_that_does_not_wait_for_what_it_reduces_is_named() -> None:
    (found,) = races(changed(hand(), "step/layer1/reduce", after=()))
    assert found.operation == "step/layer1/reduce"
    assert "step/layer1/pad may still write it" in found.why


def test_an_edge_that_is_dropped_is_found_though_prefetching_hides_it_from_lifetime() -> None:
    shape = GPT(layers=2, hidden_size=4, attention_heads=2, sequence_length=3, vocab_size=7)
    made = zero(
        gpt(shape, micro_batch_size=1),
        Strategy(parallel=Parallel(data=4), zero=Zero(stage=3, prefetch_units=2)),
    )
    assert races(made) == []
    (program,) = made.programs
    waits = [
        each
        for each in program.by_id.values()
        if isinstance(each, Compute)
        and each.action is Action.FORWARD
        and any(isinstance(program.by_id.get(str(edge)), AllGather) for edge in each.after)
    ]
    assert len(waits) >= 4
    for wait in waits:
        found = check(changed(made, wait.id, after=()))
        assert [(each.invariant, each.operation) for each in found][-1] == ("races", wait.id)


def test_two_independent_races_are_both_reported_and_what_follows_from_one_is_not() -> None:
    faulty = changed(hand(), "step/layer1/forward", after=())
    faulty = changed(faulty, "step/layer0/backward", after=())
    faulty = twice(faulty, "step/layer1/forward", after=())
    assert [each.operation for each in races(faulty)] == [
        "step/layer1/forward",
        "step/layer0/backward",
    ]


def test_the_next_step_is_ordered_after_the_one_before() -> None:
    assert races(without(hand(), "step/layer0/update")) == []
    build, (x, y) = filled(1, 4, 4)
    build.step.all_reduce("reduce", "data", x.all)
    build.step.copy("copy", y.all, x.all, after=["step/reduce"])
    (found,) = races(build.schedule())
    assert found.operation == "step/reduce"
    assert found.why == "reads x0 while step/copy of the step before may still write it"
    assert found.witness[-1] == "missing: step/reduce after the previous step/copy"


def test_an_edge_to_the_previous_instance_orders_the_seam() -> None:
    build, (x, y) = filled(1, 4, 4)
    build.step.all_reduce("reduce", "data", x.all, after=[Previous("step/copy")])
    build.step.copy("copy", y.all, x.all, after=["step/reduce"])
    assert races(build.schedule()) == []


def test_what_ran_two_steps_ago_is_known_though_the_end_of_that_step_is_not() -> None:
    build, (flag, x, y, z) = filled(1, 1, 4, 4, 4)
    first = build.step.fill("first", x.all, 0.0, stream=COMMUNICATION)
    then = build.step.side("then")
    again = then.fill("again", x.all, 0.0, after=[first])
    then.fill("behind", y.all, 0.0, stream=COMMUNICATION, after=[again])
    build.step.branch("branch", flag.all, then, build.step.side("otherwise"), after=[])
    build.step.fill("end", z.all, 0.0)
    assert races(build.schedule()) == []


def test_a_list_that_was_not_taken_does_not_hide_what_ran_before_it_on_its_stream() -> None:
    build, (flag, x) = filled(1, 1, 4)
    build.step.fill("first", x.all, 0.0, stream=COMMUNICATION, after=[Previous("step/then/known")])
    build.step.fill("hidden", x.all, 0.0, after=["step/first"])
    then = build.step.side("then")
    then.fill("known", x.all, 0.0)
    build.step.branch("branch", flag.all, then, build.step.side("otherwise"), after=[])
    (found,) = races(build.schedule())
    assert (found.operation, found.why) == (
        "step/first",
        "writes x1 while step/hidden of the step before may still write it",
    )


@pytest.mark.parametrize("waits", [True, False])
def test_either_of_two_streams_may_be_the_one_that_knows(*, waits: bool) -> None:
    build, (flag, x, y, z) = filled(1, 1, 4, 4, 4)
    build.stream("other")
    asked = build.step.fill("asked", z.all, 0.0, stream="other")
    first = build.step.fill("first", x.all, 0.0, stream=COMMUNICATION, after=[asked])
    last = build.step.fill("last", x.all, 0.0, after=[first])
    then, otherwise = build.step.side("then"), build.step.side("otherwise")
    then.fill("wait", y.all, 0.0, stream=COMMUNICATION, after=[last])
    otherwise.fill("wait", z.all, 0.0, stream="other", after=[last] if waits else [])
    build.step.branch("branch", flag.all, then, otherwise, after=[])
    assert [each.operation for each in races(build.schedule())] == ["step/first"] * (not waits)


@pytest.mark.parametrize(
    ("other", "written", "fine"),
    [(False, False, True), (True, False, False), (False, True, False)],
    ids=["the same flag", "another flag", "written in between"],
)
def test_branches_on_one_value_go_the_same_way(*, other: bool, written: bool, fine: bool) -> None:
    build, (flag, another, x) = filled(1, 1, 1, 4)
    then, otherwise = build.step.side("one"), build.step.side("two")
    then.fill("fill", x.all, 0.0)
    build.step.branch("first", flag.all, then, build.step.side("nothing"), after=[])
    after = []
    if written:
        after = [build.step.fill("write", flag.all, 0.0, stream=COMMUNICATION)]
    otherwise.fill("fill", x.all, 0.0, stream=COMMUNICATION)
    value = another if other else flag
    build.step.branch("second", value.all, build.step.side("none"), otherwise, after=after)
    ends = ["step/one/fill", "step/two/fill"]
    build.step.host_wait("one over", ends[0])
    build.step.host_wait("two over", ends[1])
    assert [each.operation for each in races(build.schedule())] == ends[1:] * (not fine)


def test_micro_batches_that_share_a_buffer_are_ordered_among_each_other() -> None:
    def accumulate(*, waits: bool) -> Schedule:
        build, (x, y) = filled(1, 4, 4)
        previous: str | Previous = Previous("step/reduce1")
        for number in range(2):
            after = [previous] if waits or number == 0 else []
            copied = build.step.copy(f"copy{number}", y.all, x.all, after=after)
            previous = build.step.all_reduce(f"reduce{number}", "data", x.all, after=[copied])
        return build.schedule()

    assert races(accumulate(waits=True)) == []
    (found,) = races(accumulate(waits=False))
    assert found.operation == "step/copy1"
    assert "while step/reduce0 may still write it" in found.why


def apart(one: View, other: View, ranks: int) -> list[Finding]:
    """Two streams write one view each, in no order."""
    build, _ = filled(ranks, 8)
    build.step.fill("one", one, 0.0)
    build.step.fill("other", other, 0.0, stream=COMMUNICATION)
    return races(build.schedule())


def test_parts_that_do_not_overlap_need_no_order() -> None:
    x = BufferHandle(filled(4, 8)[1][0].buffer)
    assert apart(x[:4], x[4:], 4) == []
    assert apart(x[:5], x[4:], 4)
    assert apart(x.own("data", 1), x[4:], 4) == []
    assert apart(x.own("data", 1), x[3:], 4)
    assert apart(x.own("data", 1), x.own("data", 1, 1), 4) == []
    assert apart(x.own("data", 2), x.own("data", 1, 3), 4)


def test_a_collective_owns_its_views_until_it_has_finished() -> None:
    build, (x, y) = filled(4, 8, 2)
    gathered = build.step.all_gather(
        "gather", "data", y.all, x.all, after=[Previous("step/write"), Previous("step/read")]
    )
    build.step.fill("write", y.all, 1.0)
    build.step.fill("read", x.all, 1.0, after=[gathered])
    (found,) = races(build.schedule())
    assert found.why == "writes x1 while step/gather may still read it"


@pytest.mark.parametrize(
    ("start", "size", "fine"), [(0, 2, True), (1, 1, False)], ids=["own slot", "shifted"]
)
def test_a_collective_in_place_is_legal_in_the_own_slot_alone(
    start: int, size: int, *, fine: bool
) -> None:
    build, (x,) = filled(4, 8)
    whole = View(buffer="x0", size=4 * size)
    build.step.all_gather("gather", "data", x.own("data", size, start), whole)
    build.step.reduce_scatter("scatter", "data", whole, x.own("data", size, start))
    assert [each.operation for each in races(build.schedule())] == (
        [] if fine else ["step/gather", "step/scatter"]
    )


def test_a_collective_in_the_slot_of_another_axis_is_not_in_place() -> None:
    build = ScheduleBuilder.of("two", data=2, tensor=2)
    build.group("data", "data")
    x = build.buffer("x", 4, persistent=True)
    build.setup.allocate(x)
    build.setup.fill("x", x.all, 0.0)
    build.step.all_gather("gather", "data", x.own("tensor", 2), x.all)
    (found,) = races(build.schedule())
    assert found.witness == (
        "writes elements 0 to 4 of x",
        "reads the rank's own 2 elements along tensor from 0 on of x",
    )


def test_members_of_a_together_do_not_share_what_they_write() -> None:
    def exchange(other: slice) -> list[Finding]:
        build, (x,) = filled(4, 8)
        build.step.send("send", "data", x[:4], 1)
        build.step.receive("receive", "data", x[other], -1)
        build.step.together("both", 2)
        return races(build.schedule())

    assert exchange(slice(4, 8)) == []
    assert [each.operation for each in exchange(slice(3, 7))] == ["step/both"]


def test_the_host_reads_what_a_branch_decides_on_after_it_was_written() -> None:
    def decide(*, waits: bool) -> list[Finding]:
        build, (flag,) = filled(1, 1)
        reduced = build.step.all_reduce("reduce", "data", flag.all)
        sides = build.step.side("yes"), build.step.side("no")
        build.step.branch("branch", flag.all, *sides, after=[reduced] if waits else [])
        return races(build.schedule())

    assert decide(waits=True) == []
    (found,) = decide(waits=False)
    assert found.operation == "step/branch"
    assert "on the host, reads elements 0 to 1" in found.witness[1]


def test_what_one_list_of_a_branch_leaves_running_is_awaited_by_its_own_previous_instance() -> None:
    """A gather after an update that overflow skips: the next step waits for the last one there was.

    Stage 1 with fp16 does so: what the forward waits for may be several steps ago.
    """

    def step(*, waits: bool) -> list[Finding]:
        build, (x, flag) = filled(1, 4, 1)
        after = [Previous("step/update/gather")] if waits else []
        build.step.copy("forward", x.all, x.all, after=after)
        yes, no = build.step.side("skip"), build.step.side("update")
        updated = no.fill("write", x.all, 0.0)
        no.all_gather("gather", "data", x.all, x.all, after=[updated])
        build.step.branch("branch", flag.all, yes, no, after=[])
        return races(build.schedule())

    assert step(waits=True) == []
    assert [each.operation for each in step(waits=False)] == ["step/forward"]


def test_two_gradients_in_one_place_are_found_within_their_backward() -> None:
    (program,) = hand().programs
    backward = program.by_id["step/layer0/backward"]
    assert isinstance(backward, Compute)
    last = backward.operands[-1]
    overlapping = replace(last, view=replace(last.view, start=1, size=2))
    faulty = changed(hand(), backward.id, operands=(*backward.operands, overlapping))
    (found,) = races(faulty)
    assert found.operation == backward.id


def test_a_forward_that_does_not_wait_for_the_gather_that_ended_the_step_before_is_found() -> None:
    shape = GPT(layers=1, hidden_size=4, attention_heads=2, sequence_length=3, vocab_size=7)
    made = zero(
        gpt(shape, micro_batch_size=1),
        Strategy(parallel=Parallel(data=4), zero=Zero(stage=1), train=Train(optimizer=SGD())),
    )
    forward = next(
        each
        for each in made.programs[0].by_id.values()
        if isinstance(each, Compute) and any(isinstance(edge, Previous) for edge in each.after)
    )
    (found, *_) = races(changed(made, forward.id, after=()))
    assert found.operation == forward.id
    assert found.why.endswith("/gather of the step before may still write it")
