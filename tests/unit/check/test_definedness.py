from mutation import hand, without

from zsim.builder import ScheduleBuilder
from zsim.check import Finding, check
from zsim.layout import Layout, Piece
from zsim.operation import View
from zsim.schedule import Kind, Schedule


def definedness(schedule: Schedule) -> list[Finding]:
    return [each for each in check(schedule) if each.invariant == "definedness"]


def test_padding_that_nothing_wrote_does_not_reach_a_reduction() -> None:
    (found,) = definedness(without(hand(), "step/layer1/pad"))
    assert found.operation == "step/layer1/reduce"
    assert found.why == (
        "reads layer1/staging, of which nothing wrote elements 6 to 8 since it was allocated"
    )
    assert found.witness == (
        "step/layer1/reduce reads elements 0 to 8 of layer1/staging",
        "step/layer1/stage wrote elements 0 to 6",
    )


def test_padding_is_called_so_where_a_layout_says_it() -> None:
    build = ScheduleBuilder.of("padded", data=2)
    build.group("data", "data")
    pieces = (Piece(parameter="w", start=0, size=3),)
    build.layout(Layout(name="cut", pieces=pieces, elements=4, axis="data"))
    whole = build.buffer("whole", 4, kind=Kind.GRADIENT, layout="cut", persistent=True)
    shard = build.buffer("shard", 2, persistent=True)
    build.setup.allocate(whole, shard)
    build.setup.fill("some", whole[:3], 0.0)
    build.step.reduce_scatter("reduce", "data", whole.all, shard.all)
    (found,) = definedness(build.schedule())
    assert "elements 3 to 4, which are padding" in found.why


def test_memory_is_new_after_every_allocation() -> None:
    build = ScheduleBuilder.of("again", data=1)
    x, y = build.buffer("x", 4), build.buffer("y", 4, persistent=True)
    build.setup.allocate(y)
    for number in range(2):
        build.step.allocate(x)
        if number == 0:
            build.step.fill("fill", x.all, 0.0)
        build.step.copy(f"copy{number}", x.all, y.all)
        build.step.free(x)
    (found,) = definedness(build.schedule())
    assert found.operation == "step/copy1"
    assert found.witness[1] == "nothing wrote x at all"


def test_an_addition_reads_what_it_adds_to() -> None:
    build = ScheduleBuilder.of("sum", data=1)
    x, y = build.buffer("x", 4, persistent=True), build.buffer("y", 4, persistent=True)
    build.setup.allocate(x, y)
    build.setup.fill("x", x.all, 0.0)
    build.step.copy("add", x.all, y.all, accumulate=True)
    (found,) = definedness(build.schedule())
    assert found.operation == "step/add"


def test_an_own_part_is_not_the_whole() -> None:
    def read(view: View) -> list[Finding]:
        build = ScheduleBuilder.of("own", data=4)
        x, y = build.buffer("x", 8, persistent=True), build.buffer("y", 8, persistent=True)
        build.setup.allocate(x, y)
        build.setup.fill("own", x.own("data", 2), 0.0)
        build.step.copy("read", view, View(buffer="y", size=view.size))
        return definedness(build.schedule())

    assert read(View(buffer="x", size=2, axis="data")) == []
    assert read(View(buffer="x", size=1, axis="data"))
    assert read(View(buffer="x", size=2))
    assert read(View(buffer="x", size=8))


def test_windows_on_all_of_a_layout_make_a_segment_whole() -> None:
    def read(*windows: tuple[int, int]) -> list[Finding]:
        build = ScheduleBuilder.of("windows", data=3)
        pieces = (Piece(parameter="w", start=0, size=7),)
        cuts = (0, 3, 3, 7)
        build.layout(Layout(name="cut", pieces=pieces, elements=7, axis="data", cuts=cuts))
        segment = build.buffer("segment", 4, layout="cut", shard="data", persistent=True)
        copy = build.buffer("copy", 4, persistent=True)
        build.setup.allocate(segment, copy)
        for number, (start, size) in enumerate(windows):
            view = View(buffer="segment", start=start, size=size, layout="cut")
            build.setup.fill(f"fill{number}", view, 0.0)
        build.step.copy("read", segment.all, copy.all)
        return definedness(build.schedule())

    assert read((0, 7)) == []
    assert read((0, 2), (2, 5)) == []
    assert read((0, 2), (3, 4))


def test_every_way_through_a_branch_is_gone() -> None:
    build = ScheduleBuilder.of("branch", data=1)
    flag, x = build.buffer("flag", 1, persistent=True), build.buffer("x", 4)
    y = build.buffer("y", 4, persistent=True)
    build.setup.allocate(flag, y)
    build.setup.fill("flag", flag.all, 0.0)
    build.step.allocate(x)
    then, otherwise = build.step.side("yes"), build.step.side("no")
    then.fill("x", x.all, 0.0)
    build.step.branch("branch", flag.all, then, otherwise, after=[])
    build.step.copy("copy", x.all, y.all)
    build.step.free(x)
    assert [each.operation for each in definedness(build.schedule())] == ["step/copy"]
