"""Batch that stays while axes change: the global one, however many replicas share it."""

from collections.abc import Collection
from dataclasses import dataclass

from zsim.scenario.tables import ScenarioError, TrainTable

BATCH = ("micro_batch_size", "gradient_accumulation_steps", "global_batch_size")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fixed:
    """Sequences of a step over all replicas, and the micro-batch of the run that they are from."""

    global_batch: int
    micro_batch: int


def held(train: TrainTable, fixed: Fixed, replicas: int, given: Collection[str]) -> TrainTable:
    """Return `train` with the sequences of `fixed` in a step, over all replicas.

    `given` has the fields of `train` that an axis sets. The micro-batch stays as it is where it
    divides what a replica has, else it is the largest smaller one that does; gradient accumulation
    makes up the rest. Where an axis sets one of the two, the other follows; where it sets the
    global batch or both, all stays as the axes say.

    Raises:
        ScenarioError: the replicas cannot share so many sequences equally.
    """
    micro, steps, total = (f"train.{name}" in given for name in BATCH)
    if total or (micro and steps):
        return train
    global_batch = fixed.global_batch
    if global_batch % replicas:
        raise ScenarioError(
            f"train.global_batch_size: {global_batch}, held fixed, must be a multiple of the "
            f"{replicas} replicas"
        )
    if micro or steps:
        follows = BATCH[1] if micro else BATCH[0]
        return train.model_copy(update={follows: None, "global_batch_size": global_batch})
    share = global_batch // replicas
    largest = min(train.micro_batch_size or fixed.micro_batch, share)
    size = next(size for size in range(largest, 0, -1) if share % size == 0)
    return train.model_copy(
        update={
            "micro_batch_size": size,
            "gradient_accumulation_steps": None,
            "global_batch_size": global_batch,
        }
    )
