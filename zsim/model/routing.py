"""Rules of routed experts: which rows are dropped, and over which tokens their loads are summed."""

from dataclasses import dataclass
from enum import StrEnum


class DropRule(StrEnum):
    """How rows beyond a capacity are chosen."""

    WEIGHT = "weight"
    """Rows with the smallest weights are dropped."""
    POSITION = "position"
    """The last rows are dropped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drops:
    """Rows that are dropped: those of a source for an expert beyond `capacity`, chosen by `by`."""

    capacity: int
    by: DropRule = DropRule.WEIGHT

    def __str__(self) -> str:
        return f"beyond {self.capacity} by {self.by}"


class LoadScope(StrEnum):
    """The tokens over which an auxiliary loss sums the loads of experts."""

    RANK = "rank"
    """The tokens of a rank in a micro-batch."""
    SEQUENCE = "sequence"
    """Those of all ranks that share sequences, in a micro-batch."""
    MICRO_BATCH = "micro_batch"
    """Those of all ranks, in a micro-batch."""
    BATCH = "batch"
    """Those of all ranks, in this micro-batch and those before it: Megatron's global loss."""
