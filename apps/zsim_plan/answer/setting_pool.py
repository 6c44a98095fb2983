"""Groups of settings with lower bounds, for the search of the best setting."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from zsim_plan.answer.best_question import Question
from zsim_plan.answer.setting_bound import SettingBound
from zsim_plan.answer.setting_trial import Bounder, SettingOutcome
from zsim_plan.search.plain_settings import plainest
from zsim_plan.search.search import SettingBranch
from zsim_plan.search.space import RefusedSettings, SettingGroup


@dataclass(slots=True)
class SettingPool:
    """Groups of settings with their bounds, and refused groups.

    Groups get bounds by `plain`, then by `bound_others`. Groups that keep states or checkpoints off
    the device are held back until `release`. A bound holds for the defaults of its group; `lowered`
    computes that of all its knobs. With `sure_only`, groups that cannot surely fit get no bound of
    the step time, since they cannot win over a setting that does.
    """

    question: Question
    groups: list[SettingGroup] = field(default_factory=list[SettingGroup])
    bounds: list[SettingBound] = field(default_factory=list[SettingBound])
    refused: Counter[str] = field(default_factory=Counter[str])
    settings: int = 0
    sure_only: bool = False
    unbounded: dict[int, SettingGroup] = field(default_factory=dict[int, SettingGroup])
    held_back: list[SettingGroup] = field(default_factory=list[SettingGroup])
    _bounder: Bounder = field(default_factory=Bounder)
    _lowered: set[int] = field(default_factory=set[int])
    _full: dict[object, SettingBound] = field(default_factory=dict[object, SettingBound])
    _unsure: dict[object, SettingBound] = field(default_factory=dict[object, SettingBound])

    def __post_init__(self) -> None:
        for each in self.question.space().groups():
            if isinstance(each, RefusedSettings):
                self.refused[each.why] += each.count
                self.settings += each.count
                continue
            self.settings += len(each.knobs)
            if each.moves_states:
                self.held_back.append(each)
            else:
                self.unbounded[len(self.unbounded)] = each

    def plain(self) -> Iterator[int]:
        """Yield the plainest group that may fit, of each runtime, stage and checkpointing.

        Without full checkpointing it must surely fit by its bound, except of the first runtime.
        """
        groups = [*self.unbounded.values()]
        for places in plainest(groups):
            for place in places:
                known = len(self.groups)
                if (group := self.unbounded.pop(place, None)) is not None:
                    self._bound(group)
                if len(self.groups) > known:
                    if self._is_plain(known):
                        yield known
                    break

    def _is_plain(self, place: int) -> bool:
        group = self.groups[place]
        is_full = group.changes["activations.checkpointing"] == "full"
        return is_full or group.comes_first or not self.bounds[place].is_unsure

    def bound_others(self) -> Iterator[None]:
        """Bound the other groups; yield after each."""
        for number in [*self.unbounded]:
            self._bound(self.unbounded[number])
            del self.unbounded[number]
            yield

    def release(self) -> None:
        """Add the groups that were held back, with their bounds."""
        held_back, self.held_back = self.held_back, []
        for each in held_back:
            self._bound(each)

    def _bound(self, group: SettingGroup) -> None:
        """Add a group with its bound, or count the reason why it cannot run."""
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
            bound = SettingBound(why_not="takes longer than --within even by its bound")
        if bound.why_not:
            self.refused[bound.why_not] += len(group.knobs)
        else:
            self.groups.append(group)
            self.bounds.append(bound)

    def lowered(self, place: int) -> SettingBound | None:
        """Return the bound of all settings of a group; None if it was requested before."""
        if place in self._lowered:
            return None
        self._lowered.add(place)
        group, default = self.groups[place], self.bounds[place]
        return self._bounder.least_of_all(default, group, self._tables(group))

    def branches(self, start: int = 0) -> list[SettingBranch]:
        """Return the groups from index `start` as branches of a search."""
        value = self.question.value
        return [
            SettingBranch(
                bound=value(bound.step_time_s * bound.slower, group.fleet.gpus),
                floor=value(bound.kernels_s * bound.slower, group.fleet.gpus),
                memory_bytes=bound.memory_bytes,
                settings=len(group.knobs),
                is_unsure=bound.is_unsure,
                family=f"{group.family} {group.fleet.gpus} {dict(group.fleet.changes)}",
                likely=group.likely,
                larger=group.larger,
            )
            for group, bound in zip(self.groups[start:], self.bounds[start:], strict=True)
        ]

    def tables(self, place: int, number: int) -> dict[str, Any]:
        """Return the scenario tables of a setting of a group."""
        return self.question.scenario(self.groups[place].setting(number))

    def full(self, place: int, number: int) -> SettingOutcome | None:
        """Return the outcome of a setting whose bound of memory exceeds the GPU; else None."""
        return self._bounder.full(self.tables(place, number)) if number else None

    def _tables(self, group: SettingGroup) -> Callable[[int], dict[str, Any]]:
        return lambda number: self.question.scenario(group.setting(number))


def _without_batch(group: SettingGroup, *, chunks: bool = True) -> object:
    """Return a key that is equal for groups that differ only in the micro-batch.

    Without `chunks` the layers of their chunks may differ, too.
    """
    changes = group.changes if chunks else group.without_chunks
    return group.fleet.gpus, tuple(
        (key, value) for key, value in changes.items() if not key.startswith("train.")
    )
