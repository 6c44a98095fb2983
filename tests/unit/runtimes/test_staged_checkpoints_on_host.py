"""Checkpoints that stages of FSDP2's pipelines keep in host memory: proof, copies, memory, time."""

import re
from collections.abc import Callable, Iterator, Set
from functools import partial

import pytest
from exact_training import proves_and_trains
from fsdp2_pipelines import CHUNKS, KEPT, SHAPE, model_of, strategy_of
from stage_orders import without_first_wait

from zsim.analysis.summary import summary
from zsim.backend.backend import Job
from zsim.cluster.cluster import Cluster
from zsim.config_error import ConfigError
from zsim.files.installed import topology
from zsim.model.model import Model, ModelError
from zsim.proof import check
from zsim.runtimes.registry import host_bytes, make_schedule
from zsim.schedule.operation import Allocate, Copy, Free, Operation, Receive, Send, Together, walk
from zsim.schedule.operation_list import COMPUTE
from zsim.schedule.replace import replace
from zsim.schedule.schedule import HostBytes, Program, Schedule, ScheduleError
from zsim.strategy.activations import Checkpointing
from zsim.strategy.strategy import Strategy
from zsim_des import SimBackend
from zsim_plan.bounds.memory_bounds import device_bytes
from zsim_runtimes.fsdp2.options import FSDP2, PipelineSchedule

FULL = {"activations.checkpointing": Checkpointing.FULL}
FREED = KEPT.but(reshard_after_forward=True)
HIDDEN_BYTES = 4 * 8 * 2
"""4 tokens of 8 elements in bf16: what a block is given."""


def moving(
    pipeline: int, micro_batches: int, options: FSDP2 = KEPT, *, moves: bool = True
) -> Strategy:
    once = strategy_of(pipeline, micro_batches, options).but(FULL)
    return once.but({"zero.emulate": options.but(offload_wrapper=moves)})


def written(strategy: Strategy, layers: int) -> tuple[Model, Schedule]:
    model = model_of(strategy, replace(SHAPE, layers=layers))
    return model, make_schedule(model, strategy)


def crossing(program: Program, verb: str) -> list[Copy]:
    """Copies of checkpoints one way."""
    return [
        each for each in walk(program.step) if isinstance(each, Copy) and f"/{verb}/" in each.id
    ]


@pytest.mark.matrix(15)
@pytest.mark.parametrize(
    ("strategy", "layers"),
    [
        (moving(2, 3), 4),
        (moving(3, 4, FREED).but({"parallel.data": 2, "parallel.replicate": 2}), 6),
        (moving(2, 3).but({"parallel.data": 2, "parallel.tensor": 2}), 5),
        (moving(2, 4, CHUNKS).but({"parallel.data": 2}), 6),
        (moving(2, 3).but({"activations.every_nth": 2, "train.clip_norm": None}), 6),
    ],
)
def test_stages_train_what_one_process_does_and_are_proved(strategy: Strategy, layers: int) -> None:
    model, made = written(strategy, layers)
    assert all(crossing(each, "offload") for each in made.programs)
    proves_and_trains(made, model, strategy)


@pytest.mark.parametrize(
    ("pipeline", "options", "layers", "blocks"),
    [(3, KEPT, 6, [2, 3, 1]), (2, KEPT, 4, [2, 2]), (2, CHUNKS, 6, [3, 3])],
)
def test_each_stage_copies_what_its_blocks_are_given_out_and_back(
    pipeline: int, options: FSDP2, layers: int, blocks: list[int]
) -> None:
    strategy = moving(pipeline, 4, options)
    model, made = written(strategy, layers)
    for count, program in zip(blocks, made.programs, strict=True):
        for verb in ("offload", "fetch"):
            copies = crossing(program, verb)
            assert len(copies) == 4 * count
            assert {each.stream for each in copies} == {COMPUTE}
    promised = tuple(
        HostBytes(
            to_host=4 * count * HIDDEN_BYTES,
            from_host=4 * count * HIDDEN_BYTES,
            role=f"stage{stage}",
        )
        for stage, count in enumerate(blocks)
    )
    assert host_bytes(model, strategy) == made.contract.host_bytes == promised


