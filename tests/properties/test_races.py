"""Races are found exactly where ranks that run a few steps could come to one, access by access."""

from itertools import product

from drawn_programs import programs
from few_steps import Run, decided_by
from hypothesis import given
from hypothesis import strategies as st

from zsim.proof import races
from zsim.proof.context import Context
from zsim.schedule.access import accesses
from zsim.schedule.operation import Branch
from zsim.schedule.schedule import Schedule

STEPS = 3


def races_in(schedule: Schedule, run: Run) -> bool:
    """Whether two accesses on one rank overlap, one of them a write, and are not ordered."""
    mesh = schedule.mesh
    for later, (operation, known) in enumerate(run.ran):
        for earlier, (other, _) in enumerate(run.ran[:later]):
            if earlier in known or isinstance(other, Branch):
                continue
            for one, two in product(accesses(operation), accesses(other)):
                if one.view.buffer != two.view.buffer or not (one.writes or two.writes):
                    continue
                for rank in range(mesh.size):
                    where = mesh.coordinates(rank)
                    start, size = schedule.extent(one.view, where)
                    low, length = schedule.extent(two.view, where)
                    if max(start, low) < min(start + size, low + length):
                        return True
    return False


def comes_to_a_race(schedule: Schedule) -> bool:
    """Whether a few steps can come to a race, whichever flags are set in each."""
    (program,) = schedule.programs
    names = {decided_by(each) for each in program.by_id.values() if isinstance(each, Branch)}
    ways = [
        dict(zip(names, each, strict=True)) for each in product((True, False), repeat=len(names))
    ]
    for each in product(ways, repeat=STEPS):
        run = Run(program)
        for flags in each:
            run.step(flags)
        if races_in(schedule, run):
            return True
    return False


def between_operations(schedule: Schedule) -> list[str]:
    """Races between operations; views of one operation that overlap are apart."""
    return [each.why for each in races.examine(Context.of(schedule)) if each.witness[3:]]


@given(st.integers(1, 2).flatmap(lambda flags: programs(flags=flags)))
def test_a_race_is_found_exactly_where_a_few_steps_come_to_one(schedule: Schedule) -> None:
    assert bool(between_operations(schedule)) == comes_to_a_race(schedule)
