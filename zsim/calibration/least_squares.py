"""The search that every fit shares: robust least squares within bounds, by scipy.

What is made small is the weighted sum of sqrt(r^2 + scale^2) over the residuals r: nearly |r|, in
which a few wild rows do not pull on the rest, and smooth at 0 (Charbonnier's pseudo-Huber loss).
Predictions have kinks, where the fastest algorithm or tile is another one. The scale therefore
starts wide, as do the steps of the slopes, and narrows; each search begins where the one before
ended.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

Array: TypeAlias = NDArray[np.float64]
Residuals: TypeAlias = Callable[[Array], Array]
Slopes: TypeAlias = Callable[[Array, float], Array]
"""Derivatives of residuals at a vector, over a step of some length; a row for each residual."""

_least_squares: Any = least_squares  # scipy is not typed, and defaults say less than its manual

SCALES = (0.3, 0.1, 0.02)
"""Residuals below the last are as good as none."""

HOLD = 1e-4
"""Weight of staying at the start: else constants on which no residual depends would drift."""

MOST_CALLS = 100
"""Evaluations of the residuals at one scale, those for slopes not counted."""

TOLERANCE = 1e-4


def minimized(
    residuals: Residuals,
    start: Array,
    bounds: tuple[Array, Array],
    *,
    weights: Array,
    slopes: Slopes | None = None,
    scales: tuple[float, ...] = SCALES,
) -> Array:
    """Return the vector within `bounds` that makes the weighted residuals least.

    Args:
        residuals: of a vector, one for each of `weights`.
        start: where the search begins; moved into the bounds if it is outside.
        bounds: least and most of each place of the vector.
        weights: what each residual counts.
        slopes: derivatives of the residuals; by default differences along every place.
        scales: of the loss, one search each.
    """
    home: Array = np.clip(start, *bounds)
    found, along = home, slopes or partial(differences, residuals, bounds)
    held = np.full(len(home), HOLD * weights.max())
    for scale in scales:

        def slopes_at(at: Array, step: float = scale / 2) -> Array:
            return np.concatenate([along(at, step), np.eye(len(at))])

        found = _least_squares(
            lambda at: np.concatenate([residuals(at), at - home]),
            found,
            jac=slopes_at,
            bounds=bounds,
            loss=partial(_loss, scale=scale, weights=np.concatenate([weights, held])),
            ftol=TOLERANCE,
            xtol=TOLERANCE,
            gtol=None,
            max_nfev=MOST_CALLS,
        ).x
    return found


def _loss(squares: Array, *, scale: float, weights: Array) -> Array:
    """Return the loss of squared residuals and its first derivative, as scipy asks for them.

    The second derivative is left at 0, which makes every step one of weighted least squares: where
    most residuals are far from 0 the true curvature nearly vanishes, and steps would be wild.
    """
    root = np.sqrt(squares + scale**2)
    return np.stack([2 * weights * (root - scale), weights / root, np.zeros_like(root)])


def differences(residuals: Residuals, bounds: tuple[Array, Array], at: Array, step: float) -> Array:
    """Return the slopes of `residuals` over `step` to both sides of `at`, or as far as `bounds`."""
    columns: list[Array] = []
    for place, (low, high) in enumerate(zip(*bounds, strict=True)):
        ahead, behind = at.copy(), at.copy()
        ahead[place], behind[place] = min(at[place] + step, high), max(at[place] - step, low)
        width = ahead[place] - behind[place]
        columns.append((residuals(ahead) - residuals(behind)) / width)
    return np.stack(columns, axis=1)
