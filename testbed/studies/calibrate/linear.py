"""Linear fits to times and sizes: nothing negative, errors relative, columns that cannot be told apart left out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Estimate:
    """A fitted number and its standard error, from the residuals; ``None``: not enough points for one.

    A parameter that the data cannot tell from others, or that came out at its bound, is 0 with error ``None``.
    """

    value: float
    error: float | None

    @property
    def is_certain(self) -> bool:
        """More than two standard errors from 0."""
        return self.value > 0 and self.error is not None and self.value > 2 * self.error


@dataclass(frozen=True)
class LinearFit:
    """``r2`` is 1 - (sum of squared residuals) / (sum of squared deviations from the mean), of the values as
    they are. ``residuals_ratio`` are (fitted - measured) / measured, in the order of the points.
    """

    estimates: Mapping[str, Estimate]
    r2: float
    residuals_ratio: tuple[float, ...]

    def value(self, name: str) -> float:
        return self.estimates[name].value

    @property
    def max_ratio(self) -> float:
        """Largest relative residual, without sign."""
        return max((abs(r) for r in self.residuals_ratio), default=0.0)

    @property
    def rms_ratio(self) -> float:
        return rms(self.residuals_ratio)


def rms(values: Sequence[float]) -> float:
    """Root of the mean square; 0 of nothing."""
    return math.sqrt(sum(v * v for v in values) / len(values)) if values else 0.0


def r_squared(measured: Sequence[float], fitted: Sequence[float]) -> float:
    """As ``LinearFit.r2``; values that are all equal are explained if they are met to a part in a million."""
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
    """Non-negative coefficients of ``columns`` that minimise the sum of squared relative residuals.

    The most important column comes first: one that is a combination of those before it is left out, as
    with a constant where only one number of blocks was measured. ``fixed`` is what every point has beside
    the columns. Measured values are positive.
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
    """Standard errors of the free columns, from the spread of the residuals."""
    more = len(residuals) - len(free)
    if not free or more < 1:
        return {}
    variance = float((residuals**2).sum()) / more
    x = matrix[:, free] / scale[free]
    covariance = variance * np.linalg.inv(x.T @ x)
    return {n: float(np.sqrt(covariance[i, i]) / scale[n]) for i, n in enumerate(free)}
