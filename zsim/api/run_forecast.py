"""The forecast of a training run: its figures, without a trace."""

from dataclasses import dataclass
from enum import StrEnum


class Quantity(StrEnum):
    """Compared quantity."""

    STEP_TIME = "step time"
    """Seconds of an optimizer step."""
    MEMORY = "peak memory"
    """Bytes that a rank reserves, or allocates, whichever was published."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunForecast:
    """Prediction for a run.

    Attributes:
        usable_bytes: memory that a rank may reserve: that of its GPU minus that of CUDA and NCCL.
        fits: True if every rank has the memory that it reserves.
        alternative: index of the predicted scenario in the list of the run.
        kept_bytes: lower bound of the peak of a rank without the buffers of collectives.
    """

    step_time_s: float
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    usable_bytes: int
    fits: bool
    alternative: int = 0
    kept_bytes: int = 0

    @property
    def needed_bytes(self) -> int:
        """Bytes that a rank would reserve; at least its allocations if it runs out of memory."""
        if self.fits:
            return self.peak_reserved_bytes
        return max(self.peak_reserved_bytes, self.peak_allocated_bytes)
