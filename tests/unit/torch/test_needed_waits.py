"""Waits that the executor leaves out: what is ordered stays ordered, and no wait is left over."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest
from drawn_programs import programs
from hypothesis import given
from hypothesis import strategies as st
from tiny_training import Case

from zsim.schedule.operation import (
    Branch,
    Edge,
    Free,
    FreeMode,
    HostWait,
    Operation,
    Previous,
    StreamOperation,
    walk,
)
from zsim.schedule.schedule import Schedule
from zsim.strategy.optimizer_rule import Adam
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim.strategy.train import Train
from zsim_torch.execute.needed_waits import NeededWaits

Edges = Mapping[str, tuple[Edge, ...]]
STEPS = 3


def edges_of(operation: Operation) -> tuple[Edge, ...]:
    """What an operation waits for, as the schedule has it."""
    if isinstance(operation, HostWait):
        return (operation.operation,)
    return getattr(operation, "after", getattr(operation, "uses", ()))


@dataclass
class Unrolled:
    """A few steps by the meaning of each wait: what had finished when something was done.

    Communicators order nothing. `told` has what the host knew, or a stream, or who asks for a
    deferred free once its uses are over.
    """

    homes: Mapping[str, str]
    edges: Edges
    host: set[int] = field(default_factory=set[int])
    tails: dict[str, set[int]] = field(default_factory=dict[str, set[int]])
    done: dict[str, set[int]] = field(default_factory=dict[str, set[int]])
    previous: dict[str, set[int]] = field(default_factory=dict[str, set[int]])
    told: list[tuple[str, set[int]]] = field(default_factory=list[tuple[str, set[int]]])
    count: int = 0

    def step(self, operations: tuple[Operation, ...], sides: Mapping[str, bool]) -> None:
        self.done = {}
        self._issue(operations, sides)
        self.previous |= self.done

    def _issue(self, operations: tuple[Operation, ...], sides: Mapping[str, bool]) -> None:
        for operation in operations:
            waits = set[int]().union(*map(self._of, self.edges.get(operation.id, ())))
            known = self.host | waits
            match operation:
                case HostWait() | Branch() | Free(mode=FreeMode.HOST):
                    self.host = known
                case Free(mode=FreeMode.DEFERRED):
                    pass
                case Free(buffer=buffer):
                    known |= self.tails.get(self.homes[buffer], set())
                    self.tails[self.homes[buffer]] = known
                case _:
                    stream: str = getattr(operation, "stream", "")
                    known |= self.tails.get(stream, set())
                    self.count += 1
                    self.done[operation.id] = self.tails[stream] = known | {self.count}
            self.told.append((operation.id, known))
            if isinstance(operation, Branch):
                side = operation.then if sides[operation.id] else operation.otherwise
                self._issue(side, sides)

    def _of(self, edge: Edge) -> set[int]:
        if isinstance(edge, Previous):
            return self.previous.get(edge.operation, set())
        return self.done.get(edge, set())


@dataclass
class Drawn:
    """A step with frees, the homes of buffers, and the ways that its branches go."""

    operations: tuple[Operation, ...]
    homes: dict[str, str]
    sides: list[dict[str, bool]]

    def told(self, edges: Edges) -> list[tuple[str, set[int]]]:
        unrolled = Unrolled(self.homes, edges)
        for sides in self.sides:
            unrolled.step(self.operations, sides)
        return unrolled.told

    def given(self) -> dict[str, tuple[Edge, ...]]:
        return {each.id: edges_of(each) for each in walk(self.operations)}


@st.composite
def steps(draw: st.DrawFn) -> Drawn:
    """Steps that Hypothesis draws, with frees of every mode between their operations."""
    (program,) = draw(programs()).programs
    streams = st.sampled_from(["compute", "communication", "other"])
    homes: dict[str, str] = {buffer.name: draw(streams) for buffer in program.buffers}
    operations: list[Operation] = []
    names: list[str] = []
    for place, operation in enumerate(program.step):
        operations.append(operation)
        names += [each.id for each in walk([operation]) if isinstance(each, StreamOperation)]
        if draw(st.booleans()) and names:
            operations.append(
                Free(
                    id=f"free{place}",
                    buffer=draw(st.sampled_from(sorted(homes))),
                    mode=draw(st.sampled_from(FreeMode)),
                    uses=tuple(draw(st.lists(st.sampled_from(names), max_size=3))),
                )
            )
    branches = [each.id for each in walk(operations) if isinstance(each, Branch)]
    flips = st.fixed_dictionaries({name: st.booleans() for name in branches})
    sides = draw(st.lists(flips, min_size=STEPS, max_size=STEPS))
    return Drawn(tuple(operations), homes, sides)


@given(steps())
def test_what_was_ordered_is_ordered_by_the_waits_that_are_left(drawn: Drawn) -> None:
    needed = NeededWaits.of(drawn.operations, drawn.homes).edges
    assert drawn.told(needed) == drawn.told(drawn.given())


@given(steps())
def test_each_wait_for_the_same_step_that_is_left_orders_something(drawn: Drawn) -> None:
    if any(isinstance(each, Branch) for each in drawn.operations):
        return  # an edge may be needed the other way
    needed = NeededWaits.of(drawn.operations, drawn.homes).edges
    told = drawn.told(needed)
    for name, edges in needed.items():
        for edge in set(edges):
            if isinstance(edge, str):
                rest = tuple(other for other in edges if other != edge)
                assert drawn.told({**needed, name: rest}) != told, (name, edge)


def schedule(stage: int) -> Schedule:
    return Case(
        Strategy(
            parallel=Parallel(data=2),
            zero=Zero(stage=stage, bucket_elements=60),
            train=Train(optimizer=Adam(), clip_norm=0.05, gradient_accumulation_steps=2),
        )
    ).schedule()


def counted(stage: int) -> tuple[int, int, int, int]:
    """Edges and operations awaited: all of a step, and those that are left."""
    program = schedule(stage).programs[0]
    homes = {buffer.name: buffer.home for buffer in program.buffers}
    needed = NeededWaits.of(program.step, homes)
    all_edges = [edge for each in walk(program.step) for edge in edges_of(each)]
    operations = [each for each in walk(program.step) if isinstance(each, StreamOperation)]
    left = sum(map(len, needed.edges.values()))
    return len(all_edges), left, len(operations), len(needed.awaited)


@pytest.mark.parametrize("stage", range(4))
def test_zsims_own_stages_wait_less_than_their_schedules_say(stage: int) -> None:
    edges, left, operations, awaited = counted(stage)
    assert left < edges
    assert awaited <= left
    assert awaited < operations


def test_waits_of_threads_of_the_host_and_for_them_stay() -> None:
    (program,) = schedule(3).programs
    homes = {buffer.name: buffer.home for buffer in program.buffers}
    threads = {getattr(each, "stream", "") for each in walk(program.step)} | set(homes.values())
    left = NeededWaits.of(program.step, homes, threads).edges
    given_edges = {each.id: edges_of(each) for each in walk(program.step)}
    assert {name: edges for name, edges in left.items() if edges} == {
        name: edges for name, edges in given_edges.items() if edges
    }
