"""Serves requests with the exact semantics of the paper's public simulator.

Requests are admitted in the order of arrival, and everything about them is known then. A request's raw wait
is the longest among its hops. It really waits until the first attempt of the backoff series that is not
before that. It holds cache on every hop from its arrival to its completion, waiting and session
setup included, so servers can be oversubscribed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from policies.interfaces import Router
from policies.problem import Hop, Placement, PolicyError, Problem, RequestSpec, Route, service_s
from policies.remember import remember
from policies.state import SystemState
from policies.workload import Backoff, RequestPlan

_MAX_KNOWN = 65536
"""At most this many service times are kept: one per chain and kind of request."""


class ReplayedRequest(NamedTuple):
    """A request's outcome in seconds: ``time_s`` from arrival to last token, ``ttft_s`` to the first one."""

    plan: RequestPlan
    route: Route
    waiting_s: float
    ttft_s: float
    time_s: float


class EndReplay(Exception):
    """``on_end`` raises it to end a replay, whose result is not needed any more."""


class ServiceTimes:
    """``policies.problem.service_s`` with a memory of results."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._known_s: dict[tuple[RequestSpec, tuple[Hop, ...]], tuple[float, float]] = {}

    def of(self, request: RequestSpec, hops: tuple[Hop, ...]) -> tuple[float, float]:
        """Returns the seconds of (the first token, the whole request)."""
        known = self._known_s.get((request, hops))
        if known is None:
            times_s = service_s(self._problem, request, hops)
            known = remember(self._known_s, (request, hops), times_s, _MAX_KNOWN)
        return known


@lru_cache
def _attempts_s(first_s: float, max_s: float) -> tuple[list[float], Iterator[float]]:
    """Returns the attempts of a backoff without jitter: those that were asked for until now, and those to come."""
    return [0.0], accumulate(Backoff(first_s, max_s).waits_s(0))


def backoff_s(raw_wait_s: float, backoff: Backoff) -> float:
    """Returns the first attempt at or after ``raw_wait_s``: they are at 0, f, f + 2 f, ... (steps <= max)."""
    known_s, coming_s = _attempts_s(backoff.first_s, backoff.max_s)
    while known_s[-1] < raw_wait_s:
        known_s.append(next(coming_s))
    return known_s[bisect_left(known_s, raw_wait_s)]


def replay(
    problem: Problem,
    placement: Placement,
    router: Router,
    requests: Iterable[RequestPlan],
    session_setup_s: float = 0.0,
    backoff: Backoff = Backoff(),  # noqa: B008 - frozen
    on_end: Callable[[ReplayedRequest], None] | None = None,
) -> list[ReplayedRequest]:
    """Serves ``requests`` (ascending arrivals). Raises ``PolicyError`` if one has no chain.

    ``on_end`` is called with each request whose end is known; what it raises ends the replay.
    """
    state = SystemState(placement.cache_bytes)
    kinds: dict[tuple[int, int, int, int | None], tuple[RequestSpec, RequestSpec]] = {}
    service_times = ServiceTimes(problem)
    setup_s = session_setup_s + problem.initial_delay_s
    done: list[ReplayedRequest] = []
    for plan in requests:
        lengths = (plan.client, plan.n_input_tokens, plan.n_output_tokens, plan.max_new_tokens)
        kind = kinds.get(lengths)
        if kind is None:
            kind = kinds[lengths] = plan.known, plan.served
        request, served = kind
        now_s = plan.arrival_at_s
        state.advance(now_s)
        try:
            route = router.route(request, state, now_s)
        except PolicyError as error:
            raise PolicyError(f"request {plan.index}: {error}") from error
        if route is None:
            raise PolicyError(
                f"request {plan.index} of {request.n_tokens} tokens has no chain with room for it"
            )
        waiting_s = backoff_s(route.wait_s, backoff) if route.wait_s else 0.0
        first_s, all_s = service_times.of(served, route.hops)
        before_s = waiting_s + setup_s
        time_s = before_s + all_s
        state.open(plan.index, route.hops, problem.model.cache_bytes(request.n_tokens), now_s + time_s)
        done.append(ReplayedRequest(plan, route, waiting_s, before_s + first_s, time_s))
        if on_end is not None:
            on_end(done[-1])
    return done
