"""Prepare lists of operations for issuing: the id of each and its progress line."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from zsim.schedule.operation import Allocate, Free, Operation, SetScalar


@dataclass(slots=True, eq=False)
class IssueLine:
    """An operation, its id, and the start of its line in the progress record.

    Operations that neither compute nor wait on the host have an empty line. `issue` is bound when
    the operation is first issued.
    """

    name: str
    line: bytes
    operation: Operation
    issue: Callable[[], None] | None = None


@dataclass(slots=True)
class IssueLines:
    """Lines of each list of operations in a schedule, created once."""

    _made: dict[int, tuple[Iterable[Operation], list[IssueLine]]] = field(
        default_factory=dict[int, tuple[Iterable[Operation], list[IssueLine]]]
    )

    def of(self, operations: Iterable[Operation]) -> list[IssueLine]:
        """Return the lines of `operations`, in order."""
        known = self._made.get(id(operations))
        if known is not None and known[0] is operations:
            return known[1]
        made = [
            IssueLine(each.id, each.id.encode() if _may_last(each) else b"", each)
            for each in operations
        ]
        if isinstance(operations, tuple):
            self._made[id(operations)] = operations, made
        return made


def _may_last(operation: Operation) -> bool:
    """Return True if the host may spend time on an operation: it computes or waits."""
    return not isinstance(operation, Allocate | SetScalar) and (
        not isinstance(operation, Free) or bool(operation.uses)
    )
