"""Foresight's placement with the last choice by rehearsals in the simulator, which sees every step and message."""

from __future__ import annotations

import math
import random
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean
from typing import ClassVar, NamedTuple

from policies.foresight import ForesightPlacement
from policies.foresight_routing import ForesightRouting
from policies.foresight_sharing import UNCLEAR_RATIO, SharedSearch
from policies.interfaces import Want
from policies.neighbours import Neighbours
from policies.outcomes import Outcome
from policies.problem import Hop, Placement, PolicyError, Problem, Route
from policies.rehearsal import Rehearsal
from policies.replay import ReplayedRequest
from policies.search import likely_requests
from policies.state import SystemState
from policies.workload import RequestPlan

_STREAM = "rehearsal"
_FEWEST, _MOST = 50, 200
"""Requests of a rehearsal. With fewer than ``_FEWEST``, chance would decide."""
_MOST_WORK = 100_000
"""Tokens times hops of the finalists' rehearsals, at most: they take 2 to 7 s of CPU. As much again for borders that are moved."""
_BYTES_OF_WORK = 70_000
"""So many bytes of a prompt on a link take the simulator as long as a token on a hop."""
_CLEAR = 2.0
"""A difference is clear from so many standard errors."""
_GIVEN_UP_RATIO = 10.0
"""A request that is given up counts as one that takes so many times as long as its client waited."""


class _Judged(NamedTuple):
    """What a rehearsal shows of each request.

    ``misses`` is 0 for one that meets its objectives, 1 for one that misses some, and 2 for one that is given up. ``times`` are as
    in ``foresight_sharing.Cost``. ``chains`` are the chains of those that had one.
    """

    misses: Sequence[int]
    times: Sequence[float]
    chains: Sequence[tuple[Hop, ...]] = ()


@dataclass
class RehearsedForesight(ForesightPlacement):
    """Foresight's placement, unless rehearsals show that another finalist or other borders are clearly better (own).

    Foresight expects times from mean numbers of sessions. Rehearsals compute every step, and so see how sessions bunch: where
    two servers have equal parts of a chain, for example, all sessions can end up in one step, on one server at a time.
    The placement is Foresight's where the simulator cannot serve the scenario or has too much to do for it, where servers keep
    caches for later requests (nobody knows which), and where servers do not share their time and no message waits for a link
    (then Foresight's own trials are exact).
    """

    name: str = "foresight-rehearsed"
    wants: ClassVar[tuple[Want, ...]] = ("rehearsal",)

    def _best_shared(self, problem: Problem, design_concurrency: int | None) -> Placement:
        search = _Rehearsals(problem, self.name)
        finalists = search.finalists(design_concurrency)
        if problem.rehearsal is None or problem.rehearsal.keeps_caches:
            return finalists[0]
        return search.best(finalists, problem.rehearsal)


