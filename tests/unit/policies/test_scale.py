"""The fast searches for large problems return the same as the plain ones."""

from __future__ import annotations

import math
from random import Random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from benchmarks.large_problem import large_problem, poisson_requests
from policies.chains import Chains, Link, cheapest
from policies.optimal_rr import OptimalRr
from policies.petals import PetalsPlacement
from policies.petals_routing import PetalsRouter, PetalsRouting
from policies.petals_search import Costs, Search, ServerByServer, Vectorised
from policies.problem import Hop, Placement, Problem, RequestSpec
from policies.registry import PAIRS, resolve_placement, resolve_routing
from policies.replay import ReplayedRequest, replay
from policies.state import SystemState
from policies.wsrr import link_wait_s
from tests.support.problems import placements, problems


@st.composite
def searches(draw: st.DrawFn) -> tuple[Search, Search, int, list[int], bytes]:
    """Both searches on few distinct delays, so that costs tie, with any lowest entries and full servers."""
    n = draw(st.integers(1, 14))
    delays = st.sampled_from([0.0, 0.01, 0.02, 0.0301])
    rows = st.lists(delays, min_size=n, max_size=n)
    problem = draw(
        problems(
            memory=[50.0] * n,
            decode_s=draw(st.lists(st.sampled_from([0.001, 0.002, 0.0033]), min_size=n, max_size=n)),
            hardware=["gpu"] * n,
            rtt_s=draw(st.lists(rows, min_size=1, max_size=2)),
            server_rtt_s=draw(st.lists(rows, min_size=n, max_size=n)),
            join_order=list(range(n)),
            block_caps=[None] * n,
            forward_rps=[50.0] * n,
            n_blocks=draw(st.integers(1, 6)),
        )
    )
    ranges = draw(placements(problem)).ranges
    costs = Costs(18.0, 50.0, tuple(server.decode_s * 1e3 for server in problem.servers))
    entries = [draw(st.integers(0, held.n_blocks)) // 2 + held.first for held in ranges]
    full = bytes(draw(st.lists(st.integers(0, 1), min_size=n, max_size=n)))
    client = draw(st.integers(0, len(problem.clients) - 1))
    assume(any(held.n_blocks for held in ranges))
    plain, arrays = ServerByServer(problem, ranges, costs), Vectorised(problem, ranges, costs)
    return plain, arrays, client, entries, full


@given(searches())
def test_petals_search_with_arrays_finds_the_same_chain_at_the_same_cost_to_the_last_bit(
    given_search: tuple[Search, Search, int, list[int], bytes],
) -> None:
    plain, arrays, client, entries, full = given_search
    assert arrays.shortest(client, entries, full) == plain.shortest(client, entries, full)


@given(searches())
def test_a_known_cost_that_is_enough_does_not_change_what_petals_search_finds(
    given_search: tuple[Search, Search, int, list[int], bytes],
) -> None:
    plain, arrays, client, entries, full = given_search
    found = plain.shortest(client, entries, full)
    for at_most_ms in (found[1], found[1] + 1.0, found[1] + 60.0):
        assert arrays.shortest(client, entries, full, at_most_ms) == found


def replayed(problem: Problem, pair: str, n_requests: int) -> list[ReplayedRequest]:
    placement_name, routing_name = PAIRS[pair]
    placement = resolve_placement(placement_name).place(problem)
    router = resolve_routing(routing_name).bind(problem, placement)
    return replay(problem, placement, router, poisson_requests(problem, n_requests, 3), 60.0)


@pytest.mark.parametrize("pair", ["petals", "petals-optimized-order", "petals-optimized-number"])
def test_petals_on_a_hundred_servers_serves_every_request_alike_with_either_search(
    pair: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = large_problem(100, seed=1)
    by_arrays = replayed(problem, pair, 1500)
    monkeypatch.setattr("policies.petals_search.FEW_SERVERS", 1000)
    assert replayed(problem, pair, 1500) == by_arrays
    assert len({request.route.hops for request in by_arrays}) > 1


def test_petals_searches_once_for_each_set_of_full_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = large_problem(60, seed=0)
    placement = PetalsPlacement().place(problem)
    router = PetalsRouting().bind(problem, placement)
    searched: list[bytes] = []
    search = PetalsRouter._shortest

    def counted(self: PetalsRouter, client: int, kind: object, full: bytes) -> object:
        searched.append(full)
        return search(self, client, kind, full)  # type: ignore[arg-type]

    monkeypatch.setattr(PetalsRouter, "_shortest", counted)
    replay(problem, placement, router, poisson_requests(problem, 1000, 0), 250.0)
    assert 1 < len(searched) == len(set(searched)) < 1000


def loaded(placement: Placement, draws: Random, n_sessions: int) -> SystemState:
    """Open sessions of one hop each on servers with blocks."""
    state = SystemState(placement.cache_bytes)
    holding = [j for j, held in enumerate(placement.ranges) if held.n_blocks]
    for key in range(n_sessions):
        j = draws.choice(holding)
        held = placement.ranges[j]
        block_bytes = placement.cache_bytes[j] / held.n_blocks / draws.randint(1, 4)
        state.open(key, [Hop(j, held.first, held.last)], block_bytes, draws.choice([5.0, 7.5, 30.0, 400.0]))
    return state


@pytest.mark.parametrize("seed", range(8))
def test_optimal_routing_on_many_servers_is_the_best_over_all_thresholds_of_all_links(seed: int) -> None:
    problem = large_problem(60, seed)
    placement = PetalsPlacement().place(problem)
    request = RequestSpec(0, problem.n_input_tokens, problem.n_output_tokens)
    state = loaded(placement, Random(seed), 600)
    graph = Chains(problem, placement).of(request)
    links = [link for groups in graph.into for group in groups for link in group]
    waits_s = {id(link): link_wait_s(link, state, 1.0) for link in links}
    best_s = math.inf
    for most_s in sorted(set(waits_s.values())):

        def keep(link: Link, most_s: float = most_s) -> bool:
            return waits_s[id(link)] <= most_s

        service_s, chain = cheapest(graph.into, keep=keep)
        if chain:
            best_s = min(best_s, service_s + max(waits_s[id(link)] for link in chain))
    route = OptimalRr().bind(problem, placement).route(request, state, 1.0)
    assert route is not None
    assert route.cost_s == best_s
    assert graph.idle is not None and best_s > graph.idle.cost_s


def test_the_counts_of_active_sessions_are_those_of_the_sessions_themselves() -> None:
    draws = Random(5)
    state = SystemState([100.0] * 4)
    for key in range(300):
        hops = [Hop(j, 0, 1) for j in draws.sample(range(4), draws.randint(1, 3))]
        state.open(key, hops, 1.0, key + draws.randint(1, 30))
        if draws.random() < 0.3:
            state.close(draws.randint(0, key))
        state.advance(key)
        counts = [len(state.sessions(j)) for j in range(4)]
        assert list(state.all_active()) == counts == [state.n_active(j) for j in range(4)]
        assert sum(counts) > 0


def test_a_large_problem_is_the_same_for_the_same_seed_and_another_for_another() -> None:
    problem = large_problem(50, seed=2)
    assert problem == large_problem(50, seed=2)
    assert problem.server_rtt_s != large_problem(50, seed=3).server_rtt_s
    assert sum(server.hardware == "a100-sweep" for server in problem.servers) == 10
    assert poisson_requests(problem, 20, 2) == poisson_requests(problem, 20, 2)
