"""The arithmetic of a score: a run's figures, the best of reference policies, and what a setting's score is.

In short: a setting's score has half of its weight on goodput, a quarter on the p95 of the time to the first
token, and a quarter on the p95 of the time per further token. Each is the policy's figure over the best that
any reference policy has there, so that 1 is "as good as the best of them in everything", which none of them
is everywhere.

All three are over every request that was sent. One that was given up has met no objective, and is later than
any that was served. A policy that gives up more requests than the reference that gives up the fewest loses
its part for times, all of it at ``MOST_GIVEN_UP`` more: a percentile alone would not see these.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean

import msgspec

GOODPUT_WEIGHT, TTFT_WEIGHT, TPOT_WEIGHT = 0.5, 0.25, 0.25
PERCENTILE = 0.95
MOST_GIVEN_UP = 1 - PERCENTILE
"""Share of requests that are given up at which nothing is left of a setting's part for times."""
MOST_RATIO = 2.0
"""A figure counts as at most so many times the best of the reference policies."""


class Figures(msgspec.Struct, frozen=True):
    """What a run has of a policy.

    - ``met_ratio``: share of the requests sent that were completed and met the objective
    - ``goodput``: such requests per second, over the time in which requests arrived
    - ``given_up_ratio``: share of the requests sent that were not completed
    - ``ttft_p95_s``, ``tpot_p95_s``: the 95th percentiles over all requests sent; ``None``: the request at it
      was given up
    - ``tpot_p50_s``: the median over the requests that have it
    """

    met_ratio: float
    goodput: float
    given_up_ratio: float
    ttft_p95_s: float | None
    tpot_p95_s: float | None
    tpot_p50_s: float | None


class Best(msgspec.Struct, frozen=True):
    """The best that any reference policy has in a setting, each by its mean over the frozen seeds.

    ``ttft_rate`` and ``tpot_rate`` are means of 1 / p95 (1/s), which are 0 where the p95 was given up.
    """

    met_ratio: float
    given_up_ratio: float
    ttft_rate: float
    tpot_rate: float


def percentile(values: Sequence[float], n_missing: int, share: float) -> float | None:
    """Return the smallest value that at least ``share`` of all do not exceed; ``n_missing`` more are infinite.

    ``None`` if it is one of these, or if there is no value at all.
    """
    n = len(values) + n_missing
    index = max(math.ceil(share * n - 1e-9), 1) - 1
    return sorted(values)[index] if index < len(values) else None


def rate_of(p95_s: float | None) -> float:
    return 0.0 if p95_s is None else 1 / p95_s


def best_of(policies: Mapping[str, Sequence[Figures]]) -> Best:
    """Return the best of the reference policies, given the figures of each by seed."""
    found = [figures for figures in policies.values() if figures]

    def means(of: str) -> Iterable[float]:
        return (fmean(getattr(one, of) for one in figures) for figures in found)

    return Best(
        max(means("met_ratio")),
        min(means("given_up_ratio")),
        max(fmean(rate_of(one.ttft_p95_s) for one in figures) for figures in found),
        max(fmean(rate_of(one.tpot_p95_s) for one in figures) for figures in found),
    )


def score_of(figures: Figures, best: Best) -> float:
    """Return the score of one run of a setting: 1 is as good as the best of the references in everything."""
    excess = max(figures.given_up_ratio - best.given_up_ratio, 0.0)
    kept = max(1 - excess / MOST_GIVEN_UP, 0.0)
    times = TTFT_WEIGHT * _over(rate_of(figures.ttft_p95_s), best.ttft_rate)
    times += TPOT_WEIGHT * _over(rate_of(figures.tpot_p95_s), best.tpot_rate)
    return GOODPUT_WEIGHT * _over(figures.met_ratio, best.met_ratio) + kept * times


def _over(value: float, best: float) -> float:
    if best == 0:  # no reference policy has any: none is as good as the best, and some is the most
        return 1.0 if value == 0 else MOST_RATIO
    return min(value / best, MOST_RATIO)
