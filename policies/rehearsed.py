"""Foresight's placement with the last choice by rehearsals in the simulator, which sees every step and message."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import ClassVar, NamedTuple

from policies.foresight import ForesightPlacement
from policies.foresight_routing import ForesightRouting
from policies.foresight_sharing import SharedSearch
from policies.interfaces import Want
from policies.outcomes import Outcome
from policies.problem import Placement, PolicyError, Problem, Route
from policies.rehearsal import Rehearsal
from policies.replay import ReplayedRequest
from policies.search import likely_requests
from policies.state import SystemState
from policies.workload import RequestPlan

_STREAM = "rehearsal"
_FEWEST, _MOST = 50, 200
"""Requests of a rehearsal. With fewer than ``_FEWEST``, chance would decide."""
_MOST_WORK = 100_000
"""Tokens times hops of all rehearsals of a decision, at most: they take 2 to 7 s of CPU."""
_BYTES_OF_WORK = 70_000
"""So many bytes of a prompt on a link take the simulator as long as a token on a hop."""
_CLEAR = 2.0
"""A difference is clear from so many standard errors."""
_UNCLEAR_RATIO = 0.02
_GIVEN_UP_RATIO = 10.0
"""A request that is given up counts as one that takes so many times as long as its client waited."""


class _Judged(NamedTuple):
    """What a rehearsal shows of each request.

    ``misses`` is 0 for one that meets its objectives, 1 for one that misses some, and 2 for one that is given up. ``times`` are as
    in ``foresight_sharing.Cost``.
    """

    misses: Sequence[int]
    times: Sequence[float]


@dataclass
class RehearsedForesight(ForesightPlacement):
    """Foresight's placement, unless rehearsals show that another of its finalists is clearly better (own).

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
        if others:
            best = self._judged_by(rehearsal, chosen, requests)
        for other in others:
            judged = self._judged_by(rehearsal, other, requests)
            if _is_clearly_better(judged, best):
                chosen, best = other, judged
        return chosen

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
            prompt = plan.n_input_tokens * problem.model.token_bytes / _BYTES_OF_WORK
            work += n_hops * (plan.n_output_tokens + prompt)
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
        return _Judged(misses, [self.time(one) for one in done])


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
    return fmean(one.times) < (1 - _UNCLEAR_RATIO) * fmean(other.times)
