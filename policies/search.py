"""Choosing by trial: candidates are simulated on synthetic arrivals, the same ones for every candidate.

The arrivals are made from the load that a problem states (rate, maximal lengths, clients). All random
streams have fixed seeds, so the same problem always has the same result.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from statistics import fmean
from typing import NamedTuple

from policies.design import single_request_s
from policies.feasibility import largest_concurrency
from policies.greedy import block_counts
from policies.interfaces import Router
from policies.link_waits import LinkWaits
from policies.problem import InfeasiblePlacement, Placement, PolicyError, Problem
from policies.replay import EndReplay, ReplayedRequest, replay
from policies.shared_replay import replay_shared
from policies.sharing import Sharing
from policies.waiting import ROUNDING_RATIO
from policies.workload import RequestPlan

MakeRouter = Callable[[Problem, Placement], Router]
"""``bind`` of a routing policy."""

STREAM_REQUESTS = 100
"""A synthetic stream has at least this many requests: as many as in the paper's experiments."""
_MOST_REQUESTS = 1000
_MOST_BY_SERVERS = 15_000
"""Limit of a stream's requests times servers, if it has over ``STREAM_REQUESTS``: trials take time."""

_FINEST_RATIO = 0.02
"""Neighbouring candidates for |R| differ by at least this share. With many unlike servers every |R| has
other m_j."""


_MOST_TYPICAL = 8
"""At most this many lengths stand for all known ones."""


class Load(NamedTuple):
    """A kind of synthetic load, relative to the one that the problem states.

    Requests arrive at ``rate_ratio`` times the stated rate, with gamma-distributed gaps of ``shape`` (1:
    Poisson; less: bursts). Input and output lengths are each one of ``length_ratios`` times the maximum,
    equally likely. There are few, because routers prepare for every kind of request. If the lengths of past
    requests are known, one of these (``typical_lengths``) replaces the maxima.
    """

    name: str
    rate_ratio: float = 1.0
    shape: float = 1.0
    length_ratios: tuple[float, ...] = (1.0,)


STATED = Load("stated")


def synthetic_requests(
    problem: Problem, load: Load, stream: str, n_requests: int = STREAM_REQUESTS
) -> list[RequestPlan]:
    """Returns requests of ``load`` from equally likely clients. ``stream`` seeds the random numbers."""
    rng = random.Random(f"synthetic {load.name} {stream}")
    known = typical_lengths(problem)
    scale_s = 1 / (load.shape * load.rate_ratio * problem.request_rate)
    at_s = 0.0
    requests = []
    for index in range(n_requests):
        client = rng.randrange(len(problem.clients))
        longest = known[0] if len(known) == 1 else rng.choice(known)
        n_in, n_out = (max(round(rng.choice(load.length_ratios) * n), min(n, 1)) for n in longest)
        requests.append(RequestPlan(index, client, at_s, n_in, n_out, problem.reserved_output_tokens))
        at_s += rng.gammavariate(load.shape, scale_s)
    return requests


def likely_requests(problem: Problem, stream: str, n_requests: int) -> list[RequestPlan]:
    """Returns requests as ``synthetic_requests`` at the stated load, but with outputs of real past requests.

    Routers do not see outputs, so there may be many different ones. Inputs are those of ``typical_lengths``.
    Without known lengths the requests are those of ``synthetic_requests``.
    """
    requests = synthetic_requests(problem, STATED, stream, n_requests)
    if not problem.length_samples:
        return requests
    rng = random.Random(f"outputs {stream}")
    typical = typical_lengths(problem)
    found = []
    for plan in requests:
        n_input, n_output = rng.choice(problem.length_samples)
        near = min(typical, key=lambda lengths: (abs(lengths[0] - n_input), lengths))[0]
        found.append(replace(plan, n_input_tokens=near, n_output_tokens=n_output))
    return found


