"""An all-to-all in which block i of rank r holds the number 10 r + i, with a program per rank."""

from zsim.schedule.builder import ScheduleBuilder
from zsim.schedule.layout import Layout, Piece
from zsim.schedule.mesh import Span
from zsim.schedule.schedule import Kind, Schedule

BLOCK = 2


def numbered(ranks: int) -> Schedule:
    """Return a schedule in which rank r keeps what it receives as parameter `came{r}`."""
    build = ScheduleBuilder("numbered", ScheduleBuilder.of("", data=ranks).mesh)
    data = build.group("data", "data")
    size = ranks * BLOCK
    for rank in range(ranks):
        role = build.role(f"rank{rank}", Span(axis="data", start=rank, end=rank + 1))
        name = f"came{rank}"
        piece = Piece(parameter=name, start=0, size=size)
        build.layout(Layout(name=name, pieces=(piece,), elements=size))
        came = role.buffer(name, size, kind=Kind.PARAMETER, layout=name, persistent=True)
        sent = role.buffer("sent", size)
        role.setup.allocate(came)
        step = role.step
        step.allocate(sent)
        for block in range(ranks):
            filled = step.fill(
                f"fill{block}", sent[block * BLOCK : (block + 1) * BLOCK], 10 * rank + block
            )
        moved = step.all_to_all("exchange", data, sent.all, came.all, after=[filled])
        step.free(sent, uses=[moved])
    return build.schedule()


def expected(ranks: int, rank: int) -> list[float]:
    """Return the elements that `rank` receives."""
    return [10.0 * member + rank for member in range(ranks) for _ in range(BLOCK)]
