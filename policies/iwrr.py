"""Helix' routing: interleaved weighted round robin over the edges of the largest flow (arXiv 2406.01566)."""

from __future__ import annotations

from dataclasses import dataclass

from policies.flow import HUB, Rates, max_flow
from policies.interfaces import RoutingPolicy
from policies.positions import Onward
from policies.problem import Hop, Placement, Problem, RequestSpec, Route
from policies.state import SystemState
from policies.waiting import waited_route

_LEAST_RATIO = 0.05
"""Edges with less than this share of the flow that leaves a server are not used."""
_HIGH_WATER_RATIO = 0.9
"""Servers whose caches would be expected to be fuller than this are avoided."""
_OUTPUT_RATIO = 0.6
"""A request is expected to need cache for this share of its possible output."""


@dataclass
class Iwrr(RoutingPolicy):
    """Interleaved weighted round robin over the edges of the placement's largest flow (Helix).

    At each hop the server with the smallest load + length / flow is chosen; of equal ones the first listed.
    Its load then grows by length / flow. Loads belong to edges. The length is the prompt's. A session stays
    on its chain. Two kinds of servers are left out: those behind edges with under 5 % of the flow that leaves
    a server, and those whose caches would be expected to be over 90 % full with the request on all their
    blocks. A request is expected to need cache for its input and 0.6 of its output.

    In Helix' code loads also grow by 1 / flow with every decoded token, which a router does not see here. There
    0.6 refers to an average output of 240 tokens. Here it refers to the request's possible output. The caches
    of other sessions count as their reservations, reduced by the ratio that results at the design lengths.
    Helix refuses a request if no server is below the limit of 90 %. Here the limit is then ignored, and the
    request waits for cache as usual. If no edge with flow leads to the end (the request is too long for these
    servers' caches), the other servers are weighted by the tokens per second that each can process.
    """

    name: str = "iwrr"

    def bind(self, problem: Problem, placement: Placement) -> IwrrRouter:
        return IwrrRouter(problem, placement)


class IwrrRouter:
    """The router of ``Iwrr``. Every call changes the loads, even if the request then does not start."""

    def __init__(self, problem: Problem, placement: Placement) -> None:
        self._problem = problem
        self._placement = placement
        self._rates = Rates(problem)
        self._onward = Onward(problem, placement)
        self._flow = max_flow(self._rates, placement.ranges, problem.model.n_blocks).edges_tps
        self._leaving: dict[int, float] = {}
        for (tail, _), tps in self._flow.items():
            self._leaving[tail] = self._leaving.get(tail, 0.0) + tps
        self._loads: dict[tuple[int, int], float] = {}
        n_in, n_out = problem.n_input_tokens, problem.n_output_tokens
        self._held_ratio = (n_in + _OUTPUT_RATIO * n_out) / (n_in + n_out)

    def route(self, request: RequestSpec, state: SystemState, now_s: float) -> Route | None:
        """Returns the chain; ``Route.wait_s`` is its longest wait, ``cost_s`` that plus the service time."""
        onward = self._onward.of(request.cache_tokens)
        if 0 not in onward:
            return None
        hops: list[Hop] = []
        tail, position = HUB, 0
        while position < self._problem.model.n_blocks:
            hop = self._next(request, state, tail, onward[position])
            hops.append(hop)
            tail, position = hop.server, hop.last
        return waited_route(self._problem, request, hops, state, now_s)

    def _next(self, request: RequestSpec, state: SystemState, tail: int, hops: list[Hop]) -> Hop:
        least_tps = _LEAST_RATIO * self._leaving.get(tail, 0.0)
        flows = [(self._flow.get((tail, hop.server), 0.0), hop) for hop in hops]
        weighted = [(tps, hop) for tps, hop in flows if tps and tps >= least_tps]
        if not weighted:
            weighted = [(self._passes_tps(hop.server), hop) for hop in hops]
        below = [(tps, hop) for tps, hop in weighted if self._below_mark(request, state, hop.server)]
        loads = self._loads
        after = [
            (loads.get((tail, hop.server), 0.0) + request.n_input_tokens / tps, hop)
            for tps, hop in below or weighted
        ]
        load, chosen = min(after, key=lambda one: one[0])
        loads[tail, chosen.server] = load
        return chosen

    def _passes_tps(self, server: int) -> float:
        return self._rates.server_tps(server, self._placement.ranges[server].n_blocks)

    def _below_mark(self, request: RequestSpec, state: SystemState, server: int) -> bool:
        model, room = self._problem.model, state.cache_bytes[server]
        n_tokens = request.n_input_tokens + _OUTPUT_RATIO * request.n_output_tokens
        need_bytes = n_tokens * model.cache_bytes_per_token * self._placement.ranges[server].n_blocks
        held_bytes = (room - state.free_bytes(server)) * self._held_ratio
        return held_bytes + need_bytes <= _HIGH_WATER_RATIO * room
