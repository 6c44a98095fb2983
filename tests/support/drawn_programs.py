"""Programs that Hypothesis draws: any accesses on any streams, in any order or none."""

from hypothesis import strategies as st

from zsim.schedule.builder import BufferHandle, OperationList, ScheduleBuilder
from zsim.schedule.operation import Edge, Previous, View
from zsim.schedule.schedule import Schedule

STREAMS = ("compute", "communication", "other")


@st.composite
def views(draw: st.DrawFn, buffer: BufferHandle, ranks: int, *, size: int | None = None) -> View:
    """A part of `buffer`: the same on every rank, or the rank's own."""
    elements = buffer.buffer.elements
    if draw(st.booleans()):
        start = draw(st.integers(0, elements - (size or 1)))
        length = draw(st.integers(1, elements - start)) if size is None else size
        return View(buffer=buffer.name, start=start, size=length)
    length = draw(st.integers(1, elements // ranks)) if size is None else size
    start = draw(st.integers(0, elements - ranks * length))
    return buffer.own("data", length, start)


class Writer:
    """Draws the operations of a part, and remembers what edges can name."""

    def __init__(self, draw: st.DrawFn, build: ScheduleBuilder, ranks: int, flags: int) -> None:
        self.draw = draw
        self.ranks = ranks
        self.buffers = [build.buffer(f"x{n}", 6, persistent=True) for n in range(2)]
        self.flags = [build.buffer(f"flag{n}", 1, persistent=True) for n in range(flags)]
        self.names: list[str] = []

    def write(self, part: OperationList, count: int, *, inside: bool = False) -> None:
        """Append `count` operations."""
        draw = self.draw
        for number in range(count):
            choices = ["fill", "copy", "reduce", "gather", "wait", "free"]
            kind = draw(st.sampled_from(choices if inside else [*choices, "branch"]))
            edges: list[Edge] = []
            if self.names:
                edges = list(draw(st.lists(st.sampled_from(self.names), max_size=2)))
                if draw(st.integers(0, 2)) == 0:
                    edges.append(Previous(draw(st.sampled_from(self.names))))
            name, stream = f"{kind}{number}", draw(st.sampled_from(STREAMS))
            one, other = draw(st.permutations(self.buffers))
            if kind == "wait" and edges:
                part.host_wait(name, edges[0])
            elif kind == "branch":
                sides = part.side(f"{name}/then"), part.side(f"{name}/otherwise")
                for side in sides:
                    self.write(side, draw(st.integers(0, 3)), inside=True)
                part.branch(name, draw(st.sampled_from(self.flags)).all, *sides, after=edges)
            elif kind == "copy":
                source = draw(views(one, self.ranks))
                target = (
                    draw(views(other, self.ranks, size=source.size))
                    if (source.axis or source.size * self.ranks <= 6)
                    else View(buffer=other.name, size=source.size)
                )
                self.names.append(part.copy(name, source, target, stream=stream, after=edges))
            elif kind == "reduce":
                view = draw(views(one, self.ranks))
                self.names.append(part.all_reduce(name, "data", view, stream=stream, after=edges))
            elif kind == "gather":
                size = draw(st.integers(1, 6 // self.ranks))
                start = draw(st.integers(0, 6 - size * self.ranks))
                whole = View(buffer=one.name, start=start, size=size * self.ranks)
                own = one.own("data", size, start)
                self.names.append(
                    part.all_gather(name, "data", own, whole, stream=stream, after=edges)
                )
            else:
                view = draw(views(one, self.ranks))
                self.names.append(part.fill(name, view, 0.0, stream=stream, after=edges))


@st.composite
def programs(draw: st.DrawFn, *, filled: bool = True, flags: int = 1) -> Schedule:
    """A step of fills, copies, collectives, waits of the host and branches on three streams.

    Setup fills every buffer, or whichever are drawn. Branches read one of so many `flags`.
    """
    ranks = draw(st.integers(1, 3))
    build = ScheduleBuilder.of("drawn", data=ranks)
    build.stream("other")
    build.group("data", "data")
    writer = Writer(draw, build, ranks, flags)
    build.setup.allocate(*writer.buffers, *writer.flags)
    for flag in writer.flags:
        build.setup.fill(flag.name, flag.all, 0.0)
    for buffer in writer.buffers:
        if filled or draw(st.booleans()):
            build.setup.fill(buffer.name, buffer.all, 0.0)
    writer.write(build.step, draw(st.integers(2, 7)))
    return build.schedule()
