"""A knob that bounds something bounds it: what a host may hold or issue ahead, in each schedule."""

from collections.abc import Iterator

import pytest

from zsim.model.architecture import GPT
from zsim.model.gpt import gpt
from zsim.runtimes.registry import make_schedule
from zsim.schedule.operation import (
    Action,
    Allocate,
    Compute,
    Free,
    HostWait,
    Operation,
    ReduceScatter,
)
from zsim.schedule.schedule import Program
from zsim.strategy.strategy import Parallel, Strategy, Zero

MODEL = gpt(
    GPT(layers=5, hidden_size=8, attention_heads=2, sequence_length=4, vocab_size=11),
    micro_batch_size=1,
)


def program(strategy: Strategy) -> Program:
    (made,) = make_schedule(MODEL, strategy).programs
    return made


def alive(made: Program, suffix: str) -> Iterator[tuple[Operation, set[str]]]:
    """Each operation of a step, with the buffers called so that are alive after it."""
    found: set[str] = set()
    for operation in made.step:
        if isinstance(operation, Allocate) and suffix in operation.buffer:
            found.add(operation.buffer)
        elif isinstance(operation, Free):
            found.discard(operation.buffer)
        yield operation, set(found)


def visits(made: Program) -> Iterator[tuple[str, Operation]]:
    """The operations of a step with the visit that each belongs to, such as forward/mb0/head."""
    units = {unit.name for unit in MODEL.units}
    for operation in made.step:
        path = operation.id.split("/")
        if len(path) > 4 and path[3] in units:
            yield "/".join(path[1:4]), operation


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_a_gather_is_issued_at_most_so_many_units_ahead(ahead: int) -> None:
    made = program(Strategy(parallel=Parallel(data=2), zero=Zero(stage=3, prefetch_units=ahead)))
    most = max(len(held) for _, held in alive(made, "/gathered"))
    assert most == 1 + ahead  # a bucket for each unit: the one at hand, and those ahead


@pytest.mark.parametrize("limit", [0, 900, 1800, 2700])
def test_gathers_ahead_stay_within_the_cap(limit: int) -> None:
    made = program(
        Strategy(
            parallel=Parallel(data=2), zero=Zero(stage=3, prefetch_units=5, gathered_elements=limit)
        )
    )
    free = program(Strategy(parallel=Parallel(data=2), zero=Zero(stage=3, prefetch_units=5)))

    def most(each: Program) -> int:
        return max(
            sum(each.by_name[name].elements for name in held)
            for _, held in alive(each, "/gathered")
        )

    largest = max(each.elements for each in made.buffers if "/gathered" in each.name)
    assert most(made) <= max(limit, largest) < most(free)


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("flying", [0, 1, 3])
def test_so_many_reductions_are_unfinished_while_backward_goes_on(stage: int, flying: int) -> None:
    made = program(
        Strategy(
            parallel=Parallel(data=2),
            zero=Zero(stage=stage, reductions_in_flight=flying, bucket_elements=100),
        )
    )
    reduced: set[str] = set()
    most = 0
    for operation, held in alive(made, "/staging"):
        reduced &= held
        if isinstance(operation, ReduceScatter):
            reduced.add(operation.source.buffer)
        elif isinstance(operation, Compute) and operation.action is Action.BACKWARD:
            most = max(most, len(reduced))
    assert most == flying


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("ahead", [1, 2, 4])
def test_the_host_waits_for_the_unit_so_many_visits_before(stage: int, ahead: int) -> None:
    made = program(
        Strategy(parallel=Parallel(data=2), zero=Zero(stage=stage, host_ahead_units=ahead))
    )
    order = list(dict.fromkeys(name for name, _ in visits(made)))
    waits = {name: each.operation for name, each in visits(made) if isinstance(each, HostWait)}
    assert list(waits) == order[ahead:]  # backward included
    for name, awaited in waits.items():
        before = order[order.index(name) - ahead]
        assert isinstance(awaited, str)
        assert awaited.startswith(f"step/{before}/")


def test_without_a_limit_the_host_never_waits() -> None:
    made = program(Strategy(parallel=Parallel(data=2), zero=Zero(stage=3)))
    assert not any(isinstance(operation, HostWait) for operation in made.step)
