"""Several layouts with the same parameters: which one holds them, and whether others agree."""

from dataclasses import replace
from itertools import pairwise

from mutation import split
from runtimes_by_hand import deepspeed, fsdp2, megatron

from zsim.builder import ScheduleBuilder
from zsim.check import Finding, check
from zsim.layout import Layout, Piece
from zsim.operation import Action, Role, View
from zsim.schedule import Buffer, Contract, Kind, LogicalParameter, Schedule


def partition(schedule: Schedule) -> list[tuple[str, str]]:
    return [(each.operation, each.why) for each in check(schedule) if each.invariant == "partition"]


def with_layout(schedule: Schedule, name: str, **fields: object) -> Schedule:
    """The schedule with other `fields` of a layout."""
    return replace(
        schedule,
        layouts=tuple(
            replace(each, **fields) if each.name == name else each  # type: ignore[arg-type]  # a field by name
            for each in schedule.layouts
        ),
    )


def with_kind(schedule: Schedule, name: str, kind: Kind) -> Schedule:
    (program,) = schedule.programs
    buffers = tuple(
        replace(each, kind=kind) if each.name == name else each for each in program.buffers
    )
    return replace(schedule, programs=(replace(program, buffers=buffers),))


def with_state(schedule: Schedule, like: str, **fields: object) -> Schedule:
    """The schedule with one more persistent buffer, as `like` is but for `fields`."""
    (program,) = schedule.programs
    more: Buffer = replace(program.by_name[like], **fields)  # type: ignore[arg-type]  # a field by name
    program = replace(
        program, buffers=(*program.buffers, more), persistent=(*program.persistent, more.name)
    )
    return replace(schedule, programs=(program,))


def test_masters_alone_may_hold_the_parameters() -> None:
    """The sharded parameter of FSDP2 in fp32 may be called a master as well."""
    assert partition(with_kind(fsdp2(), "shard", Kind.MASTER)) == []
    nowhere = with_kind(fsdp2(), "shard", Kind.WORKSPACE)
    why = "lies in no parameter layout, and must lie in exactly one"
    assert partition(nowhere)[:2] == [("w", why), ("b", why)]


def test_a_layout_that_holds_a_part_of_a_parameter_is_found() -> None:
    pieces = (Piece(parameter="w", start=0, size=4), Piece(parameter="b", start=5, size=3))
    assert partition(with_layout(fsdp2(), "alone", pieces=pieces))[0] == (
        "alone",
        "holds 4 elements of w, which has 5",
    )


def test_a_layout_that_holds_something_else_beside_parameters_is_found() -> None:
    pieces = (Piece(parameter="w", start=0, size=5), Piece(parameter="x", start=5, size=3))
    assert ("alone", "holds x, which the contract does not name") in partition(
        with_layout(fsdp2(), "alone", pieces=pieces)
    )


def test_a_layout_of_something_else_is_nobody_s_business() -> None:
    build = ScheduleBuilder.of("other", data=2)
    build.layout(Layout(name="w", pieces=(Piece(parameter="w", start=0, size=4),), elements=4))
    build.layout(Layout(name="x", pieces=(Piece(parameter="x", start=0, size=3),), elements=4))
    w = build.buffer("w", 4, kind=Kind.PARAMETER, layout="w", persistent=True)
    build.setup.allocate(w)
    contract = Contract(parameters=(LogicalParameter(name="w", elements=4),))
    assert partition(build.schedule(contract)) == []


def test_a_parameter_that_lies_in_two_blocks_is_found() -> None:
    wrong = with_layout(fsdp2(), "cut", blocks=(0, 4))
    assert ("cut", "w lies in two blocks") in partition(wrong)


def test_masters_cut_otherwise_than_the_parameters_are_held_once_each() -> None:
    """Megatron: the parameters lie whole, one after the other, the masters are cut by bucket."""
    assert partition(megatron()) == []
    found = partition(with_state(megatron(), "master", name="again"))
    why = "is held by 2 persistent buffers of kind master, not 1"
    assert found == [("w", why), ("b", why)]


def test_masters_that_leave_a_parameter_out_are_found() -> None:
    schedule = megatron()
    w = Piece(parameter="w", start=0, size=5)
    layout = Layout(name="w_alone", pieces=(w,), elements=12, axis="data", blocks=(0, 8))
    schedule = replace(schedule, layouts=(*schedule.layouts, layout))
    (program,) = schedule.programs
    buffers = tuple(
        replace(each, layout="w_alone") if each.name == "master" else each
        for each in program.buffers
    )
    schedule = replace(schedule, programs=(replace(program, buffers=buffers),))
    why = "is held by 0 persistent buffers of kind master, not 1"
    assert ("b", why) in partition(schedule)


