"""Bounds of views: on every rank, a view must lie in its buffer, and a window in its layout."""

from collections.abc import Generator
from contextlib import contextmanager

from zsim.schedule.layout import Layout
from zsim.schedule.operation import View
from zsim.schedule.program import Buffer, ScheduleError, UncheckedSchedule


@contextmanager
def at(where: str) -> Generator[None]:
    """Convert faults of the mesh or a layout to ScheduleError, with `where` in the message."""
    try:
        yield
    except ScheduleError:
        raise
    except ValueError as error:
        raise ScheduleError(f"{where}: {error}") from error


def inspect_view(schedule: UncheckedSchedule, buffer: Buffer, where: str, view: View) -> None:
    """Raise ScheduleError unless `view` of `buffer` exists on every rank.

    Raises:
        ScheduleError: it does not; the message starts with `where`.
    """
    if view.layout is not None:
        _inspect_window(schedule, buffer, where, view)
        return
    count = 1
    if view.axis is not None:
        with at(where):
            count = schedule.mesh.axis_size(view.axis)
    end = view.start + count * view.size
    if end > buffer.elements:
        raise ScheduleError(
            f"{where}: view of {view.buffer} ends at {end}, past {buffer.elements} elements"
        )
    if buffer.shard is not None and view.size != buffer.elements:
        _need_on_every_rank(schedule, buffer, where, end)


def _inspect_window(schedule: UncheckedSchedule, buffer: Buffer, where: str, view: View) -> None:
    layout = schedule.layout_by_name.get(view.layout or "")
    if layout is None or layout.axis is None:
        raise ScheduleError(f"{where}: no layout {view.layout!r} that is cut along an axis")
    if view.start + view.size > layout.elements:
        raise ScheduleError(f"{where}: the window leaves layout {view.layout}")
    if view.origin is None:
        if buffer.layout != view.layout or buffer.shard is None:
            raise ScheduleError(f"{where}: {view.buffer} is no shard of layout {view.layout}")
    elif layout.blocks is not None:
        raise ScheduleError(f"{where}: origin {view.origin} on layout {layout.name}, in blocks")
    elif view.origin + view.size > buffer.elements:
        raise ScheduleError(f"{where}: the window leaves {view.buffer}")


def _need_on_every_rank(schedule: UncheckedSchedule, buffer: Buffer, where: str, end: int) -> None:
    """Raise ScheduleError if some rank does not have this part of a shard."""
    layout = schedule.layout_by_name[buffer.layout or ""]
    count = schedule.mesh.axis_size(buffer.shard or "")
    least = min(layout.segment(rank, count)[1] for rank in ranks_of_all_sizes(layout, count))
    if end > least:
        why = f"some rank has {least} elements of layout {layout.name}; a window on it says which"
        raise ScheduleError(f"{where}: view of {buffer.name} ends at {end}, but {why}")


def ranks_of_all_sizes(layout: Layout, count: int) -> range:
    """Return ranks that include every size of a segment."""
    return range(count) if layout.cuts else range(1)


def window_of(view: View) -> tuple[str, int] | None:
    """Return layout and start of a window; None if the view is not a window."""
    return None if view.layout is None else (view.layout, view.start)
