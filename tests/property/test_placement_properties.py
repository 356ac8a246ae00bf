"""Placements of random problems: what must always hold, and plain transcriptions of the algorithms."""

from __future__ import annotations

import dataclasses
import re

from hypothesis import given, settings
from hypothesis import strategies as st

from policies import InfeasiblePlacement, Problem, RequestSpec, SystemState
from policies.cgbp import CgBp, lower_bounds_per_token_s
from policies.checks import check_placement, check_route
from policies.feasibility import largest_concurrency
from policies.greedy import amortized_s, block_counts, plan, serving_order
from policies.petals import choose_ranges, petals_block_counts
from policies.registry import PLACEMENTS, ROUTINGS
from policies.wsrr import WsRr
from tests.support.effort import n_drawn
from tests.support.problems import every_chain, problems

LARGEST = {"milp-paper": (2, 4), **dict.fromkeys(("milp", "lp-rounding", "helix"), (4, 6))}
"""Placements that are quick on small instances only: most servers and blocks."""


@st.composite
def placing(draw: st.DrawFn) -> tuple[Problem, str]:
    """Draw a problem and the name of a placement policy for it."""
    name = draw(st.sampled_from(sorted(PLACEMENTS)))
    return draw(problems(*LARGEST.get(name, ()))), name


@given(placing(), st.integers(1, 6))
def test_a_placement_holds_every_block_within_memory_and_has_a_chain_for_every_client(
    choice: tuple[Problem, str], concurrency: int
) -> None:
    problem, name = choice
    try:
        placement = PLACEMENTS[name]().place(problem, concurrency)
    except InfeasiblePlacement:
        return
    assert placement.policy == name
    check_placement(problem, placement)
    for client in range(len(problem.clients)):
        for routing in ROUTINGS.values():
            request = RequestSpec(client, problem.n_input_tokens, problem.n_output_tokens)
            idle = SystemState(placement.cache_bytes)
            route = routing().bind(problem, placement).route(request, idle, 0.0)
            assert route is not None
            check_route(problem, placement, route, routing.name)
            assert route.wait_s == 0.0


@settings(max_examples=n_drawn(15))
@given(placing(), st.integers(1, 6))
def test_a_placement_is_the_same_every_time(choice: tuple[Problem, str], concurrency: int) -> None:
    problem, name = choice
    answers = []
    for _ in range(2):
        try:
            answers.append(PLACEMENTS[name]().place(problem, concurrency))
        except InfeasiblePlacement as error:
            answers.append(str(error))
    assert answers[0] == answers[1]


@given(problems(), st.integers(1, 6))
def test_cg_bp_is_infeasible_exactly_when_the_servers_blocks_do_not_add_up(
    problem: Problem, concurrency: int
) -> None:
    fits = sum(block_counts(problem, concurrency)) >= problem.model.n_blocks
    try:
        CgBp().place(problem, concurrency)
    except InfeasiblePlacement:
        assert not fits
    else:
        assert fits


@given(problems(), st.integers(2, 12))
def test_the_remedies_that_an_infeasible_placement_names_are_enough(
    problem: Problem, concurrency: int
) -> None:
    try:
        CgBp().place(problem, concurrency)
    except InfeasiblePlacement as error:
        message = str(error)
    else:
        return  # nothing to mend
    limit = re.search(r"\|R\| <= (\d+)", message)
    assert (limit is not None) == (largest_concurrency(problem) > 0)
    if limit:
        assert CgBp().place(problem, int(limit[1])).design_concurrency == int(limit[1])
    for n, hardware in re.findall(r"(\d+) more (\S+) server", message):
        counts = block_counts(problem, concurrency)
        kind = max(
            (j for j, s in enumerate(problem.servers) if s.hardware == hardware), key=counts.__getitem__
        )
        assert (
            not CgBp().place(_with_more(problem, kind, int(n)), concurrency).uncovered(problem.model.n_blocks)
        )


