"""Progress finds a deadlock exactly when ranks that run the programs one by one get stuck."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from zsim.proof import check
from zsim.schedule.builder import BufferHandle, RoleBuilder, ScheduleBuilder
from zsim.schedule.mesh import Mesh, Span
from zsim.schedule.operation import Receive, Send, Together
from zsim.schedule.program_index import HOST, Numbered
from zsim.schedule.schedule import Schedule

STEPS = 2
GROUPS = ("pipe", "again", "data")
STREAMS = ("compute", "communication", "other")


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """One or two roles that exchange the same things, each in an order of its own."""
    pipe, data = draw(st.integers(1, 4)), draw(st.integers(1, 2))
    build = ScheduleBuilder.of("drawn", pipe=pipe, data=data)
    build.stream("other")
    for group in GROUPS:
        build.group(group, "data" if group == "data" else "pipe")
    exchanges = draw(
        st.lists(st.tuples(st.sampled_from(GROUPS), st.integers(0, 3), st.booleans()), max_size=3)
    )
    collectives = draw(st.lists(st.sampled_from(GROUPS), max_size=3))
    cut = draw(st.integers(0, pipe - 1))
    roles: list[RoleBuilder] = [build]
    if cut:
        roles = [
            build.role("low", Span(axis="pipe", start=0, end=cut)),
            build.role("high", Span(axis="pipe", start=cut, end=pipe)),
        ]
    for role in roles:
        x = role.buffer("x", 1, persistent=True)
        role.setup.allocate(x)
        role.setup.fill("x", x.all, 0.0)
        write(draw, role, x, exchanges=exchanges, collectives=collectives)
    return build.schedule()


def write(
    draw: st.DrawFn,
    role: RoleBuilder,
    x: BufferHandle,
    *,
    exchanges: Sequence[tuple[str, int, bool]],
    collectives: Sequence[str],
) -> None:
    """Sends and receives in any order, collectives in the given one, on any streams."""
    items: list[tuple[str, ...]] = []
    for number, (among, distance, together) in enumerate(exchanges):
        key = (f"{among}{number}", among, str(distance))
        items += [("t", *key)] if together else [("s", *key), ("r", *key)]
    order = draw(st.permutations([*items, *(("c", "", "", "") for _ in collectives)]))
    upcoming = iter(enumerate(collectives))
    issued: list[str] = []
    for kind, name, group, offset in order:
        stream = draw(st.sampled_from(STREAMS))
        after = draw(st.lists(st.sampled_from(issued), max_size=1)) if issued else []
        if kind == "c":
            number, among = next(upcoming)
            done = role.step.all_reduce(f"c{number}", among, x.all, stream=stream, after=after)
        elif kind == "s":
            done = role.step.send(
                f"{name}/s", group, x.all, int(offset), stream=stream, after=after
            )
        elif kind == "r":
            back = -int(offset)
            done = role.step.receive(f"{name}/r", group, x.all, back, stream=stream, after=after)
        else:
            role.step.send(f"{name}/s", group, x.all, int(offset), stream=stream)
            role.step.receive(f"{name}/r", group, x.all, -int(offset), stream=stream)
            done = role.step.together(f"{name}/t", 2, after=after)
        issued.append(done)
        if draw(st.integers(0, 4)) == 0:
            role.step.host_wait(f"wait{len(issued)}", draw(st.sampled_from(issued)))


@dataclass
class Rank:
    """One rank that runs setup and the steps: what it has issued, started and finished."""

    numbered: Numbered
    place: dict[str, int]
    communicators: dict[str, int]
    host: int = 0
    started: set[int] = field(default_factory=set[int])
    done: set[int] = field(default_factory=set[int])

    @property
    def length(self) -> int:
        """Operations of all steps; operation k of step s has number s x length of a step + k."""
        return STEPS * len(self.numbered.operations)

    def issue(self) -> None:
        """The host goes on until it has to wait."""
        count = len(self.numbered.operations)
        while self.host < self.length:
            step, number = divmod(self.host, count)
            if self.numbered.stream[number] == HOST:
                if not all(
                    step * count + edge in self.done for edge in self.numbered.edges[number]
                ):
                    return
                self.done.add(self.host)
            self.host += 1

    def start(self) -> None:
        """Start what nothing on this rank holds back."""
        count = len(self.numbered.operations)
        for item in range(self.host):
            step, number = divmod(item, count)
            if item in self.done or self.numbered.stream[number] == HOST:
                continue
            held = any(
                self._holds(each % count, number) for each in range(item) if each not in self.done
            )
            if not held and self._after(step * count, number):
                self.started.add(item)

    def _after(self, first: int, number: int) -> bool:
        """Whether what `number` waits for in its step, which begins at `first`, has finished."""
        return all(first + edge in self.done for edge in self.numbered.edges[number])

    def _holds(self, earlier: int, number: int) -> bool:
        """Whether both are on one stream, or on one communicator."""
        stream, group = self.numbered.stream, self.numbered.group
        if stream[earlier] == HOST:
            return False
        return stream[earlier] == stream[number] or group[earlier] == group[number] != ""


def parts(numbered: Numbered, number: int) -> list[tuple[str, int]]:
    """(kind, offset) of each operation of a communicator that an entry consists of."""
    operation = numbered.operations[number]
    members = operation.members if isinstance(operation, Together) else (operation,)
    found: list[tuple[str, int]] = []
    for member in members:
        match member:
            case Send(offset=offset):
                found.append(("send", offset))
            case Receive(offset=offset):
                found.append(("receive", offset))
            case _:
                found.append(("collective", 0))
    return found


class World:
    """All ranks, one by one, with who waits for whom written out."""

    def __init__(self, schedule: Schedule) -> None:
        mesh: Mesh = schedule.mesh
        self.ranks: list[Rank] = []
        for rank in range(mesh.size):
            coordinates = mesh.coordinates(rank)
            program = schedule.program_of(rank)
            groups = schedule.groups
            self.ranks.append(
                Rank(
                    Numbered(program, program.step, schedule.streams),
                    {group.name: group.index(mesh, coordinates) for group in groups},
                    {group.name: min(group.members(mesh, coordinates)) for group in groups},
                )
            )
        self.sizes = {group.name: group.size(mesh) for group in schedule.groups}
        self.partners: dict[tuple[int, int], set[tuple[int, int]]] = defaultdict(set)
        self._pair()

    def _pair(self) -> None:
        meetings: dict[tuple[object, ...], list[tuple[int, int]]] = defaultdict(list)
        for rank, each in enumerate(self.ranks):
            counts: dict[tuple[object, ...], int] = defaultdict(int)
            for item in range(each.length):
                number = item % len(each.numbered.operations)
                group = each.numbered.group[number]
                if not group:
                    continue
                where = (group, each.communicators[group])
                mine, size = each.place[group], self.sizes[group]
                for kind, offset in parts(each.numbered, number):
                    peer = (mine + offset) % size
                    between = {"send": (mine, peer), "receive": (peer, mine), "collective": ()}
                    key = (*where, kind == "collective", *between[kind])
                    nth = counts[(*key, kind)] = counts[(*key, kind)] + 1
                    meetings[(*key, nth)].append((rank, item))
        for meeting in meetings.values():
            for one, other in product(meeting, meeting):
                self.partners[one].add(other)

    def gets_stuck(self) -> bool:
        """Run until nothing moves; whether something is left."""
        before = -1
        while (now := sum(len(rank.done) + len(rank.started) for rank in self.ranks)) != before:
            before = now
            for rank in self.ranks:
                rank.issue()
                rank.start()
            for number, rank in enumerate(self.ranks):
                for item in rank.started - rank.done:
                    if all(
                        other in self.ranks[partner].started
                        for partner, other in self.partners[number, item]
                    ):
                        rank.done.add(item)
        return any(len(rank.done) < rank.length for rank in self.ranks)


@given(schedules())
def test_a_deadlock_is_found_exactly_when_ranks_get_stuck(schedule: Schedule) -> None:
    found = {finding.invariant for finding in check(schedule)}
    assert "matching" not in found
    assert ("progress" in found) is World(schedule).gets_stuck()
