"""Races: two accesses to the same bytes, one of which writes, never overlap in time.

Proved for every role, any number of steps, and every path through the branches: any two accesses
to overlapping elements of a buffer, one of them a write, are ordered by happens-before
(`zsim.schedule.happens_before`). A collective reads and writes its views from its start to its
completion. Views that depend on the rank are compared for every rank at once
(`zsim.proof.overlap`). Within one operation, and between the members of a `Together`, written
elements overlap nothing else, except in a collective in place (an all-reduce or a broadcast from a
view into itself, a gather from the own slot of its target, a reduce-scatter into the own slot of
its source) and in a copy of a view to itself.

Buffers that use one block of memory in turn belong to `lifetime`: its rules order the last use of
the first before the first use of the second.

All possible effects of a step on a persistent buffer count for the next one, and those in a list
of a branch for all later steps; `zsim.proof.step_boundary` computes exactly what a step knows of
all steps before it.

Assumed: the order of operations follows from the rank's own program; a schedule that is ordered
only through another role's program is refused. A branch may take either list in any step, but
takes the same as an earlier one of its step on the same value, without a write to that buffer in
between.

Cost: none for buffers that stay on one stream. For the others, one comparison of each operation
that names them with the last write and read of each stream; if that does not suffice, one for each
two overlapping views.
"""

from collections.abc import Iterable
from functools import partial

from zsim.proof.collision import AccessesByBuffer, Collisions, Race, inside
from zsim.proof.context import SETUP, STEP, Context, NumberedProgram
from zsim.proof.finding import Finding
from zsim.proof.overlap import Overlap, describe_view
from zsim.proof.step_boundary import StepBoundary
from zsim.schedule.access import Access
from zsim.schedule.happens_before import BranchPath, Timeline
from zsim.schedule.operation import Operation
from zsim.schedule.program_index import ALLOCATE, FREE, HOST, READ, History

INVARIANT = "races"


def examine(context: Context) -> list[Finding]:
    """Find every two unordered accesses; of a chain of such, the first."""
    overlap = Overlap(context.schedule)
    found: list[Finding] = []
    for each in context.programs:
        for _, numbered in each.parts:
            for number in numbered.doubled:
                found += _within(context, each, numbered.operations[number], overlap)
        if not each.crowded:
            found += _races(each, SETUP, each.setup_order, overlap=overlap)
            found += each.proved(partial(_races, each, STEP, overlap=overlap))
    return found


def _races(each: NumberedProgram, part: str, order: Timeline, *, overlap: Overlap) -> list[Finding]:
    numbered = order.numbered
    persistent = set(each.program.persistent) if part == STEP else set[str]()
    found: dict[tuple[int, int], Finding] = {}
    shared = [name for name, history in numbered.history.items() if history.away]
    exact: dict[str, Collisions] = {}
    boundary, known = StepBoundary(order), AccessesByBuffer()
    first, *others = order.paths
    for path in (first, *others):
        races: list[Race] = []
        for name in shared:
            history = numbered.history[name]
            if path is not first and path.since > history.numbers[-1]:
                continue
            lasts = name in persistent
            if not _is_ordered(path, history, boundary if lasts else None):
                if name not in exact:
                    exact[name] = Collisions(order, name, overlap, boundary=boundary, known=known)
                races += exact[name].find(path, lasts=lasts)
        for race in _roots(path, races):
            found.setdefault((race.later, race.earlier), _finding(each, path, race))
    return [finding for _, finding in sorted(found.items(), key=lambda item: item[0])]


