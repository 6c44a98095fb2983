"""The fit: one set of constants for a GPU, and exceptions of systems, found together.

What is made small is the sum over measured configurations of |log(predicted / measured)|, in
which a few wild rows do not pull on the rest, plus a price on every constant that leaves its start,
and a higher one on every exception that a system takes for itself. Each configuration that was
measured several times counts once, by its median. The search goes down by least squares that are
weighted again in each step (Holland and Welsch 1977), damped as Levenberg and Marquardt do, and
along each constant by itself where protocols change and slopes say nothing; from a few places, the
same ones every time.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import log

import numpy as np
from numpy.typing import NDArray

from zsim.calibration.constants import CHOICES, EXCEPTIONS, bounds, searched
from zsim.calibration.measured import Measurement
from zsim.calibration.predictor import Array, Point, Predictor, points
from zsim.collective import direct
from zsim.collective.profile import NetworkProfile

SMALL_BYTES = 64 * 2**10
SMALL_WEIGHT = 0.15  # below 64 KiB a benchmark measures its host more than its network
PRICE = 0.03  # of leaving the start by a factor e, in rows that are wrong by as much
EXCEPTION_PRICE = 0.1
ROUND = 0.02  # errors below this count by their square, and exceptions below it are none
ATTEMPTS, SPREAD, SEED = 2, 0.5, 0  # all but the first begin where a shake leads
ROUNDS, DESCENTS, SWEEPS = 8, 12, 2
FIRST_STEP, LAST_STEP, LARGEST_STEP = 0.15, 0.005, 1.0
SLOPE_STEP = 0.02
ENOUGH = 1e-3  # a relative gain below which a descent ends


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Constants shared by all systems, and of each system; `loss` says how well they do."""

    shared: NetworkProfile
    systems: Mapping[str, NetworkProfile]
    loss: float


def fitted(
    rows: Collection[Measurement],
    start: NetworkProfile,
    *,
    exceptions: Collection[str] = EXCEPTIONS,
) -> Fit:
    """Constants that fit `rows` best, from `start` on; a system may differ in `exceptions`.

    A system that is the only one has none.
    """
    by_system: defaultdict[str, list[Measurement]] = defaultdict(list)
    for row in rows:
        by_system[row.system].append(row)
    all_points = {name: points(by_system[name]) for name in sorted(by_system)}
    allowed = exceptions if len(all_points) > 1 else ()
    begins = [_Problem(all_points, each, allowed) for each in _choices(start, all_points)]
    first, problem = min(((_found(each, 0), each) for each in begins), key=lambda it: it[0].loss)
    others = [_found(problem, attempt) for attempt in range(1, ATTEMPTS)]
    return min([first, *others], key=lambda fit: fit.loss)


def _choices(
    start: NetworkProfile, all_points: Mapping[str, Sequence[Point]]
) -> list[NetworkProfile]:
    """Starts that differ in the group size from which the switch reduces, if rows can tell."""
    told = any(p.shape.ranks_per_node in {4, 5} for found in all_points.values() for p in found)
    if not start.nvls or not told:
        return [start]
    return [replace(start, nvls_choice=choice) for choice in CHOICES]


