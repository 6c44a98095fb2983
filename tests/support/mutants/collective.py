"""A collective gets another group, another size, another reduction."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from mutation import changed

from mutants.mutant import Mutant, Operator, around, on_streams
from zsim.schedule.operation import (
    AllGather,
    AllReduce,
    Broadcast,
    Copy,
    Fill,
    Receive,
    ReduceScatter,
    Reduction,
    Send,
    View,
)
from zsim.schedule.schedule import Schedule


def groups(schedule: Schedule) -> Iterator[Mutant]:
    for operation in on_streams(schedule):
        if isinstance(
            operation, AllGather | ReduceScatter | AllReduce | Broadcast | Send | Receive
        ):
            for group in schedule.groups:
                if group.name != operation.group:
                    make = partial(changed, schedule, operation.id, group=group.name)
                    yield Mutant((operation.id,), make)


def _smaller(view: View, by: int) -> View:
    return replace(view, size=view.size - by)


def sizes(schedule: Schedule) -> Iterator[Mutant]:
    """A little less is read and written; in the buffers the rest stays as it was."""
    for operation in on_streams(schedule):
        views: dict[str, Any] = {}
        match operation:
            case AllGather(source=source, target=target) if source.size:
                count = target.size // source.size
                views = {"source": _smaller(source, 1), "target": _smaller(target, count)}
            case ReduceScatter(source=source, target=target) if target.size:
                count = source.size // target.size
                views = {"source": _smaller(source, count), "target": _smaller(target, 1)}
            case AllReduce(source=source, target=target) if source.size:
                views = {"source": _smaller(source, 1), "target": _smaller(target, 1)}
            case Copy(source=source, target=target) if source.size and target.size:
                views = {"source": _smaller(source, 1), "target": _smaller(target, 1)}
            case Fill(target=target) if target.size:
                views = {"target": _smaller(target, 1)}
            case _:
                continue
        yield Mutant(around(operation), partial(changed, schedule, operation.id, **views))


def reductions(schedule: Schedule) -> Iterator[Mutant]:
    for operation in on_streams(schedule):
        if isinstance(operation, ReduceScatter | AllReduce):
            for reduction in Reduction:
                if reduction is not operation.reduction:
                    make = partial(changed, schedule, operation.id, reduction=reduction)
                    yield Mutant((operation.id,), make)


CHANGE_GROUP = Operator(
    "change a group",
    frozenset({"matching", "placement", "volume", "value", "progress", "uniformity", "order"}),
    groups,
)
CHANGE_SIZE = Operator(
    "change a size",
    frozenset({"matching", "placement", "volume", "value", "definedness", "partition"}),
    sizes,
)
CHANGE_REDUCTION = Operator(
    "change a reduction",
    frozenset({"placement", "value", "skip path"}),
    reductions,
)
