"""Bounds of groups of settings, in parts that other processes can compute."""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from zsim_plan.answer.best_question import Question
from zsim_plan.answer.setting_bound import LATE, SettingBound
from zsim_plan.answer.setting_trial import Bounder, SettingOutcome
from zsim_plan.search.space import SettingGroup

PARTS = 32
"""Approximate number of parts of the groups, which processes bound at the same time."""


@dataclass(slots=True, kw_only=True)
class GroupBounder:
    """Computes bounds of groups; a group gets that of a smaller one that already has no memory.

    With `sure_only`, groups that cannot surely fit get no bound of the step time, since they cannot
    win over a setting that does.
    """

    question: Question
    sure_only: bool = False
    _bounder: Bounder = field(default_factory=Bounder)
    _full: dict[object, SettingBound] = field(default_factory=dict[object, SettingBound])
    _unsure: dict[object, SettingBound] = field(default_factory=dict[object, SettingBound])

    def bound(self, group: SettingGroup) -> SettingBound:
        """Return the bound of the defaults of a group."""
        full, key = self._full, _without_batch(group)
        smaller = full.get(key) or full.get(_without_batch(group, chunks=False))
        if smaller is None and self.sure_only:
            smaller = self._unsure.get(key)
        bound = smaller or self._bounder.bound_of_defaults(
            group, self._tables(group), sure_only=self.sure_only
        )
        if bound.is_full:  # the bound on memory grows with micro-batch and chunks
            full[key] = bound
        elif bound.is_unsure and self.sure_only:
            self._unsure[key] = bound
        if not bound.why_not and self.question.is_late(bound.kernels_s, group.fleet.gpus):
            return SettingBound(why_not=f"{LATE} even by its bound")
        return bound

    def lowered(self, default: SettingBound, group: SettingGroup) -> SettingBound:
        """Return the bound of all settings of a group, from that of its defaults."""
        return self._bounder.least_of_all(default, group, self._tables(group))

    def sharpened(self, bound: SettingBound, group: SettingGroup) -> SettingBound:
        """Return a tighter bound of a group, which takes longer to compute than `bound`."""
        return self._bounder.sharpened(bound, group, self._tables(group)(0))

    def full(self, tables: Mapping[str, Any]) -> SettingOutcome | None:
        """Return the outcome of a setting whose bound of memory exceeds the GPU; else None."""
        return self._bounder.full(tables)

    def _tables(self, group: SettingGroup) -> Callable[[int], dict[str, Any]]:
        return lambda number: self.question.scenario(group.setting(number))


def bounds_of(
    question: Question, groups: Sequence[SettingGroup], *, sure_only: bool
) -> list[SettingBound]:
    """Return the bounds of groups; another process can compute them."""
    bounder = GroupBounder(question=question, sure_only=sure_only)
    return [bounder.bound(each) for each in groups]


def in_parts(groups: Iterable[tuple[int, SettingGroup]]) -> list[dict[int, SettingGroup]]:
    """Return numbered groups in at most about `PARTS` parts.

    Groups that share models are in the same part.
    """
    sharing: dict[Hashable, dict[int, SettingGroup]] = {}
    for number, group in groups:
        sharing.setdefault(group.model_key, {})[number] = group
    least = sum(map(len, sharing.values())) // PARTS
    parts: list[dict[int, SettingGroup]] = []
    for each in sharing.values():
        if parts and len(parts[-1]) < least:
            parts[-1].update(each)
        else:
            parts.append({**each})
    return parts


def _without_batch(group: SettingGroup, *, chunks: bool = True) -> object:
    """Return a key that is equal for groups that differ only in the micro-batch.

    Without `chunks` the layers of their chunks may differ, too.
    """
    changes = group.changes if chunks else group.without_chunks
    return group.fleet.gpus, tuple(
        (key, value) for key, value in changes.items() if not key.startswith("train.")
    )
