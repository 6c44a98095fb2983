"""A small change to a schedule that is right: where it is, and what it makes of it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from zsim.schedule.access import accesses
from zsim.schedule.mesh import Span
from zsim.schedule.operation import Operation, Previous, StreamOperation, walk
from zsim.schedule.schedule import Program, RankRole, Schedule


@dataclass(frozen=True)
class Mutant:
    """A change that has not been made yet.

    Attributes:
        where: operations, buffers or layouts that it touches: a finding has to name one of them.
        make: makes the change; it may raise what a constructor of the schedule raises.
    """

    where: tuple[str, ...]
    make: Callable[[], Schedule]


@dataclass(frozen=True)
class Operator:
    """A class of changes, and the families of invariants that each may break."""

    name: str
    invariants: frozenset[str]
    sites: Callable[[Schedule], Iterator[Mutant]]


def only_program(schedule: Schedule) -> Program:
    """The program of the only role."""
    (program,) = schedule.programs
    return program


def in_step(schedule: Schedule) -> Iterator[Operation]:
    """Every operation of the step, in the order of issue; both lists of a branch."""
    yield from walk(only_program(schedule).step)


def on_streams(schedule: Schedule) -> Iterator[StreamOperation]:
    """Every operation of the step that runs on a stream."""
    for operation in in_step(schedule):
        if isinstance(operation, StreamOperation):
            yield operation


def around(operation: Operation) -> tuple[str, ...]:
    """An operation that is gone, and the buffers that it left as they were."""
    return (operation.id, *(each.view.buffer for each in accesses(operation)))


def named(edge: str | Previous) -> str:
    """The operation that an edge names."""
    return edge.operation if isinstance(edge, Previous) else edge


def one_rank_apart(schedule: Schedule, other: Schedule, axis: str, place: int) -> Schedule:
    """The schedule in which ranks at `place` along `axis` do what `other` says."""
    size = schedule.mesh.axis_size(axis)
    (mine,), (theirs,) = schedule.programs, other.programs
    around = [(0, place), (place + 1, size)]
    rest = tuple((Span(axis=axis, start=low, end=high),) for low, high in around if low < high)
    own = ((Span(axis=axis, start=place, end=place + 1),),)
    return replace(
        schedule,
        roles=(RankRole(name="one", boxes=own), RankRole(name="rest", boxes=rest)),
        programs=(replace(theirs, role="one"), replace(mine, role="rest")),
        contract=replace(schedule.contract, peak_bytes=()),
    )


def apart(schedule: Schedule) -> Iterator[tuple[str, int]]:
    """Axes along which there are several ranks, and the places along each."""
    for axis in schedule.mesh.axes:
        if axis.size > 1:
            for place in range(axis.size):
                yield axis.name, place
