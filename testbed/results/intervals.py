"""Means over Monte-Carlo runs with 95 % confidence intervals (Student's t)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple


class Mean(NamedTuple):
    """Mean of ``n`` runs; the true mean lies within ``mean`` +- ``half_width`` with 95 % confidence."""

    mean: float
    half_width: float
    n: int


def mean_of(values: Sequence[float], recorded_share: float = 0.0) -> Mean | None:
    """Mean and interval: t_{0.975, n-1} s / sqrt(n). ``None`` without values; one value has no interval (nan).

    ``recorded_share``: of runs that are drawn again and again from the same recorded requests, how large a part of
    them one run is. Their mean comes no closer to the truth than the recording itself, which is 1 / share runs long:
    the variance of the mean is s^2 (1 / n + share).
    """
    n = len(values)
    if not n:
        return None
    mean = math.fsum(values) / n
    if n == 1:
        return Mean(mean, math.nan, 1)
    variance = math.fsum((value - mean) ** 2 for value in values) / (n - 1)
    return Mean(mean, t_quantile(n - 1) * math.sqrt(variance * (1 / n + recorded_share)), n)


def t_quantile(degrees: int) -> float:
    """t with P(|T| <= t) = 0.95 for ``degrees`` >= 1 degrees of freedom."""
    from scipy.special import stdtrit

    return float(stdtrit(degrees, 0.975))