class _Rehearsals(SharedSearch):
    def best(self, finalists: Sequence[Placement], rehearsal: Rehearsal) -> Placement:
        """Returns the first of ``finalists``, or one that rehearsals show to be clearly better."""
        requests = self._requests(finalists)
        while len(requests) < _FEWEST and len(finalists) > 1:
            finalists = finalists[:-1]
            requests = self._requests(finalists)
        chosen, *others = finalists
        if not others:
            return chosen
        best = self._judged_by(rehearsal, chosen, requests)
        for other in others:
            judged = self._judged_by(rehearsal, other, requests)
            if _is_clearly_better(judged, best):
                chosen, best = other, judged
        return self._with_better_borders(rehearsal, chosen, best, requests)

    def _with_better_borders(
        self, rehearsal: Rehearsal, chosen: Placement, best: _Judged, requests: Sequence[RequestPlan]
    ) -> Placement:
        """Returns ``chosen``, or what becomes of it if borders between servers of its chains are moved as long as that is clearly better."""
        n_left = self._n_rehearsals(chosen, requests)
        tried, to_try = {chosen.ranges}, deque(_borders(best.chains))
        neighbours = Neighbours(self._problem, random.Random(0))
        while to_try and n_left:
            left, right, by = to_try.popleft()
            ranges = neighbours.with_border(chosen.ranges, left, right, by)
            if ranges is None or ranges in tried:
                continue
            tried.add(ranges)
            n_left -= 1
            moved = self._placed(ranges, chosen.design_concurrency)
            judged = self._judged_by(rehearsal, moved, requests)
            if _is_clearly_better(judged, best):
                chosen, best = moved, judged
                to_try = deque(_borders(best.chains))
        return chosen

    def _n_rehearsals(self, placement: Placement, requests: Sequence[RequestPlan]) -> int:
        """Returns how many rehearsals of ``requests`` with placements like this one are as much as may be done."""
        return int(
            _MOST_WORK / (self._n_hops(placement, requests[0]) * sum(map(self._work, requests)) or math.inf)
        )

    def _work(self, plan: RequestPlan) -> float:
        """Returns how many tokens on a hop take the simulator as long as a request on a hop."""
        return plan.n_output_tokens + plan.n_input_tokens * self._problem.model.token_bytes / _BYTES_OF_WORK

    def _requests(self, finalists: Sequence[Placement]) -> list[RequestPlan]:
        """Returns requests, as many as can be rehearsed with each of ``finalists``."""
        problem = self._problem
        most = problem.n_output_tokens  # what may come; to place for, a mean is enough where caches grow
        requests = [
            plan if plan.max_new_tokens is None else replace(plan, max_new_tokens=most)
            for plan in likely_requests(problem, _STREAM, _MOST)
        ]
        n_hops, work = sum(self._n_hops(placement, requests[0]) for placement in finalists), 0.0
        for n, plan in enumerate(requests):
            work += n_hops * self._work(plan)
            if work > _MOST_WORK:
                return requests[:n]
        return requests

    def _n_hops(self, placement: Placement, plan: RequestPlan) -> int:
        router = ForesightRouting().bind(self._problem, placement)
        route = router.route(plan.known, SystemState(placement.cache_bytes), 0.0)
        return 0 if route is None else len(route.hops)

    def _judged_by(
        self, rehearsal: Rehearsal, placement: Placement, requests: Sequence[RequestPlan]
    ) -> _Judged:
        try:
            outcomes = rehearsal(placement, requests)
        except PolicyError:  # such as links on which clients give servers up
            return _Judged([2] * len(requests), [math.inf] * len(requests))
        done = [_as_replayed(plan, outcome) for plan, outcome in zip(requests, outcomes, strict=True)]
        misses = [
            2 if outcome.has_failed else int(self.misses(one, safe_ratio=1.0))
            for outcome, one in zip(outcomes, done, strict=True)
        ]
        return _Judged(misses, [self.time(one) for one in done], [one.hops for one in outcomes if one.hops])


def _borders(chains: Sequence[tuple[Hop, ...]]) -> Iterator[tuple[int, int, int]]:
    """Yields moves of the borders between neighbouring servers of the chain that most requests have: (left, right, by blocks)."""
    for chain, _ in Counter(chains).most_common(1):
        for left, right in pairwise(chain):
            yield left.server, right.server, -1
            yield left.server, right.server, 1


def _as_replayed(plan: RequestPlan, outcome: Outcome) -> ReplayedRequest:
    route = Route(outcome.hops, outcome.wait_s, 0.0)
    if outcome.has_failed or outcome.ttft_s is None:
        late_s = _GIVEN_UP_RATIO * outcome.e2e_s
        return ReplayedRequest(plan, route, late_s, late_s, late_s)
    return ReplayedRequest(plan, route, outcome.wait_s, outcome.ttft_s, outcome.e2e_s)


def _is_clearly_better(one: _Judged, other: _Judged) -> bool:
    """Whether ``one`` misses clearly less often; or, if neither does, is faster by more than chance."""
    gains = [b - a for a, b in zip(one.misses, other.misses, strict=True)]
    if abs(sum(gains)) > _CLEAR * math.sqrt(sum(gain * gain for gain in gains)):
        return sum(gains) > 0
    return fmean(one.times) < (1 - UNCLEAR_RATIO) * fmean(other.times)
