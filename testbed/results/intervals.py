"""Means over Monte-Carlo runs with 95 % confidence intervals (Student's t)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple


class Mean(NamedTuple):
    """Mean over ``n`` runs; its 95 % confidence interval is ``mean`` +- ``half_width`` (nan for one run)."""

    mean: float
    half_width: float
    n: int


def mean_of(values: Sequence[float], recorded_share: float = 0.0) -> Mean | None:
    """Return the mean and its interval's half width t_{0.975, n-1} s / sqrt(n); None without values.

    ``recorded_share``: for runs that are drawn repeatedly from the same recorded requests, the share of the
    recording that one run uses. The recording is a sample itself, 1 / share runs long, so the variance of the
    mean is s^2 (1 / n + share).
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
    """Return t with P(|T| <= t) = 0.95 for ``degrees`` >= 1 degrees of freedom."""
    from scipy.special import stdtrit

    return float(stdtrit(degrees, 0.975))
