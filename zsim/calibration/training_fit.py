"""From published runs of training to what kernels reach in training, one set for each GPU.

A run's time is the time of its kernels alone, each class over its share, and a rest: launches that
a kernel waits for, communication that is not hidden, copies. The rest comes from a simulation. The
loss is the mean of |log(predicted / measured)|, rounded where it is small so that the search does
not stick in a corner, each file weighing the same; the search steps up and down along each
constant. Sweeps that judge are never fitted.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import hypot, log
from statistics import fmean

from zsim.cost.fitted_time import Peaks, work_s
from zsim.cost.in_training import MATRIX, SHARES, InTraining, share_of
from zsim.cost.kernel_profile import KernelProfile
from zsim.kernel import Kernel

MANY = 20
"""Runs from which every constant is fitted; fewer say one thing."""

ALL_FREE = (*((name,) for name in SHARES), ("beside_collective",))
ONE_FREE = (MATRIX,)
"""Constants that move together. A GPU of few runs has the matrix units of its sibling and the same
libraries; what differs is how fast its power limit lets them run."""

BOUNDS: Mapping[str, tuple[float, float]] = {"beside_collective": (1.0, 1.5)}
SHARE_BOUNDS = (0.3, 3.0)
"""Least and most of a constant. Kernels beside collectives were seen up to 1.4 times as long (Lee
et al. 2025, arXiv 2507.03114), most of them 1.2 times; a share outside these is another kernel."""

FIRST_STEP, LAST_STEP, SWEEPS = 0.2, 1e-4, 300
ROUND = 0.02
"""Errors below are as good as none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """A published run and what was simulated of it.

    Attributes:
        file: table that it is from.
        seconds: published.
        alone_s: seconds of work of each class of kernels where they run alone, by share.
        rest_s: all else of the step, if collectives slow nothing down.
        beside_s: seconds of kernels beside collectives.
    """

    file: str
    seconds: float
    alone_s: Mapping[str, float]
    rest_s: float
    beside_s: float

    def predicted_s(self, by: InTraining) -> float:
        """Seconds that constants give."""
        work = sum(value / by.constant(name) for name, value in self.alone_s.items())
        return work + self.rest_s + self.beside_s * max(0.0, by.beside_collective - 1)


def alone_s(
    kernels: Mapping[Kernel, int], peaks: Mapping[Kernel, Peaks], by: KernelProfile
) -> dict[str, float]:
    """Seconds of work of `kernels`, each so many times, by the share that they have."""
    sums = dict.fromkeys(SHARES, 0.0)
    for kernel, count in kernels.items():
        sums[share_of(kernel)] += count * work_s(kernel, peaks[kernel], by)
    return sums


def loss(observed: Sequence[Observed], by: InTraining) -> float:
    """Mean of |log(predicted / measured)| over files, `ROUND` where a run is met exactly."""
    by_file: defaultdict[str, list[float]] = defaultdict(list)
    for each in observed:
        by_file[each.file].append(hypot(log(each.predicted_s(by) / each.seconds), ROUND))
    return fmean(fmean(errors) for errors in by_file.values())


def fitted(observed: Sequence[Observed], start: InTraining) -> InTraining:
    """`start` with as many constants moved as there are runs to say where to."""
    if not observed:
        return start
    free = ALL_FREE if len(observed) >= MANY else ONE_FREE
    found, least = start, loss(observed, start)
    steps = dict.fromkeys(free, FIRST_STEP)
    for _ in range(SWEEPS):
        for names in free:
            for factor in (1 + steps[names], 1 / (1 + steps[names])):
                tried = found
                for name in names:
                    tried = tried.changed(name, _moved(found, name, factor))
                if (new := loss(observed, tried)) < least:
                    found, least = tried, new
                    steps[names] *= 1.3
                    break
            else:
                steps[names] /= 2
        if max(steps.values()) < LAST_STEP:
            break
    return found


def _moved(by: InTraining, name: str, factor: float) -> float:
    low, high = BOUNDS.get(name, SHARE_BOUNDS)
    return min(max(by.constant(name) * factor, low), high)
