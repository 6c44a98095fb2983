"""One rank of a trace with its program, and the lists of branches it took."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from zsim.proof.finding import Finding
from zsim.schedule.issue_order import SETUP
from zsim.schedule.operation import Branch, Operation, StreamOperation, walk
from zsim.schedule.schedule import Program
from zsim.trace.trace import Event, RankTrace

INVARIANT = "refinement"

Instance = tuple[int, str]
"""An operation of a step: the step, and its id."""


def refuted(operation: str, why: str, *witness: str, role: str = "") -> Finding:
    """Return a finding about a trace."""
    return Finding(invariant=INVARIANT, role=role, operation=operation, why=why, witness=witness)


def in_words(instance: Instance) -> str:
    """Return text for an operation with its step; an empty id is the end of the step."""
    step, operation = instance
    operation = operation or "the end"
    return operation if step == SETUP else f"{operation} of step {step}"


@dataclass(frozen=True, slots=True)
class BranchOutcome:
    """The list of a branch that ran in a step; `torn` if operations of both lists ran."""

    step: int
    branch: str
    then: bool
    torn: bool


class TracedRank:
    """One rank of a trace with its program for `steps` steps.

    A branch counts as having run the list with more events. Without any events, it is the list
    without operations on streams, or else `otherwise`.
    """

    def __init__(self, program: Program, trace: RankTrace, steps: int) -> None:
        self.program = program
        self.trace = trace
        self.steps = steps
        self.outcomes: list[BranchOutcome] = []
        self.issued = list(self._issued())

    @property
    def name(self) -> str:
        """Role and rank, as findings name them."""
        return f"{self.trace.role} rank {self.trace.rank}"

    @cached_property
    def events(self) -> dict[Instance, Event]:
        """The first event of each operation, by step and operation."""
        found: dict[Instance, Event] = {}
        for event in self.trace.events:
            found.setdefault((event.step, event.operation), event)
        return found

    @property
    def entries(self) -> Iterator[tuple[int, StreamOperation]]:
        """The operations on streams with their steps, in the order of issue."""
        for step, operation in self.issued:
            if isinstance(operation, StreamOperation):
                yield step, operation

    def _issued(self) -> Iterator[tuple[int, Operation]]:
        yield from self._taken(self.program.setup, SETUP)
        for step in range(self.steps):
            yield from self._taken(self.program.step, step)

    def _taken(
        self, operations: tuple[Operation, ...], step: int
    ) -> Iterator[tuple[int, Operation]]:
        for operation in operations:
            yield step, operation
            if isinstance(operation, Branch):
                then = self._outcome(operation, step)
                yield from self._taken(operation.then if then else operation.otherwise, step)

    def _outcome(self, branch: Branch, step: int) -> bool:
        ran, can_run = [0, 0], [0, 0]
        for side, operations in enumerate((branch.otherwise, branch.then)):
            for operation in walk(operations):
                if isinstance(operation, StreamOperation):
                    can_run[side] += 1
                    ran[side] += (step, operation.id) in self.events
        then = ran[1] > ran[0] or (ran == [0, 0] and not can_run[1] and bool(can_run[0]))
        self.outcomes.append(BranchOutcome(step, branch.id, then, torn=bool(ran[0] and ran[1])))
        return then
