"""Clocks say exactly what paths in the graph of waits say, on drawn programs."""

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from zsim.schedule.builder import ScheduleBuilder
from zsim.schedule.happens_before import NEVER, Timeline, drained, settled, unknown
from zsim.schedule.operation import Edge, FreeMode, Previous
from zsim.schedule.program_index import HOST, Numbered
from zsim.schedule.schedule import Schedule

STREAMS = ("compute", "communication", "other")


@st.composite
def programs(draw: st.DrawFn) -> Schedule:
    """A step of fills, collectives, waits of the host and frees on three streams, any edges."""
    build = ScheduleBuilder.of("drawn", data=1)
    build.stream("other")
    for group in ("one", "two"):
        build.group(group, "data")
    buffers = [build.buffer(f"x{home}", 1, home=home, persistent=True) for home in STREAMS]
    names = [f"step/{number}" for number in range(draw(st.integers(1, 14)))]
    earlier: list[str] = []
    for name in names:
        key = name.removeprefix("step/")
        edges: list[str] = []
        if earlier:
            edges = draw(st.lists(st.sampled_from(earlier), max_size=2))
        stream = draw(st.sampled_from(STREAMS))
        kind = draw(st.sampled_from(["fill", "fill", "reduce", "wait", "free"]))
        if kind in ("wait", "free") and not edges:
            kind = "fill"
        if kind == "wait":
            build.step.host_wait(key, edges[0])
        elif kind == "free":
            mode = draw(st.sampled_from([FreeMode.WAITED, FreeMode.HOST]))
            build.step.free(draw(st.sampled_from(buffers)), mode=mode, uses=edges)
        else:
            after: list[Edge] = list(edges)
            if previous := draw(st.sampled_from([None, name, *earlier])):
                after.append(Previous(previous))
            if kind == "fill":
                build.step.fill(key, buffers[0].all, 0.0, stream=stream, after=after)
            else:
                group = draw(st.sampled_from(["one", "two"]))
                build.step.all_reduce(key, group, buffers[0].all, stream=stream, after=after)
            earlier.append(name)
    return build.schedule()


@dataclass
class Unrolled:
    """The same program as a graph, by the definition of each wait, for several steps."""

    numbered: Numbered
    steps: int

    def known(self) -> list[list[set[tuple[int, int]]]]:
        """For each step and operation: (step, operation) of what has finished when it starts."""
        numbered = self.numbered
        done: dict[tuple[int, int], set[tuple[int, int]]] = {}
        host: set[tuple[int, int]] = set()
        tail: list[set[tuple[int, int]]] = [set() for _ in numbered.streams]
        latest: dict[str, set[tuple[int, int]]] = {}
        answer: list[list[set[tuple[int, int]]]] = []
        for step in range(self.steps):
            answer.append([])
            for number, operation in enumerate(numbered.operations):
                edges = [(step, edge) for edge in numbered.edges[number]]
                edges += [
                    (step - 1, numbered.index[name])
                    for name in numbered.previous.get(number, ())
                    if step
                ]
                waits = set[tuple[int, int]]().union(*(done[edge] for edge in edges))
                stream = numbered.stream[number]
                if stream == HOST:
                    if getattr(operation, "mode", FreeMode.HOST) is FreeMode.HOST:
                        host |= waits
                    else:
                        home = numbered.home[getattr(operation, "buffer", "")]
                        tail[home] = tail[home] | host | waits
                    answer[-1].append(set(host))
                    continue
                known = tail[stream] | host | waits | latest.get(numbered.group[number], set())
                answer[-1].append(known)
                done[step, number] = tail[stream] = known | {(step, number)}
                if numbered.group[number]:
                    latest[numbered.group[number]] = done[step, number]
        return answer


def positions(numbered: Numbered, known: set[tuple[int, int]], step: int) -> dict[int, int]:
    """The last position known on each stream, counted from the start of `step`."""
    found: dict[int, int] = {}
    for at, number in known:
        stream = numbered.stream[number]
        position = numbered.position[number] + (at - step) * numbered.length[stream]
        found[stream] = max(found.get(stream, position), position)
    return found


def agree(timeline: Timeline, step: int, *, exactly: bool) -> None:
    """The timeline of a step knows what the graph of `step` + 1 steps knows, or less."""
    numbered = timeline.numbered
    (path,) = timeline.paths
    graph = Unrolled(numbered, step + 1).known()[step]
    for number in numbered.items:
        stream, clock = numbered.stream[number], path.known[number]
        assert clock is not None
        if stream == HOST:
            continue
        known = positions(numbered, graph[number], step)
        for other, position in enumerate(clock):
            if other == stream:
                continue
            # What lies before the first step has finished: setup ends with all streams drained.
            truth = max(known.get(other, NEVER), -step * numbered.length[other])
            waits = [
                numbered.position[free]
                for free in range(number)
                if numbered.stream[free] == HOST
                and numbered.home.get(getattr(numbered.operations[free], "buffer", "")) == other
            ]
            if position in waits:
                continue  # the wait of a free is an entry of its own, without an operation
            if exactly:
                assert position == truth
            else:
                assert position <= truth


def step_of(schedule: Schedule) -> Numbered:
    (program,) = schedule.programs
    return Numbered(program, program.step, schedule.streams)


@given(programs())
def test_clocks_know_what_paths_know_in_a_first_step(schedule: Schedule) -> None:
    numbered = step_of(schedule)
    agree(Timeline(numbered, drained(numbered)), 0, exactly=True)


@given(programs())
def test_clocks_with_an_unknown_past_claim_nothing_that_is_not_so(schedule: Schedule) -> None:
    numbered = step_of(schedule)
    agree(Timeline(numbered, unknown(numbered)), 1, exactly=False)


@given(programs(), st.integers(0, 3))
def test_settled_clocks_claim_nothing_that_is_not_so(schedule: Schedule, step: int) -> None:
    agree(settled(step_of(schedule)), step, exactly=False)


@given(programs())
def test_settled_clocks_know_no_less_than_those_with_an_unknown_past(schedule: Schedule) -> None:
    numbered = step_of(schedule)
    (path,), (other,) = settled(numbered).paths, Timeline(numbered, unknown(numbered)).paths
    for number in numbered.items:
        clock, less = path.known[number], other.known[number]
        assert clock is not None
        assert less is not None
        assert all(one >= two for one, two in zip(clock, less, strict=True))
