"""Checkpoints that runtimes keep in the host's memory: where copies are, who waits, memory."""

from collections.abc import Callable, Iterator

import pytest
from fitting import fitting

from zsim.analysis.summary import summary
from zsim.backend.backend import Job
from zsim.cluster.cluster import Cluster
from zsim.config_error import ConfigError
from zsim.files.installed import topology
from zsim.model.architecture import GPT
from zsim.model.model import Model
from zsim.proof import check
from zsim.runtimes.registry import host_bytes, make_schedule
from zsim.schedule.operation import Action, Allocate, Compute, Copy, Free, HostWait, Operation, walk
from zsim.schedule.operation_list import COMPUTE
from zsim.schedule.replace import replace
from zsim.schedule.schedule import HostBytes, Program, Schedule, ScheduleError
from zsim.strategy.activations import Activations, Checkpointing
from zsim.strategy.precision import Precision
from zsim.strategy.runtime_options import RuntimeOptions
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim.strategy.train import Train
from zsim.trace.trace import Trace
from zsim_des import SimBackend
from zsim_runtimes.deepspeed.options import DeepSpeed
from zsim_runtimes.fsdp1.options import FSDP1
from zsim_runtimes.fsdp2.options import FSDP2
from zsim_runtimes.nanotron.options import Nanotron

BLOCKS = 5
SHAPE = GPT(layers=BLOCKS, hidden_size=64, attention_heads=4, sequence_length=32, vocab_size=61)
CHECKPOINT_BYTES = 32 * 64 * 2
"""A sequence of 32 tokens, 64 wide, in bf16: what a block is given."""

BLOCKING = DeepSpeed(cpu_checkpointing=True)
STREAM = DeepSpeed(cpu_checkpointing=True, checkpoint_stream=True)
MOVING: dict[str, tuple[int, RuntimeOptions]] = {
    "fsdp1": (3, FSDP1(offload_wrapper=True)),
    "fsdp2": (3, FSDP2(offload_wrapper=True)),
    **{f"deepspeed {stage}": (stage, BLOCKING) for stage in (1, 2, 3)},
    **{f"deepspeed {stage}, stream": (stage, STREAM) for stage in (1, 2, 3)},
}


def of(named: tuple[int, RuntimeOptions], **changes: object) -> Strategy:
    stage, runtime = named
    base = Strategy(
        parallel=Parallel(data=2),
        zero=Zero(stage=stage, emulate=runtime),
        activations=Activations(checkpointing=Checkpointing.FULL),
        train=Train(precision=Precision.BF16),
    )
    return base.but({key.replace("__", "."): value for key, value in changes.items()})


def written(strategy: Strategy) -> tuple[Model, Schedule, Program]:
    model = fitting(SHAPE, strategy)
    made = make_schedule(model, strategy)
    (program,) = made.programs
    return model, made, program


def crossing(program: Program, verb: str) -> list[Copy]:
    """Copies of checkpoints one way."""
    return [
        each for each in walk(program.step) if isinstance(each, Copy) and f"/{verb}/" in each.id
    ]


def place(program: Program, fits: Callable[[Operation], bool]) -> int:
    return next(number for number, each in enumerate(program.step) if fits(each))


def runs(program: Program, unit: str, action: Action) -> int:
    """Return the place where a block is run first."""
    return place(
        program,
        lambda each: isinstance(each, Compute) and (each.unit, each.action) == (unit, action),
    )


@pytest.mark.matrix(6)
@pytest.mark.parametrize("name", MOVING)
def test_a_step_is_proved_and_copies_what_the_closed_form_says(name: str) -> None:
    strategy = of(MOVING[name], train__gradient_accumulation_steps=3)
    model, made, program = written(strategy)
    assert check(made, model) == ()
    out, back = crossing(program, "offload"), crossing(program, "fetch")
    stays = ("stream" in name) * 1  # the last is kept, and of the one before the device's memory
    assert len(out) == 3 * (BLOCKS - stays)
    assert len(back) == 3 * (BLOCKS - 2 * stays)
    sizes = [len(each) * CHECKPOINT_BYTES for each in (out, back)]
    assert host_bytes(model, strategy) == (HostBytes(to_host=sizes[0], from_host=sizes[1]),)


