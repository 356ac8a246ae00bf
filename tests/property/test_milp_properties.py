"""The exact optimum of small problems against brute force, and all else against the exact optimum."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from policies import (
    BlockRange,
    Hop,
    InfeasiblePlacement,
    Placement,
    PolicyError,
    Problem,
    RequestSpec,
    Route,
    SystemState,
)
from policies.checks import check_placement, check_route
from policies.milp import BprrAnswer, relaxation_s, round_bprr, solve_bprr
from policies.milp_paper import PaperModel
from policies.offline import cg_bprr, knapsack_lower_bound_s, lower_bound_s
from policies.optimal_rr import OptimalRr
from policies.problem import hop_times_s, return_times_s, service_s
from policies.registry import PLACEMENTS
from policies.wsrr import WsRr
from tests.support.effort import n_drawn
from tests.support.problems import (
    every_chain,
    forwarded,
    placements,
    problems,
    requests,
    states,
    with_one_for_all,
)
from tests.support.route_milp import route_by_milp

REL = 1e-6
MEMORY_RATIO = 1e-9

Batch = tuple[RequestSpec, ...]


def every_placement(problem: Problem, min_blocks: int) -> Iterator[tuple[BlockRange, ...]]:
    """Yield all placements that fit into memory; with ``min_blocks`` = 1 no server is empty needlessly."""
    n_blocks, block_bytes = problem.model.n_blocks, problem.model.block_bytes
    choices = []
    for server in problem.servers:
        some = [
            BlockRange(first, last)
            for first in range(n_blocks)
            for last in range(first + 1, n_blocks + 1)
            if block_bytes * (last - first) <= server.memory_bytes
        ]
        choices.append(some if some and min_blocks else [BlockRange(0, 0), *some])
    return product(*choices)


def chain_s(problem: Problem, request: RequestSpec, chain: tuple[Hop, ...], decode_only: bool) -> float:
    """Return the seconds of all output tokens, computed from their definition."""
    n_in, n_out = request.n_input_tokens, request.n_output_tokens
    prefill_s = decode_s = 0.0
    for previous, hop in zip([None, *(h.server for h in chain)], chain, strict=False):
        server = problem.servers[hop.server]
        input_s, token_s = hop_times_s(problem, request, previous, hop.server)
        prefill_s += input_s + hop.n_blocks * server.prefill_s(n_in)
        decode_s += token_s + hop.n_blocks * server.decode_s
    input_s, token_s = return_times_s(problem, request, chain[-1].server)
    prefill_s, decode_s = prefill_s + input_s, decode_s + token_s
    return n_out * decode_s if decode_only else prefill_s + (n_out - 1) * decode_s


def least_s(problem: Problem, batch: Batch, decode_only: bool, min_blocks: int) -> float:
    """Return the optimum by trying all placements and routes; infinite if nothing fits."""
    best_s = math.inf

    def extend(chains: list[tuple[Hop, ...]], free: list[float], number: int, so_far_s: float) -> None:
        nonlocal best_s
        if so_far_s >= best_s:
            return
        if number == len(batch):
            best_s = so_far_s
            return
        request = batch[number]
        each_bytes = problem.model.cache_bytes(request.n_tokens)
        for chain in chains:
            left = list(free)
            for hop in chain:
                left[hop.server] -= each_bytes * hop.n_blocks
            memory = (server.memory_bytes for server in problem.servers)
            if all(n >= -MEMORY_RATIO * most for n, most in zip(left, memory, strict=True)):
                more_s = chain_s(problem, request, chain, decode_only)
                extend(chains, left, number + 1, so_far_s + more_s)

    for ranges in every_placement(problem, min_blocks):
        free = [
            server.memory_bytes - problem.model.block_bytes * held.n_blocks
            for server, held in zip(problem.servers, ranges, strict=True)
        ]
        extend(every_chain(Placement("any", ranges, ()), problem.model.n_blocks), free, 0, 0.0)
    return best_s


def check_answer(problem: Problem, batch: Batch, answer: BprrAnswer, decode_only: bool) -> None:
    """Check that blocks and caches fit, chains are valid, and the objective is that of the chains."""
    used = [0.0] * problem.n_servers
    for request, chain in zip(batch, answer.chains, strict=True):
        check_route(problem, Placement("exact", answer.ranges, ()), Route(chain, 0.0, 0.0), "exact")
        for hop in chain:
            used[hop.server] += problem.model.cache_bytes(request.n_tokens) * hop.n_blocks
    # Caches may use up memory to the last bit; check_placement allows for the rounding.
    check_placement(problem, Placement("exact", answer.ranges, tuple(used)))
    total_s = sum(
        chain_s(problem, request, chain, decode_only)
        for request, chain in zip(batch, answer.chains, strict=True)
    )
    assert math.isclose(answer.objective_s, total_s, rel_tol=1e-9)
    assert answer.lower_bound_s <= answer.objective_s


@st.composite
def batches(draw: st.DrawFn, max_servers: int, max_blocks: int, at_most: int) -> tuple[Problem, Batch]:
    """Draw a problem with little memory, with and without forwarding; requests of unlike clients and lengths."""
    cache_bytes = draw(st.sampled_from([0.125, 0.3, 0.5, 1.0]))
    problem = draw(problems(max_servers, max_blocks, 12 * max_blocks, cache_bytes_per_token=cache_bytes))
    if draw(st.booleans()):
        problem = forwarded(problem, over_links=draw(st.booleans()))
    return problem, tuple(draw(st.lists(requests(problem), min_size=1, max_size=at_most)))


def with_room(problem: Problem, batch: Batch) -> Problem:
    """The problem, with a first server that holds the whole model for all requests if they do not fit otherwise."""
    if optimum(problem, batch) is not None:
        return problem
    return with_one_for_all(problem, sum(problem.model.cache_bytes(request.n_tokens) for request in batch))


def optimum(
    problem: Problem, batch: Batch, decode_only: bool = False, min_blocks: int = 0
) -> BprrAnswer | None:
    try:
        return solve_bprr(problem, batch, decode_only=decode_only, min_blocks=min_blocks)
    except InfeasiblePlacement:
        return None


@settings(max_examples=n_drawn(25))
@given(batches(3, 4, 3), st.booleans(), st.integers(0, 1))
def test_the_exact_optimum_is_that_of_trying_everything(
    given_batch: tuple[Problem, Batch], decode_only: bool, min_blocks: int
) -> None:
    problem, batch = given_batch
    best_s = least_s(problem, batch, decode_only, min_blocks)
    answer = optimum(problem, batch, decode_only, min_blocks)
    if answer is None:
        assert best_s == math.inf
        return
    assert answer.proven_optimal
    check_answer(problem, batch, answer, decode_only)
    assert math.isclose(answer.objective_s, best_s, rel_tol=REL)
    if min_blocks:
        for server, held in zip(problem.servers, answer.ranges, strict=True):
            assert held.n_blocks or server.memory_bytes < problem.model.block_bytes


@settings(max_examples=n_drawn(15))
@given(batches(3, 4, 3), st.booleans())
def test_the_papers_program_has_the_same_optimum_and_a_weaker_relaxation(
    given_batch: tuple[Problem, Batch], decode_only: bool
) -> None:
    problem, batch = given_batch
    ours = optimum(problem, batch, decode_only, min_blocks=1)
    try:
        papers = solve_bprr(
            problem, batch, decode_only=decode_only, min_blocks=1, program=PaperModel, max_nodes=100_000
        )
    except InfeasiblePlacement:
        assert ours is None
        return
    assert ours is not None and papers.proven_optimal
    check_answer(problem, batch, papers, decode_only)
    assert math.isclose(papers.objective_s, ours.objective_s, rel_tol=REL)
    weak_s = relaxation_s(problem, batch, decode_only=decode_only, min_blocks=1, program=PaperModel)
    tight_s = relaxation_s(problem, batch, decode_only=decode_only, min_blocks=1)
    assert weak_s <= tight_s + REL * ours.objective_s


@settings(max_examples=n_drawn(15))
@given(batches(4, 6, 4), st.booleans())
def test_a_search_without_branches_is_no_worse_than_cg_bprr_and_says_how_far_the_optimum_may_be(
    given_batch: tuple[Problem, Batch], decode_only: bool
) -> None:
    problem, batch = with_room(*given_batch), given_batch[1]
    try:
        greedy_s = cg_bprr(problem, batch, decode_only=decode_only).objective_s
    except PolicyError:
        return
    found = solve_bprr(problem, batch, decode_only=decode_only, max_nodes=0)
    assert found == solve_bprr(problem, batch, decode_only=decode_only, max_nodes=0)
    check_answer(problem, batch, found, decode_only)
    assert found.objective_s <= greedy_s * (1 + REL)
    best = optimum(problem, batch, decode_only)
    assert best is not None
    assert found.objective_s * (1 - found.gap_ratio) <= best.objective_s * (1 + REL)
    assert found.proven_optimal == (found.gap_ratio == 0)


@settings(max_examples=n_drawn(10))
@given(batches(4, 6, 4), st.booleans())
def test_the_bounds_lie_below_the_optimum_and_the_rounded_relaxation_above(
    given_batch: tuple[Problem, Batch], decode_only: bool
) -> None:
    problem, batch = with_room(*given_batch), given_batch[1]
    answer = optimum(problem, batch, decode_only)
    assert answer is not None
    check_answer(problem, batch, answer, decode_only)
    fractional_s = lower_bound_s(problem, batch, decode_only=decode_only)
    knapsack_s = knapsack_lower_bound_s(problem, batch, decode_only=decode_only)
    assert fractional_s <= knapsack_s * (1 + 1e-9)
    assert knapsack_s <= answer.objective_s * (1 + REL)
    assert relaxation_s(problem, batch, decode_only=decode_only) <= answer.objective_s * (1 + REL)
    try:
        rounded = round_bprr(problem, batch, decode_only=decode_only)
    except InfeasiblePlacement as error:
        assert "rounding the LP relaxation" in str(error)
        return
    check_answer(problem, batch, rounded, decode_only)
    assert answer.objective_s <= rounded.objective_s * (1 + REL)


@settings(max_examples=n_drawn(25))
@given(batches(4, 6, 4), st.sampled_from(sorted(PLACEMENTS.keys() - {"milp-paper"})))  # it takes seconds
def test_no_placement_with_routes_that_do_not_wait_beats_the_optimum(
    given_batch: tuple[Problem, Batch], name: str
) -> None:
    problem, batch = given_batch
    try:
        placement = PLACEMENTS[name]().place(problem, len(batch))
    except InfeasiblePlacement:
        return
    check_placement(problem, placement)
    router, state, total_s = WsRr().bind(problem, placement), SystemState(placement.cache_bytes), 0.0
    for key, request in enumerate(batch):
        route = router.route(request, state, 0.0)
        if route is None or route.wait_s > 0:
            return  # not all at once: no solution of the exact problem
        state.open(key, route.hops, problem.model.cache_bytes(request.n_tokens), 1e9)
        total_s += service_s(problem, request, route.hops)[1]
    answer = optimum(problem, batch)
    assert answer is not None
    assert answer.objective_s <= total_s * (1 + REL)


@settings(max_examples=n_drawn(25))
@given(problems(4, 6), st.integers(1, 5), st.booleans())
def test_cg_bprr_lies_between_the_optimum_and_theorem_1s_bound(
    problem: Problem, n_requests: int, decode_only: bool
) -> None:
    lengths = (problem.n_input_tokens, problem.n_output_tokens)
    batch = tuple(RequestSpec(i % len(problem.clients), *lengths) for i in range(n_requests))
    try:
        greedy = cg_bprr(problem, batch, decode_only=decode_only)
    except InfeasiblePlacement:
        return
    assert max(greedy.per_request_s) <= greedy.theorem1_s / n_requests * (1 + 1e-9)
    assert greedy.objective_s <= greedy.theorem1_s * (1 + 1e-9)
    for request, chain, time_s in zip(batch, greedy.chains, greedy.per_request_s, strict=True):
        everything = every_chain(Placement("greedy", greedy.ranges, ()), problem.model.n_blocks)
        cheapest_s = min(chain_s(problem, request, any_chain, decode_only) for any_chain in everything)
        assert math.isclose(time_s, cheapest_s, rel_tol=1e-9)
        assert math.isclose(chain_s(problem, request, chain, decode_only), time_s, rel_tol=1e-9)
    answer = optimum(problem, batch, decode_only)
    assert answer is not None
    assert answer.objective_s <= greedy.objective_s * (1 + REL)


@settings(max_examples=n_drawn(40))
@given(st.data(), st.booleans())
def test_routing_by_thresholds_costs_what_milp_24_costs(data: st.DataObject, forwarding: bool) -> None:
    problem = data.draw(problems())
    if forwarding:
        problem = forwarded(problem, over_links=data.draw(st.booleans()))
    placement = data.draw(placements(problem))
    state, request = data.draw(states(problem, placement)), data.draw(requests(problem))
    route = OptimalRr().bind(problem, placement).route(request, state, 0.0)
    by_milp = route_by_milp(problem, placement, request, state, 0.0)
    if route is None or by_milp is None:
        assert route is by_milp
        return
    check_route(problem, placement, by_milp, "milp (24)")
    assert math.isclose(route.cost_s, by_milp.cost_s, rel_tol=1e-7)


@settings(max_examples=n_drawn(10))
@given(batches(4, 6, 4))
def test_the_exact_optimum_is_the_same_every_time(given_batch: tuple[Problem, Batch]) -> None:
    problem, batch = given_batch
    assert optimum(problem, batch) == optimum(problem, batch)
