"""In which formats numbers are added up and kept: no exact number shows it.

What is decided: for every element of every parameter, by rank, the poorest format that its gradient
goes through between backward and update: where it is kept before and after ranks are added up,
where ranks are, and where micro-batches are; the same for the number that a clip reads. An edited
schedule is wrong if one of them has fewer bits of mantissa or of exponent than in the schedule
that `zsim.zero` makes of the same strategy, which follows what it says of formats (`precision`,
`reduce_dtype`, `communication_data_type`, `grad_reduce_in_fp32`). Where that adds up nothing, an
edited one may add in the poorest format that numbers go through there anyway. Beside that, what is
updated and its moments must have the optimizer's format, and what forward and backward read of
parameters must have come through the compute format or a richer one, or where the model says that
they are gathered in 8-bit floats, through these. A richer format is never
wrong here, though it costs memory; nor does this judge activations.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import assert_never

import numpy as np
from numpy.typing import NDArray

from zsim.backend.backend import Job
from zsim.backend.values import Seat
from zsim.dtype import DType
from zsim.schedule.access import accesses
from zsim.schedule.operation import (
    Action,
    AllGather,
    AllReduce,
    Broadcast,
    Communication,
    Compute,
    Copy,
    Fill,
    Receive,
    ReduceScatter,
    Role,
    Send,
    View,
)
from zsim.strategy.precision import Precision
from zsim_des.values import Carrier, Modular, carry
from zsim_des.values.modular import shared
from zsim_des.values.noted_memory import NotedMemory

Limits = NDArray[np.uint8]
"""Elements by what was the least so far: mantissa and exponent bits of each of four kinds."""

BITS: dict[DType, tuple[int, int]] = {
    DType.INT8: (0, 0),
    DType.INT64: (0, 0),
    DType.FP8: (2, 4),
    DType.FP16: (10, 5),
    DType.BF16: (7, 8),
    DType.FP32: (23, 8),
    DType.FP64: (52, 11),
}
"""Bits of mantissa and of exponent; what is no fraction has none. E4M3 stands for any fp8."""

BEFORE, RANKS, MICRO_BATCHES, AFTER = 0, 2, 4, 6
NAMES = {BEFORE: "kept before", RANKS: "ranks added", MICRO_BATCHES: "added", AFTER: "kept after"}
NO_LIMIT = 255
Found = dict[tuple[str, ...], Limits]
"""By what reads them, the least of limits by element."""


def lowered(limits: Limits, kind: int, dtype: DType) -> Limits:
    """`limits` once numbers went through `dtype`."""
    found = limits.copy()
    for place, bits in enumerate(BITS[dtype]):
        found[:, kind + place] = np.minimum(found[:, kind + place], bits)
    return found


def kept(limits: Limits, dtype: DType) -> Limits:
    """`limits` once numbers were kept in `dtype`: before or after ranks were added up."""
    summed = (limits[:, RANKS] < NO_LIMIT)[:, None]
    return np.where(summed, lowered(limits, AFTER, dtype), lowered(limits, BEFORE, dtype))


class Formats(NotedMemory):
    """Implements `Values`; `found` is what updates and clips read, `wrong` what is always so."""

    def __init__(self, job: Job, precision: Precision) -> None:
        self.found: Found = {}
        self.wrong: list[str] = []
        self._precision = precision
        self._modular = Modular(job.schedule)
        self._float8 = {each.name for each in job.model.parameters if each.float8}

    def memory(self, elements: int, dtype: DType) -> Limits:
        """New memory, without limits."""
        del dtype
        return np.full((elements, 8), NO_LIMIT, np.uint8)

    def is_zero(self, window: Limits) -> bool:
        """Not known; a run is told which way to go."""
        del window
        return True

    def apply(
        self,
        operation: Compute | Fill | Copy,
        views: Sequence[Limits],
        *,
        seat: Seat,
        step: int,
        scalars: Mapping[str, float],
    ) -> Sequence[Limits | None]:
        """Return what `operation` writes: see `Values.apply`."""
        del step, scalars
        match operation:
            case Fill():
                return [np.full_like(views[0], NO_LIMIT)]
            case Copy():
                return [None, self._copied(operation, views, seat)]
            case Compute():
                self._read(operation, views, seat)
                return [
                    _written(operation, view, seat.program.by_name[access.view.buffer].dtype)
                    if access.writes
                    else None
                    for access, view in zip(accesses(operation), views, strict=True)
                ]
            case _:
                assert_never(operation)

    def _copied(self, copy: Copy, views: Sequence[Limits], seat: Seat) -> Limits:
        source, target = views
        by_name = seat.program.by_name
        dtype = by_name[copy.target.buffer].dtype

        def moved(new: Limits, old: Limits) -> Limits:
            if copy.accumulate:
                added = lowered(np.minimum(new, old), MICRO_BATCHES, dtype)
                nothing = (old == NO_LIMIT).all(axis=1)[:, None]  # zeros: the sum is exact
                new = np.where(nothing, new, added)
            return kept(new, dtype)

        if not copy.by_parameter:
            return moved(source, target)
        found = target.copy()
        here = self._modular.fragments(by_name[copy.source.buffer], seat)
        there = self._modular.fragments(by_name[copy.target.buffer], seat)
        for first, at, size in shared(here, there):
            found[at : at + size] = moved(source[first : first + size], target[at : at + size])
        return found

    def _read(self, compute: Compute, views: Sequence[Limits], seat: Seat) -> None:
        by_name = seat.program.by_name
        for operand, view in zip(compute.operands, views, strict=True):
            dtype = by_name[operand.view.buffer].dtype
            match compute.action, operand.role:
                case Action.UPDATE, Role.GRADIENT:
                    trained = next(each for each in compute.operands if each.role in TRAINED)
                    self._note_gradient(trained.view, view, seat)
                case Action.UPDATE, _:
                    if poorer(dtype, self._precision.optimizer):
                        self.wrong.append(f"{compute.id}: {operand.role} in {dtype}")
                case Action.CLIP, Role.INPUT:
                    self._note((f"{seat.rank}", "clip"), view)
                case ((Action.FORWARD | Action.RECOMPUTE | Action.BACKWARD), Role.PARAMETER):
                    wanted = self._wanted(operand.view, seat)
                    if _is_poor(view, wanted) or poorer(dtype, wanted):
                        self.wrong.append(f"{compute.id}: parameters poorer than they should be")
                case _:
                    pass

    def _wanted(self, view: View, seat: Seat) -> DType:
        """The format of parameters that a segment reads."""
        start, size = self._modular.schedule.extent(view, seat.coordinates)
        names = {
            each.parameter
            for each in self._modular.fragments(seat.program.by_name[view.buffer], seat)
            if each.position < start + size and start < each.position + each.size
        }
        return DType.FP8 if names and names <= self._float8 else self._precision.compute

    def _note_gradient(self, trained: View, gradient: Limits, seat: Seat) -> None:
        start, size = self._modular.schedule.extent(trained, seat.coordinates)
        for each in self._modular.fragments(seat.program.by_name[trained.buffer], seat):
            low, high = max(start, each.position), min(start + size, each.position + each.size)
            if low < high:
                whole = np.full((each.offset + each.size, 8), NO_LIMIT, np.uint8)
                shift = each.offset - each.position
                whole[low + shift : high + shift] = gradient[low - start : high - start]
                self._note((f"{seat.rank}", each.parameter), whole)

    def _note(self, key: tuple[str, ...], limits: Limits) -> None:
        known = self.found.get(key, np.full((0, 8), NO_LIMIT, np.uint8))
        size = max(len(known), len(limits))
        both = [
            np.concatenate([each, np.full((size - len(each), 8), NO_LIMIT, np.uint8)])
            for each in (known, limits)
        ]
        self.found[key] = np.minimum(*both)

    def meet(self, members: Sequence[Communication], sources: Sequence[Limits]) -> Sequence[Limits]:
        """Return what each member of a communicator gets: see `Values.meet`."""
        return [
            kept(_received(member, place, sources), member.wire)
            for place, member in enumerate(members)
        ]


TRAINED = (Role.MASTER, Role.PARAMETER)


def _written(compute: Compute, view: Limits, dtype: DType) -> Limits:
    """Numbers of an operand once they are written: new ones but for what is changed in place."""
    changed = compute.action in (Action.UNSCALE, Action.CLIP)
    return kept(view if changed else np.full_like(view, NO_LIMIT), dtype)


def poorer(one: DType, other: DType) -> bool:
    """Whether a format has less of something than the other."""
    return any(a < b for a, b in zip(BITS[one], BITS[other], strict=True))


def _is_poor(limits: Limits, dtype: DType) -> bool:
    """Whether some number was kept in less than `dtype`."""
    return any(
        bool((limits[:, kind + place] < bits).any())
        for kind in (BEFORE, AFTER)
        for place, bits in enumerate(BITS[dtype])
    )


def _received(member: Communication, place: int, sources: Sequence[Limits]) -> Limits:
    match member:
        case AllGather():
            return np.concatenate(sources)
        case ReduceScatter(accumulate=accumulate):
            size = len(sources[0]) // len(sources)
            parts = [source[place * size : (place + 1) * size] for source in sources]
            return lowered(np.minimum.reduce(parts), RANKS, accumulate)
        case AllReduce(accumulate=accumulate):
            return lowered(np.minimum.reduce(list(sources)), RANKS, accumulate)
        case Broadcast(root=root):
            return sources[root]
        case Send() | Receive():
            return sources[0]
        case _:
            raise TypeError(member.name)


def formats_of(job: Job, precision: Precision) -> Formats:
    """What one step of a job makes of formats.

    Raises:
        RefusedError: the schedule cannot be simulated at all.
        RunFailedError: it began and could not end.
    """
    values = Formats(job, precision)
    carry(replace(job, steps=1), Carrier(job.schedule, values))
    return values


def _allowed(wanted: Limits) -> Limits:
    """What limits may be: where there were none, the least that there were of any kind."""
    least = np.tile(wanted.reshape(len(wanted), -1, 2).min(axis=1), (1, wanted.shape[1] // 2))
    return np.where(wanted == NO_LIMIT, least, wanted)


def poorer_than(found: Formats, expected: Formats) -> str:
    """Where `found` went through a poorer format than `expected`, if it did."""
    for text in found.wrong:
        return text
    for key, limits in found.found.items():
        wanted = expected.found.get(key)
        if wanted is None:
            continue
        size = min(len(limits), len(wanted))
        less = (limits[:size] < _allowed(wanted[:size])).any(axis=0)
        for column in np.flatnonzero(less).tolist():
            kind = NAMES[column - column % 2]
            return f"rank {key[0]}: gradient of {key[1]} is {kind} in a poorer format"
    return ""
