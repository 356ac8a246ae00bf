"""Means over Monte-Carlo runs with 95 % confidence intervals (Student's t)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

EQUAL, UNRESOLVED, LESS, MORE = "equal", "unresolved", "less", "more"


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


def sign_of(pairs: Sequence[tuple[float, float]], difference: Mean) -> str:
    """Return whether the first values of ``pairs`` are ``LESS`` or ``MORE`` than the second; ``difference``: its mean.

    ``UNRESOLVED`` if its interval contains 0, ``EQUAL`` if the values of every pair are equal.
    """
    if all(math.isclose(one, other, rel_tol=1e-9) for one, other in pairs):
        return EQUAL
    if abs(difference.mean) <= difference.half_width:
        return UNRESOLVED
    return MORE if difference.mean > 0 else LESS


def t_quantile(degrees: int) -> float:
    """Return t with P(|T| <= t) = 0.95 for ``degrees`` >= 1 degrees of freedom."""
    from scipy.special import stdtrit

    return float(stdtrit(degrees, 0.975))
