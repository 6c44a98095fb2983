"""Python stacks that are cheap to keep: code objects and offsets, converted to lines on demand."""

import sys
from collections.abc import Iterable
from itertools import pairwise
from types import CodeType, FrameType
from typing import NamedTuple


class StackFrame(NamedTuple):
    """A line of Python on a stack."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.function}"


class CallStack:
    """The lines on a Python stack, the innermost first."""

    __slots__ = ("_offsets",)

    def __init__(self, offsets: tuple[tuple[CodeType, int], ...]) -> None:
        self._offsets = offsets

    @property
    def frames(self) -> tuple[StackFrame, ...]:
        """Return the frames, the innermost first."""
        return tuple(
            StackFrame(code.co_filename, _line(code, offset), code.co_qualname)
            for code, offset in self._offsets
        )


class CallStacks:
    """Captures stacks of this process; equal stacks are one object.

    Frames of files whose path starts with one of `hidden`, and frames beyond `depth`, are omitted.
    """

    def __init__(self, hidden: Iterable[str] = (), depth: int = 64) -> None:
        self._hidden = tuple(hidden)
        self._depth = depth
        self._known: dict[tuple[int, ...], CallStack] = {}
        self._is_hidden: dict[CodeType, bool] = {}

    def take(self, frame: FrameType | None = None) -> CallStack:
        """Return the stack from `frame` outwards; by default from the caller."""
        # No name may hold the frame of this call: a frame that refers to itself would keep the
        # caller's tensors alive until a garbage collection, and hide that they were dropped.
        current: FrameType | None = frame or sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
        found: list[tuple[CodeType, int]] = []
        key: list[int] = []
        hides = self._hides
        while current is not None and len(found) < self._depth:
            code = current.f_code
            if not hides(code):
                found.append((code, current.f_lasti))
                key += (id(code), current.f_lasti)  # the stored stack keeps the code alive
            current = current.f_back
        known = self._known.get(tuple(key))
        if known is None:
            known = self._known[tuple(key)] = CallStack(tuple(found))
        return known

    def _hides(self, code: CodeType) -> bool:
        hidden = self._is_hidden.get(code)
        if hidden is None:
            hidden = self._is_hidden[code] = code.co_filename.startswith(self._hidden)
        return hidden


def _line(code: CodeType, offset: int) -> int:
    starts = [(start, line) for start, _, line in code.co_lines() if line is not None]
    for (_, line), (following, _) in pairwise([*starts, (sys.maxsize, 0)]):
        if offset < following:
            return line
    return code.co_firstlineno
