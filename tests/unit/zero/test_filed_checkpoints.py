"""Checkpoints on NVMe: proved, moved once each way by each link, read ahead of their backward."""

from itertools import product

import pytest
from exact_training import STEPS, cluster, trained

from zsim.backend.backend import Job
from zsim.config_error import ConfigError
from zsim.model.architecture import GPT
from zsim.model.gpt import gpt
from zsim.model.model import Model
from zsim.proof import check
from zsim.runtimes.registry import make_schedule
from zsim.schedule.operation import Action, Compute, Copy, Free, Operation, Read, Write
from zsim.schedule.replace import replace
from zsim.schedule.schedule import FileBytes, HostBytes, Schedule
from zsim.strategy.strategy import Strategy
from zsim_des.simulation import SimBackend
from zsim_des.values import train

LAYERS = 4
SHAPE = GPT(layers=LAYERS, hidden_size=4, attention_heads=2, sequence_length=2, vocab_size=3)
CHECKPOINT_BYTES = 2 * 4 * 4
"""A sequence of two tokens, 4 wide, in fp32: what a block is given."""


def strategy(stage: object = 2, **said: object) -> Strategy:
    """Full checkpoints in files; `said` are keys, with `__` for the dot."""
    keys: dict[str, object] = {
        "activations.checkpointing": "full",
        "offload.checkpoints": "nvme",
        "parallel.data": 2,
    }
    made = Strategy.of({"zero": {"stage": stage}})
    return made.but(keys | {key.replace("__", "."): value for key, value in said.items()})


def model(wanted: Strategy) -> Model:
    return gpt(
        SHAPE,
        micro_batch_size=1,
        tensor=wanted.parallel.tensor,
        precision=wanted.train.precision,
    )


WAYS = [
    way
    for number, way in enumerate(
        product((0, 1, 2, 3), (False, True), ((1, False), (2, False), (2, True)), (0, 1, 3))
    )
    if number % 11 == 0
]
"""Some of: stage, memory in a row, tensor ranks with what is partitioned, units read ahead."""


@pytest.mark.matrix(21)
@pytest.mark.parametrize(("stage", "contiguous", "tensor", "ahead"), WAYS)
def test_every_way_is_proved_and_trains_as_one_process_does(
    stage: int,
    contiguous: bool,
    tensor: tuple[int, bool],
    ahead: int,
) -> None:
    wanted = strategy(
        stage,
        zero__contiguous=contiguous,
        parallel__tensor=tensor[0],
        activations__partition=tensor[1],
        offload__read_units=ahead,
        train__gradient_accumulation_steps=2,
    )
    subject = model(wanted)
    assert check(make_schedule(subject, wanted), subject) == ()
    expected = train(subject, wanted, STEPS)
    assert trained(make_schedule(subject, wanted), subject, expected).is_right


@pytest.mark.matrix(6)
@pytest.mark.parametrize("partition", [False, True])
def test_each_link_carries_each_checkpoint_once_each_way(*, partition: bool) -> None:
    wanted = strategy(
        parallel__tensor=2, activations__partition=partition, train__gradient_accumulation_steps=3
    )
    moved = 3 * LAYERS * CHECKPOINT_BYTES // (2 if partition else 1)
    contract = make_schedule(model(wanted), wanted).contract
    assert contract.host_bytes == (HostBytes(to_host=moved, from_host=moved),)
    assert contract.file_bytes == FileBytes(read=moved, written=moved)
    assert check(make_schedule(model(wanted), wanted), model(wanted)) == ()


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_a_checkpoint_is_read_as_many_units_ahead_of_its_copy_as_asked(ahead: int) -> None:
    wanted = strategy(offload__read_units=ahead)
    (program,) = make_schedule(model(wanted), wanted).programs
    order: list[tuple[str, str]] = []
    for operation in program.step:
        if isinstance(operation, Read):
            order.append(("read", operation.id.rpartition("/read/")[2]))
        elif isinstance(operation, Copy) and "/fetch/" in operation.id:
            order.append(("copy", operation.id.rpartition("/fetch/")[2]))
    copies = [value for kind, value in order if kind == "copy"]
    reads = [value for kind, value in order if kind == "read"]
    assert copies == reads
    assert len(copies) == LAYERS
    for number, value in enumerate(copies):
        before = [each for kind, each in order[: order.index(("copy", value))] if kind == "read"]
        assert len(before) <= number + 1 + ahead + 1
        assert len(before) >= min(LAYERS, number + 1 + (ahead if number else 0))


def test_host_memory_holds_two_checkpoints_on_their_way_and_those_read_ahead() -> None:
    for ahead in (0, 1, 2):
        wanted = strategy(offload__read_units=ahead)
        peaks = {p: s for _, p, s in make_schedule(model(wanted), wanted).contract.peak_bytes}
        assert peaks["host"] == (2 + ahead) * CHECKPOINT_BYTES
        assert peaks["nvme"] == LAYERS * CHECKPOINT_BYTES


def without(schedule: Schedule, part: str) -> Schedule:
    """The schedule without what operations whose id has a part wait for, or free."""

    def loose(operation: Operation) -> Operation:
        if part in operation.id and isinstance(operation, Read | Write):
            return replace(operation, after=())
        if part in operation.id and isinstance(operation, Free):
            return replace(operation, uses=())
        return operation

    (program,) = schedule.programs
    step = tuple(map(loose, program.step))
    assert step != program.step
    return replace(schedule, programs=(replace(program, step=step),))


@pytest.mark.parametrize("part", ["/read/", "/write/", "leaving", "coming"])
def test_what_orders_files_and_memory_is_found_where_it_is_missing(part: str) -> None:
    wanted = strategy()
    schedule = make_schedule(model(wanted), wanted)
    found = {each.invariant for each in check(without(schedule, part), model(wanted))}
    assert found & {"races", "lifetime"}


def test_writes_run_beside_forward_and_reads_beside_backward() -> None:
    wanted = strategy()
    subject = model(wanted)
    job = Job(schedule=make_schedule(subject, wanted), model=subject, cluster=cluster(2), steps=2)
    trace = SimBackend().run(job, seed=0)
    (rank, _) = trace.ranks if len(trace.ranks) == 2 else (trace.ranks[0], None)
    by_id = job.schedule.programs[0].by_id
    last = [event for event in rank.events if event.step == 1]
    for kind, action in ((Write, Action.FORWARD), (Read, Action.BACKWARD)):
        files = [e for e in last if isinstance(by_id[e.operation], kind)]
        assert len(files) == LAYERS
        computing = [
            event
            for event in last
            if isinstance(operation := by_id[event.operation], Compute)
            and operation.action is action
        ]
        assert any(
            one.start_ps < other.end_ps and other.start_ps < one.end_ps
            for one in files
            for other in computing
        )


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (
            {"activations__checkpointing": "none"},
            "offload.checkpoints: 'nvme' needs activations.checkpointing = full",
        ),
        ({"offload__checkpoints": "tape"}, "offload.checkpoints"),
        (
            {"activations__offload": True},
            "activations.offload: is not here any more: say offload.checkpoints = host",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(said: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        strategy(**said)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