def _is_ordered(path: BranchPath, history: History, boundary: StepBoundary | None) -> bool:
    """Return True if each access is ordered after the last of every stream, for any views.

    With a `boundary`, include those of the steps before.
    """
    numbered, known_at = path.numbered, path.known
    streams, positions = numbered.stream, numbered.position
    touched: dict[int, int] = {}
    written: dict[int, int] = {}
    before: dict[int, int] = {}  # the last of each stream in the step before, if any
    knowing: set[tuple[int, int]] = set()  # streams ordered after those of another one
    if boundary is not None:
        for number, code in zip(history.numbers, history.codes, strict=True):
            stream = streams[number]
            if stream != HOST:
                position = positions[number] - len(numbered.entries[stream])
                touched[stream] = position
                before[stream] = number
                if code != READ:
                    written[stream] = position
    for number, code in zip(history.numbers, history.codes, strict=True):
        known = known_at[number]
        if known is None or code == FREE:
            continue
        if code == ALLOCATE:
            touched.clear()
            written.clear()
            continue
        stream = streams[number]
        for other, position in (written if code == READ else touched).items():
            if known[other] >= position or other == stream:
                continue
            if position > 0 or boundary is None or numbered.sides or stream == HOST:
                return False
            # Of the step before: a stream ordered after it once stays ordered after it.
            if (stream, other) not in knowing:
                if not boundary.knows(path, number, before[other]):
                    return False
                knowing.add((stream, other))
        if stream != HOST:
            touched[stream] = positions[number]
            if code != READ:
                written[stream] = positions[number]
    return True


def _roots(path: BranchPath, races: Iterable[Race]) -> list[Race]:
    """Return races that would remain if all others were ordered by an edge."""
    kept: list[Race] = []
    for race in sorted(races, key=lambda race: (race.later, -race.earlier)):
        if not any(_explains(path, root, race) for root in kept):
            kept.append(race)
    return kept


def _explains(path: BranchPath, root: Race, race: Race) -> bool:
    """Return True if an edge between the two accesses of `root` would order `race`."""
    numbered = path.numbered
    on_host = numbered.stream[root.later] == HOST
    if not (on_host or root.later == race.later or path.is_before(root.later, race.later)):
        return False
    count = len(numbered.operations)
    ahead, behind = root.earlier, race.earlier
    if behind < 0 <= ahead:  # `race` with an earlier step, `root` within this one
        number = behind + count
        stream = numbered.stream[number]
        known = path.known[ahead]
        shift = len(numbered.entries[stream])
        return known is not None and (
            stream == numbered.stream[ahead] or known[stream] >= numbered.position[number] - shift
        )
    if ahead < 0 <= behind:
        return False
    ahead, behind = ahead % count, behind % count
    if ahead == behind:
        return True
    return behind < ahead and path.known[ahead] is not None and path.is_before(behind, ahead)


def _finding(each: NumberedProgram, path: BranchPath, race: Race) -> Finding:
    numbered = path.numbered
    later = numbered.operations[race.later].id
    earlier = numbered.operations[race.earlier].id  # negative: of the step before
    before = race.earlier < 0
    stream = numbered.stream[race.earlier]
    on = numbered.streams[stream]
    known = path.known[race.later]
    assert known is not None
    waited = known[stream]
    last = "nothing of this step" if waited <= 0 else f"{_entry(path, stream, waited)}"
    name = race.later_view.buffer
    verb = "writes" if race.later_writes else "reads"
    may = "write" if race.earlier_writes else "read"
    of = " of the step before" if before else ""
    here = numbered.stream[race.later]
    where = "the host" if here == HOST else numbered.streams[here]
    return Finding(
        invariant=INVARIANT,
        role=each.program.role,
        operation=later,
        why=f"{verb} {name} while {earlier}{of} may still {may} it",
        witness=(
            f"{earlier}{of}, on {on}, {may}s {describe_view(race.earlier_view)} of {name}",
            f"{later}, on {where}, {verb} {describe_view(race.later_view)}",
            f"what {later} has waited for on {on} ends with {last}",
            f"missing: {later} after {f'the previous {earlier}' if before else earlier}",
        ),
    )


def _entry(path: BranchPath, stream: int, position: int) -> str:
    return path.numbered.operations[path.numbered.entries[stream][position - 1]].id


def _within(
    context: Context, each: NumberedProgram, operation: Operation, overlap: Overlap
) -> list[Finding]:
    """Find overlapping views of one operation, one of them written."""
    found: list[Finding] = []
    for one, other in inside(context.schedule, operation, overlap):
        name = one.view.buffer
        lines = tuple(
            f"{_verb(access)} {describe_view(access.view)} of {name}" for access in (one, other)
        )
        found.append(
            Finding(
                invariant=INVARIANT,
                role=each.program.role,
                operation=operation.id,
                why=f"writes a part of {name} that it {_verb(other)} in another place too",
                witness=lines,
            )
        )
    return found


def _verb(access: Access) -> str:
    return "updates" if access.reads and access.writes else "writes" if access.writes else "reads"
