"""Replay of requests with the exact semantics of the paper's public simulator.

Requests are admitted in order of arrival and everything about them is known then. A request's raw
waiting is the largest among its hops; what it waits is the first instant of the backoff series not
before that. It holds cache on every hop from its arrival to its completion, waiting and session
setup included, so that servers can be oversubscribed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from policies.interfaces import Router
from policies.problem import Placement, Problem, RequestSpec, Route, service_s
from policies.state import SystemState
from testbed.errors import RunError
from testbed.experiment import Backoff, RequestPlan


@dataclass(frozen=True)
class ReplayedRequest:
    """What became of a request. ``time_s`` is arrival to last token, ``ttft_s`` to the first."""

    index: int
    route: Route
    waiting_s: float
    ttft_s: float
    time_s: float


def backoff_s(raw_wait_s: float, backoff: Backoff) -> float:
    """The first attempt at or after ``raw_wait_s``: at 0, then first, first + 2 first, ... (steps <= max)."""
    instant_s, step_s = 0.0, backoff.first_s
    while instant_s < raw_wait_s:
        instant_s += step_s
        step_s = min(2 * step_s, backoff.max_s)
    return instant_s


def replay(
    problem: Problem,
    placement: Placement,
    router: Router,
    requests: Iterable[RequestPlan],
    session_setup_s: float = 0.0,
    backoff: Backoff = Backoff(),  # noqa: B008 - frozen
) -> list[ReplayedRequest]:
    """Replay ``requests`` (ascending arrivals). Raises ``RunError`` if one has no chain."""
    state = SystemState(placement.cache_bytes)
    done: list[ReplayedRequest] = []
    for plan in requests:
        request = RequestSpec(plan.client, plan.n_input_tokens, plan.n_output_tokens)
        state.advance(plan.arrival_at_s)
        route = router.route(request, state, plan.arrival_at_s)
        if route is None:
            raise RunError(f"request {plan.index} of {request.n_tokens} tokens has no chain with room for it")
        waiting_s = backoff_s(route.wait_s, backoff)
        first_s, all_s = service_s(problem, request, route.hops)
        before_s = waiting_s + session_setup_s + problem.initial_delay_s
        time_s = before_s + all_s
        state.open(
            plan.index,
            route.hops,
            problem.model.cache_bytes(request.n_tokens),
            plan.arrival_at_s + time_s,
        )
        done.append(ReplayedRequest(plan.index, route, waiting_s, before_s + first_s, time_s))
    return done
