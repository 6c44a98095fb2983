"""A reduction of what nobody wrote is found, and no other: counted element by element."""

from drawn_programs import programs
from hypothesis import given

from zsim.proof import values
from zsim.proof.context import Context
from zsim.schedule.issue_order import taken
from zsim.schedule.operation import AllGather, AllReduce, Copy, Fill, Operation, View
from zsim.schedule.schedule import Schedule

STEPS = 5
Places = list[tuple[int, str, int]]
"""A rank, a buffer, an element of it."""


def places(schedule: Schedule, view: View, rank: int) -> Places:
    """What a view is on one rank."""
    start, size = schedule.extent(view, schedule.mesh.coordinates(rank))
    return [(rank, view.buffer, start + index) for index in range(size)]


def run(schedule: Schedule, operation: Operation, written: set[tuple[int, str, int]]) -> bool:
    """Run one operation on all ranks; whether it adds up what nobody wrote."""
    ranks = range(schedule.mesh.size)

    def of(view: View) -> list[Places]:
        return [places(schedule, view, rank) for rank in ranks]

    def put(target: Places, known: list[bool]) -> None:
        for place, is_known in zip(target, known, strict=True):
            (written.add if is_known else written.discard)(place)

    match operation:
        case Fill(target=view):
            for target in of(view):
                put(target, [True] * len(target))
        case Copy(source=source, target=target):
            known = [[place in written for place in each] for each in of(source)]
            for each, values_of in zip(of(target), known, strict=True):
                put(each, values_of)
        case AllGather(source=source, target=target):
            whole = [place in written for each in of(source) for place in each]
            for each in of(target):
                put(each, whole)
        case AllReduce(source=source, target=target):
            parts = [[place in written for place in each] for each in of(source)]
            known_sums = [all(each) for each in zip(*parts, strict=True)]
            for each in of(target):
                put(each, known_sums)
            return not all(known_sums)
        case _:
            pass
    return False


def adds_nothing(schedule: Schedule) -> bool:
    """Whether what nobody wrote is added up; flags are zero, so no branch takes its first list."""
    (program,) = schedule.programs
    written: set[tuple[int, str, int]] = set()
    found = False
    for part in (program.setup, *(program.step for _ in range(STEPS))):
        for operation in taken(part, overflows=False):
            found |= run(schedule, operation, written)
    return found


@given(programs(filled=False))
def test_what_nobody_wrote_is_found_where_it_is_added_up(schedule: Schedule) -> None:
    found = values.shown(Context.of(schedule)).findings
    assert bool(found) == adds_nothing(schedule)
    assert all(each.why.startswith("computes with") for each in found)


@given(programs())
def test_nothing_is_found_where_setup_writes_everything(schedule: Schedule) -> None:
    assert values.shown(Context.of(schedule)).findings == ()