def typical_lengths(problem: Problem) -> list[tuple[int, int]]:
    """Returns (input, output) lengths that stand for those of past requests.

    Past requests are sorted by length and divided into equal groups; each group's mean is returned. Without
    known lengths the result is the maxima.
    """
    if not problem.length_samples:
        return [(problem.n_input_tokens, problem.n_output_tokens)]
    if len(set(problem.length_samples)) == 1:
        return [problem.length_samples[0]]
    ordered = sorted(problem.length_samples, key=lambda lengths: (sum(lengths), lengths))
    n = min(_MOST_TYPICAL, len(ordered))
    parts = [ordered[i * len(ordered) // n : (i + 1) * len(ordered) // n] for i in range(n)]
    return [(round(fmean(a for a, _ in part)), round(fmean(b for _, b in part))) for part in parts]


def stream_requests(problem: Problem) -> int:
    """Returns how many requests a stream needs.

    They are a quarter more than the stated load has at a time; with fewer, memory would never be scarce. They
    are at most a quarter more than CG-BP can make room for, at least ``STREAM_REQUESTS``, and limited,
    because trials take time.
    """
    try:
        at_a_time = min(problem.request_rate * single_request_s(problem), largest_concurrency(problem))
    except InfeasiblePlacement:  # the placement policy will report it
        return STREAM_REQUESTS
    most = min(_MOST_REQUESTS, _MOST_BY_SERVERS // problem.n_servers)
    return max(min(math.ceil(1.25 * at_a_time), most), STREAM_REQUESTS)


class Trials:
    """Simulates placements on streams of ``n_requests`` requests, which are made once.

    They are served with the reference's semantics, or by ``replay_shared`` where messages wait for links.
    """

    def __init__(self, problem: Problem, make_router: MakeRouter, loads: Sequence[Load]) -> None:
        self._problem = problem
        self.n_requests = stream_requests(problem)
        self._make_router = make_router
        self._loads = tuple(loads)
        self._waits = LinkWaits.of(problem)
        self._sharing = Sharing(problem)
        self._requests: dict[tuple[Load, str], list[RequestPlan]] = {}
        self.refusal: PolicyError | None = None
        """Why a request had no chain, the last time."""

    def per_token_s(self, placement: Placement, streams: Sequence[str]) -> list[list[float]]:
        """Returns, for every load, the mean time per token on each of ``streams``, in seconds.

        It is the mean over requests of (completion - arrival) / output tokens; infinite if some
        request has no chain.
        """
        router = self._make_router(self._problem, placement)
        return [[self._mean_s(placement, router, load, stream) for stream in streams] for load in self._loads]

    def mean_per_token_s(self, placement: Placement, streams: Sequence[str], most_s: float) -> float:
        """Returns the mean of ``per_token_s`` over the first load's streams; infinite as soon as it is above ``most_s``."""
        router, sum_s = self._make_router(self._problem, placement), 0.0
        for stream in streams:
            left_s = most_s * len(streams) - sum_s
            sum_s += self._mean_s(placement, router, self._loads[0], stream, left_s)
            if sum_s == math.inf:
                break
        return sum_s / len(streams)

    def _mean_s(
        self, placement: Placement, router: Router, load: Load, stream: str, most_s: float = math.inf
    ) -> float:
        requests = self._requests.get((load, stream))
        if requests is None:
            requests = synthetic_requests(self._problem, load, stream, self.n_requests)
            self._requests[load, stream] = requests
        left_s = (1 + ROUNDING_RATIO) * most_s * len(requests)

        def check(done: ReplayedRequest) -> None:
            nonlocal left_s
            left_s -= done.time_s / done.plan.n_output_tokens
            if left_s < 0:
                raise EndReplay

        on_end = None if most_s == math.inf else check
        try:
            if self._waits is None:
                done = replay(self._problem, placement, router, requests, on_end=on_end)
            else:
                done = replay_shared(
                    *(self._problem, placement, router, requests, self._sharing, self._waits), on_end=on_end
                )
        except EndReplay:
            return math.inf
        except PolicyError as refusal:
            self.refusal = refusal
            return math.inf
        return sum(d.time_s / d.plan.n_output_tokens for d in done) / len(done)


def candidate_concurrencies(problem: Problem, at_most: int) -> list[int]:
    """Returns at most ``at_most`` values of |R| that are worth a trial, ascending.

    They are the largest |R| for each set of m_j that CG-BP can have, thinned out. Empty if not even one
    session fits.
    """
    limit = largest_concurrency(problem)
    found: list[int] = []
    low = 1
    while low <= limit:
        counts = block_counts(problem, low)
        same, above = low, limit + 1  # the largest |R| with the same m_j, by bisection
        while above - same > 1:
            middle = (same + above) // 2
            same, above = (middle, above) if block_counts(problem, middle) == counts else (same, middle)
        found.append(same)
        low = max(same + 1, math.floor(same * (1 + _FINEST_RATIO)))
    if len(found) <= at_most:
        return found
    step = (len(found) - 1) / (at_most - 1)
    return [found[round(i * step)] for i in range(at_most)]


class SearchedConcurrency(NamedTuple):
    """The best |R| and its placement."""

    value: int
    placement: Placement


def search_design_concurrency(
    problem: Problem,
    place: Callable[[Problem, int | None], Placement],
    make_router: MakeRouter,
    *,
    at_most: int = 40,
    n_streams: int = 3,
) -> SearchedConcurrency:
    """Returns the |R| whose placement serves the stated load fastest, of at most ``at_most`` that it tries.

    ``place`` and ``make_router`` are a placement policy's ``place`` and a routing policy's ``bind``.
    Of equally fast ones the larger |R| wins, and of those with the same placement only the largest is tried.
    Raises ``InfeasiblePlacement`` if no |R| has a placement that serves the requests.
    """
    trials = Trials(problem, make_router, (STATED,))
    streams = [f"search {i}" for i in range(n_streams)]
    best: SearchedConcurrency | None = None
    best_s, tried = math.inf, set[Hashable]()
    for concurrency in reversed(candidate_concurrencies(problem, at_most)):
        try:
            placement = place(problem, concurrency)
        except InfeasiblePlacement:
            continue
        if (held := (tuple(map(tuple, placement.ranges)), tuple(placement.cache_bytes))) in tried:
            continue
        tried.add(held)
        mean_s = trials.mean_per_token_s(placement, streams, best_s)
        if mean_s < best_s:
            best_s, best = mean_s, SearchedConcurrency(concurrency, placement)
    if best is None:
        placement = place(problem, None)  # its error names what is missing
        why = "" if trials.refusal is None else f" (the last: {trials.refusal})"
        raise InfeasiblePlacement(
            f"{placement.policy} has no placement that serves the requests of a search at any design "
            f"concurrency{why}; give the servers more memory, or use a routing policy that returns a chain for every request, "
            "with the wait for its room"
        )
    return best
