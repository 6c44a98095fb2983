"""Poison mode: what is right stays the same to the bit, and what is not yet valid is no number."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
from shared_ranks import SharedPools
from torch import nn

import zsim_topologies
from zsim.backend.backend import Job
from zsim.model.architecture import GPT
from zsim.model.gpt import gpt
from zsim.runtimes.registry import make_schedule
from zsim.schedule.builder import BufferHandle, ScheduleBuilder
from zsim.schedule.layout import Layout, Piece
from zsim.schedule.operation import AllGather, Compute, Operation
from zsim.schedule.replace import replace
from zsim.schedule.schedule import Kind, Schedule
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim.strategy.train import LossScale, Train
from zsim_torch import RankPool, TorchBackend
from zsim_torch.execute.poison import PoisonError
from zsim_torch.supervise.rank_failure import RankFailedError
from zsim_torch.train import Option, train

SHAPE = GPT(layers=1, hidden_size=8, attention_heads=1, sequence_length=8, vocab_size=256)
STRATEGIES = (
    Strategy(
        parallel=Parallel(data=2),
        zero=Zero(stage=3, bucket_elements=300),
        train=Train(gradient_accumulation_steps=2),
    ),
    Strategy(
        parallel=Parallel(data=2),
        zero=Zero(stage=2),
        train=Train(precision=Precision.FP16, loss_scale=LossScale(initial=2.0**24), clip_norm=0.1),
    ),
)


def job(strategy: Strategy) -> Job:
    model = gpt(SHAPE, micro_batch_size=1, precision=strategy.train.precision)
    return Job(
        schedule=make_schedule(model, strategy),
        model=model,
        cluster=zsim_topologies.load("dgx_a100_infiniband"),
        steps=4,
    )


@pytest.fixture(scope="module")
def pool(pool_of: SharedPools) -> RankPool:
    return pool_of(2)


@pytest.mark.matrix(6)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_is_right_is_the_same_to_the_bit(pool: RankPool, strategy: Strategy) -> None:
    subject = job(strategy)
    plain = TorchBackend(pool=pool).run(subject, seed=1)
    poisoned = TorchBackend(pool=pool, poison=True).run(subject, seed=1)
    for one, other in zip(plain.ranks, poisoned.ranks, strict=True):
        assert one.losses == other.losses
        assert one.book == other.book


def without_waits(schedule: Schedule, gather: str) -> Schedule:
    """`schedule`, in which nothing waits for the operation `gather`."""
    (program,) = schedule.programs

    def freed(operation: Operation) -> Operation:
        if isinstance(operation, Compute) and gather in operation.after:
            return replace(operation, after=tuple(e for e in operation.after if e != gather))
        return operation

    step = tuple(freed(operation) for operation in program.step)
    assert step != program.step
    return replace(schedule, programs=(replace(program, step=step),))


@pytest.mark.one_commit_in(6)
def test_a_wait_that_is_missing_is_seen_whatever_the_timing(pool: RankPool) -> None:
    subject = job(STRATEGIES[0])
    (program,) = subject.schedule.programs
    gathers = [each.id for each in program.step if isinstance(each, AllGather)]
    subject = replace(subject, schedule=without_waits(subject.schedule, gathers[1]))
    with pytest.raises(RankFailedError, match="memory that is not valid was read") as caught:
        TorchBackend(pool=pool, poison=True).run(subject, seed=1)
    assert "no number first at rank 0, step/forward/mb0/" in str(caught.value)
    assert "in step 0" in str(caught.value)
    Path(caught.value.details).unlink()


def parameter(build: ScheduleBuilder, name: str, elements: int) -> BufferHandle:
    """A persistent parameter that a run can be asked for."""
    piece = Piece(parameter=name, start=0, size=elements)
    build.layout(Layout(name=name, pieces=(piece,), elements=elements))
    return build.buffer(name, elements, kind=Kind.PARAMETER, layout=name, persistent=True)


Between = Callable[[ScheduleBuilder, BufferHandle, BufferHandle], object]


def moved(between: Between, *, wait: bool = True) -> Schedule:
    """`x` is gathered into `y`, and `y` copied to `z`; `between` stands before the copy."""
    build = ScheduleBuilder.of("moved", data=1)
    data = build.group("data", "data")
    x, y = build.buffer("x", 2), build.buffer("y", 2, home="communication")
    z = parameter(build, "z", 2)
    build.setup.allocate(z)
    step = build.step
    step.allocate(x, y)
    filled = step.fill("x", x.all, 3.0)
    gathered = step.all_gather("gather", data, x.all, y.all, after=[filled])
    between(build, x, y)
    step.copy("copy", y.all, z.all, after=[gathered] if wait else [])
    return build.schedule()


def run(schedule: Schedule) -> list[float]:
    option = Option(write_back=False, poison=True)
    values = train(nn.Identity(), ("",), schedule, (), option=option).full_parameters()
    return [float(value) for value in values["z"]]


def test_a_result_is_there_for_who_waits_alone() -> None:
    assert run(moved(lambda build, x, y: None)) == [3.0, 3.0]
    assert all(math.isnan(value) for value in run(moved(lambda build, x, y: None, wait=False)))


FAULTS: dict[str, tuple[Between, str]] = {
    "source freed": (lambda build, x, y: build.step.free(x), "reads"),
    "source written": (lambda build, x, y: build.step.fill("late", x.all, 4.0), "reads"),
    "target written": (lambda build, x, y: build.step.fill("late", y.all, 4.0), "writes"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_a_collective_in_flight_uses_must_not_change(name: str) -> None:
    between, what = FAULTS[name]
    with pytest.raises(PoisonError, match=f"^step/gather: what it {what} changed while it was in"):
        run(moved(between))
