"""What nothing wrote is found where some rank reads it, counted element by element."""

from itertools import product

from drawn_programs import programs
from hypothesis import given

from zsim.access import accesses
from zsim.check import definedness
from zsim.check.subject import Subject
from zsim.issue import taken
from zsim.schedule import Schedule

STEPS = 2


def reads_nothing(schedule: Schedule) -> bool:
    """Whether some rank reads an element that nothing wrote, in some run of a few steps."""
    (program,) = schedule.programs
    for sides in product((False, True), repeat=STEPS):
        for rank in range(schedule.mesh.size):
            where = schedule.mesh.coordinates(rank)
            written: set[tuple[str, int]] = set()
            parts = [(program.setup, False), *((program.step, side) for side in sides)]
            for part, side in parts:
                for operation in taken(part, overflows=side):
                    touched = [
                        (access, {(access.view.buffer, start + index) for index in range(size)})
                        for access in accesses(operation)
                        for start, size in (schedule.extent(access.view, where),)
                    ]
                    if any(access.reads and elements - written for access, elements in touched):
                        return True
                    for access, elements in touched:
                        if access.writes:
                            written |= elements
    return False


@given(programs(filled=False))
def test_a_read_of_what_nothing_wrote_is_found(schedule: Schedule) -> None:
    found = bool(definedness.examine(Subject.of(schedule)))
    assert found >= reads_nothing(schedule)
    views = {
        access.view
        for program in schedule.programs
        for operation in program.by_id.values()
        for access in accesses(operation)
    }
    if all(view.axis is None or schedule.mesh.size == 1 for view in views):
        assert found == reads_nothing(schedule)


@given(programs())
def test_nothing_is_found_where_setup_writes_everything(schedule: Schedule) -> None:
    assert definedness.examine(Subject.of(schedule)) == []
