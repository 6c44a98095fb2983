"""Differences between the final state of a run and that of plain data parallelism."""

from collections.abc import Iterator

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from zsim.backend.values import Seat
from zsim.schedule.access import accesses
from zsim.schedule.issue_order import taken
from zsim.schedule.mesh import Coordinates
from zsim.schedule.operation import Action, Compute, Copy, Operand, Read, Role, View
from zsim.schedule.schedule import Kind, Program, Schedule
from zsim_des.values.carrier import Carrier
from zsim_des.values.field import Numbers
from zsim_des.values.modular import Modular
from zsim_des.values.plain import TENSOR, PlainState

Mask = NDArray[np.bool_]


def differences(carrier: Carrier[Numbers], values: Modular, expected: PlainState) -> Iterator[str]:
    """Yield the differences between the end of a run and `expected`.

    Compared are updated values and their moments, parameters and masters that the next step reads
    before it writes them, and the scalars of every host. Also yield trained parameters that no rank
    updates, untrained ones that no rank has, and untrained ones that a rank updates.
    """
    found = _Comparison(carrier, values, expected)
    for seat in carrier.seats:
        yield from found.updated(seat)
        yield from found.read_next(seat)
    yield from found.left_out()
    for seat, scalars in zip(carrier.seats, carrier.scalars, strict=True):
        for name, value in scalars.items():
            wanted = expected.scalars.get(name, carrier.scalars[0][name])
            if value != wanted:
                yield f"rank {seat.rank}: scalar {name} is {value}, not {wanted}"


class _Comparison:
    """The memory at the end of a run, and the expected state."""

    def __init__(self, carrier: Carrier[Numbers], values: Modular, expected: PlainState) -> None:
        self._carrier = carrier
        self._values = values
        self._expected = expected
        self._updated = expected.late or expected
        self._missing = [
            {name: np.ones(len(value), bool) for name, value in own.items()}
            for own in expected.parameters
        ]

    def left_out(self) -> Iterator[str]:
        """Yield parameters with elements that no rank updates, or that no rank has."""
        for place, own in enumerate(self._missing):
            for name in own:
                if own[name].any():
                    verb = "updates" if name in self._expected.moments[place] else "has"
                    yield f"nobody {verb} all of {name}, {place}"

    def updated(self, seat: Seat) -> Iterator[str]:
        """Yield differences in the values that the rank updates, and in their moments."""
        place = seat.coordinates.get(TENSOR, 0)
        kept_at = _homes(seat.program)
        for update in _updates(seat.program):
            operands = [
                replace(each, view=kept_at.get(each.view, each.view)) for each in update.operands
            ]
            (trained,) = (each for each in operands if each.role in TRAINED)
            moments = [each for each in operands if each.role is Role.MOMENT]
            memory = self._held(seat, trained.view)
            kept = [self._held(seat, each.view) for each in moments]
            if memory is None or any(each is None for each in kept):
                yield f"rank {seat.rank}: {update.id} has no memory"
                continue
            for name, here, there in self._pieces(seat, trained):
                if name not in self._expected.moments[place]:
                    yield f"rank {seat.rank}: {update.id} updates {name}, which is not trained"
                    continue
                self._missing[place][name][there] = False
                if not np.array_equal(memory[here], self._updated.parameters[place][name][there]):
                    yield f"rank {seat.rank}: {name} in {trained.view.buffer}"
                for number, each in enumerate(kept):
                    known = self._updated.moments[place][name]
                    wanted = known[number][there] if number < len(known) else None
                    if each is not None and (
                        wanted is None or not np.array_equal(each[here], wanted)
                    ):
                        yield f"rank {seat.rank}: {name} in {moments[number].view.buffer}"

    def read_next(self, seat: Seat) -> Iterator[str]:
        """Yield differences in parameters and masters that the next step would read."""
        place = seat.coordinates.get(TENSOR, 0)
        for name, read in _read_next(self._values.schedule, seat.program, seat.coordinates).items():
            block = self._carrier.memory[seat.rank].blocks.get(name)
            for each in self._values.fragments(seat.program.by_name[name], seat):
                if block is None or each.parameter not in self._expected.parameters[place]:
                    continue
                here = slice(each.position, each.position + each.size)
                there = slice(each.offset, each.offset + each.size)
                is_master = seat.program.by_name[name].kind is Kind.MASTER
                state = self._updated if is_master else self._expected
                wanted = state.parameters[place][each.parameter][there]
                if each.parameter not in self._expected.moments[place]:
                    same = block.memory[here] == wanted
                    self._missing[place][each.parameter][there] &= ~same
                if ((block.memory[here] != wanted) & read[here]).any():
                    yield f"rank {seat.rank}: {each.parameter} in {name}, which is read next"

    def _held(self, seat: Seat, view: View) -> Numbers | None:
        block = self._carrier.memory[seat.rank].blocks.get(view.buffer)
        start, size = self._values.schedule.extent(view, seat.coordinates)
        return None if block is None else block.memory[start : start + size]

    def _pieces(self, seat: Seat, operand: Operand) -> Iterator[tuple[str, slice, slice]]:
        """Yield name, operand slice and parameter slice for each parameter in an operand."""
        start, size = self._values.schedule.extent(operand.view, seat.coordinates)
        for each in self._values.fragments(seat.program.by_name[operand.view.buffer], seat):
            low, high = max(start, each.position), min(start + size, each.position + each.size)
            if low < high:
                shift = each.offset - each.position
                yield (
                    each.parameter,
                    slice(low - start, high - start),
                    slice(low + shift, high + shift),
                )


TRAINED = (Role.MASTER, Role.PARAMETER)


def _updates(program: Program) -> Iterator[Compute]:
    for operation in program.by_id.values():
        if isinstance(operation, Compute) and operation.action is Action.UPDATE:
            yield operation


def _homes(program: Program) -> dict[View, View]:
    """Return the file view of each value read from a file, by the view it is read into."""
    return {each.target: each.source for each in program.by_id.values() if isinstance(each, Read)}


def _read_next(schedule: Schedule, program: Program, at: Coordinates) -> dict[str, Mask]:
    """Return the elements of parameters and masters that a step reads before it writes them."""
    kinds = (Kind.PARAMETER, Kind.MASTER)
    kept = [program.by_name[name] for name in program.persistent]
    read = {each.name: np.zeros(each.elements, bool) for each in kept if each.kind in kinds}
    written = {name: np.zeros(len(each), bool) for name, each in read.items()}
    for operation in taken(program.step, overflows=False):
        touched = [each for each in accesses(operation) if each.view.buffer in read]
        adds = isinstance(operation, Copy) and operation.by_parameter
        for access in sorted(touched, key=lambda each: each.writes):
            name = access.view.buffer
            start, size = schedule.extent(access.view, at)
            part = slice(start, start + size)
            if access.reads:
                read[name][part] |= ~written[name][part]
            if access.writes and not adds:
                written[name][part] = True
    return read
