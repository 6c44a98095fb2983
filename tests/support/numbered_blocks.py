"""An all-to-all in which block i of rank r holds the number 10 r + i, with a program per rank."""

from itertools import accumulate

from zsim.schedule.builder import ScheduleBuilder
from zsim.schedule.layout import Layout, Piece
from zsim.schedule.mesh import Span
from zsim.schedule.operation import AllToAll
from zsim.schedule.schedule import Kind, Schedule


def block(source: int, target: int, *, uneven: bool) -> int:
    """Return the elements that one rank sends to another; uneven ones may be none."""
    return (source + 2 * target) % 3 if uneven else 2


def numbered(ranks: int, *, uneven: bool = False) -> Schedule:
    """Return a schedule in which rank r keeps what it receives as parameter `came{r}`."""
    build = ScheduleBuilder("numbered", ScheduleBuilder.of("", data=ranks).mesh)
    data = build.group("data", "data")
    for rank in range(ranks):
        role = build.role(f"rank{rank}", Span(axis="data", start=rank, end=rank + 1))
        sends = tuple(block(rank, other, uneven=uneven) for other in range(ranks))
        receives = tuple(block(other, rank, uneven=uneven) for other in range(ranks))
        name, size = f"came{rank}", sum(receives)
        piece = Piece(parameter=name, start=0, size=size)
        build.layout(Layout(name=name, pieces=(piece,), elements=size))
        came = role.buffer(name, size, kind=Kind.PARAMETER, layout=name, persistent=True)
        sent = role.buffer("sent", sum(sends))
        role.setup.allocate(came)
        step = role.step
        step.allocate(sent)
        filled = ""
        for other, (end, count) in enumerate(zip(accumulate(sends), sends, strict=True)):
            filled = step.fill(f"fill{other}", sent[end - count : end], 10 * rank + other)
        if uneven:
            step.add(
                AllToAll(
                    id="step/exchange",
                    stream="communication",
                    after=(filled,),
                    group=data,
                    source=sent.all,
                    target=came.all,
                    wire=sent.buffer.dtype,
                    sent=sends,
                    received=receives,
                    kept=sends[rank],
                )
            )
        else:
            step.all_to_all("exchange", data, sent.all, came.all, after=[filled])
        step.free(sent, uses=["step/exchange"])
    return build.schedule()


def expected(ranks: int, rank: int, *, uneven: bool = False) -> list[float]:
    """Return the elements that `rank` receives."""
    return [
        10.0 * member + rank
        for member in range(ranks)
        for _ in range(block(member, rank, uneven=uneven))
    ]
