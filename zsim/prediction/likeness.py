"""Judged runs that are like a run, and how far off their predictions are.

**Like** are runs that have the same runtime, constants and tier of states, compute in 16 bits or in
the same other format, use the same axes, shard parameters or do not, are on one node or on several,
and whose sizes (degrees of the axes, nodes, tokens of a micro-batch, width, bandwidth and
oversubscription of the fabric where it is used) are within a factor of `FACTOR`. Memory depends on
neither constants nor fabric, so these are not asked of it. Of a publication's more than `NEAREST`
the nearest count: by the sum of squares of the logarithms (base 2) of the sizes' ratios, and 1 for
each of precision, architecture, attention, checkpointing and compilation that differs.

**Conformal.** If the run were drawn as the n like ones were, its error would be at most the
ceil(0.9 (n + 1))-th smallest of theirs in at least nine of ten draws (Vovk, Gammerman, Shafer 2005,
"Algorithmic Learning in a Random World"; Lei et al. 2018, "Distribution-Free Predictive Inference
for Regression"). Fewer than `FEWEST` runs say nothing at that level. Runs of one publication are
more alike than those of several, so the widest percentile is stated: that of all, or of any
publication with as many. `zsim validate trust` leaves each sweep, and each publication, out in
turn, and counts how often this holds.

**Elsewhere.** Where too few are alike, publications speak instead of runs: those that have runs
with a pipeline or without, on one node or on several, with states in the same tier and in 8-bit
floats or not, as the one asked about; whatever trainer and constants. No size of it may be beyond
all of theirs by more than `FACTOR`. Each has a percentile of its own, and the largest of `g` is at
least that of one more publication in g of g + 1 draws (groups are exchanged as runs are above:
Dunn, Wasserman, Ramdas 2023, "Distribution-Free Prediction Sets for Two-Layer Hierarchical
Models").
Fewer than `FEWEST_PUBLICATIONS` say nothing: with as many that is so in nine of ten draws.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from math import ceil, log2
from statistics import median

from zsim.prediction.evidence import JudgedRun
from zsim.prediction.run_features import RunFeatures

FACTOR = 4
"""Largest ratio of the sizes of runs that are alike."""

NEAREST = 29
"""Like runs of a publication that count at most: the 27th of 29 errors has exactly nine of ten
ranks up to it. Fewer state too little of memory, more too much of pipelines (docs/validation.md has
what was tried)."""

LEVEL = 0.9
"""Share of like runs whose error is stated to be no larger."""

FEWEST = 9
"""Fewest runs of which one is the ceil(0.9 (n + 1))-th."""

FEWEST_PUBLICATIONS = 9
"""Fewest publications whose widest percentile is stated of another one: of so many it is at least
that of one more in `LEVEL` of all draws."""

AXES = ("tensor", "pipeline", "context", "replicate")
FABRIC = ("gpu_bytes_per_s", "oversubscription")
SIZES = (*AXES, "nodes", "tokens", "width")
KINDS = ("precision", "architecture", "attention", "checkpointing", "compiled")
FLOAT8 = "float8"
SIXTEEN_BITS = ("fp16", "bf16")
"""Formats that take the same bytes and, on every GPU with both, reach the same rates."""

GATHERS = 3
"""The stage that shards parameters."""


class JudgedQuantity(StrEnum):
    """Quantity whose predictions are judged."""

    STEP_TIME = "step time"
    PEAK_MEMORY = "peak memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class Likeness:
    """Judged runs like a run, nearest first, with the errors of their predictions.

    Attributes:
        errors: signed, as fractions: less than 0 where the prediction is too small.
    """

    runs: tuple[JudgedRun, ...]
    errors: tuple[float, ...]

    @property
    def median(self) -> float:
        """Return the median of the absolute errors."""
        return median(map(abs, self.errors))

    @property
    def bias(self) -> float:
        """Return the median of the signed errors."""
        return median(self.errors)

    @property
    def slower(self) -> float:
        """Return how many times as long as predicted they took, in the median; 1 if no longer.

        Too few to state an error say nothing.
        """
        if self.bound is None:
            return 1.0
        return max(1.0, median(1 / (1 + error) for error in self.errors))

    @property
    def bound(self) -> float | None:
        """Return the error that nine of ten predictions stay within; None of too few runs."""
        together = percentile(self.errors)
        if together is None:
            return None
        errors: defaultdict[str, list[float]] = defaultdict(list)
        for run, error in zip(self.runs, self.errors, strict=True):
            errors[run.publication].append(error)
        own = map(percentile, errors.values())
        return max([together, *(bound for bound in own if bound is not None)])


def alike(
    asked: RunFeatures,
    runs: Sequence[JudgedRun],
    quantity: JudgedQuantity = JudgedQuantity.STEP_TIME,
) -> Likeness:
    """Return those of `runs` that are like one with the features `asked`."""
    found: list[tuple[float, int, JudgedRun]] = []
    kind = kind_of(asked, quantity)
    for number, run in enumerate(runs):
        if kind_of(run.features, quantity) == kind and error_of(run, quantity) is not None:
            steps = _steps(asked, run.features, quantity)
            if max(steps.values()) <= log2(FACTOR):
                found.append((_distance(asked, run.features, steps.values()), number, run))
    counted: Counter[str] = Counter()
    nearest: list[JudgedRun] = []
    for _, _, run in sorted(found, key=lambda each: each[:2]):
        if counted[run.publication] < NEAREST:
            counted[run.publication] += 1
            nearest.append(run)
    errors = [error for run in nearest if (error := error_of(run, quantity)) is not None]
    return Likeness(runs=tuple(nearest), errors=tuple(errors))


@dataclass(frozen=True, slots=True, kw_only=True)
class Elsewhere:
    """Publications of runs that are no more than broadly like a run.

    Attributes:
        bounds: by publication, the error that nine of ten of its predictions stay within, or all
            where there are too few of them for a percentile.
    """

    bounds: Mapping[str, float]

    @property
    def bound(self) -> float | None:
        """Return the largest of them; None of too few publications."""
        if len(self.bounds) < FEWEST_PUBLICATIONS:
            return None
        return max(self.bounds.values())


def elsewhere(
    asked: RunFeatures,
    runs: Sequence[JudgedRun],
    quantity: JudgedQuantity = JudgedQuantity.STEP_TIME,
) -> Elsewhere:
    """Return what publications of runs broadly like one with the features `asked` say."""
    kind = broad_kind_of(asked, quantity)
    found = [
        run
        for run in runs
        if broad_kind_of(run.features, quantity) == kind and error_of(run, quantity) is not None
    ]
    if not _spanned(asked, found, quantity):
        return Elsewhere(bounds={})
    errors: defaultdict[str, list[float]] = defaultdict(list)
    for run in found:
        error = error_of(run, quantity)
        assert error is not None
        errors[run.publication].append(error)
    bounds: dict[str, float] = {}
    for publication, some in errors.items():
        own = percentile(some)
        bounds[publication] = max(map(abs, some)) if own is None else own
    return Elsewhere(bounds=bounds)


@cache
def broad_kind_of(found: RunFeatures, quantity: JudgedQuantity) -> tuple[object, ...]:
    """Return what runs must share to be broadly alike."""
    kind = (found.pipeline > 1, found.states, FLOAT8 in found.precision)
    return kind if quantity is JudgedQuantity.PEAK_MEMORY else (*kind, found.nodes > 1)


def _spanned(asked: RunFeatures, runs: Sequence[JudgedRun], quantity: JudgedQuantity) -> bool:
    """Return whether no size of `asked` is beyond those of all `runs` by more than `FACTOR`."""
    sizes: tuple[str, ...] = SIZES
    if quantity is JudgedQuantity.PEAK_MEMORY:
        sizes = (*AXES, "tokens", "width")
    elif asked.nodes > 1 and asked.oversubscription:
        sizes += FABRIC
    for name in sizes:
        there = [value for run in runs if (value := getattr(run.features, name))]
        least, most = min(there, default=0), max(there, default=0)
        if not least / FACTOR <= getattr(asked, name) <= most * FACTOR:
            return False
    return True


def percentile(errors: Iterable[float]) -> float | None:
    """Return the error that nine of ten draws stay within; None of too few errors."""
    ordered = sorted(map(abs, errors))
    rank = ceil(LEVEL * (len(ordered) + 1))
    return ordered[rank - 1] if rank <= len(ordered) else None


def unlike(
    asked: RunFeatures,
    runs: Sequence[JudgedRun],
    quantity: JudgedQuantity = JudgedQuantity.STEP_TIME,
) -> tuple[JudgedRun | None, list[str]]:
    """Return the run that differs least from one with the features `asked`, and in what, in words.

    None of a table that is empty.
    """
    found: list[tuple[int, float, int, JudgedRun, list[str]]] = []
    for number, run in enumerate(runs):
        if error_of(run, quantity) is not None:
            words = _differences(asked, run.features, quantity)
            same_kind = kind_of(asked, quantity) == kind_of(run.features, quantity)
            steps = _steps(asked, run.features, quantity)
            distance = _distance(asked, run.features, steps.values())
            found.append((0 if same_kind else len(words), distance, number, run, words))
    if not found:
        return None, []
    *_, nearest, words = min(found, key=lambda each: each[:3])
    return nearest, words


def not_shown(asked: RunFeatures, runs: Sequence[JudgedRun]) -> list[str]:
    """Return in words what is so in a run with the features `asked` and in none of `runs`."""
    words = [
        _kind_word(name, getattr(asked, name))
        for name in KINDS
        if all(getattr(run.features, name) != getattr(asked, name) for run in runs)
    ]
    sizes = (*SIZES, *(FABRIC if asked.nodes > 1 else ()))
    for name in sizes:
        value = getattr(asked, name)
        there = [getattr(run.features, name) for run in runs]
        if not min(there) <= value <= max(there):
            least, most = (_value(name, end) for end in (min(there), max(there)))
            span = least if min(there) == max(there) else f"{least} to {most}"
            words.append(f"{_size_word(name, value)} (they have {span})")
    return words


def _differences(asked: RunFeatures, there: RunFeatures, quantity: JudgedQuantity) -> list[str]:
    """Return in words what keeps a run with the features `there` from being like `asked`."""
    ours, theirs = kind_of(asked, quantity), kind_of(there, quantity)
    words = [
        f"{_kind_words(name, asked)} (not {_kind_words(name, there)})"
        for name, our, their in zip(_kind_names(quantity), ours, theirs, strict=True)
        if our != their
    ]
    return words or [
        f"{_size_word(name, getattr(asked, name))} (not {_size_word(name, getattr(there, name))})"
        for name, steps in _steps(asked, there, quantity).items()
        if steps > log2(FACTOR)
    ]


def _kind_names(quantity: JudgedQuantity) -> tuple[str, ...]:
    names: tuple[str, ...] = ("runtime", "precision", "states", "stage", *AXES)
    if quantity is JudgedQuantity.PEAK_MEMORY:
        return names
    return (*names, "constants", "nodes", "network", "oversubscription")


@cache
def kind_of(found: RunFeatures, quantity: JudgedQuantity) -> tuple[object, ...]:
    """Return what runs must share to be alike, in the order of `_kind_names`."""
    several = found.nodes > 1
    kind: tuple[object, ...] = (
        found.runtime,
        _format(found.precision),
        found.states,
        found.stage == GATHERS,
        *(getattr(found, axis) > 1 for axis in AXES),
    )
    if quantity is JudgedQuantity.PEAK_MEMORY:
        return kind
    listed = several and not found.oversubscription
    return (*kind, found.constants, several, found.network, listed)


def _format(precision: str) -> str:
    return "16 bits" if precision in SIXTEEN_BITS else precision


def _steps(asked: RunFeatures, there: RunFeatures, quantity: JudgedQuantity) -> dict[str, float]:
    """Return by name the factors of two between sizes."""
    names: tuple[str, ...] = SIZES
    if quantity is JudgedQuantity.PEAK_MEMORY:
        names = (*AXES, "tokens", "width")
    elif min(asked.nodes, there.nodes) > 1 and asked.oversubscription and there.oversubscription:
        names += FABRIC
    return {name: abs(log2(getattr(asked, name)) - log2(getattr(there, name))) for name in names}


def _distance(asked: RunFeatures, there: RunFeatures, steps: Iterable[float]) -> float:
    other = [name for name in KINDS if getattr(asked, name) != getattr(there, name)]
    return sum(step**2 for step in steps) + len(other)


def error_of(run: JudgedRun, quantity: JudgedQuantity) -> float | None:
    """Return the error of a prediction as a fraction; None where nothing was published."""
    return run.step_error if quantity is JudgedQuantity.STEP_TIME else run.peak_error


def _kind_words(name: str, found: RunFeatures) -> str:
    """Return in words what a run has of what runs must share to be alike."""
    value = getattr(found, name)
    if name in AXES:
        return _size_word(name, value) if value > 1 else f"no {name} axis"
    words = {
        "runtime": f"{value}",
        "precision": f"{value}",
        "constants": f"constants of {value}",
        "stage": f"ZeRO stage {value}",
        "states": f"states in {value} memory",
        "nodes": "several nodes" if found.nodes > 1 else "one node",
        "network": f"collectives with{'' if value else 'out'} fitted constants",
        "oversubscription": f"a fabric of {'tiers' if value else 'listed links'}",
    }
    return words[name]


def _kind_word(name: str, value: object) -> str:
    if name == "compiled":
        return "compiled blocks" if value else "blocks that are not compiled"
    return f"{name} {value}"


def _size_word(name: str, value: float) -> str:
    shown = _value(name, value)
    words = {
        "pipeline": f"{shown} stages of a pipeline",
        "replicate": f"{shown} replicas of the shards",
        "nodes": f"{shown} node{'s' if value > 1 else ''}",
        "tokens": f"{shown} tokens a micro-batch",
        "width": f"width {shown}",
        "gpu_bytes_per_s": f"{shown} of NICs a GPU",
        "oversubscription": f"oversubscription {shown}",
    }
    return words.get(name, f"{name} degree {shown}")


def _value(name: str, value: float) -> str:
    if name == "gpu_bytes_per_s":
        return f"{value / 1e9:g} GB/s"
    return f"{value:g}" if name == "oversubscription" else f"{value:,}"


def kind_text(found: RunFeatures, quantity: JudgedQuantity) -> str:
    """Return in words what runs share that are of one kind with `found`."""
    words = [found.runtime]
    if found.stage == GATHERS:
        words.append("parameters sharded")
    words += [name for name in AXES if getattr(found, name) > 1]
    if found.states != "device":
        words.append(f"states on {found.states}")
    words.append(_format(found.precision))
    if quantity is JudgedQuantity.STEP_TIME:
        words += [found.constants, "several nodes" if found.nodes > 1 else "one node"]
    return ", ".join(words)
