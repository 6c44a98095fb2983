"""Branch and bound over groups of settings: choose the next trial, and exclude groups.

A group is excluded if its lower bound is not better than the best value found (Land and Doig 1960,
"An automatic method of solving discrete programming problems"). Groups are tried in the order of
estimates, which make the search faster but do not change its result.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from math import inf, log2

FRONT_EVERY = 5
"""Period of trials that look for less memory instead of a better value."""

NEAR = 0.05
"""Gap above which such trials are half as frequent."""

LATER_EVERY = 4
"""Period of trials of plain settings that cannot win, until the gap is at most `NEAR`."""

FRONT_STEP = 0.85
"""Such a trial needs a memory bound below this fraction of the least memory found."""

FRONT_MOST = 12
"""Maximum number of trials spent on less memory."""

GAP_EVERY = 3
"""Period of trials of the group whose bound leaves the largest gap, if it is expected to fit."""

TIGHT_EVERY = 6
"""Period of trials of that group if it is expected not to fit. They find no answer, and to write a
schedule takes half as long as to simulate it."""

LEAST_MOST = 24
"""Number of families to try before settings that are held back are added."""

UNFIT_STEP = 0.05
"""Penalty of a group for each of its settings that did not fit, as a fraction."""

COST_STEP = 0.01
"""Fraction by which the expected value of a branch must be better to justify a simulation of twice
the operations."""

TIGHT = 1.25
"""Penalty factor of settings that are expected not to fit."""

BESIDE = 0.05
"""Fraction of the memory expected in addition to a bound, before any simulation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingBranch:
    """A group of settings as a branch of the search.

    Attributes:
        bound: lower bound of the values of all its settings, for the knobs considered so far.
        floor: lower bound for any knobs.
        memory_bytes: lower bound of their device memory.
        settings: number of settings.
        is_unsure: True if none of them can surely fit; such a branch cannot win over an answer.
        family: key of branches whose values exceed their bounds by similar factors.
        likely: expected ratio of a value to its bound, before a branch of the family was tried.
        cost: expected operations of a simulation, in a unit that all branches share.
        larger: for each setting, the settings that keep at least as much memory, without the
            buffers of collectives.
    """

    bound: float
    floor: float = inf
    memory_bytes: int
    settings: int
    is_unsure: bool = False
    family: str
    likely: float = 1.0
    cost: float = 1.0
    larger: Sequence[frozenset[int]] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Result of simulating one setting.

    Attributes:
        value: value to minimize; None if it could not run.
        is_answer: True if it fits and meets every limit.
        memory_bytes: device memory that it needs.
        memory_share: this memory divided by that up to which a setting surely fits.
        is_unsure: True for an answer that may not fit; answers that surely fit win over it.
        keeps_too_much: True if its memory without buffers of collectives exceeds the usable memory.
        keeps_nearly_all: True if this memory leaves almost no free memory.
    """

    value: float | None
    is_answer: bool
    is_unsure: bool = False
    keeps_too_much: bool = False
    keeps_nearly_all: bool = False
    memory_bytes: int = 0
    memory_share: float = 0.0


@dataclass(slots=True)
class _Progress:
    """Progress of a branch; `left` are the waiting settings, the next one last.

    `tight` are those that keep at least as much memory as a setting with almost no free memory.
    """

    left: list[int]
    started: int = 0
    unfit: int = 0
    ended: int = 0
    passed_over: int = 0
    first: Trial | None = None
    tight: set[int] = field(default_factory=set[int])


@dataclass(slots=True)
class Search:
    """A search among `branches`; a value within `tolerance` of the best counts as found.

    Attributes:
        usable_bytes: device memory of each setting up to which it surely fits.
        always: branches whose first settings are tried before all others.
        first: branches whose first settings are tried next, unless they cannot win. Until something
            fits, they alternate with the branches of least memory.
        holds_back: True if there are branches to `add` in case nothing fits. Until something fits,
            only the smallest branch of each family is tried, in at most `LEAST_MOST` families.
        sharper: returns a tighter bound of a branch, which takes longer to compute; None if there
            is none. The search calls it once for each branch, before it tries the branch.
    """

    branches: Sequence[SettingBranch]
    usable_bytes: int
    tolerance: float = 0.01
    always: Sequence[int] = ()
    first: Sequence[int] = ()
    holds_back: bool = False
    sharper: Callable[[int], float] | None = None
    best: float = inf
    _progress: list[_Progress] = field(init=False)
    _ratios: defaultdict[str, list[float]] = field(init=False)
    _beside: defaultdict[str, list[float]] = field(init=False)
    _least_memory: float = field(init=False, default=inf)
    _picks: int = field(init=False, default=0)
    _front_picks: int = field(init=False, default=0)
    _alternates: int = field(init=False, default=0)
    _families: set[str] = field(init=False)
    _sharp: set[int] = field(init=False, default_factory=set[int])
    _plain: deque[tuple[int, bool]] = field(init=False)
    _later: deque[int] = field(init=False, default_factory=deque[int])
    _waits: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self._progress = [_progress(each) for each in self.branches]
        self._ratios, self._beside = defaultdict(list), defaultdict(list)
        self._families = set()
        self._plain = deque([(each, True) for each in self.always])
        self._plain.extend((each, False) for each in self.first)

    def add(self, branches: Sequence[SettingBranch]) -> None:
        """Add branches that were held back."""
        self.extend(branches)
        self.holds_back = False

    def extend(
        self,
        branches: Sequence[SettingBranch],
        *,
        always: Sequence[int] = (),
        first: Sequence[int] = (),
        later: Sequence[int] = (),
    ) -> None:
        """Add branches, and those to try next, as at the start of a search.

        First settings of `later` branches are tried in any case, too, but behind better ones.
        """
        self._later.extend(later)
        self.branches = [*self.branches, *branches]
        self._progress += [_progress(each) for each in branches]
        self._plain.extend((each, True) for each in always)
        self._plain.extend((each, False) for each in first)

    def seek_least_again(self) -> None:
        """Allow `LEAST_MOST` more families, because branches of other GPUs follow."""
        self._families.clear()

    def next(self) -> tuple[int, int] | None:
        """Return the branch and the index of the setting to try next.

        None if none can win, or if the results of running trials are needed first.
        """
        found = self._alternate_pick()
        if found is None:
            found = self._plain_pick()
        if found is None:
            found = self._later_pick()
        if found is None and self.best == inf and self.holds_back:
            found = self._least_pick()
        elif found is None:
            found = self._pick()
        if found is None:
            found = self._next_later()
        if found is None:
            return None
        progress = self._progress[found]
        progress.started += 1
        return found, progress.left.pop()

    def _alternate_pick(self) -> int | None:
        """Return the branch with the least memory at every second call until a setting fits.

        None at the other calls, and while no plain setting waits or one that is always tried does.
        Large plain settings that do not fit could use all operations before any that does.
        """
        if self.best < inf or not self._plain or self._plain[0][1]:
            return None
        self._alternates += 1
        if self._alternates % 2 == 0:
            return None
        return self._least_pick() if self.holds_back else self._smallest_pick()

    def _plain_pick(self) -> int | None:
        """Return the branch of the next plain setting; None if there is none."""
        while self._plain:
            place, is_certain = self._plain.popleft()
            if not self._progress[place].started and (
                is_certain or self._may_win(self.branches[place])
            ):
                return place
        return None

    def _later_pick(self) -> int | None:
        """Return the branch of a plain setting that cannot win, if it is its turn."""
        if not self._later:
            return None
        self._waits += 1
        is_due = self.gap <= NEAR or self._waits % LATER_EVERY == 0
        return self._next_later() if is_due else None

    def _next_later(self) -> int | None:
        while self._later:
            place = self._later.popleft()
            if not self._progress[place].started:
                return place
        return None

    def _least_pick(self) -> int | None:
        """Return the branch with the least memory in a family without a trial; None if none."""
        waits = not self._families and any(each.started > each.ended for each in self._progress)
        if waits or len(self._families) >= LEAST_MOST:
            return None  # a plain setting may fit
        sizes = [
            (branch.memory_bytes, branch.bound, index)
            for index, branch in enumerate(self.branches)
            if branch.family not in self._families and not self._progress[index].started
        ]
        if not sizes:
            return None
        found = min(sizes)[-1]
        self._families.add(self.branches[found].family)
        return found

    def _pick(self) -> int | None:
        """Return the branch to try next after the plain settings; None if there is none."""
        self._picks += 1
        while (found := self._picked()) is not None and self.sharpen(found):
            pass
        return found

    def _picked(self) -> int | None:
        """Return the branch to try next by the bounds so far; None if there is none."""
        found = None
        if self.best == inf and self._picks % 2 == 0:
            found = self._smallest_pick()
        elif self._picks % (FRONT_EVERY if self.gap <= NEAR else 2 * FRONT_EVERY) == 0:
            found = self._front_pick()
        if found is None and self._picks % GAP_EVERY == 0:
            found = self._lowest_that_fits()
        elif found is None and self._picks % TIGHT_EVERY == 1:
            found = self._lowest_that_is_tight()
        found = self._best_pick() if found is None else found
        return self._front_pick() if found is None else found

    def record(self, branch: int, number: int, trial: Trial) -> None:
        """Record the result of a setting."""
        progress, known = self._progress[branch], self.branches[branch]
        progress.ended += 1
        if number == 0:
            progress.first = trial
        if trial.memory_bytes:
            self._beside[known.family].append(trial.memory_bytes - known.memory_bytes)
        if trial.value is not None:
            self._ratios[known.family].append(trial.value / known.bound if known.bound else 1.0)
        if trial.is_answer and trial.value is not None and not trial.is_unsure:
            self.best = min(self.best, trial.value)
            self._least_memory = min(self._least_memory, trial.memory_bytes)
        else:
            progress.unfit += 1
        if known.larger and trial.keeps_too_much:
            _pass_over(progress, known.larger[number])
        elif known.larger and trial.keeps_nearly_all:
            progress.tight |= known.larger[number]
        if self.best < inf:  # settings at the edge of memory cannot win any more
            for each in self._progress:
                _pass_over(each, each.tight)

    def lower_bound(self, branch: int, bound: float) -> None:
        """Replace the bound of a branch by one that includes all its knobs."""
        self._change(branch, replace(self.branches[branch], bound=bound, floor=inf))

    def sharpen(self, branch: int) -> bool:
        """Replace the bound of a branch by a tighter one; return False if there is none."""
        known = self.branches[branch]
        if self.sharper is None or branch in self._sharp:
            return False
        self._sharp.add(branch)
        bound = self.sharper(branch)
        if bound <= known.bound:
            return False
        self._change(branch, replace(known, bound=bound))
        return True

    def sharpen_lowest(self) -> None:
        """Sharpen bounds until that of the lowest branch that may win is sharp."""
        while (place := self.lowest()) is not None and self.sharpen(place):
            pass

    def _change(self, branch: int, known: SettingBranch) -> None:
        branches = list(self.branches)
        branches[branch] = known
        self.branches = branches

    def near(self) -> list[int]:
        """Return branches with remaining settings whose defaults lost, but whose knobs may win."""
        return [
            index
            for index, branch in enumerate(self.branches)
            if self._progress[index].left
            and not self._may_win(branch)
            and not branch.is_unsure
            and branch.floor < self.best * (1 - self.tolerance)
        ]

    def lowest(self) -> int | None:
        """Return the branch with the lowest bound whose remaining settings may win; None if none.

        None before anything was found.
        """
        if self.best == inf:
            return None
        left = [
            (branch.bound, index)
            for index, branch in enumerate(self.branches)
            if self._progress[index].left and self._may_win(branch)
        ]
        return min(left)[1] if left else None

    @property
    def gap(self) -> float:
        """Fraction by which an untried setting may be better than the best; 1 without a best."""
        left = [
            branch.bound
            for branch, progress in zip(self.branches, self._progress, strict=True)
            if progress.ended + progress.passed_over < branch.settings
            and not (branch.is_unsure and self.best < inf)
        ]
        if self.best == inf:
            return 1.0 if left else 0.0
        return max(0.0, 1 - min(left, default=inf) / self.best)

    def open_settings(self) -> int:
        """Return the number of settings that were not tried and may still win."""
        return sum(
            branch.settings - progress.ended - progress.passed_over
            for branch, progress in zip(self.branches, self._progress, strict=True)
            if self._may_win(branch)
        )

    def is_bounded_out(self, branch: int) -> bool:
        """Return True if the bound of a branch is not better than the best value."""
        return not self._may_win(self.branches[branch])

    def tried(self, branch: int) -> int:
        """Return the number of settings of a branch that were tried."""
        return self._progress[branch].ended

    def passed_over(self, branch: int) -> int:
        """Return the number of settings skipped because a smaller one filled the memory."""
        return self._progress[branch].passed_over

    def _may_win(self, branch: SettingBranch) -> bool:
        if self.best == inf:
            return True
        return not branch.is_unsure and branch.bound < self.best * (1 - self.tolerance)

    def _best_pick(self) -> int | None:
        estimates = [
            (self._estimate(index) * (1 + COST_STEP * log2(branch.cost)), index)
            for index, branch in enumerate(self.branches)
            if self._has_next(index) and self._may_win(branch)
        ]
        return min(estimates)[1] if estimates else None

    def _smallest_pick(self) -> int | None:
        """Return the branch with the smallest memory bound; for alternate trials until one fits."""
        sizes = [
            (branch.memory_bytes, branch.bound, index)
            for index, branch in enumerate(self.branches)
            if not self._progress[index].started
        ]
        return min(sizes)[-1] if sizes else None

    def _lowest_that_fits(self) -> int | None:
        """Return the branch with the lowest bound that may win and is expected to fit."""
        if self.best == inf:
            return None
        bounds = [
            (branch.bound, index)
            for index, branch in enumerate(self.branches)
            if self._has_next(index) and self._may_win(branch) and self._share(index) <= 1
        ]
        return min(bounds)[1] if bounds else None

    def _lowest_that_is_tight(self) -> int | None:
        """Return the branch with the lowest bound that may win, if it is expected not to fit."""
        if self.best == inf:
            return None
        bounds = [
            (branch.bound, index)
            for index, branch in enumerate(self.branches)
            if self._has_next(index) and self._may_win(branch)
        ]
        found = min(bounds)[1] if bounds else None
        return None if found is None or self._share(found) <= 1 else found

    def _front_pick(self) -> int | None:
        """Return a branch that may need less memory than all settings found; None if none."""
        if self.best == inf or self._front_picks >= FRONT_MOST:
            return None
        most = FRONT_STEP * self._least_memory
        estimates = [
            (self._estimate(index), index)
            for index, branch in enumerate(self.branches)
            if not self._progress[index].started and branch.memory_bytes <= most
        ]
        if not estimates:
            return None
        self._front_picks += 1
        return min(estimates)[1]

    def _has_next(self, index: int) -> bool:
        """Return True if a branch has a setting to try now; its first must finish before others."""
        progress = self._progress[index]
        waits = progress.started > 0 and progress.first is None
        return bool(progress.left) and not waits

    def _estimate(self, index: int) -> float:
        """Estimate the value of the next setting of a branch, from its first setting if known."""
        branch, progress = self.branches[index], self._progress[index]
        first = progress.first
        is_sure = first is not None and first.is_answer and not first.is_unsure
        if is_sure and first is not None and first.value is not None:
            return first.value * (1 + 1e-3 * progress.started)
        delay, share = 1 + UNFIT_STEP * progress.unfit, self._share(index)
        if share > 1:
            delay *= TIGHT * share
        return branch.bound * _middle(self._ratios, branch.family, branch.likely) * delay

    def _share(self, index: int) -> float:
        """Estimate the memory of a branch as a share of that up to which a setting surely fits."""
        branch, first = self.branches[index], self._progress[index].first
        if first is not None:
            return first.memory_share
        if not self.usable_bytes:
            return 0.0
        beside = _middle(self._beside, branch.family, BESIDE * self.usable_bytes)
        return (branch.memory_bytes + beside) / self.usable_bytes


def _progress(branch: SettingBranch) -> _Progress:
    return _Progress([*reversed(range(branch.settings))])


def _pass_over(progress: _Progress, numbers: Set[int]) -> None:
    """Remove settings from those that wait."""
    kept = [each for each in progress.left if each not in numbers]
    progress.passed_over += len(progress.left) - len(kept)
    progress.left = kept


def _middle(known: Mapping[str, list[float]], family: str, otherwise: float) -> float:
    """Return the median of the numbers of a family, else `otherwise`."""
    found = known.get(family)
    return sorted(found)[len(found) // 2] if found else otherwise
