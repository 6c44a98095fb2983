"""Schedules written by hand, with what zsim's own stages never say: run on real ranks."""

import importlib.util
from pathlib import Path

import pytest
import torch
from hand_net import Net, batch, in_fp64
from shared_ranks import SharedPools
from torch import distributed, nn

from zsim.backend.backend import RefusedError
from zsim.proof import check
from zsim.schedule.builder import BufferHandle, ScheduleBuilder
from zsim.schedule.layout import Layout, Piece
from zsim.schedule.mesh import Span
from zsim.schedule.operation import (
    Action,
    FreeMode,
    Previous,
    Role,
)
from zsim.schedule.schedule import Kind, Schedule
from zsim_torch.execute.live_memory import MemoryFaultError
from zsim_torch.train import Option, Trained, train

EXAMPLE = Path(__file__).parents[3] / "examples" / "zero3_by_hand.py"


def zero3_by_hand() -> Schedule:
    spec = importlib.util.spec_from_file_location("zero3_by_hand", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    made = example.write()
    assert isinstance(made, Schedule)
    return made


def train_net(schedule: Schedule, steps: int) -> dict[str, torch.Tensor]:
    net = Net()
    rank = distributed.get_rank()
    data = [batch(step, rank) for step in range(steps)]
    train(net, ("layer0", "layer1", "loss"), schedule, data, steps=steps)
    return {name: value.detach() for name, value in net.named_parameters()}


@pytest.mark.one_commit_in(6)
def test_the_example_written_by_hand_trains_as_plain_sgd_does(pool_of: SharedPools) -> None:
    ranks, steps = 4, 5
    found = pool_of(ranks).run(train_net, in_fp64(zero3_by_hand()), steps)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(ranks):
            (net(batch(step, rank)) / ranks).backward()
        optimizer.step()
    for trained in found:
        for name, value in net.named_parameters():
            assert torch.allclose(trained[name], value, rtol=0, atol=1e-12)


def parameter(build: ScheduleBuilder, name: str, elements: int) -> BufferHandle:
    """A persistent parameter that a run can be asked for."""
    piece = Piece(parameter=name, start=0, size=elements)
    build.layout(Layout(name=name, pieces=(piece,), elements=elements))
    return build.buffer(name, elements, kind=Kind.PARAMETER, layout=name, persistent=True)


def run_alone(schedule: Schedule, *, poison: bool = False, steps: int = 1) -> Trained:
    """Run what has no units."""
    option = Option(write_back=False, poison=poison)
    return train(nn.Identity(), ("",), schedule, (), steps=steps, option=option)


def values_of(schedule: Schedule, name: str) -> list[float]:
    return [float(value) for value in run_alone(schedule).full_parameters()[name]]


def ring_shift() -> Schedule:
    """Each rank starts with ones and adds what its left neighbour has: 1 + 1."""
    build = ScheduleBuilder.of("ring", data=3)
    data = build.group("data", "data")
    own, other = parameter(build, "own", 4), build.buffer("other", 4, home="communication")
    build.setup.allocate(own)
    build.setup.fill("own", own.all, 1.0)
    step = build.step
    step.allocate(other)
    step.send("send", data, own.all, 1)
    step.receive("receive", data, other.all, -1)
    shifted = step.together("shift", 2, after=[Previous("step/add")])
    added = step.copy("add", other.all, own.all, accumulate=True, after=[shifted])
    step.free(other, uses=[added])
    return build.schedule()


def test_sends_and_receives_issued_together_shift_a_ring(pool_of: SharedPools) -> None:
    assert check(ring_shift()) == ()
    for values in pool_of(3).run(values_of, ring_shift(), "own"):
        assert values == [2.0] * 4


def broadcast_from_the_last() -> Schedule:
    build = ScheduleBuilder("broadcast", ScheduleBuilder.of("", data=3).mesh)
    data = build.group("data", "data")
    piece = Piece(parameter="x", start=0, size=2)
    build.layout(Layout(name="x", pieces=(piece,), elements=2))
    first = build.role("first", Span(axis="data", start=0, end=2))
    last = build.role("last", Span(axis="data", start=2, end=3))
    for role, value in ((first, 1.0), (last, 7.0)):
        x = role.buffer("x", 2, kind=Kind.PARAMETER, layout="x", persistent=True)
        role.setup.allocate(x)
        role.setup.fill("x", x.all, value)
        role.step.broadcast("broadcast", data, x.all, root=2)
    return build.schedule()


def test_a_broadcast_comes_from_the_rank_that_it_names(pool_of: SharedPools) -> None:
    for values in pool_of(3).run(values_of, broadcast_from_the_last(), "x"):
        assert values == [7.0, 7.0]


def exchange_on_two_streams() -> Schedule:
    """Each of two ranks receives, uses what came, and sends: on streams the send does not wait."""
    build = ScheduleBuilder.of("exchange", data=2)
    there, back = build.group("there", "data"), build.group("back", "data")
    other = build.stream("other")
    piece = Piece(parameter="own", start=0, size=1)
    build.layout(Layout(name="own", pieces=(piece,), elements=1))
    for index, (receives, sends) in enumerate(((back, there), (there, back))):
        role = build.role(f"rank{index}", Span(axis="data", start=index, end=index + 1))
        own = role.buffer("own", 1, kind=Kind.PARAMETER, layout="own", persistent=True)
        came = role.buffer("came", 1, home="communication")
        role.setup.allocate(own)
        role.setup.fill("own", own.all, 1.0)
        step = role.step
        step.allocate(came)
        received = step.receive("receive", receives, came.all, 1)
        used = step.copy("use", came.all, own.all, after=[received, Previous("step/send")])
        step.send("send", sends, own.all, 1, stream=other)
        step.free(came, uses=[used])
    return build.schedule()


def refused(schedule: Schedule) -> str:
    with pytest.raises(RefusedError) as caught:
        run_alone(schedule)
    return str(caught.value)


def test_a_schedule_that_would_hang_where_the_host_waits_is_refused(pool_of: SharedPools) -> None:
    schedule = exchange_on_two_streams()
    assert not [one for one in check(schedule) if one.invariant == "progress"]
    for reason in pool_of(2).run(refused, schedule):
        assert "hangs on Gloo" in reason
        assert "\n" not in reason


def deferred() -> Schedule:
    """A buffer freed while an all-reduce still reads it; the memory comes back later."""
    build = ScheduleBuilder.of("deferred", data=2)
    data = build.group("data", "data")
    total, x, late = parameter(build, "total", 3), build.buffer("x", 3), build.buffer("late", 3)
    build.setup.allocate(total)
    step = build.step
    step.allocate(x)
    filled = step.fill("x", x.all, 2.0)
    summed = step.all_reduce("sum", data, x.all, total.all, after=[filled])
    step.free(x, mode=FreeMode.DEFERRED, uses=[summed])
    step.host_wait("wait", summed)
    step.allocate(late)
    step.fill("late", late.all, 0.0)
    step.free(late, mode=FreeMode.HOST)
    return build.schedule()


def book_of(schedule: Schedule) -> list[tuple[str, str, int]]:
    trace = run_alone(schedule, poison=True).trace
    return [(entry.operation, entry.buffer, entry.change_bytes) for entry in trace.ranks[0].book]


def test_a_deferred_free_returns_memory_at_the_next_allocation_after_its_uses(
    pool_of: SharedPools,
) -> None:
    for book in pool_of(2).run(book_of, deferred()):
        assert book == [
            ("setup/total/allocate", "total", 12),
            ("step/x/allocate", "x", 12),
            ("step/late/allocate", "x", -12),
            ("step/late/allocate", "late", 12),
            ("step/late/free", "late", -12),
        ]
    for values in pool_of(2).run(values_of, deferred(), "total"):
        assert values == [4.0] * 3


def test_without_a_process_group_collectives_of_one_rank_are_copies() -> None:
    build = ScheduleBuilder.of("alone", data=1)
    data = build.group("data", "data")
    x, y = build.buffer("x", 2), parameter(build, "y", 2)
    build.setup.allocate(y)
    step = build.step
    step.allocate(x)
    filled = step.fill("x", x.all, 3.0)
    gathered = step.all_gather("gather", data, x.all, y.all, after=[filled])
    reduced = step.reduce_scatter("reduce", data, y.all, x.all, after=[gathered])
    step.all_reduce("sum", data, y.all, after=[reduced])
    step.free(x, uses=[reduced])
    assert values_of(build.schedule(), "y") == [3.0, 3.0]


def test_memory_that_was_freed_cannot_be_read() -> None:
    build = ScheduleBuilder.of("use after free", data=1)
    x, y = build.buffer("x", 2), parameter(build, "y", 2)
    build.setup.allocate(y)
    build.step.allocate(x)
    build.step.fill("x", x.all, 3.0)
    build.step.free(x)
    build.step.copy("copy", x.all, y.all)
    with pytest.raises(MemoryFaultError, match="buffer x: used without memory"):
        run_alone(build.schedule())


def test_poison_shows_what_was_never_written() -> None:
    build = ScheduleBuilder.of("never written", data=1)
    y = parameter(build, "y", 3)
    build.setup.allocate(y)
    build.step.fill("y", y[:2], 1.0)
    values = run_alone(build.schedule(), poison=True).full_parameters()["y"]
    assert values.isnan().tolist() == [False, False, True]


def test_a_branch_follows_the_value_and_scalars_keep_to_their_limits() -> None:
    build = ScheduleBuilder.of("branch", data=1)
    data = build.group("data", "data")
    build.scalar("count", 0.0)
    flag, y = build.buffer("flag", 1), parameter(build, "y", 1)
    build.setup.allocate(y)
    build.setup.fill("y", y.all, 0.0)
    step = build.step
    step.allocate(flag)
    step.fill("flag", flag.all, 1.0, scalar="count")
    known = step.all_reduce("known", data, flag.all, after=["step/flag"])
    then, otherwise = step.side("then"), step.side("otherwise")
    then.fill("y", y.all, 5.0)
    otherwise.set_scalar("count", "count", add=1.0)
    step.branch("branch", flag.all, then, otherwise, after=[known])
    step.free(flag, uses=[known])
    schedule = build.schedule()
    one, two = run_alone(schedule, steps=1), run_alone(schedule, steps=2)
    assert (float(one.full_parameters()["y"]), one.scalars) == (0.0, {"count": 1.0})
    assert (float(two.full_parameters()["y"]), two.scalars) == (5.0, {"count": 1.0})


def test_a_number_of_ranks_that_is_not_the_schedules_is_refused() -> None:
    assert refused(zero3_by_hand()) == "ranks: the schedule is for 4, here are 1"


def test_a_unit_that_the_module_lacks_is_refused() -> None:
    build = ScheduleBuilder.of("unknown unit", data=1)
    loss = build.buffer("loss", 1, produced=True)
    build.step.allocate(loss)
    build.step.compute("run", Action.FORWARD, [(Role.OUTPUT, loss.all)], unit="nowhere")
    build.step.free(loss)
    assert "no unit 'nowhere'" in refused(build.schedule())


def test_pools_run_job_after_job(pool_of: SharedPools) -> None:
    pool = pool_of(2)
    assert pool.run(values_of, deferred(), "total") == pool.run(values_of, deferred(), "total")
