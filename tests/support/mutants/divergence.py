"""One rank takes the branch, or does not, whatever the flag says; or each has a flag of its own."""

from collections.abc import Iterable, Iterator
from functools import partial

from mutation import changed, edited, without

from mutants.mutant import Mutant, Operator, apart, in_step, named, one_rank_apart
from zsim.schedule.operation import Branch, Operation, walk
from zsim.schedule.schedule import Schedule


def sites(schedule: Schedule) -> Iterator[Mutant]:
    for branch in in_step(schedule):
        if isinstance(branch, Branch):
            where = (branch.id, *(each.id for each in (*branch.then, *branch.otherwise)))
            for place in apart(schedule):
                for side in (branch.then, branch.otherwise):
                    yield Mutant(where, partial(_always, schedule, place, branch, side))
                yield Mutant(where, partial(_the_other_way, schedule, place, branch))
            for edge in branch.after:
                yield Mutant((branch.id, named(edge)), partial(without, schedule, named(edge)))


def _always(
    schedule: Schedule, place: tuple[str, int], branch: Branch, side: tuple[Operation, ...]
) -> Schedule:
    """What the rank never does is out of its program, and out of the edges there."""

    def edit(each: Operation) -> Iterable[Operation]:
        return side if each.id == branch.id else (each,)

    other = branch.otherwise if side is branch.then else branch.then
    kept = without(schedule, *(each.id for each in walk(other)))
    return one_rank_apart(schedule, edited(kept, edit), *place)


def _the_other_way(schedule: Schedule, place: tuple[str, int], branch: Branch) -> Schedule:
    other = changed(schedule, branch.id, then=branch.otherwise, otherwise=branch.then)
    return one_rank_apart(schedule, other, *place)


BRANCH_ON_ONE = Operator(
    "take the branch on one rank only",
    frozenset({"uniformity", "matching", "progress", "value", "lifetime", "skip path", "memory"})
    | {"races", "placement", "definedness"},
    sites,
)
