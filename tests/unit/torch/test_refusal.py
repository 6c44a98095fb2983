"""What the torch backend cannot execute as written is refused in one line, before it starts."""

import pytest
from exact_training import cluster
from torch import nn

from zsim.backend.backend import Job, RefusedError
from zsim.model.equal_units import equal_units
from zsim.schedule.builder import BufferHandle, ScheduleBuilder
from zsim.schedule.layout import Layout, Piece
from zsim.schedule.operation import Action, Reduction, Role
from zsim.schedule.schedule import Kind, Place, Pool, Schedule
from zsim.strategy.optimizer_rule import SGD
from zsim_torch.backend import TorchBackend
from zsim_torch.supervise.process_group import DeviceChoice
from zsim_torch.train import Option, Trained, train


def run_alone(schedule: Schedule) -> Trained:
    """Run what has no units, on one rank."""
    return train(nn.Identity(), ("",), schedule, (), option=Option(write_back=False))


def of_backend(schedule: Schedule) -> str | None:
    """What the backend says before it starts ranks."""
    model = equal_units(parameters=100)
    job = Job(schedule=schedule, model=model, cluster=cluster(schedule.mesh.size))
    return TorchBackend(device=DeviceChoice.CPU).refusal(job)


def with_host_memory() -> tuple[ScheduleBuilder, BufferHandle, BufferHandle]:
    """Four elements on the device, and as many in host memory."""
    build = ScheduleBuilder.of("host", data=1)
    build.pools.append(Pool(name="host", place=Place.HOST))
    here, there = build.buffer("here", 4), build.buffer("there", 4, pool="host")
    build.step.allocate(here, there)
    return build, here, there


def accumulates_to_host() -> Schedule:
    build, here, there = with_host_memory()
    build.step.copy("add", here.all, there.all, accumulate=True)
    return build.schedule()


def accumulates_from_host() -> Schedule:
    build, here, there = with_host_memory()
    build.step.copy("add", there.all, here.all, accumulate=True)
    return build.schedule()


def updates_on_host() -> Schedule:
    build, here, there = with_host_memory()
    operands = [(Role.GRADIENT, here.all), (Role.PARAMETER, there.all)]
    build.step.compute("update", Action.UPDATE, operands, rule=SGD())
    return build.schedule()


def measures_on_host() -> Schedule:
    build, here, there = with_host_memory()
    operands = [(Role.GRADIENT, there.all), (Role.OUTPUT, here[:1])]
    build.step.compute("norm", Action.NORM, operands)
    return build.schedule()


def fills_on_host() -> Schedule:
    build, _, there = with_host_memory()
    build.step.fill("zero", there.all, 0.0)
    return build.schedule()


ON_BOTH = "and touches here in device memory and there in host memory"
ON_DEVICE = "runs on the device, and touches there in host memory"


@pytest.mark.parametrize(
    ("schedule", "line"),
    [
        (accumulates_to_host(), f"step/add: adds up across places, {ON_BOTH}"),
        (
            accumulates_from_host(),
            "step/add: adds up across places, and touches there in host memory and here in device "
            "memory",
        ),
        (updates_on_host(), f"step/update: runs on the device, {ON_BOTH}"),
        (
            measures_on_host(),
            "step/norm: runs on the device, and touches there in host memory and here in device "
            "memory",
        ),
        (fills_on_host(), f"step/zero: {ON_DEVICE}"),
    ],
)
def test_what_a_stream_of_the_device_cannot_do_to_host_memory_is_refused(
    schedule: Schedule, line: str
) -> None:
    with pytest.raises(RefusedError) as caught:
        run_alone(schedule)
    assert str(caught.value) == line
    assert of_backend(schedule) == line


def test_copies_to_host_memory_and_back_are_not_refused() -> None:
    build, here, there = with_host_memory()
    piece = Piece(parameter="back", start=0, size=4)
    build.layout(Layout(name="back", pieces=(piece,), elements=4))
    back = build.buffer("back", 4, kind=Kind.PARAMETER, layout="back", persistent=True)
    build.setup.allocate(back)
    filled = build.step.fill("fill", here.all, 3.0)
    out = build.step.copy("out", here.all, there.all, after=[filled])
    build.step.copy("back", there.all, back.all, divisor=2, after=[out])
    assert run_alone(build.schedule()).full_parameters()["back"].tolist() == [1.5] * 4


def issued_together(*kinds: str) -> Schedule:
    build = ScheduleBuilder.of("together", data=2)
    data = build.group("data", "data")
    smalls = [build.buffer(f"small{index}", 1) for index in range(len(kinds))]
    larges = [build.buffer(f"large{index}", 2) for index in range(len(kinds))]
    build.step.allocate(*smalls, *larges)
    for index, (kind, small, large) in enumerate(zip(kinds, smalls, larges, strict=True)):
        match kind:
            case "all_gather":
                build.step.all_gather(f"{index}", data, small.all, large.all)
            case "all_reduce":
                build.step.all_reduce(f"{index}", data, small.all)
            case "average":
                build.step.all_reduce(f"{index}", data, small.all, reduction=Reduction.AVERAGE)
            case "send":
                build.step.send(f"{index}", data, small.all, 1)
            case _:
                build.step.receive(f"{index}", data, small.all, 1)
    build.step.together("both", len(kinds))
    return build.schedule()


@pytest.mark.parametrize(
    ("kinds", "mix"),
    [
        (("send", "receive", "all_reduce"), "all_reduce (sum), receive and send"),
        (("send", "all_gather"), "all_gather and send"),
        (("all_gather", "all_reduce"), "all_gather and all_reduce (sum)"),
        (("all_reduce", "average"), "all_reduce (average) and all_reduce (sum)"),
    ],
)
def test_kinds_that_are_not_issued_as_one_are_refused(kinds: tuple[str, ...], mix: str) -> None:
    schedule = issued_together(*kinds)
    line = (
        f"step/both: issues {mix} as one; the torch backend issues collectives of one kind as one, "
        "or sends and receives"
    )
    assert of_backend(schedule) == line


@pytest.mark.parametrize(
    "kinds", [("send", "receive"), ("all_reduce", "all_reduce"), ("all_gather", "all_gather")]
)
def test_kinds_that_are_issued_as_one_are_not_refused(kinds: tuple[str, ...]) -> None:
    assert of_backend(issued_together(*kinds)) is None
