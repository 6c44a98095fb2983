"""What is said of a trace that is no run of its schedule: which rank, which operation, why."""

import pytest
from drawn_clusters import NO_MODEL

import zsim_topologies
from zsim.backend.backend import Job
from zsim.model.architecture import GPT
from zsim.model.gpt import gpt
from zsim.proof import against_trace as refinement
from zsim.runtimes.registry import make_schedule
from zsim.schedule.builder import COMMUNICATION, ScheduleBuilder
from zsim.schedule.operation import FreeMode
from zsim.schedule.replace import replace
from zsim.schedule.schedule import Contract, Kind, Schedule
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim.strategy.train import LossScale, Train
from zsim.trace.trace import Event, LedgerEntry, RankTrace, Trace
from zsim_des import SimBackend

CLUSTER = zsim_topologies.load("dgx_a100_infiniband")


def said(made: Schedule, trace: Trace) -> list[str]:
    return [f"{each.where}: {each.why}" for each in refinement.examine(made, trace)]


def run(made: Schedule, *, steps: int = 1, overflow: bool = False) -> Trace:
    job = Job(schedule=made, model=NO_MODEL, cluster=CLUSTER, steps=steps)
    overflow_steps = frozenset({steps - 1} if overflow else ())
    return SimBackend(unfold=True, overflow_steps=overflow_steps).run(job, seed=0)


def two_rounds() -> Schedule:
    """Two ranks that twice fill a buffer and sum it."""
    build = ScheduleBuilder.of("two rounds", data=2)
    group = build.group("data", "data")
    x = build.buffer("x", 4)
    step = build.step
    step.allocate(x)
    before: list[str] = []
    for number in range(2):
        filled = step.fill(f"fill{number}", x.all, 1.0, after=before)
        before = [step.all_reduce(f"sum{number}", group, x.all, after=[filled])]
    step.free(x, uses=before)
    return build.schedule()


def with_times(trace: Trace, *times: dict[str, tuple[int, int]]) -> Trace:
    """`trace` in which the operations of each rank have these times."""
    ranks = [
        replace(
            rank,
            events=tuple(
                replace(event, start_ps=start, end_ps=end)
                for event in rank.events
                for start, end in [own[event.operation.removeprefix("step/")]]
            ),
        )
        for rank, own in zip(trace.ranks, times, strict=True)
    ]
    return replace(trace, ranks=tuple(ranks), step_end_ps=(10_000,))


STEADY = {"fill0": (0, 100), "sum0": (100, 200), "fill1": (200, 300), "sum1": (300, 400)}


def test_clocks_that_began_at_other_moments_are_no_fault_and_impossible_ones_are() -> None:
    made = two_rounds()
    trace = run(made)
    # With r the shift of the second rank's clock: sum0 needs 50 + r >= 100 and 200 >= 10 + r, sum1
    # needs 160 + r >= 300 and 400 >= 60 + r. So r from 140 to 190 does.
    quick = {"fill0": (0, 10), "sum0": (10, 50), "fill1": (50, 60), "sum1": (60, 160)}
    assert said(made, with_times(trace, STEADY, quick)) == []
    # If sum1 ends at 100 there, r must be at least 200, and sum0 ended before it began.
    quick["sum1"] = (60, 100)
    (finding,) = refinement.examine(made, with_times(trace, STEADY, quick))
    assert finding.where.startswith("all rank ")
    assert finding.why == "ends before its partners can have begun it, however their clocks are set"
    assert sorted(finding.witness) == [
        "all rank 0 ends step/sum0 of step 0 before all rank 1 can have begun step/sum0 of step 0",
        "all rank 1 ends step/sum1 of step 0 before all rank 0 can have begun step/sum1 of step 0",
    ]


def test_an_early_start_is_told_with_what_it_should_have_waited_for() -> None:
    made = two_rounds()
    early = STEADY | {"fill1": (150, 250)}
    (finding,) = refinement.examine(made, with_times(run(made), STEADY, early))
    assert (finding.role, finding.operation) == ("all rank 1", "step/fill1")
    assert finding.why == (
        "starts in step 0 before step/sum0 of step 0 has ended, which it waits for"
    )
    assert finding.witness == (
        "starts at 150 ps",
        "step/sum0 of step 0 ends at 200 ps: it is named in after",
    )


