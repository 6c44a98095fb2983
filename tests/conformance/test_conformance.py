"""What every backend owes: whatever its durations, the same operations, bytes and memory.

Each test compares a trace with what follows from the schedule alone. A third party's backend is
held to the same tests: register it under `zsim.backends`.
"""

from collections import defaultdict
from collections.abc import Iterator
from functools import cache

import pytest

import zsim_topologies
from zsim.backend.backend import Backend, Job, load, names
from zsim.memory import book
from zsim.model.architecture import GPT
from zsim.model.gpt import gpt
from zsim.network.volume import element_count, is_scalar, ring_equivalent_bytes
from zsim.proof import against_trace as refinement
from zsim.runtimes.registry import make_schedule
from zsim.schedule.builder import ScheduleBuilder
from zsim.schedule.issue_order import SETUP, issued
from zsim.schedule.layout import Layout, Piece
from zsim.schedule.mesh import Axis, Joined, Mesh
from zsim.schedule.operation import (
    Branch,
    Communication,
    Free,
    FreeMode,
    Operation,
    Previous,
    Reduction,
    StreamOperation,
    Together,
)
from zsim.schedule.schedule import Contract, Program, Schedule
from zsim.strategy.optimizer_rule import SGD, Adam
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Activations, Checkpointing, Keep, Parallel, Strategy, Zero
from zsim.strategy.train import LossScale, Train
from zsim.trace.trace import Event, RankTrace, Trace

OURS = {"null", "sim", "torch"}
STEPS = 2
SHAPE = GPT(layers=2, hidden_size=6, attention_heads=2, sequence_length=4, vocab_size=11)

STRATEGIES = {
    "stage 0": Strategy(
        parallel=Parallel(data=2), zero=Zero(stage=0), train=Train(optimizer=SGD())
    ),
    "stage 1": Strategy(
        parallel=Parallel(data=2),
        zero=Zero(stage=1),
        train=Train(gradient_accumulation_steps=2, precision=Precision.BF16, clip_norm=1.0),
    ),
    "stage 2": Strategy(
        parallel=Parallel(data=3),
        zero=Zero(stage=2, bucket_elements=200),
        train=Train(gradient_accumulation_steps=2, clip_norm=1.0),
    ),
    "stage 3": Strategy(
        parallel=Parallel(data=2),
        zero=Zero(stage=3, bucket_elements=200, host_ahead_units=2),
        activations=Activations(checkpointing=Checkpointing.FULL),
        train=Train(gradient_accumulation_steps=2, optimizer=Adam(weight_decay=0.1)),
    ),
    "stage 3, fp16, kept": Strategy(
        parallel=Parallel(data=2),
        zero=Zero(
            stage=3, keep_after_forward=Keep.EVERYTHING, prefetch_units=3, reductions_in_flight=0
        ),
        train=Train(precision=Precision.FP16, loss_scale=LossScale(initial=1.0)),
    ),
    "stage 2, checkpoints in host memory": Strategy(
        parallel=Parallel(data=2),
        zero=Zero(stage=2, contiguous=True),
        activations=Activations(checkpointing=Checkpointing.FULL, offload=True),
    ),
    # With a CUDA device the torch backend runs one rank on it, with NCCL.
    "one rank, stage 0": Strategy(zero=Zero(stage=0), train=Train(clip_norm=1.0)),
    "one rank, stage 1": Strategy(zero=Zero(stage=1), train=Train(precision=Precision.BF16)),
    "one rank, stage 2": Strategy(
        zero=Zero(stage=2, bucket_elements=200), train=Train(precision=Precision.FP16)
    ),
    "one rank, stage 3": Strategy(
        zero=Zero(stage=3),
        activations=Activations(checkpointing=Checkpointing.FULL, offload=True),
        train=Train(gradient_accumulation_steps=2),
    ),
}


def by_hand() -> Schedule:
    """What zsim's own stages never say: a ring of sends, several at once, each kind of free."""
    build = ScheduleBuilder.of("by hand", data=2)
    data = build.group("data", "data")
    own = build.buffer("own", 4, persistent=True)
    others = [build.buffer(f"other{index}", 4, home="communication") for index in range(3)]
    build.setup.allocate(own)
    build.setup.fill("own", own.all, 1.0)
    step = build.step
    modes = (FreeMode.WAITED, FreeMode.DEFERRED, FreeMode.HOST)
    for index, (other, mode) in enumerate(zip(others, modes, strict=True)):
        step.allocate(other)
        step.send(f"send{index}", data, own.all, 1)
        step.receive(f"receive{index}", data, other.all, -1)
        before = Previous("step/add2") if index == 0 else f"step/add{index - 1}"
        moved = step.together(f"move{index}", 2, after=[before])
        added = step.copy(f"add{index}", other.all, own.all, accumulate=True, after=[moved])
        step.free(other, mode=mode, uses=[added])
        step.host_wait(f"wait{index}", added)
    step.broadcast("broadcast", data, own.all, root=1, after=["step/add2"])
    return build.schedule()


