"""From published runs of training to what kernels reach in training, one set for each GPU.

A run's time is the time of its kernels alone, each class over its share, and a rest: launches that
a kernel waits for, communication that is not hidden, copies. The rest comes from a simulation. What
is made small is the mean of |log(predicted / measured)|, each file weighing the same. Sweeps that
judge are never fitted.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from zsim.calibration.least_squares import Array, minimized
from zsim.cluster.profile.in_training import MATRIX, SHARES, InTraining, share_of
from zsim.cluster.profile.kernels import KernelProfile
from zsim.compute.fitted_model import Peaks, work_s
from zsim.model.kernel import Kernel

MANY = 20
"""Runs from which every constant is fitted; fewer say one thing."""

ALL_FREE = tuple((name,) for name in SHARES)
ONE_FREE = (MATRIX,)
"""Constants that move together. A GPU of few runs has the matrix units of its sibling and the same
libraries; what differs is how fast its power limit lets them run."""

AS_ALONE: Mapping[str, tuple[str, ...]] = {"h100_2025": ("Ultra-Scale Playbook",)}
"""Profiles whose kernels reach in training what they reach alone, and who published the runs.

nanotron's rows of 3B that are bound by compute take 0.92 to 1.07 of that time."""

SHARE_BOUNDS = (0.3, 3.0)
"""Least and most of a constant: a share outside these is another kernel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """A published run and what was simulated of it.

    Attributes:
        file: table that it is from.
        seconds: published.
        alone_s: seconds of work of each class of kernels where they run alone, by share.
        rest_s: all else of the step, and what collectives take from kernels.
    """

    file: str
    seconds: float
    alone_s: Mapping[str, float]
    rest_s: float

    def predicted_s(self, by: InTraining) -> float:
        """Return seconds that constants give."""
        work = sum(value / by.constant(name) for name, value in self.alone_s.items())
        return work + self.rest_s


def alone_s(
    kernels: Mapping[Kernel, int], peaks: Mapping[Kernel, Peaks], by: KernelProfile
) -> dict[str, float]:
    """Return seconds of work of `kernels`, each so many times, by the share that they have."""
    sums = dict.fromkeys(SHARES, 0.0)
    for kernel, count in kernels.items():
        sums[share_of(kernel)] += count * work_s(kernel, peaks[kernel], by)
    return sums


def fitted(observed: Sequence[Observed], start: InTraining) -> InTraining:
    """Return `start` with as many constants moved as there are runs to say where to."""
    if not observed:
        return start
    free = ALL_FREE if len(observed) >= MANY else ONE_FREE
    runs_of_file = Counter(each.file for each in observed)

    def training(factors: Array) -> InTraining:
        found = start
        for names, factor in zip(free, np.exp(factors).tolist(), strict=True):
            for name in names:
                found = found.changed(name, start.constant(name) * factor)
        return found

    def errors(factors: Array) -> Array:
        by = training(factors)
        return np.log([each.predicted_s(by) / each.seconds for each in observed])

    return training(
        minimized(
            errors,
            np.zeros(len(free)),
            (_limit(free, start, end=0), _limit(free, start, end=1)),
            weights=np.array([1 / runs_of_file[each.file] for each in observed]),
        )
    )


def _limit(free: Sequence[Sequence[str]], start: InTraining, *, end: int) -> Array:
    """Return the least (`end` 0) or most (1) by which each group may move, as logarithms."""
    nearest = (max, min)[end]
    return np.log(
        [nearest(SHARE_BOUNDS[end] / start.constant(name) for name in names) for names in free]
    )
