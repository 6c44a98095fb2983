"""Lines about how far a search of the best setting came."""

from collections.abc import Sequence
from typing import Final, Protocol

from zsim.api.tried_setting import TriedSetting
from zsim.units import format_bytes

MOST_GAP: Final = 0.05
"""Share by which settings that were not reached may be better in an answer that counts as found."""


class SearchState(Protocol):
    """How far a search came."""

    @property
    def settings(self) -> int:
        """Number of settings that were considered."""
        ...

    @property
    def gap(self) -> float:
        """Share by which something better may have been missed."""
        ...

    @property
    def open_settings(self) -> int:
        """Settings that were not reached and may be better."""
        ...

    @property
    def left_out(self) -> int:
        """Settings with offload that were not considered, since others fit without."""
        ...

    @property
    def operations(self) -> int:
        """Operations of schedules that were written or simulated."""
        ...

    @property
    def is_stopped(self) -> bool:
        """True if the search stopped for the processor time that it took."""
        ...


def unfinished_text(state: SearchState, *, has_best: bool, is_tight: bool) -> str:
    """Return in one line that more than 5 % may be left, and why; empty if not."""
    if not state.is_stopped and (not state.open_settings or state.gap <= MOST_GAP):
        return ""
    why = f"{state.operations:,} operations were simulated, --search-operations allows more"
    if state.is_stopped:
        why = "it stopped for the processor time that it took"
    left = f"{state.open_settings:,} settings were not reached"
    if not has_best:
        left = f"nothing fits so far, {left}"
    elif not is_tight:
        left = f"{left} and may be up to {state.gap:.1%} better"
    return f"search unfinished: {left}; {why}"


def optimality_text(state: SearchState, *, is_tight: bool, tight_is_faster: bool = False) -> str:
    """Return by how much something better may have been missed.

    Args:
        state: how far the search came.
        is_tight: the best setting leaves next to no memory.
        tight_is_faster: another setting that leaves next to no memory is better than the best.
    """
    if not state.open_settings:
        least = f"{max(state.gap, 0.0):.1%}"
        more = "" if least == "0.0%" else f"more than {least} "
        among = "these settings that leaves memory free" if tight_is_faster else "these settings"
        return f"nothing among {among} is {more}better"
    if is_tight:
        return (
            f"{state.open_settings:,} settings were not reached; those tried that fit leave "
            "next to no memory"
        )
    return (
        f"{state.open_settings:,} settings were not reached; none of them can be more than "
        f"{state.gap:.1%} better"
    )


def searched_text(state: SearchState, *, simulated: int, has_best: bool) -> str:
    """Return the number of simulated settings, their work, and which were not tried."""
    text = (
        f"{simulated:,} of {state.settings:,} settings simulated, {state.operations:,} operations"
    )
    if not has_best and state.open_settings:
        text += f", {state.open_settings:,} not reached"
    if state.left_out:
        text += f"; {state.left_out:,} with offload left out, since others fit without"
    return text


def nearest(tried: Sequence[TriedSetting]) -> list[tuple[str, str]]:
    """Return the setting that lacks least memory, where none fits."""
    known = [each for each in tried if each.outcome.usable_bytes]
    if not known:
        return []
    least = min(known, key=lambda each: each.outcome.memory_bytes)
    taken, usable = least.outcome.memory_bytes, least.outcome.usable_bytes
    lacks = f"takes {format_bytes(taken)} of {format_bytes(usable)}"
    if taken <= usable:
        lacks += " of the GPU, and too much of its host or drives"
    return [("nearest", f"{least.name()}: {lacks}")]
