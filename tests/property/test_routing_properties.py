"""Routers on any placement and load, compared with every possible chain."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies import Hop, Placement, Problem, RequestSpec, Route, SystemState, service_s
from policies.checks import check_route
from policies.optimal_rr import OptimalRr
from policies.petals_code import PetalsCodeRouting
from policies.petals_routing import PetalsRouting
from policies.registry import ROUTINGS
from policies.wsrr import ShortestPath, WsRr
from tests.support.problems import every_chain, forwarded, placements, problems, requests, states

ANY_CHAIN = sorted(set(ROUTINGS) - {"rr", "jffc"})
"""The others have chains of their own."""
TAKES_TURNS = {"iwrr", "rr", "swarm"}
"""What they answer depends on what they answered before."""


def plain_wait_s(state: SystemState, server: int, need_bytes: float) -> float:
    """Return the wait by its definition: until the earliest end after which the rest leaves room."""
    sessions = state.sessions(server)
    for at_s in [0.0, *(s.ends_at_s for s in sessions)]:
        used = sum(s.n_bytes for s in sessions if s.ends_at_s > at_s)
        if state.cache_bytes[server] - used >= need_bytes - 1e-6:
            return at_s
    return math.inf


def waits_s(
    problem: Problem, request: RequestSpec, chain: tuple[Hop, ...], state: SystemState
) -> list[float]:
    block_bytes = problem.model.cache_bytes(request.n_tokens)
    return [plain_wait_s(state, hop.server, hop.n_blocks * block_bytes) for hop in chain]


@st.composite
def situations(draw: st.DrawFn) -> tuple[Problem, Placement, SystemState, RequestSpec]:
    """Draw a problem, hub-spoke or forwarding, with any placement under any load."""
    problem = draw(problems())
    if draw(st.booleans()):
        problem = forwarded(problem, over_links=draw(st.booleans()))
    placement = draw(placements(problem))
    return problem, placement, draw(states(problem, placement)), draw(requests(problem))


@given(situations())
def test_ws_rr_finds_the_cheapest_of_all_chains_waiting_included(
    situation: tuple[Problem, Placement, SystemState, RequestSpec],
) -> None:
    problem, placement, state, request = situation
    router = WsRr().bind(problem, placement)
    best_s = math.inf
    for chain in every_chain(placement, problem.model.n_blocks):
        cost_s = sum(waits_s(problem, request, chain, state)) + service_s(problem, request, chain)[1]
        best_s = min(best_s, cost_s)
    route = router.route(request, state, 0.0)
    if route is None:
        assert best_s == math.inf
        return
    check_route(problem, placement, route, "ws-rr")
    assert math.isclose(route.cost_s, best_s, rel_tol=1e-9)
    chain_waits_s = waits_s(problem, request, route.hops, state)
    assert route.wait_s == max(chain_waits_s)
    service = service_s(problem, request, route.hops)[1]
    assert math.isclose(route.cost_s, sum(chain_waits_s) + service, rel_tol=1e-9)


def _is_exactly_full(placement: Placement, state: SystemState, server: int, block_bytes: float) -> bool:
    range_bytes = placement.ranges[server].n_blocks * block_bytes
    return state.n_active(server) == int(placement.cache_bytes[server] / range_bytes + 1e-9)


def _lacks_cache(placement: Placement, state: SystemState, server: int, block_bytes: float) -> bool:
    return state.free_bytes(server) < placement.ranges[server].n_blocks * block_bytes - 1e-6


@pytest.mark.parametrize(
    ("policy", "is_penalised"), [(PetalsRouting(), _is_exactly_full), (PetalsCodeRouting(), _lacks_cache)]
)
@given(situation=situations())
def test_petals_finds_the_cheapest_of_all_chains_by_its_own_costs(
    policy: PetalsRouting | PetalsCodeRouting,
    is_penalised: Callable[[Placement, SystemState, int, float], bool],
    situation: tuple[Problem, Placement, SystemState, RequestSpec],
) -> None:
    problem, placement, state, request = situation
    block_bytes = problem.model.cache_bytes(request.n_tokens)
    rtt_s = problem.raw_rtt_s[request.client]

    def cost_s(chain: tuple[Hop, ...]) -> float:
        total_s, before = rtt_s[chain[-1].server] / 2, None
        for hop in chain:
            j = hop.server
            if placement.cache_bytes[j] < hop.n_blocks * block_bytes - 1e-6:
                return math.inf
            total_s += (rtt_s[j] if before is None else problem.server_rtt_s[before][j]) / 2 + 0.018
            total_s += problem.servers[j].decode_s * hop.n_blocks
            total_s += 10.0 if is_penalised(placement, state, j, block_bytes) else 0.0
            before = j
        return total_s

    route = policy.bind(problem, placement).route(request, state, 0.0)
    best_s = min(map(cost_s, every_chain(placement, problem.model.n_blocks)), default=math.inf)
    if route is None:
        assert best_s == math.inf
        return
    check_route(problem, placement, route, policy.name)
    assert math.isclose(route.cost_s, best_s, rel_tol=1e-9)
    assert math.isclose(cost_s(route.hops), best_s, rel_tol=1e-9)
    assert route.wait_s == max(waits_s(problem, request, route.hops, state))


@given(situations())
def test_optimal_rr_finds_the_least_longest_wait_plus_service_of_all_chains(
    situation: tuple[Problem, Placement, SystemState, RequestSpec],
) -> None:
    problem, placement, state, request = situation

    def cost_s(chain: tuple[Hop, ...]) -> float:
        return max(waits_s(problem, request, chain, state)) + service_s(problem, request, chain)[1]

    best_s = min(map(cost_s, every_chain(placement, problem.model.n_blocks)), default=math.inf)
    route = OptimalRr().bind(problem, placement).route(request, state, 0.0)
    by_ws_rr = WsRr().bind(problem, placement).route(request, state, 0.0)
    if route is None or by_ws_rr is None:
        assert best_s == math.inf
        assert route is by_ws_rr
        return
    check_route(problem, placement, route, "optimal-rr")
    assert math.isclose(route.cost_s, best_s, rel_tol=1e-9)
    assert math.isclose(cost_s(route.hops), best_s, rel_tol=1e-9)
    assert route.wait_s == max(waits_s(problem, request, route.hops, state))
    assert cost_s(route.hops) <= cost_s(by_ws_rr.hops) * (1 + 1e-9)


@given(situations())
def test_the_shortest_path_is_the_cheapest_of_all_chains_on_idle_servers(
    situation: tuple[Problem, Placement, SystemState, RequestSpec],
) -> None:
    problem, placement, state, request = situation
    idle = SystemState(placement.cache_bytes)
    possible = [
        service_s(problem, request, chain)[1]
        for chain in every_chain(placement, problem.model.n_blocks)
        if max(waits_s(problem, request, chain, idle)) == 0.0
    ]
    route = ShortestPath().bind(problem, placement).route(request, state, 0.0)
    if route is None:
        assert not possible
        return
    check_route(problem, placement, route, "shortest-path")
    assert math.isclose(route.cost_s, min(possible), rel_tol=1e-9)
    assert math.isclose(service_s(problem, request, route.hops)[1], min(possible), rel_tol=1e-9)
    assert route.wait_s == max(waits_s(problem, request, route.hops, state))


@given(situations(), st.sampled_from(ANY_CHAIN))
def test_every_routing_answers_a_chain_and_its_wait_if_there_is_one(
    situation: tuple[Problem, Placement, SystemState, RequestSpec], name: str
) -> None:
    problem, placement, state, request = situation
    idle = SystemState(placement.cache_bytes)
    chains = every_chain(placement, problem.model.n_blocks)
    possible = [chain for chain in chains if max(waits_s(problem, request, chain, idle)) == 0.0]
    route = ROUTINGS[name]().bind(problem, placement).route(request, state, 0.0)
    assert (route is None) == (not possible)
    if route is not None:
        check_route(problem, placement, route, name)
        assert route.hops in possible
        assert route.wait_s == max(waits_s(problem, request, route.hops, state))


@given(st.data())
def test_a_placement_that_holds_every_block_has_a_chain_and_another_has_none(data: st.DataObject) -> None:
    problem = data.draw(problems())
    placement = data.draw(placements(problem))
    chains = every_chain(placement, problem.model.n_blocks)
    assert bool(chains) == (not placement.uncovered(problem.model.n_blocks))
    for chain in chains:
        check_route(problem, placement, Route(chain, 0.0, 0.0), "any")


@given(situations(), st.sampled_from(sorted(set(ROUTINGS) - TAKES_TURNS)))
def test_a_router_that_has_answered_other_requests_answers_as_a_fresh_one(
    situation: tuple[Problem, Placement, SystemState, RequestSpec], name: str
) -> None:
    problem, placement, state, request = situation
    routing = ROUTINGS[name]()
    used = routing.bind(problem, placement)
    for client in range(len(problem.clients)):
        for other in (request, RequestSpec(client, 2, 3)):
            used.route(other, SystemState(placement.cache_bytes), 0.0)
            used.route(other, state, 0.0)
    assert used.route(request, state, 0.0) == routing.bind(problem, placement).route(request, state, 0.0)
