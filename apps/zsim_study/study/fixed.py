"""Hold the global batch fixed while axes change the number of replicas."""

from collections.abc import Collection
from dataclasses import dataclass

from zsim.scenario.tables import ScenarioError, TrainTable

BATCH = ("micro_batch_size", "gradient_accumulation_steps", "global_batch_size")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fixed:
    """Sequences of a step over all replicas, and the micro-batch of the run that defines them."""

    global_batch: int
    micro_batch: int


def held(train: TrainTable, fixed: Fixed, replicas: int, given: Collection[str]) -> TrainTable:
    """Return `train` with the sequences of `fixed` in a step, over all replicas.

    `given` contains the fields of `train` that an axis sets. The micro-batch shrinks to the largest
    size that divides the sequences of a replica; gradient accumulation follows. If an axis sets one
    of the two, the other follows. If axes set the global batch or both, `train` is unchanged.

    Raises:
        ScenarioError: the global batch is not a multiple of the replicas.
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
