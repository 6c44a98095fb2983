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
    """Every micro-batch of the replica of `rank` in the steps of `job`.

    Raises:
        TextError: the text does not serve the model.
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
    """Return how many micro-batches a replica loads in a step: stages between ends load none."""
    return max(
        sum(
            isinstance(operation, Compute) and operation.action is Action.LOAD
            for operation in walk(program.step)
        )
        for program in schedule.programs
    )


def place_of_data(schedule: Schedule, rank: int) -> tuple[int, int]:
    """Return the number of `rank` among those that read different data, and how many there are.

    Ranks that share sequences read the same, each for its own tokens.
    """
    coordinates = schedule.mesh.coordinates(rank)
    number, count = 0, 1
    for axis in schedule.mesh.axes:
        if axis.name in schedule.contract.data_axes and axis.name != CONTEXT:
            number = number * axis.size + coordinates[axis.name]
            count *= axis.size
    return number, count