def test_what_did_not_run_ran_twice_or_ran_elsewhere_is_told_apart_on_every_rank() -> None:
    made = two_rounds()
    trace = run(made)
    first, second = trace.ranks
    astray = replace(first.events[0], stream="communication")
    ranks = (
        replace(first, events=(astray, *first.events[1:])),
        replace(second, events=(*second.events[:2], *second.events[3:], second.events[1])),
    )
    assert said(made, replace(trace, ranks=ranks)) == [
        "all rank 0: step/fill0: ran on stream communication in step 0, its stream is compute",
        "all rank 1: step/fill1: did not run in step 0",
        "all rank 1: step/sum0: ran more than once in step 0",
    ]


def test_independent_disorders_are_told_one_by_one_with_both_orders() -> None:
    build = ScheduleBuilder.of("four", data=1)
    x = build.buffer("x", 1)
    build.step.allocate(x)
    for name in "abcd":
        build.step.fill(name, x.all, 0.0)
    build.step.free(x)
    made = build.schedule()
    (rank,) = run(made).ranks
    a, b, c, d = (replace(event, start_ps=0, end_ps=0) for event in rank.events)
    trace = replace(run(made), ranks=(replace(rank, events=(b, a, d, c)),))
    first, second = refinement.examine(made, trace)
    assert (first.operation, second.operation) == ("step/b", "step/d")
    assert first.why == "stream compute has another order than the schedule"
    assert first.witness == (
        "the schedule: step/a",
        "the schedule: step/b",
        "the trace: step/b",
        "the trace: step/a",
    )


def test_ranks_that_branch_apart_are_named() -> None:
    strategy = Strategy(
        parallel=Parallel(data=2),
        zero=Zero(stage=1),
        train=Train(precision=Precision.FP16, loss_scale=LossScale(initial=2.0)),
    )
    shape = GPT(layers=1, hidden_size=4, attention_heads=2, sequence_length=4, vocab_size=11)
    made = make_schedule(
        gpt(shape, micro_batch_size=1, precision=strategy.train.precision), strategy
    )
    plain, skipped = run(made, steps=2), run(made, steps=2, overflow=True)
    assert said(made, plain) == said(made, skipped) == []
    torn = replace(plain, ranks=(plain.ranks[0], skipped.ranks[1]))
    (finding, *_) = refinement.examine(made, torn)
    assert finding.why == "ranks take different lists of it in step 1"
    assert finding.witness == ("all rank 1 takes then", "all rank 0 takes otherwise")


def deferred() -> Schedule:
    """x is freed as soon as its use has ended, at the allocation of y or at that of z."""
    build = ScheduleBuilder.of("deferred", data=1)
    x, y, z = (build.buffer(name, 1) for name in "xyz")
    step = build.step
    step.allocate(x)
    used = step.fill("use", x.all, 0.0, stream=COMMUNICATION)
    step.free(x, uses=[used], mode=FreeMode.DEFERRED)
    step.allocate(y)
    step.fill("y", y.all, 0.0)
    step.host_wait("wait", used)
    step.allocate(z)
    step.fill("z", z.all, 0.0)
    step.free(y, z)
    return build.schedule(Contract(peak_bytes=(("all", "device", 8),)))


def test_nothing_is_said_of_when_a_buffer_without_bytes_came_back() -> None:
    """A line of no bytes may allocate or free, so each is left out."""
    build = ScheduleBuilder.of("nothing", data=1)
    x, y, z = (build.buffer(name, size) for name, size in (("x", 0), ("y", 1), ("z", 1)))
    step = build.step
    step.allocate(x, y)
    used = step.fill("use", y.all, 0.0, stream=COMMUNICATION)
    step.free(x, uses=[used], mode=FreeMode.DEFERRED)
    step.host_wait("wait", used)
    step.allocate(z)
    step.free(y, z)
    made = build.schedule(Contract(peak_bytes=(("all", "device", 8),)))
    trace = run(made)
    assert [each.buffer for each in trace.ranks[0].book if not each.change_bytes] == ["x", "x"]
    assert said(made, trace) == []
    (rank,) = trace.ranks
    late = replace(
        trace, ranks=(replace(rank, book=tuple(e for e in rank.book if e.change_bytes)),)
    )
    assert said(made, late) == []


def booked(*lines: tuple[str, str, int]) -> tuple[LedgerEntry, ...]:
    return tuple(
        LedgerEntry(
            operation=f"step/{operation}",
            step=0,
            pool="device",
            buffer=buffer,
            kind=Kind.WORKSPACE,
            change_bytes=change,
        )
        for operation, buffer, change in lines
    )


