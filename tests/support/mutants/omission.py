"""Something is left out, or done to other effect: a bucket, an accumulation, fresh parameters."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial

from mutation import changed, edited, without

from mutants.mutant import Mutant, Operator, around, in_step, named, on_streams
from zsim.schedule.access import accesses
from zsim.schedule.operation import (
    Action,
    AllGather,
    AllReduce,
    Compute,
    Copy,
    Operation,
    Previous,
    ReduceScatter,
    Role,
    StreamOperation,
)
from zsim.schedule.schedule import Schedule


def buckets(schedule: Schedule) -> Iterator[Mutant]:
    """A gather, a reduction, a contribution or an update does not happen."""
    for operation in on_streams(schedule):
        skipped = isinstance(operation, AllGather | ReduceScatter | AllReduce | Copy)
        skipped = skipped or (
            isinstance(operation, Compute)
            and operation.action in (Action.UPDATE, Action.CLIP, Action.NORM, Action.FINITE)
        )
        if skipped:
            yield Mutant(around(operation), partial(without, schedule, operation.id))
        if isinstance(operation, Compute) and operation.action in (Action.NORM, Action.FINITE):
            for place, operand in enumerate(operation.operands):
                if operand.role is Role.GRADIENT:
                    left = (*operation.operands[:place], *operation.operands[place + 1 :])
                    make = partial(changed, schedule, operation.id, operands=left)
                    yield Mutant((operation.id, operand.view.buffer), make)


def overwrites(schedule: Schedule) -> Iterator[Mutant]:
    """What should be added overwrites; what should begin a sum is added to what was there."""
    for operation in on_streams(schedule):
        if isinstance(operation, Copy):
            make = partial(changed, schedule, operation.id, accumulate=not operation.accumulate)
            yield Mutant((operation.id, operation.target.buffer), make)


def stale(schedule: Schedule) -> Iterator[Mutant]:
    """What makes parameters fresh is left out, comes too early, or is not waited for."""
    operations = list(in_step(schedule))
    writers: set[str] = set()
    for operation in operations:
        if isinstance(operation, Compute) and operation.action is Action.UPDATE:
            writers |= {each.view.buffer for each in accesses(operation) if each.writes}
        elif isinstance(operation, Copy | AllGather) and operation.source.buffer in writers:
            writers.add(operation.target.buffer)
            yield Mutant(around(operation), partial(without, schedule, operation.id))
            source = next(
                each
                for each in operations
                if any(
                    a.writes and a.view.buffer == operation.source.buffer for a in accesses(each)
                )
                and isinstance(each, Compute | Copy)
            )
            make = partial(_before, schedule, operation, source, operations)
            yield Mutant((*around(operation), source.id), make)
    for operation in operations:
        if isinstance(operation, StreamOperation):
            kept = tuple(edge for edge in operation.after if not isinstance(edge, Previous))
            if kept != operation.after:
                lost = tuple(named(each) for each in operation.after if each not in kept)
                make = partial(changed, schedule, operation.id, after=kept)
                yield Mutant((operation.id, *lost), make)


def _before(
    schedule: Schedule,
    late: StreamOperation,
    early: Operation,
    operations: list[Operation],
) -> Schedule:
    """`late` is issued just before `early`, without edges to what is issued later."""
    first = {each.id for each in operations[: operations.index(early)]}
    after = tuple(edge for edge in late.after if isinstance(edge, Previous) or edge in first)
    moved = replace(late, after=after)

    def edit(each: Operation) -> Iterable[Operation]:
        if each.id == late.id:
            return ()
        return (moved, each) if each.id == early.id else (each,)

    return edited(schedule, edit)


SKIP_BUCKET = Operator(
    "skip a bucket",
    frozenset(
        {"placement", "volume", "value", "completeness", "definedness"}
        | {"skip path", "uniformity"}
    ),
    buckets,
)
OVERWRITE = Operator(
    "overwrite instead of accumulate",
    frozenset({"value", "definedness", "completeness", "placement"}),
    overwrites,
)
STALE = Operator(
    "stale parameter",
    frozenset({"value", "placement", "volume", "races", "definedness", "completeness", "progress"}),
    stale,
)
