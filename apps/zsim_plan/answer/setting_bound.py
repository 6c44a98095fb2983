"""Lower bounds of a setting, or of all settings of a group."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

LATE = "takes longer than --within"
"""Reason why a setting is no answer that would fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingBound:
    """Lower bounds of the step time and memory of a setting.

    Attributes:
        busy_s: part of the step time in which a rank computes.
        kernels_s: part of the step time of kernels and of tensor-parallel collectives.
        why_not: reason why the setting cannot run, in one line; empty if it may run.
        is_unsure: True if it cannot fit with the probability `SURE`, by the bound of its memory.
        is_full: True if the reason is memory; larger micro-batches then fail, too.
        slower: median ratio of published to predicted times of similar runs.
    """

    step_time_s: float = 0.0
    busy_s: float = 0.0
    kernels_s: float = 0.0
    memory_bytes: int = 0
    is_unsure: bool = False
    why_not: str = ""
    is_full: bool = False
    slower: float = 1.0

    def is_below(self, other: "SettingBound") -> bool:
        """Return True if the setting may run and has a lower step time than `other`."""
        return not self.why_not and self.step_time_s < other.step_time_s


def least_bound(first: SettingBound, others: Iterable[SettingBound]) -> SettingBound:
    """Return `first` with the smallest step and kernel times of `first` and `others`."""
    lower = [each for each in others if each.is_below(first)]
    if not lower:
        return first
    kernels_s = min(first.kernels_s, *(each.kernels_s for each in lower))
    least_s = min(each.step_time_s for each in lower)
    return replace(first, step_time_s=least_s, kernels_s=min(kernels_s, least_s))


def lightest_bound(first: SettingBound, others: Iterable[SettingBound]) -> SettingBound:
    """Return `first` with the smallest memory of `first` and `others`.

    If `first` cannot fit, or not surely, and a smaller one can, return the bound of the smallest: a
    bound of memory that is too large may have no bound of time.
    """
    lighter = [each for each in others if not each.why_not]
    if not first.why_not:
        lighter.append(first)
    if not lighter:
        return first
    least = min(lighter, key=lambda each: each.memory_bytes)
    if first.why_not or (first.is_unsure and not least.is_unsure):
        return least
    return replace(first, memory_bytes=least.memory_bytes)
