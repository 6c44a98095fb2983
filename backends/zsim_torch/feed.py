"""Micro-batches of text for one rank, in the order in which its program loads them."""

from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from zsim.backend.backend import Job
from zsim.schedule.operation import Action, Compute, walk
from zsim.schedule.schedule import Schedule
from zsim.zero.names import CONTEXT
from zsim_torch.text import BatchPlace, read_text


def feed(job: Job, rank: int, *, data: Path | None, seed: int) -> Iterator[Tensor]:
    """Yield the micro-batches of this rank's replica in the steps of `job`.

    Raises:
        TextError: the text cannot be used for the model.
    """
    shape = job.model.architecture
    assert shape is not None
    text = read_text(data, shape.sequence_length, vocab_size=shape.vocab_size)
    reader, readers = place_of_data(job.schedule, rank)
    for step in range(job.steps):
        for micro_batch in range(micro_batches(job.schedule)):
            which = BatchPlace(
                step=step,
                micro_batch=micro_batch,
                coordinate=reader,
                ranks=readers,
                size=job.model.micro_batch_size,
            )
            yield text.batch(which, seed=seed)


def micro_batches(schedule: Schedule) -> int:
    """Return the number of micro-batches that a replica loads in a step.

    In a pipeline only the first and last stage load any.
    """
    return max(
        sum(
            isinstance(operation, Compute) and operation.action is Action.LOAD
            for operation in walk(program.step)
        )
        for program in schedule.programs
    )


def place_of_data(schedule: Schedule, rank: int) -> tuple[int, int]:
    """Return the index of `rank` among ranks that read different data, and their number.

    Ranks of a context group read the same data, each for its own tokens.
    """
    coordinates = schedule.mesh.coordinates(rank)
    number, count = 0, 1
    for axis in schedule.mesh.axes:
        if axis.name in schedule.contract.data_axes and axis.name != CONTEXT:
            number = number * axis.size + coordinates[axis.name]
            count *= axis.size
    return number, count