def test_moments_beside_masters_are_as_many_for_each_parameter() -> None:
    moment = with_state(megatron(), "master", name="moment", kind=Kind.MOMENT)
    assert partition(moment) == []
    pieces = (Piece(parameter="b", start=8, size=3),)
    layout = Layout(name="b_alone", pieces=pieces, elements=12, axis="data", blocks=(0, 8))
    more = replace(moment, layouts=(*moment.layouts, layout))
    more = with_state(more, "master", name="second", kind=Kind.MOMENT, layout="b_alone")
    assert partition(more) == [("b", "is held by 2 persistent buffers of kind moment, not 1")]


def test_roles_may_split_the_ranks_of_a_joined_axis() -> None:
    for axis in ("replicate", "outer", "inner"):
        assert check(split(fsdp2(), fsdp2(), axis=axis)) == ()


def test_a_rank_without_its_shard_of_a_joined_axis_is_found() -> None:
    schedule = fsdp2()
    (program,) = schedule.programs
    other = replace(schedule, programs=(replace(program, persistent=()),))
    found = [
        (each.role, each.operation)
        for each in check(split(schedule, other, axis="inner"))
        if each.invariant == "partition"
    ]
    assert found == [("first", "cut")]


def test_roles_that_gather_along_different_axes_do_not_match() -> None:
    """Both bring two elements: one its slot along one axis, the other along another."""

    def slots(axis: str) -> Schedule:
        build = ScheduleBuilder.of("slots", outer=2, inner=2)
        group = build.group("outer", "outer")
        build.layout(Layout(name="flat", pieces=(), elements=4))
        x = build.buffer("x", 4, layout="flat", persistent=True)
        build.setup.allocate(x)
        build.step.fill("fill", x.all, 0.0)
        build.step.all_gather("gather", group, x.own(axis, 2), x.all, after=["step/fill"])
        return build.schedule()

    def found(schedule: Schedule) -> list[Finding]:
        return [each for each in check(schedule) if each.invariant == "matching"]

    assert found(split(slots("outer"), slots("outer"), axis="outer")) == []
    (finding,) = found(split(slots("outer"), slots("inner"), axis="outer"))
    assert "the roles bring parts of different tensors, equal in size, to outer" in finding.why


def sliced(*cuts: int, start: int = 2, size: int = 5, origin: int = 0) -> list[Finding]:
    """A reduced bucket of a flat tensor, of which each rank takes what it owns; uneven cuts."""
    build = ScheduleBuilder.of("uneven", data=4)
    group = build.group("data", "data")
    pieces = (Piece(parameter="a", start=0, size=2), Piece(parameter="w", start=2, size=5))
    build.layout(Layout(name="flat", pieces=pieces, elements=8, axis="data", cuts=cuts))
    alone = (Piece(parameter="w", start=0, size=5),)
    build.layout(Layout(name="bucket", pieces=alone, elements=5))
    largest = max(high - low for low, high in pairwise(cuts))
    own = build.buffer("own", largest, layout="flat", shard="data", persistent=True)
    other = build.buffer("other", largest, layout="flat", shard="data", persistent=True)
    bucket = build.buffer("bucket", 5, layout="bucket", persistent=True)
    build.setup.allocate(own, other, bucket)
    build.step.fill("zero", own.all, 0.0)
    build.step.compute("backward", Action.BACKWARD, [(Role.GRADIENT, bucket.all)], unit="u")
    build.step.all_reduce("reduce", group, bucket.all, after=["step/backward"])
    build.step.copy(
        "slice",
        View(buffer="bucket", start=start, size=size, layout="flat", origin=origin),
        View(buffer="own", start=start, size=size, layout="flat"),
        after=["step/reduce"],
    )
    build.step.copy("keep", own.all, other.all)
    return [each for each in check(build.schedule()) if each.invariant == "placement"]


def test_windows_on_uneven_segments_are_parts_of_what_the_buffer_holds() -> None:
    assert sliced(0, 1, 4, 4, 8) == []
    assert sliced(0, 1, 4, 4, 8, start=3, size=4, origin=1) == []
    (finding,) = sliced(0, 1, 4, 4, 8, start=1, size=4)
    assert finding.operation == "step/slice"
    assert finding.why == "bucket has something else where the window on flat is"


def test_the_flat_tensor_of_a_runtime_is_read_whole_again_after_its_gather() -> None:
    assert check(split(deepspeed(), deepspeed())) == ()
