"""SWARM's routing: priorities that grow by a moving average of latency (arXiv 2301.11913, appendix C)."""

from __future__ import annotations

from dataclasses import dataclass

from policies.interfaces import RoutingPolicy
from policies.link_waits import LinkWaits, backlog_s
from policies.positions import Onward
from policies.problem import Hop, Placement, Problem, RequestSpec, Route, hop_times_s
from policies.state import SystemState
from policies.waiting import waited_route, waiting_s


@dataclass
class SwarmRouting(RoutingPolicy):
    """Per hop the server with the lowest priority value, which then grows by its average latency (SWARM).

    Each server, and the clients together, keep a priority value and a moving average for every server that
    can be next. Of equal values the server listed first wins. So a server that is twice as slow is chosen
    half as often.

    Helix' code measures the latency, from when a prompt is sent to a server until the server has computed it.
    A router gets no measurements, so here the latency is modelled for the present state: the wait for cache,
    the prompt's communication with its expected wait for the link, and its time on the blocks. It does not include
    that other sessions slow a server down. It counts at once, while a measured one counts from a later request on.
    ``smoothing_ratio`` is the weight of the newest latency in the average: 0.1 is the default of SWARM's own code,
    and Helix' has 0.8. The average starts with a server's first latency, while it starts with a constant in Helix' code.
    """

    smoothing_ratio: float = 0.1
    name: str = "swarm"

    def bind(self, problem: Problem, placement: Placement) -> SwarmRouter:
        return SwarmRouter(problem, placement, self.smoothing_ratio)


class SwarmRouter:
    """Every call of ``route`` changes the priorities, even if the request then does not start."""

    def __init__(self, problem: Problem, placement: Placement, smoothing_ratio: float) -> None:
        self._problem = problem
        self._onward = Onward(problem, placement)
        self._link_waits = LinkWaits.of(problem)
        self._smoothing_ratio = smoothing_ratio
        self._priority_s: dict[tuple[int | None, int], float] = {}
        self._average_s: dict[tuple[int | None, int], float] = {}

    def route(self, request: RequestSpec, state: SystemState, now_s: float) -> Route | None:
        """Returns the chosen chain; ``Route.wait_s`` is its longest wait, ``cost_s`` that plus the service."""
        onward = self._onward.of(request.cache_tokens)
        if 0 not in onward:
            return None
        hops: list[Hop] = []
        previous: int | None = None
        position = 0
        while position < self._problem.model.n_blocks:
            hop = min(onward[position], key=lambda hop: self._priority_s.get((previous, hop.server), 0.0))
            self._use(previous, hop, self._latency_s(request, state, now_s, previous, hop))
            hops.append(hop)
            previous, position = hop.server, hop.last
        return waited_route(self._problem, request, hops, state, now_s)

    def _use(self, previous: int | None, hop: Hop, latency_s: float) -> None:
        edge = previous, hop.server
        known_s = self._average_s.get(edge, latency_s)
        average_s = known_s + self._smoothing_ratio * (latency_s - known_s)
        self._average_s[edge] = average_s
        self._priority_s[edge] = self._priority_s.get(edge, 0.0) + average_s

    def _latency_s(
        self, request: RequestSpec, state: SystemState, now_s: float, previous: int | None, hop: Hop
    ) -> float:
        problem = self._problem
        wait_s = waiting_s(
            state, hop.server, hop.n_blocks * problem.model.cache_bytes(request.cache_tokens), now_s
        )
        way_s = hop_times_s(problem, request, previous, hop.server)[0]
        if self._link_waits is not None:
            way_s += backlog_s(
                state, self._link_waits.there(request.client, previous, hop.server), now_s, now_s
            )
        return wait_s + way_s + problem.servers[hop.server].prefill_of_s(request.n_input_tokens, hop.blocks)