def most_alive(program: Program, names: Set[str]) -> int:
    """Count how many of these buffers a step holds at once."""
    alive, most = set[str](), 0
    for operation in program.step:
        if isinstance(operation, Allocate) and operation.buffer in names:
            alive.add(operation.buffer)
            most = max(most, len(alive))
        elif isinstance(operation, Free):
            alive.discard(operation.buffer)
    return most


def inner(program: Program) -> set[str]:
    """Hidden states between two blocks of a stage, that forward made or that came back."""
    handed_on = {
        each.source.buffer if isinstance(each, Send) else each.target.buffer
        for operation in program.step
        for each in (operation.members if isinstance(operation, Together) else (operation,))
        if isinstance(each, Send | Receive)
    }
    return {
        each.name
        for each in program.buffers
        if re.fullmatch(r"\w+/output(@\d+)?(/gathered)?", each.name) and each.name not in handed_on
    }


def test_a_stage_holds_hidden_states_of_one_block_and_its_host_those_of_all_in_flight() -> None:
    """Of 3 stages, of which stage s has 3 - s micro-batches in flight, and 2, 3 and 1 blocks."""
    _, made = written(moving(3, 4), 6)
    _, kept = written(moving(3, 4, moves=False), 6)
    # What a block is given and what it makes, as long as it runs; the one block of the last stage
    # is given what was received, which comes back into other memory.
    assert [most_alive(each, inner(each)) for each in made.programs] == [2, 2, 1]
    # Inputs of the 2 blocks of the first stage, of the 2 of the second that it made itself, and of
    # the head.
    assert [most_alive(each, inner(each)) for each in kept.programs] == [3 * 2, 2 * 2, 1]
    promised = {role: size for role, pool, size in made.contract.peak_bytes if pool == "host"}
    assert promised == {
        "stage0": 3 * 2 * HIDDEN_BYTES,
        "stage1": 2 * 3 * HIDDEN_BYTES,
        "stage2": 1 * 1 * HIDDEN_BYTES,
    }


@pytest.mark.parametrize(("pipeline", "options"), [(3, KEPT), (3, FREED), (2, CHUNKS)])
def test_the_bound_of_memory_holds_and_is_less_by_what_moves(pipeline: int, options: FSDP2) -> None:
    bounds: list[int] = []
    for moves in (True, False):
        strategy = moving(pipeline, 6, options, moves=moves)
        model, made = written(strategy, 6)
        bounds.append(device_bytes(model, strategy))
        peaks = [size for _, pool, size in made.contract.peak_bytes if pool == "device"]
        assert bounds[-1] <= max(peaks)
    assert bounds[0] < bounds[1]


def test_what_was_received_stays_beside_its_copy() -> None:
    """`_RecvInfo.buffer` is the stage's for good."""
    for program in written(moving(3, 4), 6)[1].programs[1:]:
        given = {each.source.buffer for each in crossing(program, "offload")} & set(
            program.persistent
        )
        assert len(given) == 4
        freed = {each.buffer for each in walk(program.step) if isinstance(each, Free)}
        assert not given & freed


def behind(bytes_per_s: int) -> Cluster:
    """Eight GPUs, each behind a PCIe link of such a rate."""
    found = topology("dgx_a100_infiniband", None, 1)
    assert found.pcie_link is not None
    return replace(found, pcie_link=replace(found.pcie_link, bytes_per_s=bytes_per_s), copies=None)


