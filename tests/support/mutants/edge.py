"""An edge is dropped: of `after`, of the uses of a free, of what a branch waits for."""

from collections.abc import Iterator
from functools import partial
from typing import Any

from mutation import changed

from mutants.mutant import Mutant, Operator, in_step, named
from zsim.schedule.operation import Branch, Edge, Free, StreamOperation
from zsim.schedule.schedule import Schedule


def sites(schedule: Schedule) -> Iterator[Mutant]:
    for operation in in_step(schedule):
        edges: tuple[Edge, ...] = ()
        field = "after"
        if isinstance(operation, Free):
            field, edges = "uses", operation.uses
        elif isinstance(operation, StreamOperation | Branch):
            edges = operation.after
        for place, edge in enumerate(edges):
            left: dict[str, Any] = {field: (*edges[:place], *edges[place + 1 :])}
            make = partial(changed, schedule, operation.id, **left)
            yield Mutant((operation.id, named(edge)), make)


DROP_EDGE = Operator(
    "drop an edge",
    frozenset({"races", "definedness", "lifetime", "completeness", "value", "progress"}),
    sites,
)
