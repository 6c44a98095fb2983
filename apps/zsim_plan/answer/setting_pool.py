"""Groups of settings with lower bounds, for the search of the best setting."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any

from zsim_plan.answer.best_question import Question
from zsim_plan.answer.group_bounds import GroupBounder, bounds_of, in_parts
from zsim_plan.answer.setting_bound import SettingBound
from zsim_plan.answer.setting_trial import SettingOutcome
from zsim_plan.search.plain_settings import plainest
from zsim_plan.search.search import SettingBranch
from zsim_plan.search.space import RefusedSettings, SettingGroup


@dataclass(slots=True)
class SettingPool:
    """Groups of settings with their bounds, and refused groups.

    Groups get bounds by `plain`, then by `bound_others`. If the question asks for the fewest GPUs,
    `bound_more_gpus` instead bounds groups with the next larger number of GPUs. Groups that keep
    states or checkpoints off the device are held back until `release`. A bound holds for the
    defaults of its group; `lowered` computes that of all its knobs. See `GroupBounder` for
    `sure_only`.
    """

    question: Question
    groups: list[SettingGroup] = field(default_factory=list[SettingGroup])
    bounds: list[SettingBound] = field(default_factory=list[SettingBound])
    refused: Counter[str] = field(default_factory=Counter[str])
    settings: int = 0
    sure_only: bool = False
    unbounded: dict[int, SettingGroup] = field(default_factory=dict[int, SettingGroup])
    held_back: list[SettingGroup] = field(default_factory=list[SettingGroup])
    _bounder: GroupBounder = field(init=False)
    _lowered: set[int] = field(default_factory=set[int])

    def __post_init__(self) -> None:
        self._bounder = GroupBounder(question=self.question)
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
        """Yield the plainest group that surely fits by its bound, for each kind of plain setting.

        Until one does, also groups that may fit: with full checkpointing, or of the first runtime.
        """
        groups, none_fits = [*self.unbounded.values()], True
        for places in plainest(groups):
            found = self._plainest(places, groups)
            if found is None:
                continue
            if not self.bounds[found].is_unsure:
                none_fits = False
                yield found
            elif none_fits and self._may_be_plain(found):
                yield found

    def _plainest(self, places: Iterable[int], groups: Sequence[SettingGroup]) -> int | None:
        """Bound groups until one surely fits; return it, else the first that may fit.

        Of each pair of tensor and pipeline degrees, only one that may fit is considered.
        """
        first, known = None, set[object]()
        for place in places:
            degrees = groups[place].degrees
            if degrees in known or (group := self.unbounded.pop(place, None)) is None:
                continue
            self._add(group, self._bounder.bound(group))
            if not self.groups or self.groups[-1] is not group:
                continue  # it cannot run
            found = len(self.groups) - 1
            if not self.bounds[found].is_unsure:
                return found
            known.add(degrees)
            first = found if first is None else first
        return first

    def _may_be_plain(self, place: int) -> bool:
        group = self.groups[place]
        return group.comes_first or group.changes["activations.checkpointing"] == "full"

    def bound_others(self, executor: Executor) -> Iterator[None]:
        """Bound the other groups with `executor`; yield after each part of them.

        Groups are added in the order of the space, whichever part ends first.
        """
        yield from self._bound_all(executor, self.unbounded)
        self.unbounded = {}

    def bound_more_gpus(self, executor: Executor) -> bool:
        """Bound and add groups of more and more GPUs until one surely fits by its bound.

        Return False if there were none left.
        """
        known = len(self.groups)
        while self.unbounded and not any(not each.is_unsure for each in self.bounds[known:]):
            least = min(group.fleet.gpus for group in self.unbounded.values())
            chosen = {
                place: group for place, group in self.unbounded.items() if group.fleet.gpus == least
            }
            for _ in self._bound_all(executor, chosen):
                pass
            self._leave_out(chosen)
        return len(self.groups) > known

    def leave_more_gpus(self) -> None:
        """Add the other groups without a bound: with more GPUs than an answer they cannot win."""
        for group in self.unbounded.values():
            self._add(group, SettingBound())
        self.unbounded = {}

    def _leave_out(self, places: Iterable[int]) -> None:
        left_out = {*places}
        self.unbounded = {
            place: group for place, group in self.unbounded.items() if place not in left_out
        }

    def release(self, executor: Executor) -> None:
        """Add the groups that were held back, with their bounds."""
        for _ in self._bound_all(executor, dict(enumerate(self.held_back))):
            pass
        self.held_back = []

    def _bound_all(self, executor: Executor, groups: Mapping[int, SettingGroup]) -> Iterator[None]:
        """Bound `groups` in parts and add them; yield after each part."""
        parts = in_parts(groups.items())
        running = [
            executor.submit(bounds_of, self.question, [*each.values()], sure_only=self.sure_only)
            for each in parts
        ]
        bounds: dict[int, SettingBound] = {}
        for part, future in zip(parts, running, strict=True):
            bounds.update(zip(part, future.result(), strict=True))
            yield
        for number, group in groups.items():
            self._add(group, bounds[number])

    def _add(self, group: SettingGroup, bound: SettingBound) -> None:
        """Add a group with its bound, or count the reason why it cannot run."""
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
        return self._bounder.lowered(self.bounds[place], self.groups[place])

    def sharpened(self, place: int) -> SettingBound:
        """Return the tightest known bound of a group, and keep it."""
        self.bounds[place] = self._bounder.sharpened(self.bounds[place], self.groups[place])
        return self.bounds[place]

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
                cost=group.cost,
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
