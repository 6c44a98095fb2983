"""Lines about how far a search of the best setting came."""

from collections.abc import Sequence
from typing import Final, Protocol

from zsim.api.error_text import probability_text
from zsim.api.setting_trial import SettingOutcome
from zsim.api.tried_setting import TriedSetting
from zsim.prediction.error_rule import SURE
from zsim.units import format_bytes

MOST_GAP: Final = 0.05
"""Share by which settings that were not reached may be better in an answer that counts as found."""

BETTER: Final = {
    "time": "faster",
    "cost": "cheaper",
    "energy": "less energy",
    "gpus": "faster",
}
"""Words for a setting that is better, by objective."""


class FoundSettings(Protocol):
    """Settings that a search found."""

    @property
    def objective(self) -> str:
        """The quantity that is minimized."""
        ...

    @property
    def unsure(self) -> TriedSetting | None:
        """The setting that is better than the best, but may not fit."""
        ...

    def gain(self, other: TriedSetting) -> str:
        """Return in words by how much a setting is better than the best."""
        ...


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


def risk_text(outcome: SettingOutcome) -> str:
    """Return that no setting that was tried surely fits, if the best does not; else ""."""
    if outcome.is_sure:
        return ""
    chance = probability_text(outcome.fit_probability)
    return f"may not fit: probability {chance}, and no setting tried reaches {SURE:.0%}; "


def better_unsure(found: FoundSettings) -> list[tuple[str, str]]:
    """Return the line about a setting that is better than the best, but may not fit."""
    if (other := found.unsure) is None:
        return []
    outcome = other.outcome
    taken, usable = format_bytes(outcome.memory_bytes), format_bytes(outcome.usable_bytes)
    risk = f"probability {probability_text(outcome.fit_probability)}, {taken} of {usable}"
    text = f"{other.name()}: {found.gain(other)} but may not fit: {risk}"
    return [("faster" if found.objective == "time" else "better", text)]


def unfinished_text(state: SearchState, *, has_best: bool, is_sure: bool) -> str:
    """Return in one line that more than 5 % may be left, and why; empty if not."""
    if not state.is_stopped and (not state.open_settings or state.gap <= MOST_GAP):
        return ""
    why = f"{state.operations:,} operations were simulated, --search-operations allows more"
    if state.is_stopped:
        why = "it stopped for the processor time that it took"
    left = f"{state.open_settings:,} settings were not reached"
    if not has_best:
        left = f"nothing fits so far, {left}"
    elif is_sure:
        left = f"{left} and may be up to {state.gap:.1%} better"
    return f"search unfinished: {left}; {why}"


def optimality_text(state: SearchState, *, is_sure: bool, unsure_is_better: bool = False) -> str:
    """Return by how much something better may have been missed.

    Args:
        state: how far the search came.
        is_sure: the best setting surely fits.
        unsure_is_better: another setting that may not fit is better than the best.
    """
    if not state.open_settings:
        least = f"{max(state.gap, 0.0):.1%}"
        more = "" if least == "0.0%" else f"more than {least} "
        among = f"these settings that fits with at least {SURE:.0%}"
        among = among if unsure_is_better else "these settings"
        return f"nothing among {among} is {more}better"
    if not is_sure:
        return f"{state.open_settings:,} settings were not reached; those tried may not fit"
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
