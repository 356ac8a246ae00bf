"""How long a session must wait for cache on a server: t^W, from the cache that active sessions hold."""

from __future__ import annotations

import math
from collections.abc import Sequence

from policies.problem import Hop, Problem, RequestSpec, Route, service_s
from policies.state import SystemState

ROUNDING_RATIO = 1e-9
"""A shortage of cache below this share of the need counts as none: it comes from float rounding."""


def fits(free_bytes: float, need_bytes: float) -> bool:
    return free_bytes >= need_bytes * (1.0 - ROUNDING_RATIO)


def waiting_s(state: SystemState, server: int, need_bytes: float, now_s: float) -> float:
    """Returns the seconds from ``now_s`` until ``need_bytes`` of cache are free on ``server``.

    New sessions are not considered. 0 if there is room now; infinite if the server's whole cache is too
    small. Sessions are assumed to end at their expected ends; an overdue one counts as ending now.
    """
    enough_bytes = need_bytes * (1.0 - ROUNDING_RATIO)
    free_bytes = state.free_bytes(server)
    if free_bytes >= enough_bytes:
        return 0.0
    if state.cache_bytes[server] < enough_bytes:
        return math.inf
    for held in state.sessions(server):
        free_bytes += held.n_bytes
        if free_bytes >= enough_bytes:
            return max(held.ends_at_s - now_s, 0.0)
    return math.inf


def waited_route(
    problem: Problem, request: RequestSpec, hops: Sequence[Hop], state: SystemState, now_s: float
) -> Route:
    """Returns the route along ``hops``: it waits for the slowest hop, and costs that wait plus the service."""
    token_bytes = problem.model.cache_bytes(request.cache_tokens)
    wait_s = max(waiting_s(state, hop.server, hop.n_blocks * token_bytes, now_s) for hop in hops)
    return Route(tuple(hops), wait_s, wait_s + service_s(problem, request, hops)[1])
