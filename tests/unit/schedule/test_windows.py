"""Which windows on layouts, copies by parameter and joined axes a schedule may name."""

import pytest

from zsim.schedule.builder import BufferHandle, ScheduleBuilder
from zsim.schedule.layout import Layout, Piece
from zsim.schedule.mesh import Axis, Joined, Mesh
from zsim.schedule.operation import Action, OperationError, Role, View
from zsim.schedule.schedule import Contract, Kind, ScheduleError
from zsim.strategy.optimizer_rule import SGD

PIECE = Piece(parameter="w", start=0, size=8)


def start() -> tuple[ScheduleBuilder, BufferHandle, BufferHandle]:
    """Four ranks; 8 elements whole, and the rank's shard of them."""
    mesh = Mesh(
        axes=(Axis(name="far", size=2), Axis(name="near", size=2)),
        joined=(Joined(name="data", axes=("far", "near")),),
    )
    build = ScheduleBuilder("windows", mesh)
    build.layout(Layout(name="flat", pieces=(PIECE,), elements=8, axis="data"))
    build.layout(Layout(name="blocks", pieces=(PIECE,), elements=8, axis="data", blocks=(0, 4)))
    whole = build.buffer("whole", 8, layout="flat")
    shard = build.buffer("shard", 2, layout="flat", shard="data")
    build.step.allocate(whole, shard)
    return build, whole, shard


def test_a_window_in_a_buffer_that_holds_it_starts_at_its_origin() -> None:
    build, whole, shard = start()
    here = whole.window("flat", 5, 2, origin=1)
    build.step.copy("slices", here, shard.window("flat", 5, 2))
    schedule = build.schedule()
    coordinates = [schedule.mesh.coordinates(rank) for rank in range(4)]
    assert [schedule.extent(here, each) for each in coordinates] == [(0, 0), (1, 2), (3, 2), (5, 1)]


def test_a_window_that_leaves_its_buffer_is_refused() -> None:
    build, whole, _ = start()
    build.step.fill("fill", whole.window("flat", 8, origin=1), 0.0)
    with pytest.raises(ScheduleError, match="step/fill: the window leaves whole"):
        build.schedule()


def test_a_window_that_leaves_its_layout_is_refused() -> None:
    build, whole, _ = start()
    build.step.fill("fill", whole.window("flat", 5, 4, origin=0), 0.0)
    with pytest.raises(ScheduleError, match="the window leaves layout flat"):
        build.schedule()


def test_a_window_without_an_origin_lies_in_a_shard() -> None:
    build, whole, _ = start()
    build.step.fill("fill", whole.window("flat", 2), 0.0)
    with pytest.raises(ScheduleError, match="whole is no shard of layout flat"):
        build.schedule()


def test_a_window_with_an_origin_on_blocks_is_refused() -> None:
    build, whole, _ = start()
    build.step.fill("fill", whole.window("blocks", 2, origin=0), 0.0)
    with pytest.raises(ScheduleError, match="fill: origin 0 on layout blocks, in blocks"):
        build.schedule()


def test_a_window_in_a_shard_in_blocks_is_the_rank_s_part_of_it() -> None:
    build, _, _ = start()
    cut = build.buffer("cut", 2, layout="blocks", shard="data")
    window = cut.window("blocks", 4, 1)
    build.step.allocate(cut)
    build.step.fill("fill", window, 0.0)
    schedule = build.schedule()
    coordinates = [schedule.mesh.coordinates(rank) for rank in range(4)]
    # Rank i has elements i and 4 + i of the whole; the window is [1, 5).
    assert [schedule.extent(window, each) for each in coordinates] == [
        (1, 1),
        (0, 1),
        (0, 1),
        (0, 1),
    ]


def test_operands_of_an_update_are_one_window() -> None:
    build, _, shard = start()
    operands = [
        (Role.GRADIENT, shard.window("flat", 4)),
        (Role.PARAMETER, shard.window("flat", 4, 4)),
    ]
    build.step.compute("update", Action.UPDATE, operands, rule=SGD())
    with pytest.raises(ScheduleError, match="update: operands are not one window on one layout"):
        build.schedule()


def test_a_part_of_a_shard_that_some_rank_does_not_have_is_refused() -> None:
    build, _, _ = start()
    build.layout(
        Layout(name="uneven", pieces=(PIECE,), elements=8, axis="data", cuts=(0, 4, 4, 7, 8))
    )
    cut = build.buffer("cut", 4, layout="uneven", shard="data")
    build.step.allocate(cut)
    build.step.fill("all", cut.all, 0.0)
    build.step.fill("window", cut.window("uneven", 2), 0.0)
    build.schedule()
    build.step.fill("part", cut[:2], 0.0)
    why = (
        "step/part: view of cut ends at 2, but some rank has 0 elements of layout uneven; a window"
    )
    with pytest.raises(ScheduleError, match=why):
        build.schedule()


@pytest.mark.parametrize(("layout", "origin"), [(None, 0), ("flat", -1)])
def test_an_origin_needs_a_layout_and_is_not_negative(layout: str | None, origin: int) -> None:
    with pytest.raises(OperationError, match=f"origin {origin} needs a layout, and to be >= 0"):
        View(buffer="x", size=1, layout=layout, origin=origin)


def test_a_window_is_copied_to_the_same_window() -> None:
    build, whole, shard = start()
    build.step.copy("slices", whole.window("flat", 4, 2, origin=0), shard.window("flat", 4, 4))
    with pytest.raises(ScheduleError, match="step/slices: copies a window to another one"):
        build.schedule()


def test_a_copy_by_parameter_may_change_the_size() -> None:
    build, whole, shard = start()
    build.step.copy("cut", whole.all, shard.all, by_parameter=True)
    assert "step/cut" in build.schedule().programs[0].by_id


@pytest.mark.parametrize("part", [slice(0, 4), slice(0, 8)])
def test_a_copy_by_parameter_needs_whole_buffers_with_layouts(part: slice) -> None:
    build, whole, shard = start()
    plain = build.buffer("plain", 8)
    build.step.allocate(plain)
    source = plain if part == slice(0, 8) else whole
    build.step.copy("cut", source[part], shard.all, by_parameter=True)
    with pytest.raises(ScheduleError, match="by parameter needs the whole of a buffer with a lay"):
        build.schedule()


@pytest.mark.parametrize(("size", "allowed"), [(7, False), (8, True), (11, False)])
def test_a_copy_out_of_a_bucket_leaves_its_room_out(size: int, *, allowed: bool) -> None:
    build, _, shard = start()
    bucket = build.buffer("bucket", 11, layout="flat", kind=Kind.COMMUNICATION)
    build.step.allocate(bucket)
    build.step.copy("cut", bucket[0:size], shard.all, by_parameter=True)
    if allowed:
        assert "step/cut" in build.schedule().programs[0].by_id
        return
    with pytest.raises(ScheduleError, match="by parameter needs the whole of a buffer with a lay"):
        build.schedule()


def test_a_group_names_the_parts_of_a_joined_axis() -> None:
    build, _, _ = start()
    build.group("data", "data")
    with pytest.raises(ScheduleError, match="group data: axis data is joined"):
        build.schedule()


def test_data_axes_are_single_axes_of_the_mesh() -> None:
    build, _, _ = start()
    build.schedule(Contract(data_axes=("far", "near")))
    with pytest.raises(ScheduleError, match="data_axes: no single axis 'pipe'"):
        build.schedule(Contract(data_axes=("far", "pipe")))
