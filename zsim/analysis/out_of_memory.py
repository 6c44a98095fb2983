"""Describe an out-of-memory failure: its moment and the largest consumers of memory."""

from zsim.analysis.memory_category import by_category
from zsim.analysis.memory_footprint import Lack
from zsim.schedule.describe_operation import moment
from zsim.units import format_bytes


def lack_object(lack: Lack) -> dict[str, object]:
    """Return the failure as an object for `--json`; sizes are in bytes."""
    kind, size = lack.alive_bytes[0]
    return {
        "operation": lack.operation,
        "moment": moment(lack.operation),
        "needed_bytes": lack.needed_bytes,
        "capacity_bytes": lack.capacity_bytes,
        "largest_consumer": {
            "kind": kind,
            "bytes": size,
            "largest_buffer": lack.largest_buffer,
            "largest_buffer_bytes": lack.largest_buffer_bytes,
        },
        "alive_bytes": dict(lack.alive_bytes),
    }


def alive_text(lack: Lack) -> str:
    """Return the live memory by category, largest first, then the largest buffer."""
    sizes = ", ".join(
        f"{name} {format_bytes(size)}" for name, size in by_category(lack.alive_bytes)
    )
    largest = f"{lack.largest_buffer} {format_bytes(lack.largest_buffer_bytes)}"
    return f"{sizes}; largest buffer: {largest}"