def in_blocks() -> Schedule:
    """Blocks over a joined axis, replicas, windows, copies by parameter, as other runtimes have."""
    names = ("replicate", "far", "near")
    axes = tuple(Axis(name=name, size=size) for name, size in zip(names, (2, 2, 1), strict=True))
    mesh = Mesh(axes=axes, joined=(Joined(name="data", axes=("far", "near")),))
    build = ScheduleBuilder("in blocks", mesh)
    data, replicas = build.group("data", "far", "near"), build.group("replicas", "replicate")
    gather, reduce = build.stream("gather"), build.stream("reduce")
    pieces = (Piece(parameter="w", start=0, size=3), Piece(parameter="b", start=4, size=1))
    build.layout(Layout(name="blocks", pieces=pieces, elements=6, axis="data", blocks=(0, 4)))
    build.layout(Layout(name="flat", pieces=pieces, elements=6, axis="data"))
    own = build.buffer("own", 3, layout="blocks", shard="data", persistent=True)
    gathered = build.buffer("gathered", 6, layout="blocks", home=gather)
    whole = build.buffer("whole", 6, layout="flat")
    kept = build.buffer("kept", 3, layout="flat", shard="data")
    build.setup.allocate(own)
    build.setup.fill("own", own.all, 1.0)
    step, slot = build.step, gathered.own("data", 3)
    step.allocate(gathered, whole)
    placed = step.copy("in", own.all, slot, stream=gather, after=[Previous("step/back")])
    step.all_gather("gather", data, slot, gathered.all, stream=gather, after=[placed])
    out = step.copy(
        "out", gathered.all, whole.all, by_parameter=True, divisor=2, after=["step/gather"]
    )
    step.free(gathered, uses=[out])
    mean, window = Reduction.AVERAGE, whole.window("flat", 4, 1, origin=1)
    summed = step.all_reduce("sum", data, whole.all, reduction=mean, stream=reduce, after=[out])
    step.allocate(kept)
    step.copy("slices", window, kept.window("flat", 4, 1), after=[summed])
    both = step.all_reduce("replicas", replicas, whole.all, stream=reduce, after=["step/slices"])
    step.copy("back", whole.all, own.all, by_parameter=True, accumulate=True, after=[both])
    step.host_wait("updated", "step/back")
    step.free(whole, kept, mode=FreeMode.HOST, uses=[both])
    return build.schedule(Contract(data_axes=names))


BY_HAND = {"by hand": by_hand, "in blocks": in_blocks}


def job(name: str) -> Job:
    cluster = zsim_topologies.load("dgx_a100_infiniband")
    if name in BY_HAND:
        model = gpt(SHAPE, micro_batch_size=1)
        return Job(schedule=BY_HAND[name](), model=model, cluster=cluster, steps=STEPS)
    strategy = STRATEGIES[name]
    model = gpt(SHAPE, micro_batch_size=2, precision=strategy.train.precision)
    return Job(schedule=make_schedule(model, strategy), model=model, cluster=cluster, steps=STEPS)


@cache
def run(backend: str, name: str) -> tuple[Job, Trace]:
    """One run for all tests."""
    made: Backend = load(backend)()
    given = job(name)
    assert made.refusal(given) is None
    return given, made.run(given, seed=7)