class _Problem:
    """A vector of logarithms, the shared constants and then those of each system, and its loss."""

    def __init__(
        self,
        all_points: Mapping[str, Sequence[Point]],
        start: NetworkProfile,
        exceptions: Collection[str],
    ) -> None:
        self.systems = tuple(all_points)
        self.names = searched(start)
        self.excepted = np.array(
            [number for number, name in enumerate(self.names) if name in exceptions], dtype=np.intp
        )
        self.home = np.log([getattr(start, name) for name in self.names])
        limits = np.array([bounds(name, start) for name in self.names])
        self.low, self.high = limits[:, 0], limits[:, 1]
        self.count = len(self.names) + len(self.excepted) * len(self.systems)
        self._start = start
        self._predictors = [Predictor(all_points[name]) for name in self.systems]
        self._measured = [np.log([p.seconds for p in all_points[name]]) for name in self.systems]
        self._weights = [
            np.array(
                [SMALL_WEIGHT if p.size_bytes < SMALL_BYTES else 1.0 for p in all_points[name]]
            )
            for name in self.systems
        ]
        self._fastest = [_fastest_s(all_points[name]) for name in self.systems]

    def beginning(self, attempt: int) -> Array:
        """Where an attempt begins: at the start, or shaken; launches as fast as was measured."""
        vector = np.zeros(self.count)
        shake = np.random.default_rng(SEED + attempt).normal(scale=SPREAD, size=len(self.names))
        vector[: len(self.names)] = self.inside(self.home + (shake if attempt else 0))
        launch = self.names.index("launch_s")
        for system, fastest_s in enumerate(self._fastest):
            if launch in self.excepted and fastest_s is not None:
                place = self._place(system) + int(np.flatnonzero(self.excepted == launch)[0])
                vector[place] = log(fastest_s) - vector[launch]
        return vector

    def inside(self, constants: Array) -> Array:
        """The constants within their bounds."""
        return np.clip(constants, self.low, self.high)

    def _place(self, system: int) -> int:
        return len(self.names) + system * len(self.excepted)

    def places(self, system: int) -> NDArray[np.intp]:
        """Places in the vector on which the predictions of a system depend."""
        own = self._place(system) + np.arange(len(self.excepted))
        return np.concatenate([np.arange(len(self.names)), own]).astype(np.intp)

    def constants(self, vector: Array, system: int) -> Array:
        """The logarithms of the constants of one system."""
        found = vector[: len(self.names)].copy()
        place = self._place(system)
        found[self.excepted] += vector[place : place + len(self.excepted)]
        return self.inside(found)

    def profile(self, constants: Array) -> NetworkProfile:
        """The profile with these constants."""
        values = dict(zip(self.names, np.exp(constants).tolist(), strict=True))
        return replace(self._start, **values)

    def errors(self, constants: Array, system: int) -> Array:
        """log(predicted / measured) of each point of a system."""
        predicted = np.log(self._predictors[system].seconds(self.profile(constants)))
        return predicted - self._measured[system]

    def part(self, vector: Array, system: int) -> float:
        """The errors of one system, summed."""
        errors = self.errors(self.constants(vector, system), system)
        return float(self._weights[system] @ _rounded(errors))

    def price(self, vector: Array) -> float:
        """What constants cost that are not where they began."""
        shared = len(self.names)
        moved = _rounded(vector[:shared] - self.home).sum() * PRICE
        return float(moved + _rounded(vector[shared:]).sum() * EXCEPTION_PRICE)

    def loss(self, vector: Array) -> float:
        """All errors, and the price."""
        parts = (self.part(vector, system) for system in range(len(self.systems)))
        return sum(parts) + self.price(vector)

    def normal(self, vector: Array) -> tuple[Array, Array]:
        """Matrix and gradient of the weighted least squares that stand for the loss here."""
        matrix, gradient = np.zeros((self.count, self.count)), np.zeros(self.count)
        for system, weights in enumerate(self._weights):
            constants = self.constants(vector, system)
            errors = self.errors(constants, system)
            slopes = self._slopes(constants, errors, system)
            slopes = np.concatenate([slopes, slopes[:, self.excepted]], axis=1)
            weighted = weights / _rounded(errors)
            places = self.places(system)
            matrix[np.ix_(places, places)] += slopes.T @ (weighted[:, None] * slopes)
            gradient[places] += slopes.T @ (weighted * errors)
        shared = len(self.names)
        away = np.concatenate([vector[:shared] - self.home, vector[shared:]])
        price = np.where(np.arange(self.count) < shared, PRICE, EXCEPTION_PRICE) / _rounded(away)
        matrix[np.diag_indices(self.count)] += price
        return matrix, gradient + price * away

    def _slopes(self, constants: Array, errors: Array, system: int) -> Array:
        slopes = np.empty((len(errors), len(self.names)))
        for number in range(len(self.names)):
            inner = constants[number] + SLOPE_STEP <= self.high[number]
            step = SLOPE_STEP if inner else -SLOPE_STEP
            moved = constants.copy()
            moved[number] += step
            slopes[:, number] = (self.errors(moved, system) - errors) / step
        return slopes


