"""Copies of reduced gradients that several runtimes write."""

from zsim.schedule.operation import Edge
from zsim.schedule.schedule_writer import ScheduleWriter


def set_or_add(writer: ScheduleWriter, source: str, target: str, *, stream: str) -> str:
    """Copy to `target`, allocating it, or add if an earlier micro-batch allocated it."""
    first = target not in writer.alive
    if first:
        writer.allocate(target)
    verb = "set" if first else "add"
    return writer.copy(f"{verb}/{target}", source, target, accumulate=not first, stream=stream)


def divide(
    writer: ScheduleWriter, name: str, divisor: int, *, stream: str, after: tuple[Edge, ...] = ()
) -> str:
    """Divide a buffer in place."""
    path = f"divide/{name}"
    return writer.copy(path, name, name, divisor=divisor, stream=stream, after=after)
