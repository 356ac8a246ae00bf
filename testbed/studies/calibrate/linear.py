"""Linear fits of times and sizes: with non-negative coefficients, relative errors, and without dependent
columns.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Estimate:
    """A fitted number and its standard error, computed from the residuals; None if there are too few points
    for one.

    A parameter that depends on others in the data, or that was fitted to its bound, is 0 with error None.
    """

    value: float
    error: float | None

    @property
    def is_certain(self) -> bool:
        """Whether the value is more than two standard errors above 0."""
        return self.value > 0 and self.error is not None and self.value > 2 * self.error


@dataclass(frozen=True)
class LinearFit:
    """The result of a fit.

    ``r2``: 1 - (sum of squared residuals) / (sum of squared deviations from the mean), with absolute
    residuals. ``residuals_ratio``: (fitted - measured) / measured, in the order of the points.
    """

    estimates: Mapping[str, Estimate]
    r2: float
    residuals_ratio: tuple[float, ...]

    def value(self, name: str) -> float:
        return self.estimates[name].value

    @property
    def max_ratio(self) -> float:
        """The largest absolute value of ``residuals_ratio``; 0 without points."""
        return max((abs(r) for r in self.residuals_ratio), default=0.0)

    @property
    def rms_ratio(self) -> float:
        return rms(self.residuals_ratio)


def rms(values: Sequence[float]) -> float:
    """Returns the root mean square; 0 if there are no values."""
    return math.sqrt(sum(v * v for v in values) / len(values)) if values else 0.0


def r_squared(measured: Sequence[float], fitted: Sequence[float]) -> float:
    """Returns R², as in ``LinearFit``.

    If all measured values are equal, it is 1 if the fitted ones equal them to one part in a million, else 0.
    """
    y, f = np.asarray(measured, dtype=np.float64), np.asarray(fitted, dtype=np.float64)
    left, total = float(((y - f) ** 2).sum()), float(((y - y.mean()) ** 2).sum())
    if total <= len(y) * (1e-9 * float(np.abs(y).max(initial=0.0))) ** 2:
        return 1.0 if left <= 1e-12 * float((y**2).sum()) else 0.0
    return 1 - left / total


def fit_linear(
    columns: Mapping[str, Sequence[float]],
    measured: Sequence[float],
    *,
    fixed: Sequence[float] | None = None,
) -> LinearFit:
    """Returns the non-negative coefficients of ``columns`` that minimise the sum of squared relative
    residuals.

    ``columns``: name -> one value per point, the most important column first. A column that is a linear
    combination of those before it is left out, for example the constant if only one number of blocks was
    measured. ``fixed``: a summand of each point that is not fitted. ``measured`` must be positive.
    """
    from scipy.optimize import nnls

    y = np.asarray(measured, dtype=np.float64)
    offset = np.zeros(len(y)) if fixed is None else np.asarray(fixed, dtype=np.float64)
    matrix = np.column_stack([np.asarray(c, dtype=np.float64) for c in columns.values()]) / y[:, None]
    scale = np.linalg.norm(matrix, axis=0)
    scale[scale == 0] = 1.0
    kept: list[int] = []
    for number in range(matrix.shape[1]):
        if np.linalg.matrix_rank(matrix[:, [*kept, number]] / scale[[*kept, number]], tol=1e-6) > len(kept):
            kept.append(number)
    wanted = 1 - offset / y
    values = np.zeros(matrix.shape[1])
    if kept:
        scaled, _ = nnls(matrix[:, kept] / scale[kept], wanted)
        values[kept] = scaled / scale[kept]
    residuals = matrix @ values - wanted
    errors = _errors(matrix, scale, [n for n in kept if values[n] > 0], residuals)
    return LinearFit(
        {name: Estimate(float(values[n]), errors.get(n)) for n, name in enumerate(columns)},
        r_squared(measured, list((residuals + 1) * y)),
        tuple(float(r) for r in residuals),
    )


def _errors(matrix: Array, scale: Array, free: list[int], residuals: Array) -> dict[int, float]:
    """Returns the standard errors of the columns ``free``, by their index, from the spread of the
    residuals.
    """
    more = len(residuals) - len(free)
    if not free or more < 1:
        return {}
    variance = float((residuals**2).sum()) / more
    x = matrix[:, free] / scale[free]
    covariance = variance * np.linalg.inv(x.T @ x)
    return {n: float(np.sqrt(covariance[i, i]) / scale[n]) for i, n in enumerate(free)}
