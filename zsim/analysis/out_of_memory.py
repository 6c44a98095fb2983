"""Describe an out-of-memory failure: its moment and the largest consumers of memory."""

from zsim.analysis.memory_category import by_category
from zsim.analysis.memory_footprint import MemoryShortage
from zsim.schedule.describe_operation import moment
from zsim.units import format_bytes


def shortage_object(shortage: MemoryShortage) -> dict[str, object]:
    """Return the failure as an object for `--json`; sizes are in bytes."""
    kind, size = shortage.alive_bytes[0]
    return {
        "operation": shortage.operation,
        "moment": moment(shortage.operation),
        "needed_bytes": shortage.needed_bytes,
        "capacity_bytes": shortage.capacity_bytes,
        "largest_consumer": {
            "kind": kind,
            "bytes": size,
            "largest_buffer": shortage.largest_buffer,
            "largest_buffer_bytes": shortage.largest_buffer_bytes,
        },
        "alive_bytes": dict(shortage.alive_bytes),
    }


def alive_text(shortage: MemoryShortage) -> str:
    """Return the live memory by category, largest first, then the largest buffer."""
    sizes = ", ".join(
        f"{name} {format_bytes(size)}" for name, size in by_category(shortage.alive_bytes)
    )
    largest = f"{shortage.largest_buffer} {format_bytes(shortage.largest_buffer_bytes)}"
    return f"{sizes}; largest buffer: {largest}"
