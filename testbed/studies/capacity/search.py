"""Search for the highest rate at which the objectives are kept, and for its interval.

In short, a rate is *kept* if its verdict keeps all objectives, else it is *broken*. Rates double or halve
from the start until one is kept and the next one is not; then the logarithm of the rate is bisected. If a
rate is kept and a lower one is not, there are several edges between kept and broken rates. The search begins
again from a kept rate that it meets above an edge, and so finds the highest edge that it meets.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from testbed.studies.capacity.verdict import Verdict

STEPS_UP, STEPS_DOWN = 10, 6
"""The most doublings and halvings from the start."""
STEPS_LOOKED = 4
"""If the start is not kept, so many doublings are tried: the placement for a higher rate may have more room.
"""
TURNOVERS = 5
"""A run serves at least so many times the mean number of requests in the system, as far as its limit allows.
"""


class RateTrial(NamedTuple):
    """A rate (requests/s) to judge, with ``n_requests`` per seed."""

    rate: float
    n_requests: int


@dataclass
class SearchResult:
    """The result: ``kept`` is the highest rate that keeps the objectives, ``broken`` the next judged one
    above it.

    - ``low``, ``high``: the interval of the highest rate. Up to ``low`` the 95 % intervals over seeds keep
      all limits; from ``high`` on one exceeds its limit. None: outside of the rates that are tried
    - ``error``: why a run failed; there is no result then
    - ``at_bottom``: the verdict on the lowest rate, if not even that is kept
    - ``n_judged``: the number of verdicts; ``judged``: those with the final number of requests, sorted by
      rate
    """

    kept: Verdict | None = None
    broken: Verdict | None = None
    low: float | None = None
    high: float | None = None
    error: str = ""
    at_bottom: Verdict | None = None
    n_judged: int = 0
    judged: list[Verdict] = field(default_factory=list)
    broken_below: list[float] = field(default_factory=list)
    """Rates below ``kept`` that were judged and not kept, with any number of requests."""


def stopped(verdicts: Sequence[Verdict]) -> SearchResult:
    """Returns what is known of a search that was stopped after ``verdicts``, in the order of its questions.

    Only those with the last number of requests count. There is no interval.
    """
    last = [v for v in verdicts if v.n_requests == verdicts[-1].n_requests]
    judged = sorted(last, key=lambda v: v.rate)
    kept = max((v for v in judged if v.is_kept), key=lambda v: v.rate, default=None)
    broken = [v for v in judged if kept is None or v.rate > kept.rate]
    return SearchResult(
        kept=kept,
        broken=min(broken, key=lambda v: v.rate, default=None),
        n_judged=len(verdicts),
        judged=judged,
    )


Search = Generator[RateTrial, Verdict, SearchResult]
_Step = Generator[RateTrial, Verdict, Verdict]


class _Broken(Exception):
    """A run failed, which ends the search."""


def search(start: float, n_requests: int, most_requests: int, width: float, has_interval: bool) -> Search:
    """A generator: it yields rates to judge, is sent their verdicts, and returns the result.

    It ends when the highest rate is known to within a factor of ``1 + width``. The rates of the result are
    all judged with the same number of requests: ``n_requests``, doubled until it is ``TURNOVERS`` times the
    mean number of requests in the system (rate x mean time in the system), at most ``most_requests``.
    ``has_interval``: there are several seeds, so that ``low`` and ``high`` are searched for, too.
    """
    return _Searcher(start, n_requests, most_requests, width).run(has_interval)


def rounded(rate: float) -> float:
    """Returns ``rate`` with six digits, so that the reported rate is exactly the one that was judged."""
    return float(f"{rate:.6g}")


class _Searcher:
    def __init__(self, start: float, n_requests: int, most_requests: int, width: float) -> None:
        self._start, self._n, self._most, self._width = start, n_requests, most_requests, width
        self._known: dict[RateTrial, Verdict] = {}

    def run(self, has_interval: bool) -> Search:
        while True:
            found = SearchResult()
            try:
                yield from self._find(found, has_interval)
            except _Broken as error:
                found.error = str(error)
            above = self._kept_beyond(found)
            if above is None:
                break
            self._start = above
        found.n_judged, found.judged = len(self._known), self._judged()
        most = found.kept.rate if found.kept is not None else 0.0
        found.broken_below = sorted(
            {q.rate for q, v in self._known.items() if q.rate < most and not v.is_kept}
        )
        return found

    def _find(self, found: SearchResult, has_interval: bool) -> Generator[RateTrial, Verdict, None]:
        step = 0
        while True:
            verdict = yield from self._judge(self._grid(step))
            if verdict.is_kept:
                if self._takes_more(verdict):
                    continue
                found.kept, others = verdict, step + 1
                if step == STEPS_UP:
                    return
            else:
                if step == 0 and (higher := (yield from self._kept_above())):
                    step = higher
                    continue
                if step == 0 and not (yield from self._judge(self._grid(-STEPS_DOWN))).is_kept:
                    step = -STEPS_DOWN
                if step == -STEPS_DOWN:
                    found.kept, found.at_bottom = None, self._known[RateTrial(self._grid(step), self._n)]
                    return
                others = step - 1
            other = self._known.get(RateTrial(self._grid(others), self._n))
            if other is not None and other.is_kept != verdict.is_kept:
                break
            step = others
        low, high = sorted((self._grid(step), self._grid(others)))
        low, high = yield from self._edge(low, high, lambda v: v.is_kept)
        found.kept, found.broken = (self._known[RateTrial(rate, self._n)] for rate in (low, high))
        if has_interval:
            found.low = (yield from self._outer(low, -1, lambda v: v.is_surely_kept))[0]
            found.high = (yield from self._outer(high, 1, lambda v: not v.is_surely_broken))[1]

    def _kept_beyond(self, found: SearchResult) -> float | None:
        """Returns the highest rate judged that is kept, if it is higher than what was found."""
        if found.error or found.kept is None:
            return None
        kept = max(v.rate for v in self._judged() if v.is_kept)
        return kept if kept > found.kept.rate else None

    def _kept_above(self) -> Generator[RateTrial, Verdict, int]:
        """Judges ``STEPS_LOOKED`` doublings of the start. Returns the highest step that is kept; 0 if none
        is.
        """
        kept = 0
        for step in range(1, STEPS_LOOKED + 1):
            if (yield from self._judge(self._grid(step))).is_kept:
                kept = step
        return kept

    def _grid(self, step: int) -> float:
        return rounded(self._start * 2.0**step)

    def _judge(self, rate: float) -> _Step:
        trial = RateTrial(rate, self._n)
        if trial not in self._known:
            self._known[trial] = yield trial
        verdict = self._known[trial]
        if verdict.error:
            raise _Broken(verdict.error)
        return verdict

    def _judged(self) -> list[Verdict]:
        """Returns the verdicts with the present number of requests, sorted by rate."""
        return [verdict for trial, verdict in sorted(self._known.items()) if trial.n_requests == self._n]

    def _takes_more(self, verdict: Verdict) -> bool:
        """Raises the number of requests if it is too small for ``verdict``. Returns whether it did."""
        # Twice the rate, since the highest rate is less than one doubling away.
        before, needed = self._n, TURNOVERS * 2 * verdict.rate * verdict.mean_s
        while self._n < min(needed, self._most):
            self._n = min(2 * self._n, self._most)
        return self._n > before

    def _edge(
        self, low: float, high: float, holds: Callable[[Verdict], bool]
    ) -> Generator[RateTrial, Verdict, tuple[float, float]]:
        """Bisects until the end of ``holds`` is known. ``holds`` is true at ``low`` and false at ``high``."""
        while high / low > 1 + self._width:
            middle = rounded(math.sqrt(low * high))
            if not low < middle < high:
                break
            if holds((yield from self._judge(middle))):
                low = middle
            else:
                high = middle
        return low, high

    def _outer(
        self, rate: float, way: int, holds: Callable[[Verdict], bool]
    ) -> Generator[RateTrial, Verdict, tuple[float | None, float | None]]:
        """As ``_edge``, but searches from ``rate`` towards higher (``way`` 1) or lower (-1) rates.

        Returns (None, None) if the edge is outside of the rates that are tried.
        """
        limit = self._grid(STEPS_UP if way > 0 else -STEPS_DOWN)
        inner = rate
        verdict = yield from self._judge(rate)
        if holds(verdict) != (way > 0):
            return rate, rate
        while holds(verdict) == (way > 0):
            if inner == limit or (limit - inner) * way <= 0:
                return None, None
            rate, inner = inner, self._next(inner, way, limit)
            verdict = yield from self._judge(inner)
        low, high = sorted((rate, inner))
        return (yield from self._edge(low, high, holds))

    def _next(self, rate: float, way: int, limit: float) -> float:
        """Returns the next rate in direction ``way`` that is judged already, or else half or twice
        ``rate``.
        """
        known = [v.rate for v in self._judged() if (v.rate - rate) * way > 0]
        if known:
            return min(known) if way > 0 else max(known)
        return min(rounded(2 * rate), limit) if way > 0 else max(rounded(rate / 2), limit)
