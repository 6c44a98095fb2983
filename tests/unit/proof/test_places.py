"""Kernels find what they read and write in the memory of their own processor."""

import pytest

from zsim.model.architecture import GPT
from zsim.model.gpt import gpt
from zsim.proof import check
from zsim.runtimes.registry import make_schedule as zero
from zsim.schedule.builder import ScheduleBuilder
from zsim.schedule.operation import Action, Role
from zsim.schedule.replace import replace
from zsim.schedule.schedule import Kind, Place, Pool, Schedule
from zsim.strategy.optimizer_rule import Adam
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim.strategy.train import Train

SHAPE = GPT(layers=1, hidden_size=4, attention_heads=2, sequence_length=2, vocab_size=3)


def places(schedule: Schedule) -> list[str]:
    return [
        f"{each.operation} {each.why}" for each in check(schedule) if each.invariant == "places"
    ]


def moved_to_host(schedule: Schedule, kind: Kind) -> Schedule:
    """Put the buffers of a kind into host memory, and leave everything else as it is."""
    host = Pool(name="elsewhere", place=Place.HOST)
    programs = tuple(
        replace(
            program,
            buffers=tuple(
                replace(each, pool=host.name) if each.kind is kind else each
                for each in program.buffers
            ),
        )
        for program in schedule.programs
    )
    return replace(schedule, pools=(*schedule.pools, host), programs=programs)


@pytest.mark.matrix(6)
@pytest.mark.parametrize("kind", [Kind.MASTER, Kind.MOMENT, Kind.GRADIENT, Kind.PARAMETER])
def test_states_in_host_memory_that_kernels_of_the_device_read_are_found(kind: Kind) -> None:
    model = gpt(SHAPE, micro_batch_size=1, precision=Precision.BF16)
    made = zero(
        model,
        Strategy(
            parallel=Parallel(data=2),
            zero=Zero(stage=2),
            train=Train(clip_norm=1.0, precision=Precision.BF16),
        ),
    )
    assert places(made) == []
    found = places(moved_to_host(made, kind))
    assert any("in host memory" in each for each in found)


def update_beside(*pools: str, on_thread: bool = False) -> Schedule:
    """Adam on four elements whose gradient, parameter and moments are in these pools."""
    build = ScheduleBuilder.of("update", data=1)
    build.pools.append(Pool(name="host", place=Place.HOST))
    stream = build.host_thread("adam") if on_thread else "compute"
    roles = (Role.GRADIENT, Role.PARAMETER, Role.MOMENT, Role.MOMENT)
    views = []
    for number, pool in enumerate(pools):
        where = "adam" if on_thread and pool == "host" else "compute"
        buffer = build.buffer(f"x{number}", 4, pool=pool, persistent=True, home=where)
        build.setup.allocate(buffer)
        build.setup.fill(f"fill{number}", buffer.all, 0.0, stream=where)
        views.append(buffer.all)
    operands = list(zip(roles, views, strict=True))
    build.step.compute("update", Action.UPDATE, operands, rule=Adam(), stream=stream)
    return build.schedule()


def test_an_update_runs_where_its_stream_does() -> None:
    assert places(update_beside(*["device"] * 4)) == []
    assert places(update_beside(*["host"] * 4, on_thread=True)) == []
    assert places(update_beside(*["host"] * 4))[-1] == (
        "step/update runs on the device, and touches x0 in host memory"
    )
    (found,) = places(update_beside("device", "device", "host", "host", on_thread=True))
    assert found == (
        "step/update runs on the host, and touches x0 in device memory and x2 in host memory"
    )


def test_a_reduction_of_host_memory_is_found() -> None:
    build = ScheduleBuilder.of("sum", data=2)
    build.pools.append(Pool(name="host", place=Place.HOST))
    thread = build.host_thread("thread")
    there = build.buffer("there", 4, pool="host", persistent=True, home=thread)
    build.setup.allocate(there)
    build.setup.fill("fill", there.all, 0.0, stream=thread)
    build.step.all_reduce("sum", build.group("data", "data"), there.all)
    assert places(build.schedule()) == [
        "step/sum runs on the device, and touches there in host memory"
    ]


def test_copies_cross_and_sums_do_not() -> None:
    build = ScheduleBuilder.of("copies", data=1)
    build.pools.append(Pool(name="host", place=Place.HOST))
    here = build.buffer("here", 4, persistent=True)
    thread = build.host_thread("thread")
    there = build.buffer("there", 4, pool="host", persistent=True, home=thread)
    build.setup.allocate(here, there)
    build.setup.fill("fill/here", here.all, 0.0)
    build.setup.fill("fill/there", there.all, 0.0, stream=thread)
    build.step.copy("copy", here.all, there.all)
    build.step.copy("add", here.all, there.all, accumulate=True, after=["step/copy"])
    (found,) = places(build.schedule())
    assert found.startswith("step/add adds up across places")


def test_sums_and_segments_of_a_device_and_a_thread_do_not_mix() -> None:
    build = ScheduleBuilder.of("mixed", data=2)
    build.host_thread("thread")
    here = build.buffer("here", 4, persistent=True)
    build.setup.allocate(here)
    build.setup.fill("fill", here.all, 0.0)
    build.step.all_reduce("sum", build.group("data", "data"), here.all, stream="thread")
    assert places(build.schedule()) == [
        "step/sum is a AllReduce on a thread of the host, and touches here in device memory"
    ]
