"""Text about the progress of a search for the best setting."""

from collections.abc import Sequence
from typing import Final, Protocol

from zsim.api.error_text import probability_text
from zsim.prediction.error_rule import SURE
from zsim.units import format_bytes
from zsim_plan.answer.setting_trial import SettingOutcome
from zsim_plan.answer.tried_setting import TriedSetting

MOST_GAP: Final = 0.05
"""Maximum gap at which a search counts as finished: settings not reached may be better by this."""

ALL: Final = 0.999
"""Gap between settings with different numbers of GPUs, if the fewest are sought."""

BETTER: Final = {
    "time": "faster",
    "cost": "cheaper",
    "energy": "less energy",
    "gpus": "faster",
}
"""Words for a better setting, by objective."""


class FoundSettings(Protocol):
    """Result of a search: the objective and the gain of a setting."""

    @property
    def objective(self) -> str:
        """The quantity that is minimized."""
        ...

    @property
    def unsure(self) -> TriedSetting | None:
        """The setting that is better than the best but may not fit; None if there is none."""
        ...

    def gain(self, other: TriedSetting) -> str:
        """Return the text of the gain of `other` over the best setting."""
        ...


class SearchState(Protocol):
    """State of a search."""

    @property
    def settings(self) -> int:
        """Number of settings that were considered."""
        ...

    @property
    def gap(self) -> float:
        """Fraction by which a setting that was not simulated may be better."""
        ...

    @property
    def open_settings(self) -> int:
        """Number of settings not simulated that may be better."""
        ...

    @property
    def left_out(self) -> int:
        """Number of settings with offload that were skipped, since others fit without it."""
        ...

    @property
    def operations(self) -> int:
        """Operations of the schedules that were written or simulated."""
        ...

    @property
    def objective(self) -> str:
        """The quantity that is minimized."""
        ...

    @property
    def is_stopped(self) -> bool:
        """True if the search reached its limit of processor time."""
        ...

    @property
    def is_interrupted(self) -> bool:
        """True if the user ended the search."""
        ...


def risk_text(outcome: SettingOutcome) -> str:
    """Return a warning if the best setting may not fit; else an empty string."""
    if outcome.is_sure:
        return ""
    chance = probability_text(outcome.fit_probability)
    return f"may not fit: probability {chance}, and no setting tried reaches {SURE:.0%}; "


def better_unsure(found: FoundSettings) -> list[tuple[str, str]]:
    """Return the line about a setting that is better than the best but may not fit."""
    if (other := found.unsure) is None:
        return []
    outcome = other.outcome
    taken, usable = format_bytes(outcome.memory_bytes), format_bytes(outcome.usable_bytes)
    risk = f"probability {probability_text(outcome.fit_probability)}, {taken} of {usable}"
    text = f"{other.name()}: {found.gain(other)} but may not fit: {risk}"
    return [("faster" if found.objective == "time" else "better", text)]


def may_exist(objective: str, gap: float) -> str:
    """Return by how much a setting that was not simulated may be better."""
    if objective == "gpus" and gap > ALL:
        return "fewer GPUs may do"
    return f"up to {gap:.1%} {BETTER[objective]} may exist"


def unfinished_text(state: SearchState, *, has_best: bool, is_sure: bool) -> str:
    """Return a warning that a setting better by more than 5 % may be missed; empty if not."""
    is_cut_off = state.is_stopped or state.is_interrupted
    if not is_cut_off and (not state.open_settings or state.gap <= MOST_GAP):
        return ""
    left = f"{state.open_settings:,} settings were not simulated"
    if not has_best:
        left = f"nothing fits so far, {left}"
    elif is_sure and state.gap < 1:
        left = f"{may_exist(state.objective, state.gap)}, {left}"
    more = f"continue with --search-operations {max(2 * state.operations, 1)}"
    if state.is_stopped:
        more = f"it reached its limit of processor time, {more}"
    elif state.is_interrupted:
        more = "it was interrupted, continue with the same command"
    return f"search unfinished: {left}; {more}"


def optimality_text(state: SearchState, *, is_sure: bool, unsure_is_better: bool = False) -> str:
    """Return by how much a missed setting may be better.

    Args:
        state: state of the search.
        is_sure: True if the best setting surely fits.
        unsure_is_better: True if a setting that may not fit is better than the best.
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
    """Return the number of simulated settings, their work, and the number of those skipped."""
    text = (
        f"{simulated:,} of {state.settings:,} settings simulated, {state.operations:,} operations"
    )
    if not has_best and state.open_settings:
        text += f", {state.open_settings:,} not reached"
    if state.left_out:
        why = "since others fit without" if has_best else "not reached"
        text += f"; {state.left_out:,} with offload left out, {why}"
    return text


def nearest(tried: Sequence[TriedSetting]) -> list[tuple[str, str]]:
    """Return the line about the setting with the least memory if no setting fits."""
    known = [each for each in tried if each.outcome.usable_bytes]
    if not known:
        return []
    least = min(known, key=lambda each: each.outcome.memory_bytes)
    taken, usable = least.outcome.memory_bytes, least.outcome.usable_bytes
    lacks = f"takes {format_bytes(taken)} of {format_bytes(usable)}"
    if taken <= usable:
        lacks += " of the GPU, and too much of its host or drives"
    return [("nearest", f"{least.name()}: {lacks}")]
