"""Foresight's placement where sessions share servers' time or wait for links, or requests differ in known lengths.

It is the best on trial of several policies' placements and of changes of them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

from policies.cgbp import CgBp, lower_bounds_per_token_s
from policies.composition import ChainComposition
from policies.design import check_design_concurrency
from policies.foresight_routing import WEIGHED, ForesightRouter, counted_tokens
from policies.greedy import plan
from policies.link_waits import LinkWaits
from policies.neighbours import Neighbours, Ranges
from policies.parallax import Parallax
from policies.pipelines import SeparatePipelines, Swarm, WholeModel
from policies.problem import Placement, PolicyError, Problem
from policies.replay import ReplayedRequest, replay
from policies.search import candidate_concurrencies, likely_requests
from policies.shared_replay import replay_shared
from policies.sharing import Sharing
from policies.workload import Backoff

_RIVALS = (CgBp, ChainComposition, Parallax, SeparatePipelines, Swarm, WholeModel)
"""Policies whose placements are tried. Helix' is too slow, and so is Parallax' with many servers."""
_MANY_SERVERS = 100
_FITTING = "fit 0"
_VALIDATION = ("validation 0", "validation 1")
_N_EXACT = 8
"""Number of exact replays; fewer with more servers than ``_MANY_SERVERS``."""
_TOO_SLOW_RATIO = 1.1
"""If servers do not share their time, a placement that is slower than another by this factor on exact
replays is at the edge: it has room for the requests of most streams, but far too little on some."""
_N_FINALISTS = 3
_LONG = 12
"""A stream has this many times as many requests as the fastest chain would serve at a time."""
_FEWEST, _MOST = 100, 400
_SAFE_RATIO = 0.8
"""A request meets an objective if its expected time is at most this share of the limit: times are expected from mean numbers
of sessions, so that real ones vary more."""
_UNCLEAR_MISSED = 0.01
_UNCLEAR_RATIO = 0.02
"""Smaller differences count as chance."""


class Cost(NamedTuple):
    """A placement's cost on trial.

    ``missed`` is the share of requests that are expected to miss an objective. ``time`` is the mean over requests of
    (first token's time / its objective + time per further token / its objective) / 2, or, if some client has none for one
    of them, of (completion - arrival) / output tokens in seconds.
    """

    missed: float
    time: float


_IMPOSSIBLE = Cost(1.0, math.inf)
"""The cost if some request has no chain."""


def ranked(costs: Mapping[Ranges, Cost]) -> list[Ranges]:
    """Returns placements from the best to the worst: those that meet the objectives as often as any, by their
    times; then all others, by how often they miss.
    """
    least = min(cost.missed for cost in costs.values()) + _UNCLEAR_MISSED

    def rank(ranges: Ranges) -> tuple[float, float]:
        cost = costs[ranges]
        return (0.0 if cost.missed <= least else cost.missed, cost.time)

    return sorted(costs, key=rank)


class SharedSearch:
    """One search. Counts limit its work, not a clock.

    The best placement has the least mean time of those in which as many requests meet the objectives as
    in any; a difference of ``_UNCLEAR_MISSED`` is none.
    """

    def __init__(self, problem: Problem, name: str) -> None:
        self._problem = problem
        self._name = name
        self._sharing = Sharing(problem)
        self._waits = LinkWaits.of(problem)
        # Long enough that the first requests, which find empty servers, are a small part.
        alone_s = min(lower_bounds_per_token_s(problem)) * problem.mean_lengths[1]
        n_requests = round(min(max(_LONG * problem.request_rate * alone_s, _FEWEST), _MOST))
        self._n_requests = n_requests
        self._streams = {
            stream: likely_requests(problem, stream, n_requests) for stream in (_FITTING, *_VALIDATION)
        }
        self._objectives_s = [
            [one for one in problem.objectives_of(client) if one[0] in _METRICS]
            for client in range(len(problem.clients))
        ]
        self._weighed_s = [[one for one in of if one[0] in WEIGHED] for of in self._objectives_s]
        """What counts of a request's times, by client: (metric, limit in seconds)."""
        if any(counted_tokens(problem, client) is None for client in range(len(problem.clients))):
            self._weighed_s = [[("per_token", 1.0)] for _ in problem.clients]
        self._known: dict[tuple[Ranges, str], Cost] = {}
        self._n_concurrencies = min(max(240 // problem.n_servers, 4), 12)
        self._n_draws = min(480 // problem.n_servers, 40)

    def run(self, design_concurrency: int | None) -> Placement:
        """Returns the best placement found. Raises ``InfeasiblePlacement`` if no policy has a placement."""
        check_design_concurrency(design_concurrency)
        seeds = self._seeds(design_concurrency)
        of = {placement.ranges: placement for placement in seeds}
        best = ranked({ranges: self.cost(placement, _FITTING) for ranges, placement in of.items()})[
            :_N_FINALISTS
        ]
        improved = self._improved(of[best[0]])
        of[improved.ranges] = improved
        first = seeds[
            0
        ].ranges  # CG-BP's, if it has a placement: it stays unless another is better by more than chance
        judged = {ranges: self.judged(of[ranges]) for ranges in (first, *best, improved.ranges)}
        chosen = of[ranked(judged)[0]]
        least, of_first = judged[chosen.ranges].time, judged[first].time
        if judged[first].missed <= judged[chosen.ranges].missed and least >= (1 - _UNCLEAR_RATIO) * of_first:
            chosen = of[first]
        is_exact = self._problem.batching == "none" and self._waits is None
        return self._away_from_the_edge(chosen, seeds) if is_exact else chosen

    def _away_from_the_edge(self, chosen: Placement, seeds: list[Placement]) -> Placement:
        """Returns ``chosen``, or a seed that misses no more and is much faster on exact replays."""
        n_exact = max(min(_N_EXACT * _MANY_SERVERS // self._problem.n_servers, _N_EXACT), 2)
        streams = [likely_requests(self._problem, f"exact {i}", self._n_requests) for i in range(n_exact)]

        def exact(placement: Placement) -> Cost:
            router = ForesightRouter(self._problem, placement, Backoff())
            try:
                done = [d for requests in streams for d in replay(self._problem, placement, router, requests)]
            except PolicyError:
                return _IMPOSSIBLE
            return self._cost_of(done)

        tried = {placement.ranges: placement for placement in (*seeds, chosen)}
        costs = {ranges: exact(placement) for ranges, placement in tried.items()}
        own = costs[chosen.ranges]
        meeting = [ranges for ranges, cost in costs.items() if cost.missed <= own.missed + _UNCLEAR_MISSED]
        fastest = min(meeting, key=lambda ranges: costs[ranges].time)
        return tried[fastest] if own.time > _TOO_SLOW_RATIO * costs[fastest].time else chosen

    def judged(self, placement: Placement) -> Cost:
        """Returns the mean cost on requests that were not used in the search."""
        costs = [self.cost(placement, stream) for stream in _VALIDATION]
        return Cost(*map(fmean, zip(*costs, strict=True)))

    def cost(self, placement: Placement, stream: str) -> Cost:
        """Returns the placement's cost on a stream of requests; infinite if some request has no chain."""
        key = placement.ranges, stream
        if key not in self._known:
            self._known[key] = self._replayed(placement, stream)
        return self._known[key]

    def _replayed(self, placement: Placement, stream: str) -> Cost:
        router = ForesightRouter(self._problem, placement, Backoff(), self._sharing, self._waits)
        try:
            done = replay_shared(
                self._problem, placement, router, self._streams[stream], self._sharing, self._waits
            )
        except PolicyError:
            return _IMPOSSIBLE
        return self._cost_of(done)

    def _cost_of(self, done: Sequence[ReplayedRequest]) -> Cost:
        n_missed = sum(
            any(
                _METRICS[name](d) > _SAFE_RATIO * limit_s
                for name, limit_s in self._objectives_s[d.plan.client]
            )
            for d in done
        )
        times = (
            fmean(_METRICS[name](d) / limit_s for name, limit_s in self._weighed_s[d.plan.client])
            for d in done
        )
        return Cost(n_missed / len(done), fmean(times))

    def _seeds(self, design_concurrency: int | None) -> list[Placement]:
        problem = self._problem
        seeds: dict[Ranges, Placement] = {}
        refusals = []
        for rival in _RIVALS:
            if rival is Parallax and problem.n_servers > _MANY_SERVERS:
                continue
            try:
                found = rival().place(problem, design_concurrency)
            except PolicyError as refusal:
                refusals.append(refusal)
                continue
            seeds.setdefault(found.ranges, self._placed(found.ranges, found.design_concurrency))
        for concurrency in reversed(candidate_concurrencies(problem, self._n_concurrencies)):
            ranges = plan(problem, concurrency).ranges
            placement = self._placed(ranges, concurrency)
            if not placement.uncovered(problem.model.n_blocks):
                seeds.setdefault(ranges, placement)
        if not seeds:
            raise refusals[0]
        return list(seeds.values())

    def _placed(self, ranges: Ranges, concurrency: int | None) -> Placement:
        return Placement(self._name, ranges, self._problem.room_bytes(ranges), concurrency)

    def _improved(self, placement: Placement) -> Placement:
        neighbours = Neighbours(self._problem, random.Random("foresight"))
        cost = self.cost(placement, _FITTING)
        least = cost.missed
        for _ in range(self._n_draws):
            ranges = neighbours.draw(placement.ranges)
            if ranges is None:
                continue
            changed = self._placed(ranges, placement.design_concurrency)
            changed_cost = self.cost(changed, _FITTING)
            least = min(least, changed_cost.missed)
            is_as_good = changed_cost.missed <= least + _UNCLEAR_MISSED
            if is_as_good and (cost.missed > least + _UNCLEAR_MISSED or changed_cost.time < cost.time):
                placement, cost = changed, changed_cost
        return placement


_METRICS: dict[str, Callable[[ReplayedRequest], float]] = {
    "queue": lambda done: done.waiting_s,
    "ttft": lambda done: done.ttft_s,
    "tpot": lambda done: (done.time_s - done.ttft_s) / max(done.plan.n_output_tokens - 1, 1),
    "per_token": lambda done: done.time_s / done.plan.n_output_tokens,
    "e2e": lambda done: done.time_s,
}
"""The objectives' metrics, each in seconds."""
