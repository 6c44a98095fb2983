"""Micro-batches of text for one rank, in the order in which its program loads them."""

from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from zsim.backend import Job
from zsim.operation import Action, Compute, walk
from zsim_torch.text import Batch, read_text

DATA_AXIS = "data"
"""Ranks that differ along this axis of the mesh read different text."""


def feed(job: Job, rank: int, *, data: Path | None, seed: int) -> Iterator[Tensor]:
    """Every micro-batch that `rank` loads in the steps of `job`.

    Raises:
        TextError: the text does not serve the model.
    """
    shape = job.model.architecture
    assert shape is not None
    text = read_text(data, shape.sequence_length, vocab_size=shape.vocab_size)
    mesh = job.schedule.mesh
    shared = any(axis.name == DATA_AXIS for axis in mesh.axes)
    loads = sum(
        isinstance(operation, Compute) and operation.action is Action.LOAD
        for operation in walk(job.schedule.program_of(rank).step)
    )
    for step in range(job.steps):
        for micro_batch in range(loads):
            which = Batch(
                step=step,
                micro_batch=micro_batch,
                coordinate=mesh.coordinates(rank)[DATA_AXIS] if shared else 0,
                ranks=mesh.axis_size(DATA_AXIS) if shared else 1,
                size=job.model.micro_batch_size,
            )
            yield text.batch(which, seed=seed)
