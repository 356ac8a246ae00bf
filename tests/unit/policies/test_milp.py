"""The exact optimum and the rounded relaxation on problems small enough to solve by hand."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from policies import BlockRange, Hop, InfeasiblePlacement, PolicyError, Problem, RequestSpec, SystemState
from policies.checks import check_placement
from policies.link_costs import cheapest_chain, link_costs
from policies.milp import LpRounding, MilpPlacement, relaxation_s, round_bprr, solve_bprr
from policies.milp_solver import LinearModel
from policies.offline import cg_bprr
from policies.positions import PositionGraph
from policies.registry import resolve_pair, resolve_placement
from tests.support.problems import make_problem, placed
from tests.support.route_milp import route_by_milp

ONE = RequestSpec(0, 1, 1)


def two_servers(memory: tuple[float, float], **changes: object) -> Problem:
    """Four blocks of 10 bytes, and 1 byte of cache for each block of a session of two tokens."""
    return make_problem(memory, **{"rtt_s": [[0.1, 0.3]], **changes})  # type: ignore[arg-type]


def test_a_fast_server_takes_only_as_many_blocks_as_leave_cache_for_every_request() -> None:
    # 44 bytes: 4 blocks and one session; with three sessions 3 blocks (30 + 9) at most.
    problem = two_servers((44.0, 100.0))
    alone = solve_bprr(problem, [ONE], decode_only=True)
    assert alone.ranges[0] == BlockRange(0, 4)
    assert alone.objective_s == pytest.approx(0.1 + 4 * 0.01)
    # All three on the slow server cost 3 x 0.3; two on both and one alone on the fast one do not fit.
    answer = solve_bprr(problem, [ONE] * 3, decode_only=True)
    assert answer.objective_s == pytest.approx(0.1 + 2 * 0.3 + 3 * 4 * 0.01)
    assert sorted(len(chain) for chain in answer.chains) == [1, 1, 1]
    assert answer.proven_optimal
    assert answer.lower_bound_s == answer.objective_s


def test_the_optimum_beats_the_greedy_where_replicas_pay() -> None:
    # For two sessions CG-BP leaves room for two everywhere: 3 blocks on each (30 + 6 <= 42 < 40 + 8).
    problem = two_servers((44.0, 44.0), rtt_s=[[0.1, 0.1]])
    greedy = cg_bprr(problem, [ONE] * 2, decode_only=True)
    assert [r.n_blocks for r in greedy.ranges] == [3, 3]
    assert greedy.objective_s == pytest.approx(2 * (0.2 + 0.04))
    exact = solve_bprr(problem, [ONE] * 2, decode_only=True)
    assert exact.objective_s == pytest.approx(2 * (0.1 + 0.04))
    assert exact.ranges == (BlockRange(0, 4), BlockRange(0, 4))
    assert sorted(chain[0].server for chain in exact.chains) == [0, 1]


def test_every_server_holds_a_block_where_that_is_asked_for_and_memory_allows_it() -> None:
    problem = make_problem([100.0, 15.0, 9.0], rtt_s=[[0.1, 0.3, 0.3]])
    asked = solve_bprr(problem, [ONE], decode_only=True, min_blocks=1)
    assert [r.n_blocks for r in asked.ranges] == [4, 1, 0]
    assert asked.objective_s == solve_bprr(problem, [ONE], decode_only=True).objective_s


def test_the_mean_over_all_tokens_weighs_the_prompt_once() -> None:
    problem = make_problem(
        [100.0], rtt_s=[[0.1]], input_rtt_s=0.5, prefill_slope_s=0.02, n_input_tokens=3, n_output_tokens=4
    )
    request = RequestSpec(0, 3, 4)
    first_s, later_s = 0.5 + 4 * 0.06, 0.1 + 4 * 0.01
    assert solve_bprr(problem, [request]).objective_s == pytest.approx(first_s + 3 * later_s)
    assert solve_bprr(problem, [request], decode_only=True).objective_s == pytest.approx(4 * later_s)


def test_requests_of_different_lengths_hold_different_cache() -> None:
    # A session of 2 tokens needs 4 bytes, one of 12 needs 24: together 28 beside the blocks.
    short, long = ONE, RequestSpec(0, 6, 6)
    assert solve_bprr(make_problem([68.0]), [short, long]).proven_optimal
    with pytest.raises(InfeasiblePlacement, match="with caches for 2 requests at once"):
        solve_bprr(make_problem([67.9]), [short, long])


def test_a_long_request_gets_the_fast_server_though_a_short_one_gains_more_per_token() -> None:
    # One block; the fast server has cache for one session only. Per token A needs 1 s there and 11 s on the
    # slow server, B 1 s and 10 s; A has 20 tokens and B has 100.
    problem = make_problem(
        [11.0, 100.0],
        n_blocks=1,
        cache_bytes_per_token=0.01,
        decode_s=[0.5, 0.5],
        rtt_s=[[0.5, 10.5], [0.5, 9.5]],
        n_output_tokens=100,
    )
    short, long = RequestSpec(0, 0, 20), RequestSpec(1, 0, 100)
    answer = solve_bprr(problem, [short, long], decode_only=True)
    assert answer.proven_optimal
    assert answer.objective_s == pytest.approx(20 * 11 + 100 * 1)
    assert answer.chains == ((Hop(1, 0, 1),), (Hop(0, 0, 1),))


def test_forwarding_makes_servers_near_each_other_the_optimum() -> None:
    # Two servers near the client but far from each other, and one pair far away but close together.
    far_s, near_s = 0.5, 0.01
    problem = replace(
        make_problem(
            [22.5] * 4,
            rtt_s=[[0.2, 0.2, 0.3, 0.3]],
            server_rtt_s=[
                [0, far_s, far_s, far_s],
                [far_s, 0, far_s, far_s],
                [far_s, far_s, 0, near_s],
                [far_s, far_s, near_s, 0],
            ],
        ),
        forwarding=False,
    )
    hub_spoke = solve_bprr(problem, [ONE], decode_only=True)
    assert {hop.server for hop in hub_spoke.chains[0]} == {0, 1}
    forwarding = solve_bprr(replace(problem, forwarding=True), [ONE], decode_only=True)
    assert {hop.server for hop in forwarding.chains[0]} == {2, 3}
    assert forwarding.objective_s == pytest.approx(0.15 + near_s / 2 + 0.15 + 4 * 0.01)


def test_memory_that_blocks_and_caches_fill_to_the_last_byte_is_enough() -> None:
    # 3 x 1.25 + 3 x 3 x 0.37 in binary is not 7.08 to the last bit.
    problem = make_problem([7.08], n_blocks=3, block_bytes=1.25, cache_bytes_per_token=0.185)
    assert solve_bprr(problem, [ONE] * 3).ranges == (BlockRange(0, 3),)
    with pytest.raises(InfeasiblePlacement):
        solve_bprr(replace(problem, servers=(replace(problem.servers[0], memory_bytes=7.07),)), [ONE] * 3)


def test_blocks_that_fit_nowhere_are_named_with_the_memory_they_want() -> None:
    with pytest.raises(
        InfeasiblePlacement, match=r"no placement holds blocks 2-3: .* room for 2 of 4 .* 22 bytes of memory"
    ):
        solve_bprr(make_problem([11.0, 21.0]), [ONE])


def test_requests_too_many_at_once_are_infeasible_though_each_alone_fits() -> None:
    problem = make_problem([44.0])
    assert solve_bprr(problem, [ONE]).proven_optimal
    with pytest.raises(
        InfeasiblePlacement,
        match=r"caches for 2 requests at once: .* need 48 bytes in whole blocks, the 1 servers? ha\w+ 44 bytes; fewer",
    ):
        solve_bprr(problem, [ONE] * 2)
    with pytest.raises(InfeasiblePlacement, match="2 requests at once"):
        round_bprr(problem, [ONE] * 2)
    with pytest.raises(InfeasiblePlacement, match="2 requests at once"):
        relaxation_s(problem, [ONE] * 2)


@pytest.mark.parametrize("solve", [solve_bprr, round_bprr, relaxation_s])
def test_what_the_program_cannot_say_is_refused_in_one_sentence(solve: object) -> None:
    assert callable(solve)
    with pytest.raises(PolicyError, match="at least one request"):
        solve(make_problem([100.0]), [])
    large = make_problem([1e5] * 30, n_blocks=70)
    with pytest.raises(
        PolicyError, match=r"70 blocks, 30 servers and 1 kind of request .* more than the 25000 .* use cg-bp"
    ):
        solve(large, [ONE])


@pytest.mark.parametrize("policy", [MilpPlacement(), LpRounding()])
def test_the_placements_are_for_r_requests_of_all_clients_in_turn(
    policy: MilpPlacement | LpRounding,
) -> None:
    problem = two_servers((52.0, 52.0), rtt_s=[[0.1, 0.9], [0.9, 0.1]], n_output_tokens=2)
    placement = policy.place(problem, 2)
    check_placement(problem, placement)
    assert placement.ranges == (BlockRange(0, 4), BlockRange(0, 4))
    assert placement.cache_bytes == (12.0, 12.0)
    assert (placement.policy, placement.design_concurrency) == (policy.name, 2)
    # Of two tokens one is decoded: each client on its near server. Prompts cost nothing here.
    assert placement.bounds["objective_per_token_s"] == pytest.approx((0.1 + 0.04) / 2)
    assert placement.bounds["lower_bound_per_token_s"] <= placement.bounds["objective_per_token_s"]
    with pytest.raises(PolicyError, match="at least 1, not 0"):
        policy.place(problem, 0)


def test_r_is_chosen_as_for_cg_bp_where_it_is_not_given() -> None:
    problem = make_problem([200.0, 200.0], request_rate=2.0, n_output_tokens=8)
    placement = MilpPlacement().place(problem)
    assert placement.design_concurrency == resolve_placement("cg-bp").place(problem).design_concurrency
    assert placement.bounds["proven_optimal"] == 1.0


def test_rounding_names_what_it_broke() -> None:
    problem = make_problem([27.0, 27.0, 27.0], n_blocks=5)
    assert solve_bprr(problem, [ONE] * 3).proven_optimal
    with pytest.raises(InfeasiblePlacement, match=r"rounding the LP relaxation .*; use milp or cg-bp"):
        round_bprr(problem, [ONE] * 3)


def test_a_program_that_is_given_no_branches_says_so() -> None:
    model = LinearModel()
    items = [model.variable(1.0 + i % 7, 1.0) for i in range(60)]
    model.row({x: 3.0 + i % 11 for i, x in enumerate(items)}, 101.5, 102.5)
    with pytest.raises(PolicyError, match="found no solution in 0 branches; allow more"):
        model.solve(max_nodes=0)


def test_the_solver_tells_whole_numbers_from_their_relaxation() -> None:
    model = LinearModel()
    x, y = model.variable(2.0, 5.0), model.variable(3.0, 5.0, integer=False)
    model.row({x: 2.0, y: 1.0}, 3.0, 10.0)
    relaxed, whole = model.solve(relaxed=True), model.solve()
    assert relaxed is not None and whole is not None
    assert (relaxed.values, relaxed.objective) == (pytest.approx((1.5, 0.0)), pytest.approx(3.0))
    assert (whole.values, whole.objective) == (pytest.approx((2.0, 0.0)), pytest.approx(4.0))
    assert whole.bound == pytest.approx(4.0)
    assert whole.proven_optimal
    model.row({x: 1.0}, 6.0, 7.0)
    assert model.solve() is None
    assert model.solve(relaxed=True) is None


def test_milp_24_waits_where_waiting_is_cheaper_than_the_way_around() -> None:
    problem = make_problem([100.0, 100.0], rtt_s=[[0.1, 5.0]], n_output_tokens=2)
    placement = placed(problem, [(0, 4), (0, 4)], [6.0, 60.0])
    state = SystemState(placement.cache_bytes)
    state.open("other", [Hop(0, 0, 4)], 1.5, 3.0)
    request = RequestSpec(0, 1, 2)
    waits = route_by_milp(problem, placement, request, state, 0.0)
    assert waits is not None
    assert ([h.server for h in waits.hops], waits.wait_s) == ([0], 3.0)
    assert waits.cost_s == pytest.approx(3.0 + 0.1 + 0.04)
    goes_around = route_by_milp(problem, placement, request, state, -10.0)
    assert goes_around is not None
    assert ([h.server for h in goes_around.hops], goes_around.wait_s) == ([1], 0.0)
    nowhere = placed(problem, [(0, 4), (0, 2)], [2.9, 60.0])
    assert route_by_milp(problem, nowhere, request, SystemState(nowhere.cache_bytes), 0.0) is None


def test_the_cheapest_chain_keeps_to_allowed_hops_and_takes_the_first_of_equal_ones() -> None:
    problem = make_problem([100.0] * 3, rtt_s=[[0.2, 0.1, 0.1]])
    graph = PositionGraph([BlockRange(0, 4), BlockRange(0, 4), BlockRange(0, 4)], 4)
    costs = link_costs(problem, ONE, decode_only=True)
    assert cheapest_chain(graph, costs) == (Hop(1, 0, 4),)
    assert cheapest_chain(graph, costs, lambda hop: hop.server != 1) == (Hop(2, 0, 4),)
    assert cheapest_chain(graph, costs, lambda hop: False) is None


def test_the_pair_routes_exactly_on_the_exact_placement() -> None:
    assert resolve_pair("milp") == ("milp", "optimal-rr")


def test_naming_the_policies_does_not_load_the_solver() -> None:
    code = (
        "import sys, policies.registry, testbed.simulator.offline;"
        "print([m for m in ('highspy', 'scipy', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
