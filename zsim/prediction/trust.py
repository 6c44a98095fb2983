"""Trust in a prediction, as a sentence: which judged runs are like it, and how far off they are."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from zsim.backend.backend import Job
from zsim.cluster.cluster import Cluster
from zsim.cluster.foreign_profile import foreign_words
from zsim.prediction.evidence import JudgedRun, judged_runs
from zsim.prediction.likeness import (
    FEWEST,
    Elsewhere,
    JudgedQuantity,
    Likeness,
    alike,
    elsewhere,
    not_shown,
    unlike,
)
from zsim.prediction.run_features import RunFeatures, features_of

PUBLISHED = (
    "unvalidated: times come from {gpu} rates, memory bandwidth and link speeds of {cluster} as "
    "published, and have not been judged against measurements"
)
NETWORK = (
    "unvalidated: times of kernels come from {gpu} rates and memory bandwidth as published; "
    "collectives take the constants of a network profile, which zsim validate network judges where "
    "they were measured"
)
MEASURED = "unvalidated: times were measured with zsim measure, and no run of training was judged"
NONE = "no judged run is like this one"

SIDED = 0.75
"""Share of errors on one side from which the answer says on which."""

SIDES = {
    JudgedQuantity.STEP_TIME: ("too short", "too long"),
    JudgedQuantity.PEAK_MEMORY: ("too low", "too high"),
}
STEP_TIME = JudgedQuantity.STEP_TIME


@dataclass(frozen=True, slots=True, kw_only=True)
class Trust:
    """How far to trust a prediction.

    Attributes:
        text: in one sentence.
        error: relative error that nine of ten predictions like it stay within; None where nobody
            knows.
        is_judged: whether judged runs that are like it state that error; otherwise it is that of
            other runs, or nobody's.
        slower: how many times as long as predicted judged runs like it took, in the median; 1 where
            they took no longer, or nobody knows.
    """

    text: str
    error: float | None = None
    is_judged: bool = False
    slower: float = 1.0


def trust(job: Job, aside: Sequence[str] = ()) -> Trust:
    """Return how far to trust the step time of a simulation of `job` with `aside` beside it."""
    cluster = job.cluster
    if cluster.gpu.measured is not None:
        return Trust(text=_measured(cluster))
    if cluster.gpu.kernels is None:
        sentence = PUBLISHED if cluster.network is None else NETWORK
        text = sentence.format(gpu=cluster.gpu.name, cluster=cluster.name)
        foreign = foreign_words(cluster)
        return Trust(text=f"{text}; {foreign}" if foreign else text)
    wires = "link speeds are as published"
    if cluster.network is not None:
        system = cluster.network.name.partition("/")[2]
        of = f" of one system, {system}," if system else ""
        wires = f"collectives take fitted constants{of} too"
    foreign = foreign_words(cluster)
    found = _foreign(job, foreign, aside) if foreign else _by_likeness(job, STEP_TIME, aside)
    return replace(found, text=f"{found.text}; {wires}")


def memory_trust(job: Job) -> Trust:
    """Return how far to trust the peak of device memory that is predicted for `job`."""
    return _by_likeness(job, JudgedQuantity.PEAK_MEMORY, ())


def _measured(cluster: Cluster) -> str:
    times = cluster.gpu.measured
    assert times is not None
    without = f"; not measured: {', '.join(times.missing)}" if times.missing else ""
    hurried = f"; seconds were short: {'; '.join(times.hurried)}" if times.hurried else ""
    source = dict(cluster.cites).get("measured", "measured on ranks like these")
    return f"{MEASURED} ({source}){without}{hurried}"


def _foreign(job: Job, foreign: str, aside: Sequence[str]) -> Trust:
    """Return that the error of constants of another GPU is unknown; `foreign` comes first.

    Runs on their own GPU are no evidence, however like them the run is otherwise.
    """
    asked = features_of(job)
    words = [foreign, *aside]
    if isinstance(asked, str):
        return Trust(text=f"{NONE}: {', '.join([*words, asked])}")
    runs = judged_runs()
    if not alike(asked, runs).runs:
        words += unlike(asked, runs)[1]
    return Trust(text=f"{NONE}: {', '.join(words)}")


def _by_likeness(job: Job, quantity: JudgedQuantity, aside: Sequence[str]) -> Trust:
    asked = features_of(job)
    if isinstance(asked, str):
        return Trust(text=f"{NONE}: {', '.join([asked, *aside])}")
    if aside:
        return Trust(text=f"{NONE}: {', '.join(aside)}")
    return judged_by(asked, judged_runs(), quantity)


def judged_by(
    asked: RunFeatures,
    runs: Sequence[JudgedRun],
    quantity: JudgedQuantity = JudgedQuantity.STEP_TIME,
) -> Trust:
    """Return how far to trust a prediction of `quantity`, by those of `runs` that are like it."""
    found = alike(asked, runs, quantity)
    if found.bound is not None:
        text = _sentence(asked, found, quantity)
        return Trust(text=text, error=found.bound, is_judged=True, slower=found.slower)
    others = elsewhere(asked, runs, quantity)
    broad = "" if others.bound is None else f"; {_broad_sentence(asked, others, quantity)}"
    if found.runs:
        return Trust(text=f"{_sentence(asked, found, quantity)}{broad}", error=others.bound)
    nearest, words = unlike(asked, runs, quantity)
    if nearest is None:
        return Trust(text=NONE)
    text = f"{NONE}: {', '.join(words)}; the nearest are of {nearest.publication}"
    return Trust(text=f"{text}{broad}", error=others.bound)


def _broad_sentence(asked: RunFeatures, found: Elsewhere, quantity: JudgedQuantity) -> str:
    """Say what publications of runs that are no more than broadly alike stay within, and how often.

    The largest percentile of so many is at least that of one more in all draws but one.
    """
    kind = "with a pipeline" if asked.pipeline > 1 else "without a pipeline"
    if quantity is JudgedQuantity.STEP_TIME:
        kind += " on several nodes" if asked.nodes > 1 else " on one node"
    widest, count = max(found.bounds, key=found.bounds.__getitem__), len(found.bounds)
    return (
        f"of {count} publications of other runs {kind} the furthest off ({widest}) has 9 of 10 "
        f"within {found.bound:.1%}, as one more would in {count} of {count + 1} draws"
    )


def _sentence(asked: RunFeatures, found: Likeness, quantity: JudgedQuantity) -> str:
    count, bound = len(found.runs), found.bound
    runs = "1 judged run" if count == 1 else f"{count} judged runs"
    off = f"{quantity} {found.median:.1%} off in the median{_side(found, quantity)}"
    if bound is None:
        off += f", too few for a percentile ({FEWEST} are needed)"
    else:
        off += f", at most {bound:.1%} for 9 of 10"
    alone = (
        "" if len({run.citation for run in found.runs}) > 1 else "; no other publication has any"
    )
    words = not_shown(asked, found.runs)
    without = f"; none has {', '.join(words)}" if words else ""
    return f"{runs} like this one ({_publications(found.runs)}): {off}{without}{alone}"


def _side(found: Likeness, quantity: JudgedQuantity) -> str:
    """Say on which side predictions are off, where most are on one."""
    small = sum(error < 0 for error in found.errors)
    large = sum(error > 0 for error in found.errors)
    count = len(found.errors)
    if count < FEWEST or max(small, large) < SIDED * count:
        return ""
    too_small, too_large = SIDES[quantity]
    return f", mostly {too_small if small > large else too_large}"


def _publications(runs: Sequence[JudgedRun]) -> str:
    names = dict.fromkeys(run.publication for run in runs)
    return ", ".join(names)