def _with_more(problem: Problem, kind: int, n: int) -> Problem:
    """Return ``problem`` with ``n`` more servers like server ``kind``."""

    def widen(matrix: tuple[tuple[float, ...], ...]) -> tuple[tuple[float, ...], ...]:
        return tuple((*row, *((row[kind],) * n)) for row in matrix)

    return dataclasses.replace(
        problem,
        servers=(*problem.servers, *((problem.servers[kind],) * n)),
        token_rtt_s=widen(problem.token_rtt_s),
    )


@given(problems(), st.integers(1, 6))
def test_up_to_r_sessions_never_wait(problem: Problem, concurrency: int) -> None:
    try:
        placement = CgBp().place(problem, concurrency)
    except InfeasiblePlacement:
        return
    router = WsRr().bind(problem, placement)
    state = SystemState(placement.cache_bytes)
    for key in range(concurrency):
        request = RequestSpec(key % len(problem.clients), problem.n_input_tokens, problem.n_output_tokens)
        route = router.route(request, state, 0.0)
        assert route is not None
        assert route.wait_s == 0.0
        state.open(key, route.hops, problem.design_cache_bytes, 1e9)


@given(problems(), st.integers(1, 4))
def test_no_chain_beats_the_lower_bound(problem: Problem, concurrency: int) -> None:
    try:
        placement = CgBp().place(problem, concurrency)
    except InfeasiblePlacement:
        return
    bounds_s = lower_bounds_per_token_s(problem)
    for client, bound_s in enumerate(bounds_s):
        for chain in every_chain(placement, problem.model.n_blocks):
            token_s = sum(
                problem.token_rtt_s[client][h.server] + h.n_blocks * problem.servers[h.server].decode_s
                for h in chain
            )
            assert token_s >= bound_s * (1 - 1e-9)


@given(problems(), st.integers(1, 6))
def test_the_greedy_windows_are_those_of_algorithm_1_written_out(problem: Problem, concurrency: int) -> None:
    n_blocks, s_c = problem.model.n_blocks, problem.design_cache_bytes
    counts = block_counts(problem, concurrency)
    times_s = amortized_s(problem, counts)
    order = serving_order(times_s)
    ticks = {j: round(times_s[j] * 10**15) for j in order}
    dummy = max(ticks.values(), default=0) + 10**12
    capacity, load = [0] * n_blocks, [dummy * concurrency] * n_blocks
    for j in order:
        m = counts[j]
        windows = [range(a, a + m) for a in range(n_blocks - m + 1)]
        if min(capacity) < concurrency:
            short = [w for w in windows if any(capacity[b] < concurrency for b in w)]
            window = max(short, key=lambda w: sum(load[b] for b in w))
        else:
            window = min(windows, key=lambda w: sorted(capacity[b] for b in w))
        free_bytes = problem.servers[j].memory_bytes - problem.model.block_bytes * m
        sessions = int(free_bytes / (s_c * m) + 1e-9)
        for b in window:
            load[b] -= (dummy - ticks[j]) * min(max(concurrency - capacity[b], 0), sessions)
            capacity[b] += sessions
        assert plan(problem, concurrency).ranges[j] == (window.start, window.stop)


@given(problems())
def test_petals_windows_are_the_lexicographically_weakest_ones(problem: Problem) -> None:
    counts = petals_block_counts(problem)
    ranges = choose_ranges(problem, counts, problem.join_order)
    throughput = [0.0] * problem.model.n_blocks
    for j in problem.join_order:
        m = counts[j]
        if not m:
            assert ranges[j].n_blocks == 0
            continue
        weakest = min(range(problem.model.n_blocks - m + 1), key=lambda a: sorted(throughput[a : a + m]))
        assert ranges[j] == (weakest, weakest + m)
        rps = min(
            problem.servers[j].petals_forward_rps / ((1 + m) / 2), problem.servers[j].petals_network_rps
        )
        for b in range(weakest, weakest + m):
            throughput[b] += rps