def test_memory_of_a_deferred_free_returns_after_its_use_and_no_later_than_the_host_knows() -> None:
    made = deferred()
    (rank,) = run(made).ranks
    names = [entry.operation.removeprefix("step/") for entry in rank.book if entry.change_bytes > 0]
    x, y, z = names
    ends = [entry.operation.removeprefix("step/") for entry in rank.book[-2:]]
    alive, over = [(y, "y", 4), (z, "z", 4)], [(ends[0], "y", -4), (ends[1], "z", -4)]
    early = booked((x, "x", 4), (y, "x", -4), alive[0], alive[1], *over)
    late = booked((x, "x", 4), alive[0], (z, "x", -4), alive[1], *over)
    never = booked((x, "x", 4), *alive, *over)

    def told(book: tuple[LedgerEntry, ...], used: tuple[int, int]) -> list[str]:
        times = {"step/use": used, "step/y": (100, 110), "step/z": (300, 310)}
        events = tuple(
            Event(operation=name, step=0, stream=stream, start_ps=start, end_ps=end)
            for name, stream in (
                ("step/use", "communication"),
                ("step/y", "compute"),
                ("step/z", "compute"),
            )
            for start, end in [times[name]]
        )
        one = RankTrace(rank=0, role="all", stands_for=1, events=events, book=book, transfers=())
        whole = replace(run(made), ranks=(one,), step_end_ps=(1000,))
        return said(made, whole)

    assert told(early, (0, 50)) == told(late, (0, 50)) == told(late, (0, 200)) == []
    (line,) = told(early, (0, 200))
    assert line == (
        f"all rank 0: step/{y}: books x back in step 0 before step/use of step 0, a use of it, had "
        "ended"
    )
    lines = told(never, (0, 50))
    assert f"all rank 0: step/{z}: its line of the book of x, freed, in step 0 is missing" in lines
    assert "all rank 0: device: the book of the trace reaches 12 bytes, promised are 8" in lines


def test_two_deferred_frees_of_one_buffer_may_come_back_at_two_allocations() -> None:
    build = ScheduleBuilder.of("twice", data=1)
    x, y, z = (build.buffer(name, 1) for name in "xyz")
    step = build.step
    for number in range(2):
        step.allocate(x)
        used = step.fill(f"use{number}", x.all, 0.0, stream=COMMUNICATION)
        step.free(x, uses=[used], mode=FreeMode.DEFERRED)
    for buffer in (y, z):
        step.allocate(buffer)
        step.fill(buffer.name, buffer.all, 0.0)
    step.free(y, z)
    made = build.schedule()
    trace = run(made)
    (rank,) = trace.ranks
    starts = {"step/use0": 0, "step/use1": 100, "step/y": 50, "step/z": 300}
    events = tuple(
        replace(event, start_ps=start, end_ps=start + 10)
        for event in rank.events
        for start in [starts[event.operation]]
    )
    taken = {entry.operation: entry for entry in rank.book if entry.change_bytes > 0}
    first, second, of_y, of_z = taken.values()
    gone = [entry for entry in rank.book if entry.change_bytes < 0 and entry.buffer != "x"]

    def back(at: LedgerEntry) -> LedgerEntry:
        return replace(at, buffer="x", change_bytes=-4)

    def told(*book: LedgerEntry) -> list[str]:
        one = replace(rank, events=events, book=(*book, *gone))
        return said(made, replace(trace, ranks=(one,), step_end_ps=(1000,)))

    # The first use ends before y is issued, the second one after that and before z.
    assert told(first, second, back(of_y), of_y, back(of_z), of_z) == []
    (line,) = told(first, second, back(of_y), back(of_y), of_y, of_z)
    assert line.endswith("before step/use1 of step 0, a use of it, had ended")


def test_a_trace_of_other_ranks_or_steps_is_said_to_be_that_and_nothing_else() -> None:
    made = two_rounds()
    trace = run(made)
    assert said(made, replace(trace, ranks=trace.ranks[:1])) == [
        "trace/ranks: role all has 2 ranks, the trace speaks of 1"
    ]
    assert said(made, replace(trace, ranks=(replace(trace.ranks[0], rank=7),))) == [
        "trace/ranks: rank 7 is traced, the schedule has 2"
    ]
    with pytest.raises(ValueError, match="step_end_ps: 1, must be 3"):
        replace(trace, steps=3)
