"""Foresight's placement where sessions share servers' time or wait for links, or requests differ in known lengths.

It is the best on trial of several policies' placements and of changes of them.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from heapq import heapify, heappop, heapreplace
from statistics import fmean
from typing import NamedTuple

from policies.cgbp import CgBp, lower_bounds_per_token_s
from policies.chains import Chains, HopTimes
from policies.composition import ChainComposition
from policies.design import check_design_concurrency
from policies.foresight_routing import WEIGHED, ForesightRouter, counted_tokens
from policies.greedy import plan
from policies.least_times import LeastTimes, Weights
from policies.link_waits import LinkWaits
from policies.neighbours import Neighbours, Ranges
from policies.parallax import Parallax
from policies.pipelines import SeparatePipelines, Swarm, WholeModel
from policies.problem import Placement, PolicyError, Problem
from policies.replay import ReplayedRequest, replay
from policies.search import candidate_concurrencies, likely_requests
from policies.shared_replay import shared_ends
from policies.sharing import Sharing
from policies.workload import Backoff, RequestPlan

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
UNCLEAR_RATIO = 0.02
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
_ROUNDING_RATIO = 1e-9
"""More than what sums of times are rounded by."""


IsBehind = Callable[[Cost], bool]
"""Whether a placement that costs at least so much cannot be among the best any more."""


def ranked(costs: Mapping[Ranges, Cost]) -> list[Ranges]:
    """Returns placements from the best to the worst: those that meet the objectives as often as any, by their
    times; then all others, by how often they miss.
    """
    least = min(cost.missed for cost in costs.values()) + _UNCLEAR_MISSED

    def rank(ranges: Ranges) -> tuple[float, float]:
        cost = costs[ranges]
        return (0.0 if cost.missed <= least else cost.missed, cost.time)

    return sorted(costs, key=rank)


class Limits:
    """What a further placement may cost to be among the ``n`` best of ``costs`` and its own by ``ranked``, whatever comes later.

    It is behind them if it misses more than they do and than counts as meeting the objectives as often as any; and if
    ``n`` of them miss no more and are faster. Once one misses nothing, which says for good what counts as as often, it is
    enough that ``n`` that do are faster. A cost may be less than the placement's in the end, as long as requests are still to come.
    """

    def __init__(self, costs: Collection[Cost], n: int) -> None:
        missed = sorted(cost.missed for cost in costs)
        self._most_missed = max(missed[0] + _UNCLEAR_MISSED, missed[n - 1]) if len(costs) >= n else math.inf
        alike = _UNCLEAR_MISSED if 0.0 in missed else 0.0
        by_missed = sorted((0.0 if cost.missed <= alike else cost.missed, cost.time) for cost in costs)
        self._from_missed, times = [one for one, _ in by_missed], [time for _, time in by_missed]
        self._most_time = [sorted(times[:i])[n - 1] if i >= n else math.inf for i in range(len(times) + 1)]
        """By how many of ``_from_missed`` are at most what the placement misses."""

    def are_exceeded(self, cost: Cost, time_ratio: float = 1.0) -> bool:
        """Whether a placement with a cost of at least ``cost`` is behind, with limits of time that are longer by a factor."""
        if cost.missed > self._most_missed:
            return True
        most_time = self._most_time[bisect_right(self._from_missed, cost.missed)]
        return cost.time > (1 + _ROUNDING_RATIO) * time_ratio * most_time


class _Trial:
    """One replay of a placement, as far as it has gone.

    ``ends`` are its requests as they end, ``least_times`` what they take at least, by index. ``is_missed`` and ``time`` tell of
    one that has ended whether it misses an objective, and what it took.
    """

    def __init__(
        self,
        ends: Iterator[ReplayedRequest],
        least_times: Sequence[float],
        is_missed: Callable[[ReplayedRequest], bool],
        time: Callable[[ReplayedRequest], float],
    ) -> None:
        self._ends = ends
        self._least_times = least_times
        self._is_missed, self._time = is_missed, time
        self._n_missed = 0
        self._times: list[float] = []
        self._past, self._to_come = 0.0, sum(least_times)
        """The times of requests that have ended, and the least ones of the others."""
        self.least = Cost(0.0, self._to_come / len(least_times))
        """What the placement costs at least."""
        self.cost: Cost | None = None
        """What it costs, as soon as all requests have ended; infinite if one of them has no chain."""

    @property
    def rank(self) -> tuple[float, float]:
        """Smaller for a placement that is better as far as is known."""
        missed, time = self.least
        return (0.0 if missed <= _UNCLEAR_MISSED else missed), time

    def go_on(self) -> None:
        """Replays until the next request ends."""
        try:
            done = next(self._ends)
        except PolicyError:
            self.cost = _IMPOSSIBLE
            return
        self._n_missed += self._is_missed(done)
        self._times.append(time := self._time(done))
        self._past += time
        self._to_come -= self._least_times[done.plan.index]
        n = len(self._least_times)
        self.least = Cost(self._n_missed / n, (self._past + max(self._to_come, 0.0)) / n)
        if len(self._times) == n:
            self.cost = Cost(self._n_missed / n, fmean(self._times))


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
        self._least_times = LeastTimes(problem, self._sharing, self._weights)
        self._hop_times = HopTimes(problem)
        self._chains: dict[Ranges, Chains] = {}
        if any(counted_tokens(problem, client) is None for client in range(len(problem.clients))):
            self._weighed_s = [[("per_token", 1.0)] for _ in problem.clients]
        self._known: dict[tuple[Ranges, str], Cost] = {}
        self._n_concurrencies = min(max(240 // problem.n_servers, 4), 12)
        self._n_draws = min(480 // problem.n_servers, 40)

    def run(self, design_concurrency: int | None) -> Placement:
        """Returns the best placement found. Raises ``InfeasiblePlacement`` if no policy has a placement."""
        return self.finalists(design_concurrency)[0]

    def finalists(self, design_concurrency: int | None) -> list[Placement]:
        """Returns the best placement found, then the others of the last comparison: the best on trial first, CG-BP's last.

        Raises ``InfeasiblePlacement`` if no policy has a placement.
        """
        check_design_concurrency(design_concurrency)
        seeds = self._seeds(design_concurrency)
        of = {placement.ranges: placement for placement in seeds}
        costs = self._costs_of_the_best(seeds)
        best = ranked(costs)[:_N_FINALISTS]
        improved = self._improved(of[best[0]])
        of[improved.ranges] = improved
        tried = {ranges: of[ranges] for ranges in (seeds[0].ranges, *best, improved.ranges)}
        chosen = self._best_judged(list(tried.values()))
        is_exact = self._problem.batching == "none" and self._waits is None
        if is_exact:
            chosen = self._away_from_the_edge(chosen, seeds)
        others = (*best, improved.ranges, seeds[0].ranges)
        return [of[ranges] for ranges in dict.fromkeys((chosen.ranges, *others))]

    def _costs_of_the_best(self, seeds: Sequence[Placement]) -> dict[Ranges, Cost]:
        """Returns what the ``_N_FINALISTS`` best placements cost, and others that were not seen to be behind them.

        All are replayed at the same time: always the one goes on that is the best as far as is known.
        """
        found: dict[Ranges, Cost] = {}
        limits = Limits((), _N_FINALISTS)
        trials = [self._trial(placement, _FITTING) for placement in seeds]
        coming = [(trial.rank, i) for i, trial in enumerate(trials)]
        heapify(coming)
        while coming:
            trial = trials[i := coming[0][1]]
            if trial.cost is not None:
                found[seeds[i].ranges] = self._known[seeds[i].ranges, _FITTING] = trial.cost
                limits = Limits(found.values(), _N_FINALISTS)
            elif not limits.are_exceeded(trial.least):
                trial.go_on()
                heapreplace(coming, (trial.rank, i))
                continue
            heappop(coming)
        return {seed.ranges: found[seed.ranges] for seed in seeds if seed.ranges in found}

    def _away_from_the_edge(self, chosen: Placement, seeds: list[Placement]) -> Placement:
        """Returns ``chosen``, or a seed that misses no more and is much faster on exact replays."""
        n_exact = max(min(_N_EXACT * _MANY_SERVERS // self._problem.n_servers, _N_EXACT), 2)
        streams = [likely_requests(self._problem, f"exact {i}", self._n_requests) for i in range(n_exact)]

        def exact(placement: Placement) -> Cost:
            router = ForesightRouter(self._problem, placement, Backoff(), chains=self._chains_of(placement))
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

    def _best_judged(self, placements: Sequence[Placement]) -> Placement:
        """Returns the best by ``judged``. The first, CG-BP's if it has one, stays unless another is better by more than chance."""
        first, costs = placements[0], dict[Ranges, Cost]()
        for placement in reversed(placements):  # the one that is probably the best before all others
            ratio = 1 / (1 - UNCLEAR_RATIO) if placement is first else 1.0
            is_behind = partial(Limits(costs.values(), 1).are_exceeded, time_ratio=ratio)
            if (cost := self.judged(placement, is_behind)) is not None:
                costs[placement.ranges] = cost
        of = {one.ranges: one for one in placements if one.ranges in costs}
        best = ranked({ranges: costs[ranges] for ranges in of})[0]
        cost, of_first = costs[best], costs.get(first.ranges)
        if of_first is None or of_first.missed > cost.missed:
            return of[best]
        return of[best] if cost.time < (1 - UNCLEAR_RATIO) * of_first.time else first

    def judged(self, placement: Placement, is_behind: IsBehind) -> Cost | None:
        """Returns the mean cost on requests that were not used in the search, or ``None`` as soon as it ``is_behind``."""
        n, costs = len(_VALIDATION), list[Cost]()
        for stream in _VALIDATION:

            def mean_is_behind(cost: Cost) -> bool:
                missed, time = (sum(of_all) / n for of_all in zip(*costs, cost, strict=True))
                return is_behind(Cost(missed, time))

            cost = self.cost(placement, stream, mean_is_behind)
            if cost is None:
                return None
            costs.append(cost)
        return Cost(*map(fmean, zip(*costs, strict=True)))

    def cost(self, placement: Placement, stream: str, is_behind: IsBehind) -> Cost | None:
        """Returns the placement's cost on a stream of requests; infinite if some request has no chain.

        ``None``: it ``is_behind``, which may be known long before the last request is served.
        """
        key = placement.ranges, stream
        if key not in self._known:
            cost = self._replayed(placement, stream, is_behind)
            if cost is None:
                return None
            self._known[key] = cost
        return self._known[key]

    def _replayed(self, placement: Placement, stream: str, is_behind: IsBehind) -> Cost | None:
        trial = self._trial(placement, stream)
        while trial.cost is None and not is_behind(trial.least):
            trial.go_on()
        return trial.cost

    def _trial(self, placement: Placement, stream: str) -> _Trial:
        requests, chains = self._streams[stream], self._chains_of(placement)
        router = ForesightRouter(self._problem, placement, Backoff(), self._sharing, self._waits, chains)
        ends = shared_ends(self._problem, placement, router, requests, self._sharing, self._waits)
        return _Trial(ends, self._least(placement, stream), self.misses, self.time)

    def _least(self, placement: Placement, stream: str) -> list[float]:
        """Returns the times that requests of a stream take at least, by index; 0 with many servers."""
        requests = self._streams[stream]
        if self._problem.n_servers > _MANY_SERVERS:
            return [0.0] * len(requests)
        n_held = [held.n_blocks for held in placement.ranges]
        return self._least_times.of(self._chains_of(placement), n_held, requests)

    def _weights(self, plan: RequestPlan) -> Weights:
        """Returns what ``time`` is of the seconds until a request's first token, and of those per further token."""
        n, limits_s = plan.n_output_tokens, dict(self._weighed_s[plan.client])
        if "per_token" in limits_s:
            return Weights(1 / n, 1 - 1 / n)
        first, further = (1 / limits_s[name] / len(WEIGHED) for name in WEIGHED)
        return Weights(first, further if n > 1 else 0.0)

    def _chains_of(self, placement: Placement) -> Chains:
        if placement.ranges not in self._chains:
            self._chains[placement.ranges] = Chains(self._problem, placement, self._hop_times)
        return self._chains[placement.ranges]

    def _cost_of(self, done: Sequence[ReplayedRequest]) -> Cost:
        return Cost(sum(map(self.misses, done)) / len(done), fmean(map(self.time, done)))

    def misses(self, done: ReplayedRequest, safe_ratio: float = _SAFE_RATIO) -> bool:
        """Whether a request needs more than ``safe_ratio`` of what an objective allows."""
        for name, limit_s in self._objectives_s[done.plan.client]:
            if _METRICS[name](done) > safe_ratio * limit_s:
                return True
        return False

    def time(self, done: ReplayedRequest) -> float:
        """Returns what counts of a request in ``Cost.time``."""
        weighed_s = self._weighed_s[done.plan.client]
        return sum([_METRICS[name](done) / limit_s for name, limit_s in weighed_s]) / len(weighed_s)

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
        cost = self._known[placement.ranges, _FITTING]
        least = cost.missed
        for _ in range(self._n_draws):
            ranges = neighbours.draw(placement.ranges)
            if ranges is None:
                continue
            changed = self._placed(ranges, placement.design_concurrency)
            is_behind = Limits((cost, Cost(least, math.inf)), 1).are_exceeded
            if (changed_cost := self.cost(changed, _FITTING, is_behind)) is None:
                continue
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
