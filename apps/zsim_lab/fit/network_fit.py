"""Fit of networks: shared constants of a GPU and exceptions of systems, found together.

The fit minimizes the sum over measured configurations of |log(predicted / measured)|, plus a price
for every constant that differs from its start, and a higher price for every exception of a
system. A configuration that was measured several times counts once, by its median.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from zsim.cluster.profile.network import NetworkProfile
from zsim.network.algorithm import direct
from zsim_lab.fit.constants import CHOICES, EXCEPTIONS, bounds, searched
from zsim_lab.fit.least_squares import SCALES, Array, differences, minimized
from zsim_lab.fit.predictor import Point, Predictor, points
from zsim_lab.rows.collective_rows import Measurement

SMALL_BYTES = 64 * 2**10
SMALL_WEIGHT = 0.15  # below 64 KiB a benchmark measures its host more than its network
PRICE = 0.03  # of a change by a factor e, in rows with an error of a factor e
EXCEPTION_PRICE = 0.1
ROUND = SCALES[-1]  # smaller exceptions are dropped


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkFit:
    """Constants shared by all systems, constants of each system, and the `loss` of the fit."""

    shared: NetworkProfile
    systems: Mapping[str, NetworkProfile]
    loss: float


def fitted(
    rows: Collection[Measurement],
    start: NetworkProfile,
    *,
    exceptions: Collection[str] = EXCEPTIONS,
    free: Collection[str] | None = None,
) -> NetworkFit:
    """Return constants fitted to `rows`, from `start`; a system may differ in `exceptions`.

    A single system has no exceptions. If `free` is given, only the constants in it are fitted.
    """
    by_system: defaultdict[str, list[Measurement]] = defaultdict(list)
    for row in rows:
        by_system[row.system].append(row)
    all_points = {name: points(by_system[name]) for name in sorted(by_system)}
    allowed = exceptions if len(all_points) > 1 else ()
    fits = [
        _Problem(all_points, each, allowed, free).solved() for each in _choices(start, all_points)
    ]
    return min(fits, key=lambda fit: fit.loss)


def _choices(
    start: NetworkProfile, all_points: Mapping[str, Sequence[Point]]
) -> list[NetworkProfile]:
    """Return starts that differ in the minimum group size for in-switch reduction.

    If the rows do not determine it, return one start.
    """
    told = any(p.shape.ranks_per_node in {4, 5} for found in all_points.values() for p in found)
    if not start["nvls"] or not told:
        return [start]
    return [start.changed(nvls_choice=choice) for choice in CHOICES]


class _Problem:
    """The unknowns as a vector of logarithms: shared constants, then exceptions of each system.

    Attributes:
        names: constants that are searched.
        columns: for each system, the index in the vector of each of its constants: an index of its
            own for an exception, else that of the shared constant.
        prices: matrix that computes the distance of the vector from `home`, and of exceptions from
            shared constants.
    """

    def __init__(
        self,
        all_points: Mapping[str, Sequence[Point]],
        start: NetworkProfile,
        exceptions: Collection[str],
        free: Collection[str] | None,
    ) -> None:
        self.start, self.all_points = start, all_points
        self.names = [each for each in searched(start) if free is None or each in free]
        self.home = np.log([start[name] for name in self.names])
        self.limits = np.array([bounds(name, start) for name in self.names])
        excepted = [place for place, name in enumerate(self.names) if name in exceptions]
        shared, own, count = len(self.names), len(excepted), len(all_points)
        self.columns = np.tile(np.arange(shared), (count, 1))
        self.columns[:, excepted] = shared + np.arange(count * own).reshape(count, own)
        self.of_place = np.concatenate([np.arange(shared), np.tile(excepted, count).astype(int)])
        self.prices = np.eye(len(self.of_place))
        self.prices[np.arange(shared, len(self.of_place)), self.of_place[shared:]] = -1
        self.predictors = [Predictor(found) for found in all_points.values()]
        self.measured = [np.log([p.seconds for p in found]) for found in all_points.values()]
        small = np.array([p.size_bytes < SMALL_BYTES for f in all_points.values() for p in f])
        self.weights = np.concatenate(
            [
                np.where(small, SMALL_WEIGHT, 1.0),
                np.full(shared, PRICE),
                np.full(count * own, EXCEPTION_PRICE),
            ]
        )

    def solved(self) -> NetworkFit:
        """Return the fit without exceptions that hardly differ."""
        low, high = self.limits[self.of_place].T
        found = minimized(
            self.residuals,
            self.beginning(),
            (low, high),
            weights=self.weights,
            slopes=self.slopes,
        )
        shared = found[self.of_place]
        found = np.where(np.abs(found - shared) < ROUND, shared, found)
        return NetworkFit(
            shared=self.profile(found[: len(self.names)]),
            systems={
                name: self.profile(found[columns])
                for name, columns in zip(self.all_points, self.columns, strict=True)
            },
            loss=float(self.weights @ np.hypot(self.residuals(found), ROUND)),
        )

    def beginning(self) -> Array:
        """Return the start vector: that of the profile, but with the fastest measured launches."""
        vector: Array = self.home[self.of_place]
        if "launch_s" not in self.names:
            return vector
        launch = self.names.index("launch_s")
        for columns, found in zip(self.columns, self.all_points.values(), strict=True):
            once = [p.seconds for p in found if not direct.peers(p.collective, p.shape)]
            if columns[launch] != launch and once:
                vector[columns[launch]] = np.log(min(once))
        return vector

    def profile(self, constants: Array) -> NetworkProfile:
        """Return the profile with these constants, given as logarithms."""
        values = dict(zip(self.names, np.exp(constants).tolist(), strict=True))
        return self.start.changed(**values)

    def errors(self, constants: Array, system: int) -> Array:
        """Return log(predicted / measured) of each point of a system."""
        predicted = self.predictors[system].seconds(self.profile(constants))
        found: Array = np.log(predicted) - self.measured[system]
        return found

    def residuals(self, vector: Array) -> Array:
        """Return the errors of all systems, then the changes of constants."""
        errors = [self.errors(vector[own], system) for system, own in enumerate(self.columns)]
        moved = self.prices @ vector
        moved[: len(self.names)] -= self.home
        return np.concatenate([*errors, moved])

    def slopes(self, at: Array, step: float) -> Array:
        """Return the derivatives of the residuals; a system depends only on its own columns."""
        blocks: list[Array] = []
        low, high = self.limits.T
        for system, own in enumerate(self.columns):
            block = np.zeros((len(self.measured[system]), len(at)))
            errors = partial(self.errors, system=system)
            block[:, own] = differences(errors, (low, high), at[own], step)
            blocks.append(block)
        return np.concatenate([*blocks, self.prices])
