"""Work that no clock and no load changes: lines of Python that a call executes."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import TraceFunction


def lines_run(call: Callable[[], object]) -> int:
    """Return how many lines of Python `call` executes."""
    count = 0

    def trace(_frame: FrameType, event: str, _argument: object) -> "TraceFunction":
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count
