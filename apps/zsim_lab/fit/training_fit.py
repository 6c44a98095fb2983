"""Fit the speed of kernels in training to published runs, one set of constants for each GPU.

A run's time is the time of its kernels alone, each class divided by its constant, plus a rest:
launches that a kernel waits for, exposed communication, copies. The rest comes from a simulation.
The fit minimizes the mean of |log(predicted / measured)|, with equal weights of files. Sweeps that
judge are never fitted.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from zsim.cluster.profile.in_training import MATRIX, SHARES, InTraining, share_of
from zsim.cluster.profile.kernels import KernelProfile
from zsim.compute.fitted_model import Peaks, work_s
from zsim.model.kernel import Kernel
from zsim_lab.fit.least_squares import Array, minimized

MANY = 20
"""Minimum runs for fitting every constant; with fewer, one common factor is fitted."""

ALL_FREE = tuple((name,) for name in SHARES)
ONE_FREE = (MATRIX,)
"""Groups of constants with a common factor. A GPU with few runs has the matrix units and libraries
of its sibling; the difference is the clock under its power limit."""

AS_ALONE: Mapping[str, tuple[str, ...]] = {"h100_2025": ("Ultra-Scale Playbook",)}
"""Profiles whose kernels are as fast in training as alone, and the publications of the runs.

Compute-bound rows of 3B of nanotron take 0.92 to 1.07 of that time."""

SHARE_BOUNDS = (0.3, 3.0)
"""Minimum and maximum of a constant: outside, the kernel must be a different one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """A published run and its simulated parts.

    Attributes:
        file: table of the run.
        seconds: published step time.
        alone_s: seconds of work of each class of kernels alone, by the name of the constant.
        rest_s: seconds of the rest of the step, including the slowdown of kernels by collectives.
    """

    file: str
    seconds: float
    alone_s: Mapping[str, float]
    rest_s: float

    def predicted_s(self, by: InTraining) -> float:
        """Return the predicted seconds with the constants `by`."""
        work = sum(value / by.constant(name) for name, value in self.alone_s.items())
        return work + self.rest_s


def alone_s(
    kernels: Mapping[Kernel, int], peaks: Mapping[Kernel, Peaks], by: KernelProfile
) -> dict[str, float]:
    """Return the seconds of work of `kernels` (with counts), by the name of their constant."""
    sums = dict.fromkeys(SHARES, 0.0)
    for kernel, count in kernels.items():
        sums[share_of(kernel)] += count * work_s(kernel, peaks[kernel], by)
    return sums


def fitted(observed: Sequence[Observed], start: InTraining) -> InTraining:
    """Return `start` with all constants fitted to the runs, or with one common factor if few."""
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
    """Return the minimum (`end` 0) or maximum (1) of the factor of each group, as logarithms."""
    nearest = (max, min)[end]
    return np.log(
        [nearest(SHARE_BOUNDS[end] / start.constant(name) for name in names) for names in free]
    )
