"""Data flow between iterations: how far it reaches without a segment of the model on the path.

A segment with the inputs of plain training has the outputs of plain training. So data has to be
followed only from one segment to the next: through copies, collectives and updates. It must not
flow from iteration to iteration without end.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np

from zsim.proof.execution.repetition import IrregularError, NumberedNames, single
from zsim.schedule.access import accesses
from zsim.schedule.operation import OF_SEGMENTS, Allocate, Compute, Copy, Free, Operation, View
from zsim.schedule.schedule import Buffer

DataFlow = tuple[str, str, int]
"""A data flow: source family, target family, and the increase of the number."""


class Iteration:
    """The operations of iteration `number` of the run `name`."""

    def __init__(
        self, name: str, number: int, operations: Sequence[Operation], names: NumberedNames
    ) -> None:
        self.name = name
        self.number = number
        self.operations = list(single(operations))
        self.names = names

    def flows(self, by_name: dict[str, Buffer]) -> Iterator[DataFlow]:
        """Yield the data flows through its operations.

        Raises:
            IrregularError: data is passed from iteration to iteration without end.
        """
        same = self._same_in_all(by_name)
        for operation in self.operations:
            if isinstance(operation, Compute) and operation.action in OF_SEGMENTS:
                continue
            touched = [each for each in accesses(operation) if each.view.buffer not in same]
            sources = {self._place(each.view.buffer) for each in touched if each.reads}
            targets = {self._place(each.view.buffer) for each in touched if each.writes}
            for source, here in sources:
                for target, there in targets:
                    yield source, target, there - here

    def _place(self, name: str) -> tuple[str, int]:
        """Return family and number of a buffer; one without a number belongs to this iteration."""
        family, number = self.names[name]
        return (f"{self.name} {name}", self.number) if number is None else (family, number)

    def _same_in_all(self, by_name: dict[str, Buffer]) -> set[str]:
        """Return buffers without a number that all iterations only read, or only add to.

        Raises:
            IrregularError: a buffer is neither of these, nor rewritten in each iteration.
        """
        touches: dict[str, list[tuple[Operation, bool, bool]]] = defaultdict(list)
        for operation in self.operations:
            if isinstance(operation, Allocate | Free):
                made = isinstance(operation, Allocate)
                touches[operation.buffer].append((operation, made, True))
                continue
            for view, reads, writes in accesses(operation):
                whole = _is_whole(view, by_name[view.buffer])
                touches[view.buffer].append((operation, writes and whole and not reads, writes))
        found: set[str] = set()
        for name, all_of_it in touches.items():
            _, makes, _ = all_of_it[0]
            if self.names[name][1] is not None or makes:
                continue
            if any(writes for _, _, writes in all_of_it) and not all(
                _adds(operation, name) for operation, _, _ in all_of_it
            ):
                raise IrregularError
            found.add(name)
        return found


def _is_whole(view: View, buffer: Buffer) -> bool:
    return (view.start, view.size, view.axis, view.layout) == (0, buffer.elements, None, None)


def _adds(operation: Operation, name: str) -> bool:
    """Return True if an operation only adds another buffer to buffer `name`."""
    return (
        isinstance(operation, Copy)
        and operation.accumulate
        and not operation.by_parameter
        and operation.source.buffer != name
    )


def longest_path(flows: Sequence[DataFlow]) -> int:
    """Return an upper bound of the total distance along connected data flows.

    Raises:
        IrregularError: a cycle leads to another number.
    """
    places: dict[str, int] = {}
    for source, target, _ in flows:
        places.setdefault(source, len(places))
        places.setdefault(target, len(places))
    if not places:
        return 0
    leads = np.eye(len(places), dtype=bool)
    for source, target, _ in flows:
        leads[places[source], places[target]] = True
    while True:
        further = (leads.astype(np.float32) @ leads.astype(np.float32)) > 0
        if (further == leads).all():
            break
        leads = further
    circle = (leads & leads.T).argmax(axis=1).tolist()
    steps = [(places[one], places[other], length) for one, other, length in flows]
    spread = _spread(circle, [step for step in steps if circle[step[0]] == circle[step[1]]])
    between = {
        (circle[one], circle[other], abs(length))
        for one, other, length in steps
        if circle[one] != circle[other]
    }
    found = dict(spread)
    changed = True
    while changed:
        changed = False
        for one, other, length in between:
            far = found[one] + length + spread[other]
            if far > found[other]:
                found[other], changed = far, True
    return max(found.values())


def _spread(circle: Sequence[int], steps: Sequence[tuple[int, int, int]]) -> dict[int, int]:
    """Return, for each circle, the distance between its outermost places.

    Raises:
        IrregularError: a cycle leads to another number.
    """
    nearby: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for one, other, length in steps:
        nearby[one].append((other, length))
        nearby[other].append((one, -length))
    at: dict[int, int] = {}
    spread: dict[int, int] = {}
    for begin, own in enumerate(circle):
        if begin in at:
            continue
        at[begin], queue = 0, [begin]
        for one in queue:
            for other, length in nearby[one]:
                if other not in at:
                    at[other] = at[one] + length
                    queue.append(other)
                elif at[other] != at[one] + length:
                    raise IrregularError
        ends = [at[each] for each in queue]
        spread[own] = max(spread.get(own, 0), max(ends) - min(ends))
    return spread
