"""The search that every fit shares: robust least squares within bounds, by scipy.

It minimizes the weighted sum of sqrt(r^2 + scale^2) over the residuals r (Charbonnier's
pseudo-Huber loss): nearly |r|, so that outliers pull little on the rest, and smooth at 0.
Predictions have kinks where the fastest algorithm or tile changes. So the scale and the steps of
the slopes start wide and become narrower; each search starts from the result of the one before.
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

_least_squares: Any = least_squares  # scipy is not typed

SCALES = (0.3, 0.1, 0.02)
"""Scales of the loss; residuals below the last are negligible."""

HOLD = 1e-4
"""Weight of staying at the start; else constants without effect on residuals would drift."""

MOST_CALLS = 100
"""Maximum evaluations of the residuals at one scale, excluding those for slopes."""

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
    """Return the vector within `bounds` that minimizes the weighted residuals.

    Args:
        residuals: function of a vector; returns one residual for each of `weights`.
        start: start of the search, clipped to the bounds.
        bounds: minimum and maximum of each element of the vector.
        weights: weight of each residual.
        slopes: derivatives of the residuals; default finite differences along every element.
        scales: scales of the loss, one search for each.
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
    """Return the loss of squared residuals and its first derivative, in scipy's format.

    The second derivative is set to 0, so every step is weighted least squares: with most residuals
    far from 0, the true curvature nearly vanishes, and steps would be erratic.
    """
    root = np.sqrt(squares + scale**2)
    return np.stack([2 * weights * (root - scale), weights / root, np.zeros_like(root)])


def differences(residuals: Residuals, bounds: tuple[Array, Array], at: Array, step: float) -> Array:
    """Return the slopes of `residuals` over `step` to both sides of `at`, clipped to `bounds`."""
    columns: list[Array] = []
    for place, (low, high) in enumerate(zip(*bounds, strict=True)):
        ahead, behind = at.copy(), at.copy()
        ahead[place], behind[place] = min(at[place] + step, high), max(at[place] - step, low)
        width = ahead[place] - behind[place]
        columns.append((residuals(ahead) - residuals(behind)) / width)
    return np.stack(columns, axis=1)
