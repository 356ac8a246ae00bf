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


def mean_of(values: Sequence[float]) -> Mean | None:
    """Mean and interval: t_{0.975, n-1} s / sqrt(n). ``None`` without values; one value has no interval (nan)."""
    n = len(values)
    if not n:
        return None
    mean = math.fsum(values) / n
    if n == 1:
        return Mean(mean, math.nan, 1)
    variance = math.fsum((value - mean) ** 2 for value in values) / (n - 1)
    return Mean(mean, t_quantile(n - 1) * math.sqrt(variance / n), n)


def t_quantile(degrees: int) -> float:
    """t with P(|T| <= t) = 0.95 for ``degrees`` >= 1 degrees of freedom."""
    from scipy.special import stdtrit

    return float(stdtrit(degrees, 0.975))
