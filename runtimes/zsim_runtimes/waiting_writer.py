"""Writer of a stage whose compute stream waits for messages."""

from msgspec.structs import replace

from zsim.model.pipeline_stages import Stage
from zsim.schedule.mesh import Span
from zsim.schedule.operation import Edge, Operation, StreamOperation
from zsim.schedule.operation_list import COMPUTE
from zsim.schedule.schedule_writer import ScheduleWriter
from zsim.zero.names import PIPELINE


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
                operation = replace(operation, after=after)
                self._awaited = []
        return super().add(operation)