@pytest.mark.parametrize("name", [each for each in MOVING if "stream" not in each])
def test_without_a_stream_a_copy_is_on_the_compute_stream_where_its_block_begins(name: str) -> None:
    _, _, program = written(of(MOVING[name]))
    copies = [*crossing(program, "offload"), *crossing(program, "fetch")]
    assert {each.stream for each in copies} == {COMPUTE}
    for copy in copies:
        unit = copy.id.split("/")[3]
        out = "/offload/" in copy.id
        begins = runs(program, unit, Action.FORWARD if out else Action.RECOMPUTE)
        before = program.step[program.step.index(copy) : begins]
        kernels = [each for each in before if isinstance(each, Compute)]
        assert kernels == []
        waits = [
            each for each in before if isinstance(each, HostWait) and each.id.startswith(copy.id)
        ]
        assert len(waits) == name.startswith("deepspeed")


def test_deepspeed_copies_before_submodules_are_fetched() -> None:
    _, _, program = written(
        of(
            MOVING["deepspeed 3"],
            zero__emulate=BLOCKING.but(
                stage3_prefetch_bucket_size=0,
                stage3_max_reuse_distance=0,
                stage3_param_persistence_threshold=0,
            ),
        )
    )
    (first,) = {
        next(each.id for each in program.step if unit in each.id and not isinstance(each, Allocate))
        for unit in ["step/forward/mb0/block2"]
    }
    assert "/offload/" in first


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_copies_back_on_a_stream_wait_for_no_kernel_and_copies_out_for_the_next_block(
    stage: int,
) -> None:
    _, made, program = written(of((stage, STREAM)))
    assert all(not each.after for each in crossing(program, "fetch"))
    assert "checkpoints" in made.streams
    for copy in crossing(program, "offload"):
        (last,) = copy.after
        # issued as part of the block after the one whose input it is
        assert isinstance(last, str)
        assert last.startswith(copy.id.split("/offload/")[0])


def alive(program: Program, ending: tuple[str, ...], pool: str) -> Iterator[int]:
    """Count buffers of hidden states after each operation."""
    names = {
        each.name
        for each in program.buffers
        if each.pool == pool and each.size_bytes == CHECKPOINT_BYTES and each.name.endswith(ending)
    }
    held: set[str] = set()
    for operation in program.step:
        if isinstance(operation, Allocate) and operation.buffer in names:
            held.add(operation.buffer)
        elif isinstance(operation, Free):
            held.discard(operation.buffer)
        yield len(held)


@pytest.mark.parametrize("name", MOVING)
def test_device_and_host_hold_so_many_checkpoints_at_once(name: str) -> None:
    """Counted by hand, of hidden states that forward made and that came back."""
    _, _, program = written(of(MOVING[name]))
    stream = "stream" in name
    # What a block was given and what it makes; with a stream the two that are kept, and stay, too.
    assert max(alive(program, ("/output", "/gathered"), "device")) == (4 if stream else 2)
    pool = "pageable" if name.startswith("deepspeed") and not stream else "host"
    assert max(alive(program, ("/host",), pool)) == BLOCKS - stream


def cluster() -> Cluster:
    return topology("dgx_a100_infiniband", None, 1)


def simulated(strategy: Strategy, on: Cluster) -> tuple[Job, Trace]:
    model, made, _ = written(strategy)
    job = Job(schedule=made, model=model, cluster=on, steps=2)
    return job, SimBackend().run(job, seed=0)


def slow(bytes_per_s: int) -> Cluster:
    """The same behind a slow PCIe link."""
    found = cluster()
    assert found.pcie_link is not None
    return replace(found, pcie_link=replace(found.pcie_link, bytes_per_s=bytes_per_s), copies=None)


@pytest.mark.parametrize("name", MOVING)
def test_what_is_slow_to_copy_is_waited_for_unless_it_has_a_stream_and_time(name: str) -> None:
    strategy = of(MOVING[name])
    on = slow(10**7)
    job, trace = simulated(strategy, on)
    (moved,) = host_bytes(job.model, strategy)
    bound = (moved.to_host + moved.from_host) / 10**7
    found = summary(job, trace).step_time_s
    if "stream" in name:  # copies are one after the other, but beside kernels
        assert found >= bound
    else:  # nothing is beside them
        fast = summary(*simulated(strategy, cluster())).step_time_s
        assert found >= bound + fast / 2
    carried = {link.link: link.bytes for link in trace.links}
    # of a step, by both ranks
    assert carried["pcie->host"] == 2 * moved.to_host
    assert carried["host->pcie"] == 2 * moved.from_host


