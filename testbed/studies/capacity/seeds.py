"""How many seeds would make the interval of a highest rate narrow, estimated from the seeds at hand.

At each judged rate, every limit has an excess with a 95 % half-width h over the n seeds at hand. The interval of
the highest rate holds the rates at which -1 <= z <= 1, where z is the largest excess / h. With N seeds the
half-width is c h, with c = t(N - 1) sqrt(1 / N) / (t(n - 1) sqrt(1 / n)), so that the interval holds the rates
with -c <= z <= c. Between judged rates z is interpolated over the logarithm of the rate.

h itself is known only from n seeds, and may look too small by chance. So it is taken as large as it is in
``ENOUGH`` of all cases at most: times sqrt((n - 1) / q), q the (1 - ``ENOUGH``) quantile of chi-squared.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from testbed.results.intervals import t_quantile
from testbed.studies.capacity.search import SearchResult
from testbed.studies.capacity.verdict import Verdict

WIDE_RATIO = 1 / 3
"""An interval that is wider than this share of its rate needs more seeds."""
ENOUGH = 0.8
"""The estimate is meant to be enough in this share of all cases."""
MOST_SEEDS = 100_000
_MOST_Z = 100.0
"""Larger values, such as where no seed changes anything, are interpolated as this one."""


def is_wide(found: SearchResult) -> bool:
    """Returns whether the interval of a search with several seeds is wider than ``WIDE_RATIO`` of its rate."""
    if found.kept is None or found.broken is None:
        return False
    return found.low is None or found.high is None or found.high - found.low > WIDE_RATIO * found.kept.rate


def most_seeds(drawn: Mapping[str, Any] | None) -> int:
    """Returns how many seeds there can be that choose recorded requests as ``drawn`` says (``drawn_of``)."""
    if drawn is None or drawn["draw"] != "windows":
        return MOST_SEEDS
    return int(drawn["n_recorded"] // drawn["n_requests"])


def runs_needed(found: SearchResult, n_runs: int, most: int = MOST_SEEDS) -> int | None:
    """Returns how many seeds make a wide interval of ``n_runs`` seeds narrow.

    None: it is not wide, or not even ``most`` are enough, as may be where all seeds draw from one recording.
    """
    if not 2 <= n_runs < most or not is_wide(found):
        return None
    too_few, enough = n_runs, most
    if not _is_narrow(found, n_runs, enough):
        return None
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        if _is_narrow(found, n_runs, middle):
            enough = middle
        else:
            too_few = middle
    return enough


def _is_narrow(found: SearchResult, n_runs: int, n_more: int) -> bool:
    """Returns whether the interval is narrow with ``n_more`` seeds."""
    kept, broken = found.kept, found.broken
    assert kept is not None and broken is not None, "an interval has two ends"
    share = kept.recorded_share
    scale = _half_width(n_more, share) / _half_width(n_runs, share) * _surely(n_runs)
    low = _crossing([kept, *reversed([v for v in found.judged if v.rate < kept.rate])], -scale)
    high = _crossing([broken, *(v for v in found.judged if v.rate > broken.rate)], scale)
    return low is not None and high is not None and high - low <= WIDE_RATIO * kept.rate


def _half_width(n: int, share: float) -> float:
    """Returns the half-width of the 95 % interval of a mean over ``n`` seeds, per standard deviation."""
    return t_quantile(n - 1) * math.sqrt(1 / n + share)


def _surely(n: int) -> float:
    """Returns by how much a standard deviation over ``n`` seeds is larger than estimated, with ``ENOUGH``."""
    from scipy.special import chdtri

    return math.sqrt((n - 1) / float(chdtri(n - 1, ENOUGH)))


def _crossing(outwards: Iterable[Verdict], limit: float) -> float | None:
    """Returns the first rate at which z is ``limit`` or further out; None if it is at none of them."""
    before: tuple[float, float] | None = None
    for verdict in outwards:
        at, z = math.log(verdict.rate), _z(verdict)
        if abs(z) >= abs(limit) and z * limit > 0:
            if before is None:
                return verdict.rate
            inner_at, inner_z = before
            return math.exp(at + (inner_at - at) * (limit - z) / (inner_z - z))
        before = at, z
    return None


def _z(verdict: Verdict) -> float:
    """Returns the largest excess over its half-width."""
    found = [
        over.mean / over.half_width if over.half_width else math.inf if over.mean > 0 else -math.inf
        for over in verdict.excess.values()
    ]
    return min(max(*found, -_MOST_Z), _MOST_Z)
