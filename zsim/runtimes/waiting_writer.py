"""Writer of a stage whose compute stream waits for messages."""

from collections.abc import Callable, Hashable
from functools import cache
from typing import Any, cast

from zsim.model.pipeline_stages import Stage
from zsim.schedule.mesh import Span
from zsim.schedule.operation import Copy, Edge, Operation, StreamOperation
from zsim.schedule.operation_list import COMPUTE
from zsim.schedule.quick_init import quick_replacer
from zsim.schedule.schedule_writer import ScheduleWriter
from zsim.zero.names import PIPELINE


@cache
def _with_after(kind: Hashable) -> Callable[..., StreamOperation]:
    """Return a function that copies an operation of a kind with other edges."""
    return quick_replacer(cast("type[Copy]", kind), "after")  # or any other kind


class WaitingWriter(ScheduleWriter):
    """A writer whose compute stream can wait: its next operation gets the edges.

    Attributes:
        computed: the last operation of the compute stream; in the step, of the step.
    """

    def __init__(self, stage: Stage) -> None:
        box = (Span(axis=PIPELINE, start=stage.index, end=stage.index + 1),)
        super().__init__(stage.name, box)
        self.computed = ""
        self._awaited: list[str] = []

    def wait(self, operation: str) -> None:
        """Make the compute stream wait for `operation` before its next operation."""
        self._awaited.append(operation)

    def begin_step(self) -> None:
        """End setup and start the step."""
        super().begin_step()
        self.computed = ""

    def add(self, operation: Operation) -> str:
        """Append an operation, with the edges that its stream waits for."""
        if isinstance(operation, StreamOperation) and operation.stream == COMPUTE:
            self.computed = operation.id
            if self._awaited:
                after: tuple[Edge, ...] = (*operation.after, *self._awaited)
                kind: Any = type(operation)
                operation = _with_after(kind)(operation, after)
                self._awaited = []
        return super().add(operation)
