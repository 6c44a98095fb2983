"""Convert collectives of torch to operations of a schedule, and count the bytes that they send."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from zsim.dtype import DType
from zsim.schedule.operation import (
    AllGather,
    AllReduce,
    Broadcast,
    CollectiveOperation,
    Communication,
    Edge,
    ReduceScatter,
    Reduction,
    Together,
    View,
)
from zsim.schedule.schedule import WireBytes
from zsim_record.lift.step_events import CollectiveCall, LiftError

GATHERS = frozenset(
    {
        "allgather_base",
        "allgather_into_tensor_coalesced",
        "all_gather_into_tensor",
        "all_gather_into_tensor_coalesced",
    }
)
SCATTERS = frozenset(
    {
        "reduce_scatter_base",
        "reduce_scatter_tensor",
        "reduce_scatter_tensor_coalesced",
    }
)
REDUCES = frozenset({"allreduce", "allreduce_coalesced", "all_reduce", "all_reduce_coalesced"})
BROADCASTS = frozenset({"broadcast"})
REDUCTIONS = {
    "sum": Reduction.SUM,
    "premul_sum": Reduction.SUM,
    "avg": Reduction.AVERAGE,
    "max": Reduction.MAX,
}
"""Reductions by torch's names; the factor of `premul_sum` is a value, which recordings lack."""
DTYPES = {
    "float64": DType.FP64,
    "float32": DType.FP32,
    "float16": DType.FP16,
    "bfloat16": DType.BF16,
    "float8_e4m3fn": DType.FP8,
    "float8_e5m2": DType.FP8,
    "int64": DType.INT64,
    "int8": DType.INT8,
    "uint8": DType.INT8,
    "bool": DType.INT8,
}


class CallPlace(NamedTuple):
    """The id, stream, dependencies and group of a collective in a schedule."""

    id: str
    stream: str
    after: tuple[Edge, ...]
    group: str


def collective(
    call: CollectiveCall, place: CallPlace, reads: Sequence[View], writes: Sequence[View]
) -> Communication | Together:
    """Return the operation of `call`; several tensors in one call are issued as one.

    Raises:
        LiftError: schedules have no such collective.
    """
    pairs = list(zip(reads, writes, strict=False))
    if len(reads) != len(writes) or not pairs:
        raise LiftError(f"{call.kind} at {place.id}: lists of tensors are not lifted")
    if len(pairs) == 1:
        return _one(call, place, *pairs[0])
    alone = [
        _one(call, CallPlace(f"{place.id}/{number}", place.stream, (), place.group), *pair)
        for number, pair in enumerate(pairs)
    ]
    return Together(id=place.id, stream=place.stream, after=place.after, members=tuple(alone))


def _one(call: CollectiveCall, place: CallPlace, source: View, target: View) -> CollectiveOperation:
    wire = DTYPES[call.dtype]
    common: dict[str, Any] = {**place._asdict(), "wire": wire, "source": source, "target": target}
    if call.kind in GATHERS:
        return AllGather(**common)
    if call.kind in BROADCASTS and call.root is not None:
        return Broadcast(**common, root=call.root)
    if call.kind not in SCATTERS | REDUCES:
        raise LiftError(f"{call.kind} at {place.id}: schedules have no such collective")
    if call.reduction not in REDUCTIONS:
        raise LiftError(f"{call.kind} at {place.id}: reduction {call.reduction} is not lifted")
    kind = ReduceScatter if call.kind in SCATTERS else AllReduce
    return kind(**common, reduction=REDUCTIONS[call.reduction], accumulate=wire)


def sent(call: CollectiveCall, group: str) -> list[WireBytes]:
    """Return the bytes that a rank sends, from the sizes in torch's call.

    Each tensor is cut into one chunk per rank. A ring sends all chunks but one, and twice as many
    if it reduces and gathers (Patarasuk and Yuan 2009, section 4).
    """
    count, width = len(call.ranks), DTYPES[call.dtype].size_bytes
    inputs, outputs = call.sizes[: call.reads], call.sizes[call.reads :]
    found: list[WireBytes] = []
    for given, gotten in zip(inputs, outputs, strict=False):
        whole = max(given, gotten)
        chunk = -(-whole // count)
        if call.kind in GATHERS:
            name, laps = "all_gather", 1
        elif call.kind in SCATTERS:
            name, laps = "reduce_scatter", 1
        elif call.kind in BROADCASTS:
            name, laps = "broadcast", 1
        else:
            name, laps = "all_reduce", 2
        size = laps * (count - 1) * chunk * width
        found.append(WireBytes(group=group, collective=name, bytes=size, scalar=whole == 1))
    return found
