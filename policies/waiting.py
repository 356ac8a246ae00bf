"""How long a session must wait for attention cache, as far as a router can know."""

from __future__ import annotations

import math

from policies.state import SystemState

_SLACK = 1e-9


def waiting_s(state: SystemState, server: int, n_bytes: float, now_s: float) -> float:
    """t^W: time until ``n_bytes`` are free on ``server``, by the expected ends of its sessions.

    0 if there is room now; infinite if even an empty server has not enough.
    """
    slack = n_bytes * _SLACK
    free = state.free_bytes(server)
    if free + slack >= n_bytes:
        return 0.0
    if state.cache_bytes[server] + slack < n_bytes:
        return math.inf
    for held in state.sessions(server):
        free += held.n_bytes
        if free + slack >= n_bytes:
            return max(0.0, held.ends_at_s - now_s)
    return 0.0