def test_deepspeeds_parts_of_checkpoints_stop_the_host_whatever_the_stream() -> None:
    """`_get_cpu_offload_engine` returns none where activations are partitioned."""
    changes = {"parallel.tensor": 2, "activations.partition": True}
    found = [written(of((1, runtime)).but(changes))[2].step for runtime in (BLOCKING, STREAM)]
    assert found[0] == found[1]


REFUSED: dict[str, tuple[Strategy, dict[str, object]]] = {
    "zero.fsdp2.offload_wrapper: true needs activations.checkpointing = full": (
        of(MOVING["fsdp2"]),
        {"activations.checkpointing": "none"},
    ),
    "zero.deepspeed.cpu_checkpointing: true needs activations.checkpointing = full": (
        of(MOVING["deepspeed 2"]),
        {"activations.checkpointing": "operations"},
    ),
    "zero.deepspeed.checkpoint_stream: true needs cpu_checkpointing = true": (
        of((1, BLOCKING)),
        {"zero.emulate": DeepSpeed(checkpoint_stream=True)},
    ),
    "offload.checkpoints: 'host' is for zsim's own stages; with emulate it stays at device, and "
    "zero.fsdp1.offload_wrapper = true moves checkpoints": (
        of((3, FSDP1())),
        {"offload.checkpoints": "host"},
    ),
    "offload.checkpoints: 'host' is for zsim's own stages; with emulate it stays at device": (
        of((1, Nanotron())),
        {"offload.checkpoints": "host"},
    ),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_no_runtime_does_is_refused_in_one_line(why: str) -> None:
    strategy, changes = REFUSED[why]
    with pytest.raises(ConfigError) as caught:
        strategy.but(changes)
    assert str(caught.value) == why


def edited(made: Schedule, edit: Callable[[Operation], Operation | None]) -> Schedule:
    (program,) = made.programs
    step = tuple(each for each in map(edit, program.step) if each is not None)
    assert step != program.step
    return replace(made, programs=(replace(program, step=step),))


def instead(of_it: Operation, other: Operation | None) -> Callable[[Operation], Operation | None]:
    """Return an edit that puts another operation in the place of one, or none."""

    def edit(each: Operation) -> Operation | None:
        return other if each is of_it else each

    return edit


def wrong(program: Program) -> Iterator[tuple[str, Callable[[Operation], Operation | None]]]:
    """Yield what is wrong with copies of checkpoints, and with what waits for them."""
    out, back = crossing(program, "offload"), crossing(program, "fetch")
    for which in (out[0], out[-1], back[0], back[-1]):
        yield f"no {which.id}", instead(which, None)
        half = replace(which.source, size=which.source.size // 2)
        other = replace(which, source=half, target=replace(which.target, size=half.size))
        yield f"half of {which.id}", instead(which, other)
    swapped = replace(back[0], source=back[1].source)
    yield "another checkpoint", instead(back[0], swapped)
    if out[0].stream == COMPUTE:
        return
    early = replace(out[0], after=())
    yield "a copy out before it was made", instead(out[0], early)
    copies = {each.id for each in (*out, *back)}

    def hastily(each: Operation) -> Operation:
        """Let no kernel wait for a copy."""
        if not isinstance(each, Compute):
            return each
        return replace(each, after=tuple(edge for edge in each.after if edge not in copies))

    def carelessly(each: Operation) -> Operation:
        """Free memory while it is copied."""
        if not isinstance(each, Free):
            return each
        return replace(each, uses=tuple(use for use in each.uses if use not in copies))

    yield "no wait for copies", hastily
    yield "memory freed while it is copied", carelessly


@pytest.mark.matrix(24)
@pytest.mark.parametrize("name", MOVING)
def test_wrong_copies_and_waits_are_found(name: str) -> None:
    model, made, program = written(of(MOVING[name]))

    def is_found(edit: Callable[[Operation], Operation | None]) -> bool:
        try:
            return bool(check(edited(made, edit), model))
        except ScheduleError:  # something waits for what is not there
            return True

    assert [why for why, edit in wrong(program) if not is_found(edit)] == []
