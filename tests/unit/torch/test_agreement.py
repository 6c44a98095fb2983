"""Ranks that hand different operations of equal size to one communicator are told apart by name."""

import pickle
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from zsim.schedule.builder import RoleBuilder, ScheduleBuilder
from zsim.schedule.mesh import Span
from zsim.schedule.schedule import Schedule
from zsim.trace.trace import Transfer
from zsim_torch.execute.agreement import Issued, IssuedLog, difference
from zsim_torch.supervise.rank_failure import Cause, RankFailedError
from zsim_torch.supervise.ranks import RankPool
from zsim_torch.train import Option, train


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2, timeout_s=20) as started:
        yield started


def two_roles(*orders: tuple[str, ...]) -> Schedule:
    """Each rank adds up buffers of equal size over both, in the order of its role."""
    build = ScheduleBuilder.of("two roles", data=2)
    build.group("data", "data")
    for place, order in enumerate(orders):
        role = build.role(f"role{place}", Span(axis="data", start=place, end=place + 1))
        _write(role, order)
    return build.schedule()


def _write(role: RoleBuilder, order: tuple[str, ...]) -> None:
    buffers = {name: role.buffer(name, 4, persistent=True) for name in sorted(order)}
    role.setup.allocate(*buffers.values())
    for name, buffer in buffers.items():
        role.setup.fill(name, buffer.all, 1.0)
    for name in order:
        role.step.all_reduce(f"sum/{name}", "data", buffers[name].all)


def transfers_of(schedule: Schedule) -> int:
    """How many collectives two steps of a run issue on this rank."""
    option = Option(write_back=False)
    (own,) = train(nn.Identity(), ("",), schedule, (), steps=2, option=option).trace.ranks
    return len(own.transfers)


def test_swapped_all_reduces_of_equal_size_are_told_by_name_and_rank(pool: RankPool) -> None:
    with pytest.raises(RankFailedError) as raised:
        pool.run(transfers_of, two_roles(("x", "y"), ("y", "x")))
    assert raised.value.cause is Cause.RAISED
    assert (
        "ranks diverge: collective 1 of data was step/sum/x in step 0 on rank 0, "
        "and step/sum/y in step 0 on rank 1" in str(raised.value)
    )


def test_ranks_that_agree_are_left_alone_whatever_a_role_calls_a_collective(pool: RankPool) -> None:
    assert pool.run(transfers_of, two_roles(("x", "y"), ("x", "y"))) == (4, 4)
    assert pool.run(transfers_of, two_roles(("x", "y"), ("x", "z"))) == (4, 4)


NAMES = st.lists(st.lists(st.sampled_from("abc"), max_size=3), max_size=8)


def logged(steps: list[list[str]]) -> IssuedLog:
    log = IssuedLog()
    for step, names in enumerate(steps):
        log.add_step(step, [transfer(name, step) for name in names])
    return log


def transfer(name: str, step: int) -> Transfer:
    return Transfer(
        operation=name,
        step=step,
        group="data",
        collective="all_reduce",
        elements=1,
        bytes=4,
        scalar=True,
    )


@given(NAMES, NAMES)
def test_digests_of_logs_are_equal_where_the_same_was_issued_in_each_step(
    one: list[list[str]], other: list[list[str]]
) -> None:
    def issued(steps: list[list[str]]) -> list[tuple[int, list[str]]]:
        return [(step, names) for step, names in enumerate(steps) if names]

    assert (logged(one).digests() == logged(other).digests()) == (issued(one) == issued(other))


def test_a_log_of_equal_steps_does_not_grow() -> None:
    few, many = (logged([["a", "b"]] * steps) for steps in (2, 2000))
    assert len(pickle.dumps(few.of(["data"]))) == pytest.approx(
        len(pickle.dumps(many.of(["data"]))), abs=8
    )


def test_names_of_one_role_alone_are_not_held_against_others() -> None:
    one, two = ([Issued(name, 0) for name in names] for names in ("abc", "adc"))
    assert difference(one, two, shared={"a", "c"}) is None
    assert difference(one, two, shared={"a", "b", "c"}) == (1, ("b", 0), ("d", 0))
    assert difference(one, one[:1], shared={"a", "b", "c"}) is None
