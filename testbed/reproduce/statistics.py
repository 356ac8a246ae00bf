"""Means over Monte-Carlo runs with 95 % confidence intervals (Student's t)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

CONFIDENCE = 0.95


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


@cache
def t_quantile(degrees: int) -> float:
    """t with P(|T| <= t) = 0.95 for ``degrees`` >= 1 degrees of freedom, by bisection."""
    low, high = 1.9, 12.8  # the normal distribution has 1.96, one degree of freedom 12.71
    while high - low > 1e-12:
        middle = (low + high) / 2
        if _within(middle, degrees) < CONFIDENCE:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _within(t: float, degrees: int) -> float:
    """P(|T| <= t): the finite sums of Abramowitz and Stegun, 26.7.3 and 26.7.4."""
    theta = math.atan(t / math.sqrt(degrees))
    sine, square = math.sin(theta), math.cos(theta) ** 2
    odd = degrees % 2
    term = math.cos(theta) if odd else 1.0
    total = 0.0
    for k in range(1 + odd, degrees, 2):
        total += term
        term *= square * k / (k + 1)
    if odd:
        return 2 / math.pi * (theta + sine * total)
    return sine * total
