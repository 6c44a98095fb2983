"""Lower bounds of a setting, or of all settings of a group."""

from collections.abc import Iterable
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingBound:
    """Bounds of a setting: no run of it takes less.

    Attributes:
        busy_s: seconds of these in which a rank computes.
        kernels_s: seconds of these in which kernels run, and collectives of the tensor axis.
        why_not: why there is no run at all, in one line; empty if there may be one.
        is_full: whether that is for lack of memory: larger micro-batches need more.
        slower: how many times as long as predicted runs of its kind took, in the median.
    """

    step_time_s: float = 0.0
    busy_s: float = 0.0
    kernels_s: float = 0.0
    memory_bytes: int = 0
    why_not: str = ""
    is_full: bool = False
    slower: float = 1.0

    def is_below(self, other: "SettingBound") -> bool:
        """Tell whether a setting may run, and has a lower bound than another."""
        return not self.why_not and self.step_time_s < other.step_time_s


def least_bound(first: SettingBound, others: Iterable[SettingBound]) -> SettingBound:
    """Return a bound with the step time of the least of it and others."""
    lower = [each for each in others if each.is_below(first)]
    if not lower:
        return first
    kernels_s = min(first.kernels_s, *(each.kernels_s for each in lower))
    least_s = min(each.step_time_s for each in lower)
    return replace(first, step_time_s=least_s, kernels_s=min(kernels_s, least_s))
