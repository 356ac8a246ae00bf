"""Two routings that know more than the model of the system: one learns from what clients measured, one knows regions.

Both are short enough to begin from; ``docs/policies.md`` describes what they use.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import ClassVar

from policies.chains import Chains, Link, cheapest
from policies.interfaces import RoutingPolicy, Want
from policies.outcomes import Outcome
from policies.problem import BlockRange, Hop, Placement, Problem, RequestSpec, Route, service_s
from policies.state import SystemState
from policies.waiting import waited_route
from policies.wsrr import WsRrRouter, link_wait_s

_MOST_ARMS = 4
_FAILED_RATIO = 10.0
"""A failed request counts as one that took so many times as long as modelled."""


class Bandit(RoutingPolicy):
    """Learns how much slower than modelled each chain is, and takes the fastest; every tenth request tries another."""

    name = "bandit"
    wants: ClassVar[tuple[Want, ...]] = ("requests", "seed")
    explored_ratio: ClassVar[float] = 0.1
    half_life_s: ClassVar[float] = 600.0
    """After so many seconds an outcome counts half."""

    def bind(self, problem: Problem, placement: Placement) -> BanditRouter:
        return BanditRouter(problem, placement, self.explored_ratio, self.half_life_s)


class BanditRouter:
    """An epsilon-greedy bandit whose arms are chains.

    The arms of a request are the cheapest chain with waits, and up to three others that avoid the servers of those before.
    An arm's cost is its wait, and its modelled service times the mean ratio of measured to modelled times on it.
    """

    def __init__(
        self, problem: Problem, placement: Placement, explored_ratio: float, half_life_s: float
    ) -> None:
        self._problem = problem
        self._chains = Chains(problem, placement)
        self._explored_ratio, self._half_life_s = explored_ratio, half_life_s
        self._learned: dict[tuple[int, ...], tuple[float, float, float]] = {}
        """By the servers of a chain: (sum of weighted ratios, sum of weights, when they were summed)."""

    def observe(self, outcome: Outcome) -> None:
        """Learn from a request that has ended."""
        if not outcome.hops or (outcome.n_output_tokens < 1 and not outcome.has_failed):
            return
        ratio = _FAILED_RATIO
        if not outcome.has_failed:
            done = RequestSpec(outcome.client, outcome.n_input_tokens, outcome.n_output_tokens)
            modelled_s = service_s(self._problem, done, outcome.hops)[1]
            ratio = (outcome.e2e_s - outcome.wait_s) / modelled_s
        servers = tuple(hop.server for hop in outcome.hops)
        total, weight = self._at(servers, outcome.finished_at_s)
        self._learned[servers] = total + ratio, weight + 1.0, outcome.finished_at_s

    def route(self, request: RequestSpec, state: SystemState, now_s: float) -> Route | None:
        """Return the chain with the least learned cost, or one at random if it is this request's turn to explore."""
        arms = self._arms(request, state, now_s)
        if not arms:
            return None
        if len(arms) > 1 and state.who is not None:
            rng = random.Random(f"{self._problem.seed}:bandit:{state.who.request}")
            if rng.random() < self._explored_ratio:
                return rng.choice(arms)
        return min(arms, key=lambda arm: arm.cost_s)

    def _arms(self, request: RequestSpec, state: SystemState, now_s: float) -> list[Route]:
        graph = self._chains.of(request)
        found: dict[tuple[Hop, ...], Route] = {}
        avoided: set[int] = set()

        def cost_s(link: Link) -> float:
            hop = link.hop
            shunned_s = link.service_s if hop is not None and hop.server in avoided else 0.0
            return link_wait_s(link, state, now_s) + shunned_s

        for _ in range(_MOST_ARMS):
            hops = tuple(link.hop for link in cheapest(graph.into, cost_s)[1] if link.hop is not None)
            if not hops or hops in found:
                break
            route = waited_route(self._problem, request, hops, state, now_s)
            service = route.cost_s - route.wait_s
            found[hops] = route._replace(cost_s=route.wait_s + self._ratio(hops, now_s) * service)
            avoided |= {hop.server for hop in hops}
        return list(found.values())

    def _ratio(self, hops: tuple[Hop, ...], now_s: float) -> float:
        """Return the mean ratio on a chain, with the model itself as one old outcome more."""
        total, weight = self._at(tuple(hop.server for hop in hops), now_s)
        return (total + 1.0) / (weight + 1.0)

    def _at(self, servers: tuple[int, ...], now_s: float) -> tuple[float, float]:
        total, weight, since_s = self._learned.get(servers, (0.0, 0.0, now_s))
        left = 0.5 ** (max(now_s - since_s, 0.0) / self._half_life_s)
        return left * total, left * weight


class RegionFirst(RoutingPolicy):
    """The cheapest chain within the client's own region while it has room there, else the cheapest of all (WS-RR)."""

    name = "region-first"
    wants: ClassVar[tuple[Want, ...]] = ("places",)

    def bind(self, problem: Problem, placement: Placement) -> RegionFirstRouter:
        return RegionFirstRouter(problem, placement)


class RegionFirstRouter:
    """WS-RR in the client's region, if its servers hold all blocks, and everywhere."""

    def __init__(self, problem: Problem, placement: Placement) -> None:
        self._everywhere = WsRrRouter(problem, placement)
        self._within: dict[int, WsRrRouter] = {}
        """By client."""
        places = problem.places
        if places is None:  # in a trial of a placement that does not want them
            return
        of_region: dict[str, WsRrRouter | None] = {}
        for client, region in enumerate(places.client_regions):
            if region not in of_region:
                own = replace(
                    placement,
                    ranges=tuple(
                        held if there == region else BlockRange(0, 0)
                        for held, there in zip(placement.ranges, places.server_regions, strict=True)
                    ),
                )
                is_whole = not own.uncovered(problem.model.n_blocks)
                of_region[region] = WsRrRouter(problem, own) if is_whole else None
            if (router := of_region[region]) is not None:
                self._within[client] = router

    def route(self, request: RequestSpec, state: SystemState, now_s: float) -> Route | None:
        """Return the region's chain if it has room now, else the cheapest of all."""
        router = self._within.get(request.client)
        if router is not None:
            route = router.route(request, state, now_s)
            if route is not None and route.wait_s == 0:
                return route
        return self._everywhere.route(request, state, now_s)
