"""Runs a schedule with exact values, and holds what it trained against plain data parallelism."""

import gc
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from zsim.backend import Job, RunFailedError
from zsim.issue import NO_OVERFLOW
from zsim.operation import Action, Compute, Role, View
from zsim.schedule import Program
from zsim.values import A
from zsim_des.simulation import SimBackend
from zsim_des.values.carrier import Carrier
from zsim_des.values.field import Numbers
from zsim_des.values.modular import Modular
from zsim_des.values.plain import TENSOR, Trained
from zsim_des.values.running import Fault
from zsim_des.watch import Durations


@dataclass(frozen=True, slots=True)
class Result:
    """What came of a run.

    `failure` is the first line of why it did not end, or empty; `faults` are operations that were
    disturbed; `differences` what of the parameters is not as it should be.
    """

    failure: str = ""
    faults: tuple[Fault, ...] = ()
    differences: tuple[str, ...] = ()

    @property
    def is_right(self) -> bool:
        """Whether the run did what it should."""
        return not (self.failure or self.faults or self.differences)


def train_by_schedule(
    job: Job,
    expected: Trained,
    *,
    durations: Durations | None = None,
    overflow_steps: frozenset[int] = NO_OVERFLOW,
) -> Result:
    """Run the job with values; what it trained is held against `expected`.

    Raises:
        RefusedError: the schedule cannot be simulated at all.
    """
    values = Modular(job.schedule, overflow_steps)
    carrier = Carrier(job.schedule, values, overflow_steps)
    try:
        carry(job, carrier, durations=durations, overflow_steps=overflow_steps)
    except RunFailedError as error:
        return Result(failure=str(error))
    differences = tuple(_differences(carrier, values, expected))
    return Result(faults=tuple(carrier.faults), differences=differences)


def carry(
    job: Job,
    carrier: Carrier[A],
    *,
    durations: Durations | None = None,
    overflow_steps: frozenset[int] = NO_OVERFLOW,
) -> None:
    """Run the job; `carrier` has then carried its values through it.

    Raises:
        RefusedError: the schedule cannot be simulated at all.
        RunFailedError: it began and could not end.
    """
    backend = SimBackend(
        unfold=True, overflow_steps=overflow_steps, durations=durations, watcher=carrier
    )
    with _uncollected():
        backend.step_ends_ps(job)
        carrier.settle()


@contextmanager
def _uncollected() -> Generator[None]:
    """Garbage is collected afterwards: all that is made here lives to the end of it (3x faster)."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _differences(carrier: Carrier[Numbers], values: Modular, expected: Trained) -> Iterator[str]:
    """What ranks updated and is not as expected, what nobody updated, and scalars that differ.

    What is only copied or gathered of updated parameters shows in what the next step makes of it.
    """
    missing = [
        {name: np.ones(len(value), bool) for name, value in own.items()}
        for own in expected.parameters
    ]
    for seat in carrier.seats:
        place = seat.coordinates.get(TENSOR, 0)
        for view in _updated(seat.program):
            block = carrier.memory[seat.rank].blocks.get(view.buffer)
            if block is None:
                yield f"rank {seat.rank}: {view.buffer} has no memory"
                continue
            start, size = values.schedule.extent(view, seat.coordinates)
            for each in values.fragments(seat.program.by_name[view.buffer], seat):
                low, high = max(start, each.position), min(start + size, each.position + each.size)
                part = slice(low - each.position + each.offset, high - each.position + each.offset)
                if low >= high:
                    continue
                wanted = expected.parameters[place][each.parameter][part]
                missing[place][each.parameter][part] = False
                if not np.array_equal(block.memory[low:high], wanted):
                    yield f"rank {seat.rank}: {each.parameter} in {view.buffer}"
    for place, own in enumerate(missing):
        yield from (f"nobody updates all of {name}, {place}" for name in own if own[name].any())
    if any(scalars != carrier.scalars[0] for scalars in carrier.scalars):
        yield "scalars differ between ranks"


def _updated(program: Program) -> Iterator[View]:
    """Masters, or parameters without them, that the program updates."""
    for operation in program.by_id.values():
        if isinstance(operation, Compute) and operation.action is Action.UPDATE:
            for operand in operation.operands:
                if operand.role in (Role.MASTER, Role.PARAMETER):
                    yield operand.view