def _rounded(values: Array) -> Array:
    """Nearly the absolute values, but smooth at 0."""
    found: Array = np.sqrt(values * values + ROUND * ROUND)
    return found


def _fastest_s(found: Sequence[Point]) -> float | None:
    """The least time of a collective that is launched once."""
    return min((p.seconds for p in found if not direct.peers(p.collective, p.shape)), default=None)


def _found(problem: _Problem, attempt: int) -> Fit:
    vector = problem.beginning(attempt)
    steps = np.full(problem.count, FIRST_STEP)
    loss = problem.loss(vector)
    for _ in range(ROUNDS):
        vector = _swept(problem, _descended(problem, vector), steps)
        before, loss = loss, problem.loss(vector)
        if before - loss < 2 * ENOUGH * before:
            break
    shared = len(problem.names)
    vector[shared:][np.abs(vector[shared:]) < ROUND] = 0
    return Fit(
        shared=problem.profile(vector[:shared]),
        systems={
            name: problem.profile(problem.constants(vector, system))
            for system, name in enumerate(problem.systems)
        },
        loss=problem.loss(vector),
    )


def _descended(problem: _Problem, vector: Array) -> Array:
    """Down by damped steps until they gain little."""
    shared = len(problem.names)
    loss, damping = problem.loss(vector), 0.01
    for _ in range(DESCENTS):
        matrix, gradient = problem.normal(vector)
        free = np.ones(problem.count, dtype=np.bool_)
        free[:shared] &= (vector[:shared] > problem.low + 1e-9) | (gradient[:shared] < 0)
        free[:shared] &= (vector[:shared] < problem.high - 1e-9) | (gradient[:shared] > 0)
        places = np.flatnonzero(free)
        inner = matrix[np.ix_(places, places)]
        for _ in range(6):
            step = np.zeros(problem.count)
            damped = inner + damping * np.diag(np.diag(inner) + 1e-3)
            step[places] = np.clip(-np.linalg.solve(damped, gradient[places]), -0.5, 0.5)
            moved = vector + step
            moved[:shared] = problem.inside(moved[:shared])
            less = problem.loss(moved)
            if less < loss:
                break
            damping = max(damping, 1e-3) * 6
        else:
            return vector
        gain, vector, loss, damping = loss - less, moved, less, max(damping / 4, 1e-4)
        if gain < ENOUGH * loss:
            break
    return vector


def _swept(problem: _Problem, vector: Array, steps: Array) -> Array:
    """Along each constant by itself; `steps` grow with success and shrink without."""
    shared = len(problem.names)
    every = range(len(problem.systems))
    parts = [problem.part(vector, system) for system in every]
    loss = sum(parts) + problem.price(vector)
    for _ in range(SWEEPS):
        for place in range(problem.count):
            touched = every if place < shared else [(place - shared) // len(problem.excepted)]
            for step in (steps[place], -steps[place]):
                moved = vector.copy()
                moved[place] += step
                moved[:shared] = problem.inside(moved[:shared])
                tried = [
                    problem.part(moved, system) if system in touched else parts[system]
                    for system in every
                ]
                less = sum(tried) + problem.price(moved)
                if less < loss - 1e-9:
                    vector, parts, loss = moved, tried, less
                    steps[place] = min(steps[place] * 1.6, LARGEST_STEP)
                    break
            else:
                steps[place] = max(steps[place] / 2, LAST_STEP)
    return vector
