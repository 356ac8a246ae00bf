"""Foresight's placement with the last choice by rehearsals in the simulator, which sees every step and message."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
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
_FEWEST, _MOST = 50, 400
"""Requests of a rehearsal. With fewer than ``_FEWEST``, chance would decide."""
_MOST_WORK = 200_000
"""Tokens times hops of all rehearsals of a decision, at most: they take some 5 s of CPU."""
_BYTES_OF_WORK = 70_000
"""So many bytes of a prompt on a link take the simulator as long as a token on a hop."""
_CLEAR = 2.0
"""A difference is clear from so many standard errors."""
_UNCLEAR_RATIO = 0.02
_GIVEN_UP_RATIO = 10.0
"""A request that is given up counts as one that takes so many times as long as its client waited."""


class _Judged(NamedTuple):
    """What a rehearsal shows of each request: whether it misses an objective, and its time as in ``foresight_sharing.Cost``."""

    missed: Sequence[bool]
    times: Sequence[float]


@dataclass
class RehearsedForesight(ForesightPlacement):
    """Foresight's placement, unless rehearsals show that another of its finalists is clearly better (own).

    Foresight expects times from mean numbers of sessions. Rehearsals compute every step, and so see how sessions bunch: where
    two servers have equal parts of a chain, for example, all sessions can end up in one step, on one server at a time.
    Where the simulator cannot serve the scenario, has too much to do for it, or servers do not share their time and no message
    waits for a link (then Foresight's own trials are exact), the placement is Foresight's.
    """

    name: str = "foresight-rehearsed"
    wants: ClassVar[tuple[Want, ...]] = ("rehearsal",)

    def _best_shared(self, problem: Problem, design_concurrency: int | None) -> Placement:
        search = _Rehearsals(problem, self.name)
        finalists = search.finalists(design_concurrency)
        return finalists[0] if problem.rehearsal is None else search.best(finalists, problem.rehearsal)


class _Rehearsals(SharedSearch):
    def best(self, finalists: Sequence[Placement], rehearsal: Rehearsal) -> Placement:
        """Returns the first of ``finalists``, or one that rehearsals show to be clearly better."""
        requests = self._requests(finalists)
        if len(finalists) == 1 or len(requests) < _FEWEST:
            return finalists[0]
        chosen = finalists[0]
        best = self._judged_by(rehearsal, chosen, requests)
        for other in finalists[1:]:
            judged = self._judged_by(rehearsal, other, requests)
            if _is_clearly_better(judged, best):
                chosen, best = other, judged
        return chosen

    def _requests(self, finalists: Sequence[Placement]) -> list[RequestPlan]:
        """Returns requests, as many as can be rehearsed with each of ``finalists``."""
        problem = self._problem
        requests = likely_requests(problem, _STREAM, _MOST)
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
        except PolicyError:  # some request has no chain
            return _Judged([True] * len(requests), [math.inf] * len(requests))
        done = [_as_replayed(plan, outcome) for plan, outcome in zip(requests, outcomes, strict=True)]
        return _Judged([self.misses(one, safe_ratio=1.0) for one in done], [self.time(one) for one in done])


def _as_replayed(plan: RequestPlan, outcome: Outcome) -> ReplayedRequest:
    route = Route(outcome.hops, outcome.wait_s, 0.0)
    if outcome.has_failed or outcome.ttft_s is None:
        late_s = _GIVEN_UP_RATIO * outcome.e2e_s
        return ReplayedRequest(plan, route, late_s, late_s, late_s)
    return ReplayedRequest(plan, route, outcome.wait_s, outcome.ttft_s, outcome.e2e_s)


def _is_clearly_better(one: _Judged, other: _Judged) -> bool:
    """Whether ``one`` misses clearly fewer requests; or, if neither does, is faster by more than chance."""
    gained = sum(b and not a for a, b in zip(one.missed, other.missed, strict=True))
    lost = sum(a and not b for a, b in zip(one.missed, other.missed, strict=True))
    if abs(gained - lost) > _CLEAR * math.sqrt(gained + lost):
        return gained > lost
    return fmean(one.times) < (1 - _UNCLEAR_RATIO) * fmean(other.times)
