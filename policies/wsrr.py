"""WS-RR: waiting-penalised shortest-path request routing (the paper's online algorithm)."""

from __future__ import annotations

import math

from policies.problem import Hop, Placement, Problem, RequestSpec, Route
from policies.state import SystemState
from policies.waiting import waiting_s


class WsRrRouter:
    """Shortest path over block positions: server j leads from any position in its range to its end.

    Link cost: t^W + t^I_cj + (l-1) t_cj + k (tau^I_j + (l-1) tau_j). Work per request: O(sum m_j).
    """

    def __init__(self, problem: Problem, placement: Placement) -> None:
        self._problem = problem
        self._starting_at: list[list[tuple[int, int]]] = [[] for _ in range(problem.model.n_blocks)]
        for server, (first, last) in enumerate(placement.ranges):
            for position in range(first, last):
                self._starting_at[position].append((server, last))

    def route(self, request: RequestSpec, state: SystemState, now_s: float) -> Route | None:
        problem, client, l_in = self._problem, request.client, request.n_input_tokens
        steps = request.n_output_tokens - 1
        per_block_bytes = problem.model.cache_bytes(request.n_tokens)
        fixed = [
            problem.input_rtt_s(client, j, l_in) + steps * problem.token_rtt_s[client][j]
            for j in range(problem.n_servers)
        ]
        per_block = [s.prefill_s(l_in) + steps * s.decode_s for s in problem.servers]
        waits: dict[tuple[int, int], float] = {}
        n_blocks = problem.model.n_blocks
        cost = [math.inf] * (n_blocks + 1)
        came: list[Hop | None] = [None] * (n_blocks + 1)
        cost[0] = 0.0
        for position in range(n_blocks):
            here = cost[position]
            if here == math.inf:
                continue
            for server, last in self._starting_at[position]:
                k = last - position
                wait = waits.get((server, k))
                if wait is None:
                    wait = waits[server, k] = waiting_s(state, server, k * per_block_bytes, now_s)
                total = here + wait + fixed[server] + k * per_block[server]
                if total < cost[last]:
                    cost[last], came[last] = total, Hop(server, position, last)
        return _trace_back(came, cost[n_blocks], waits)


def _trace_back(came: list[Hop | None], cost_s: float, waits: dict[tuple[int, int], float]) -> Route | None:
    hops: list[Hop] = []
    position = len(came) - 1
    while position:
        hop = came[position]
        if hop is None:
            return None
        hops.append(hop)
        position = hop.first
    hops.reverse()
    return Route(tuple(hops), max(waits[h.server, h.n_blocks] for h in hops), cost_s)


class WsRr:
    """Waiting-penalised shortest-path routing of the paper: waits and service times add up."""

    name = "ws-rr"

    def bind(self, problem: Problem, placement: Placement) -> WsRrRouter:
        return WsRrRouter(problem, placement)