@pytest.mark.parametrize("options", [KEPT, CHUNKS])
def test_copies_take_the_time_of_the_link_to_the_host_on_the_compute_stream(options: FSDP2) -> None:
    strategy = moving(2, 4, options)
    model, made = written(strategy, 6)
    times: list[float] = []
    for speed in (10**7, 10**12):
        job = Job(schedule=made, model=model, cluster=behind(speed), steps=2)
        trace = SimBackend().run(job, seed=0)
        times.append(summary(job, trace).step_time_s)
        moved = host_bytes(model, strategy)
        carried = {link.link: link.bytes for link in trace.links}
        assert carried["pcie->host"] == sum(each.to_host for each in moved)
        assert carried["host->pcie"] == sum(each.from_host for each in moved)
    most = max(each.to_host + each.from_host for each in host_bytes(model, strategy))
    assert times[0] >= most / 10**7 + times[1] / 2  # nothing of a stage runs beside its copies


def instead(made: Schedule, stage: int, which: Operation, other: Operation | None) -> Schedule:
    """Return a schedule with another operation in the place of one of a stage, or none."""
    programs = list(made.programs)
    step = [other if each is which else each for each in programs[stage].step]
    programs[stage] = replace(
        programs[stage], step=tuple(each for each in step if each is not None)
    )
    return replace(made, programs=tuple(programs))


def wrong(made: Schedule) -> Iterator[tuple[str, Callable[[], Schedule]]]:
    """Yield what is wrong with copies of checkpoints of a stage."""
    for stage, program in enumerate(made.programs):
        out, back = crossing(program, "offload"), crossing(program, "fetch")
        for which in (out[0], out[-1], back[0], back[-1]):
            half = replace(which.source, size=which.source.size // 2)
            cut = replace(which, source=half, target=replace(which.target, size=half.size))
            yield f"no {which.id}", partial(instead, made, stage, which, None)
            yield f"half of {which.id}", partial(instead, made, stage, which, cut)
        of_another = next(each for each in back if each.source.buffer != back[0].source.buffer)
        other = replace(back[0], source=of_another.source)
        yield f"{stage}: another micro-batch", partial(instead, made, stage, back[0], other)
    yield "no wait for what is received", partial(without_first_wait, made, 1)


@pytest.mark.matrix(24)
@pytest.mark.parametrize("options", [KEPT, CHUNKS])
def test_wrong_copies_are_found(options: FSDP2) -> None:
    model, made = written(moving(2, 2, options), 6)

    def is_found(edit: Callable[[], Schedule]) -> bool:
        try:
            return bool(check(edit(), model))
        except ScheduleError:  # something waits for what is not there
            return True

    assert [why for why, edit in wrong(made) if not is_found(edit)] == []


def test_a_promise_for_one_stage_is_kept_by_that_stage() -> None:
    model, made = written(moving(2, 2), 5)
    assert made.contract.host_bytes is not None
    first, second = made.contract.host_bytes
    lie = (first, replace(second, to_host=first.to_host + 1))
    found = check(replace(made, contract=replace(made.contract, host_bytes=lie)), model)
    assert {(each.role, each.operation) for each in found} == {
        ("", "contract/host_bytes"),
        ("stage1", "host/to_host"),
    }


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (
            {"pipeline_schedule": PipelineSchedule.ZERO_BUBBLE_IN_V},
            "activations.checkpointing: full with ZBVZeroBubble",
        ),
        ({"offload_policy": "cpu"}, "offload_policy: cpu is not modelled for pipeline = 2"),
    ],
)
def test_what_does_not_go_with_a_pipeline_is_refused_in_one_line(
    changes: dict[str, object], why: str
) -> None:
    options = FSDP2.model_validate(
        {"reshard_after_forward": False, "offload_wrapper": True, **changes}
    )
    strategy = moving(2, 4).but({"zero.emulate": options})
    with pytest.raises(ModelError, match=re.escape(why)):
        written(strategy, 6)
    with pytest.raises(ConfigError, match=r"needs activations\.checkpointing = full"):
        moving(2, 4).but({"activations.checkpointing": "none"})
