"""Marks for gradients that are not finite, followed for all possible origins in one run.

A number is represented by the set of origins that would make it not finite, one bit each; its value
is not known. A flag that a branch reads must depend on every origin.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import assert_never

import numpy as np
from numpy.typing import NDArray

from zsim.backend.backend import Job
from zsim.backend.values import Seat
from zsim.dtype import DType
from zsim.schedule.access import accesses
from zsim.schedule.operation import (
    MAKES_GRADIENTS,
    Action,
    Communication,
    Compute,
    Copy,
    Fill,
    Reduction,
    Role,
)
from zsim_des.values.carried_run import carry
from zsim_des.values.carrier import Carrier
from zsim_des.values.exchange import received
from zsim_des.values.modular import Modular, shared
from zsim_des.values.noted_memory import NotedMemory
from zsim_des.values.planted import Planted

Marks = NDArray[np.uint8]
"""Elements by bytes of origins."""


class MarkValues(NotedMemory):
    """Implements `Values`; `unseen` lists the origins that some branch did not see."""

    def __init__(self, job: Job, places: Sequence[Planted]) -> None:
        self._modular = Modular(job.schedule)
        self._places = places
        self._bytes = (len(places) + 7) // 8
        self._all = np.packbits(np.ones(len(places), np.uint8), bitorder="little")
        self._made: dict[tuple[int, int, str, int], list[tuple[int, Planted]]] = {}
        for number, place in enumerate(places):
            for rank in place.ranks:
                key = (rank, place.micro_batch, place.unit, place.segment)
                self._made.setdefault(key, []).append((number, place))
        self.missed = np.zeros(self._bytes, np.uint8)

    @property
    def unseen(self) -> list[Planted]:
        """Return the origins that a branch did not see."""
        bits = np.unpackbits(self.missed, bitorder="little")
        return [place for place, bit in zip(self._places, bits, strict=False) if bit]

    def memory(self, elements: int, dtype: DType) -> Marks:
        """Return new memory, without marks."""
        del dtype
        return np.zeros((elements, self._bytes), np.uint8)

    def is_zero(self, window: Marks) -> bool:
        """Record the origins that a branch does not see."""
        self.missed |= self._all & ~window[0]
        return True

    def apply(
        self,
        operation: Compute | Fill | Copy,
        views: Sequence[Marks],
        *,
        seat: Seat,
        step: int,
        scalars: Mapping[str, float],
    ) -> Sequence[Marks | None]:
        """Return the outputs of `operation`; see `Values.apply`."""
        del scalars
        match operation:
            case Fill():
                return [np.zeros_like(views[0])]
            case Copy():
                return [None, self._copied(operation, views, seat)]
            case Compute():
                return self._computed(operation, views, seat, step)
            case _:
                assert_never(operation)

    def _copied(self, copy: Copy, views: Sequence[Marks], seat: Seat) -> Marks:
        source, target = views
        if not copy.by_parameter:
            return source | target if copy.accumulate else source
        found, by_name = target.copy(), seat.program.by_name
        here = self._modular.fragments(by_name[copy.source.buffer], seat)
        there = self._modular.fragments(by_name[copy.target.buffer], seat)
        for first, at, size in shared(here, there):
            moved = source[first : first + size]
            found[at : at + size] = moved | target[at : at + size] if copy.accumulate else moved
        return found

    def _computed(
        self, compute: Compute, views: Sequence[Marks], seat: Seat, step: int
    ) -> Sequence[Marks | None]:
        pairs = list(zip(accesses(compute), views, strict=True))
        if compute.action in (Action.UPDATE, Action.UNSCALE, Action.CLIP):
            return [view if access.writes else None for access, view in pairs]
        everything = self._union(view for access, view in pairs if access.reads)
        found: list[Marks | None] = [
            np.tile(everything, (len(view), 1)) if access.writes else None for access, view in pairs
        ]
        if compute.action in MAKES_GRADIENTS and step == 0:
            roles = [each.role for each in compute.operands]
            gradients = [each for role, each in zip(roles, found, strict=True) if role is GRADIENT]
            self._mark(compute, gradients, seat.rank)
        return found

    def _union(self, views: Iterable[Marks]) -> Marks:
        found = np.zeros(self._bytes, np.uint8)
        for view in views:
            found |= np.bitwise_or.reduce(view, axis=0)
        return found

    def _mark(self, compute: Compute, gradients: Sequence[Marks | None], rank: int) -> None:
        key = (rank, compute.micro_batch, compute.unit, compute.segment)
        for number, place in self._made.get(key, ()):
            assert place.gradient is not None
            assert place.element is not None
            if place.gradient < len(gradients):
                gradient = gradients[place.gradient]
                if gradient is not None and place.element < len(gradient):
                    gradient[place.element, number // 8] |= 1 << number % 8

    def meet(self, members: Sequence[Communication], sources: Sequence[Marks]) -> Sequence[Marks]:
        """Return the result of each member of a communicator; see `Values.meet`."""
        return [received(members, place, sources, _combined) for place in range(len(members))]


GRADIENT = Role.GRADIENT


def _combined(reduction: Reduction, parts: Sequence[Marks]) -> Marks:
    del reduction
    return np.asarray(np.bitwise_or.reduce(list(parts), axis=0))


def unseen(job: Job, places: Sequence[Planted]) -> list[Planted]:
    """Return the `places` in the first step that a branch does not see.

    Raises:
        RefusedError: the schedule cannot be simulated.
        RunFailedError: the run began and could not end.
    """
    values = MarkValues(job, places)
    carry(replace(job, steps=1), Carrier(job.schedule, values))
    return values.unseen
