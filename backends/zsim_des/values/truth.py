"""Initial parameters, and the data of each replica."""

from collections.abc import Iterable

from zsim.schedule.layout import Piece
from zsim.schedule.mesh import Coordinates
from zsim.schedule.schedule import Schedule
from zsim.zero.names import PIPELINE
from zsim_des.values.field import Numbers, constants

Part = tuple[tuple[str, int], ...]
"""A part of a parameter: coordinates along the axes whose ranks hold different parts."""


def initial(parameter: str, elements: int, part: Part) -> Numbers:
    """Return the initial value of all elements of a part of a parameter."""
    return constants(f"initial {parameter} {part}", elements)


def data(replica: int, step: int, micro_batch: int, elements: int) -> Numbers:
    """Return a micro-batch of one replica."""
    return constants(f"data {replica} {step} {micro_batch}", elements)


def given(scalar: str, step: int) -> float:
    """Return the value that a caller gives in a host scalar before a step."""
    return float(constants(f"given {scalar} {step}", 1)[0])


def mask(which: tuple[int, int, int], segment: str, place: int | None) -> str:
    """Return the name of the mask of a segment on a replica in a step and micro-batch.

    `place` is the rank's place on the tensor axis if each rank draws a different mask, else None.
    """
    return f"{segment} of {which} at {place}"


def part_of(schedule: Schedule, piece: Piece, coordinates: Coordinates) -> Part:
    """Return the part of the parameter in `piece` that the rank at `coordinates` holds."""
    return tuple(
        (axis.name, coordinates[axis.name])
        for axis in schedule.mesh.axes
        if axis.size > 1
        and axis.name not in schedule.contract.data_axes
        and axis.name not in piece.copies
        and axis.name != PIPELINE  # stages hold different parameters, not parts of one
    )


def replica_of(schedule: Schedule, coordinates: Coordinates) -> int:
    """Return the number of the replica that the rank at `coordinates` belongs to."""
    number = 0
    for axis in schedule.mesh.axes:
        if axis.name in schedule.contract.data_axes:
            number = number * axis.size + coordinates[axis.name]
    return number


def is_counted(piece: Piece, coordinates: Coordinates) -> bool:
    """Return True if a norm counts `piece` on this rank: the first of several copies."""
    return _all_zero(coordinates[axis] for axis in piece.copies)


def _all_zero(numbers: Iterable[int]) -> bool:
    return not any(numbers)