@pytest.fixture(params=[*STRATEGIES, *BY_HAND])
def name(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture(params=names())
def backend(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


def ranks_of(backend: str, name: str) -> Iterator[tuple[Program, RankTrace]]:
    given, trace = run(backend, name)
    for one in trace.ranks:
        yield given.schedule.program_of(one.rank), one


def on_streams(program: Program) -> Iterator[tuple[int, StreamOperation]]:
    for step, operation in issued(program, STEPS):
        if isinstance(operation, StreamOperation):
            yield step, operation


def members(operation: Operation) -> tuple[Communication, ...]:
    if isinstance(operation, Together):
        return operation.members
    return (operation,) if isinstance(operation, Communication) else ()


def test_all_of_our_backends_are_registered_and_load() -> None:
    assert set(names()) >= OURS
    for backend in OURS:
        assert load(backend).name == backend


def test_every_rank_is_traced_or_stood_for(backend: str, name: str) -> None:
    given, trace = run(backend, name)
    assert (trace.backend, trace.schedule, trace.seed) == (backend, given.schedule.name, 7)
    assert sum(one.stands_for for one in trace.ranks) == given.schedule.mesh.size
    assert len({one.rank for one in trace.ranks}) == len(trace.ranks)
    for one in trace.ranks:
        assert one.role == given.schedule.role_of(one.rank).name


def test_streams_run_the_same_operations_in_the_same_order(backend: str, name: str) -> None:
    for program, one in ranks_of(backend, name):
        expected: defaultdict[str, list[tuple[int, str]]] = defaultdict(list)
        for step, operation in on_streams(program):
            expected[operation.stream].append((step, operation.id))
        found: defaultdict[str, list[tuple[int, str]]] = defaultdict(list)
        for event in one.events:
            found[event.stream].append((event.step, event.operation))
        assert found == expected


def test_communicators_are_handed_the_same_in_the_same_order(backend: str, name: str) -> None:
    given, _ = run(backend, name)
    for program, one in ranks_of(backend, name):
        expected = [
            (step, member.id, member.group, element_count(member), is_scalar(member))
            for step, operation in on_streams(program)
            for member in members(operation)
        ]
        found = [
            (transfer.step, transfer.operation, transfer.group, transfer.elements, transfer.scalar)
            for transfer in one.transfers
        ]
        assert found == expected
        sizes = {group.name: group.size(given.schedule.mesh) for group in given.schedule.groups}
        assert [transfer.bytes for transfer in one.transfers] == [
            ring_equivalent_bytes(member, sizes[member.group])
            for _, operation in on_streams(program)
            for member in members(operation)
        ]


def test_the_book_is_the_allocators(backend: str, name: str) -> None:
    # "by hand" has a deferred free, whose uses the host has waited for: its return is certain.
    for program, one in ranks_of(backend, name):
        assert one.book == book(program, STEPS)


def edges_of(operation: StreamOperation) -> Iterator[tuple[str, bool]]:
    for edge in operation.after:
        if isinstance(edge, Previous):
            yield edge.operation, True
        else:
            yield edge, False


def test_no_operation_starts_before_what_it_waits_for_has_ended(backend: str, name: str) -> None:
    for program, one in ranks_of(backend, name):
        when = {(event.step, event.operation): event for event in one.events}
        for step, operation in on_streams(program):
            event = when[step, operation.id]
            assert event.start_ps <= event.end_ps
            for awaited, previous in edges_of(operation):
                before = latest(when, awaited, step - 1 if previous else step)
                assert before is None or before.end_ps <= event.start_ps, (operation.id, awaited)


def latest(when: dict[tuple[int, str], Event], operation: str, step: int) -> Event | None:
    """The last instance of `operation` in `step` or before; setup has steps' earlier ones."""
    for earlier in range(step, SETUP - 1, -1):
        if (earlier, operation) in when:
            return when[earlier, operation]
    return None


def test_streams_and_communicators_run_one_operation_at_a_time(backend: str, name: str) -> None:
    for program, one in ranks_of(backend, name):
        when = {(event.step, event.operation): event for event in one.events}
        ends: dict[str, int] = {}
        for step, operation in on_streams(program):
            event = when[step, operation.id]
            lines = [f"stream {operation.stream}"]
            if members(operation):
                lines.append(f"group {members(operation)[0].group}")
            for line in lines:
                assert ends.get(line, event.start_ps) <= event.start_ps, (operation.id, line)
                ends[line] = event.end_ps


def test_what_happened_is_a_run_that_the_schedule_allows(backend: str, name: str) -> None:
    given, trace = run(backend, name)
    assert refinement.examine(given.schedule, trace) == []


def test_steps_end_after_everything_in_them(backend: str, name: str) -> None:
    given, trace = run(backend, name)
    assert trace.steps == given.steps == len(trace.step_end_ps)
    assert list(trace.step_end_ps) == sorted(trace.step_end_ps)
    for one in trace.ranks:
        for event in one.events:
            if event.step != SETUP:
                assert event.end_ps <= trace.step_end_ps[event.step]


def test_the_suite_has_every_mode_of_free_and_a_branch() -> None:
    """The jobs above would not notice a backend that lacks what they never use."""
    operations = [
        operation
        for name in (*STRATEGIES, *BY_HAND)
        for program in job(name).schedule.programs
        for operation in program.by_id.values()
    ]
    assert {op.mode for op in operations if isinstance(op, Free)} == set(FreeMode)
    assert any(isinstance(op, Branch) for op in operations)
    assert any(isinstance(op, Together) for op in operations)
