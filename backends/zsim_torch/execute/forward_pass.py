"""Extract the part of a step that computes the loss of one micro-batch, on one rank."""

from dataclasses import dataclass, field

from zsim.schedule.access import accesses
from zsim.schedule.operation import (
    Action,
    Communication,
    Compute,
    Free,
    Operation,
    Receive,
    Role,
    Send,
    StreamOperation,
    Together,
    walk,
)
from zsim.schedule.schedule import Program
from zsim_torch.module.visit import views_of


@dataclass(slots=True)
class ForwardPass:
    """Load and forwards of the first micro-batch in order, with the communication between them.

    The communication is between tensor parallel ranks and between pipeline stages. Buffers are
    followed through the step; backwards, other micro-batches and recomputations are skipped.
    """

    operations: list[Compute | Communication] = field(default_factory=list[Compute | Communication])
    _makers: dict[str, int] = field(default_factory=dict[str, int])
    _reads: list[tuple[int, ...]] = field(default_factory=list[tuple[int, ...]])

    @classmethod
    def of(cls, program: Program) -> "ForwardPass":
        """Return the forward pass of `program`."""
        made = cls()
        for operation in walk(program.step):
            for each in operation.members if isinstance(operation, Together) else (operation,):
                made._follow(each)
        made._keep_needed()
        return made

    @property
    def is_shared(self) -> bool:
        """Return True if ranks exchange values."""
        return any(isinstance(each, Communication) for each in self.operations)

    def _follow(self, operation: Operation) -> None:
        reads, writes = _views_of_pass(operation)
        if reads is not None and isinstance(operation, Compute | Communication):
            known = [self._makers[name] for name in reads if name in self._makers]
            # Keep a forward even if nothing writes its inputs: running it reports the error.
            if isinstance(operation, Compute) or len(known) == len(reads):
                self._makers.update(dict.fromkeys(writes, len(self.operations)))
                self.operations.append(operation)
                self._reads.append(tuple(known))
                return
        if isinstance(operation, Free):
            self._makers.pop(operation.buffer, None)
        elif isinstance(operation, StreamOperation):
            for access in accesses(operation):
                if access.writes:
                    self._makers.pop(access.view.buffer, None)

    def _keep_needed(self) -> None:
        """Drop communication whose result no forward and no other stage reads."""
        needed = {
            number
            for number, operation in enumerate(self.operations)
            if isinstance(operation, Compute | Send)
        }
        for number in range(len(self.operations) - 1, -1, -1):
            if number in needed:
                needed.update(self._reads[number])
        self.operations = [self.operations[number] for number in sorted(needed)]


def _views_of_pass(operation: Operation) -> tuple[list[str] | None, list[str]]:
    """Return the buffers that `operation` reads and writes; (None, ...) if not in the pass."""
    match operation:
        case Compute(action=Action.LOAD | Action.FORWARD, micro_batch=0):
            inputs = [view.buffer for view in views_of(operation, Role.INPUT)]
            return inputs, [view.buffer for view in views_of(operation, Role.OUTPUT)]
        case Receive(target=target):
            return [], [target.buffer]
        case Communication(reads=source, writes=target) if source is not None:
            return [source.buffer], [] if target is None else [target.buffer]
        case _:
            return None, []
