"""Foresight on random problems: its routes against every chain, its placements against what it guarantees."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies import Hop, InfeasiblePlacement, Placement, Problem, service_s
from policies.cgbp import CgBp
from policies.checks import check_placement, check_route
from policies.feasibility import largest_concurrency
from policies.foresight import ForesightPlacement
from policies.foresight_routing import ForesightRouting
from policies.greedy import plan
from policies.neighbours import Neighbours
from policies.prefixes import Asking, saved_s
from policies.replay import backoff_s, replay
from policies.search import STATED, synthetic_requests
from policies.waiting import waiting_s
from policies.workload import Backoff
from policies.wsrr import WsRr
from tests.support.effort import n_drawn
from tests.support.problems import every_chain, placements, problems, requests, states


@given(st.data(), st.booleans())
def test_no_chain_ends_a_request_earlier_than_foresights(data: st.DataObject, forwarding: bool) -> None:
    problem = replace(data.draw(problems()), forwarding=forwarding)
    placement = data.draw(placements(problem))
    state, request = data.draw(states(problem, placement)), data.draw(requests(problem))
    backoff = Backoff(data.draw(st.sampled_from([0.25, 1.0])), 4.0)
    block_bytes = problem.model.cache_bytes(request.n_tokens)
    chains = list(every_chain(placement, problem.model.n_blocks))
    held: dict[tuple[Hop, ...], int] = {}
    if chains and data.draw(st.booleans()):  # some have served a prompt that begins as this one
        n_held = st.integers(0, request.n_input_tokens - 1)
        held = data.draw(st.dictionaries(st.sampled_from(chains), n_held, max_size=3))
        state.asking = Asking((), tuple(held.items()))

    def time_s(chain: tuple[Hop, ...]) -> float:
        raw_s = max(waiting_s(state, hop.server, hop.n_blocks * block_bytes, 0.0) for hop in chain)
        if raw_s == math.inf:
            return math.inf
        kept_s = max(saved_s(problem, request, chain, held.get(chain, 0)), 0.0)
        return backoff_s(raw_s, backoff) + service_s(problem, request, chain)[1] - kept_s

    best_s = min(map(time_s, chains), default=math.inf)
    route = ForesightRouting(backoff).bind(problem, placement).route(request, state, 0.0)
    if route is None:
        assert best_s == math.inf
        return
    check_route(problem, placement, route, "foresight")
    assert math.isclose(route.cost_s, best_s, rel_tol=1e-9)
    assert math.isclose(time_s(route.hops), best_s, rel_tol=1e-9)


@pytest.fixture(autouse=True, scope="module")
def short_streams() -> None:
    """What a search promises of its trials is checked on whole streams."""


def validation_s(problem: Problem, placement: Placement, routing: ForesightRouting | WsRr) -> float:
    """Return the mean time per token at the stated load, on the validation streams."""
    router = routing.bind(problem, placement)
    done = [
        d
        for i in range(8)
        for d in replay(problem, placement, router, synthetic_requests(problem, STATED, f"validation {i}"))
    ]
    return fmean(d.time_s / d.plan.n_output_tokens for d in done)


@settings(max_examples=n_drawn(10), deadline=None)
@given(problems())
def test_a_placement_is_cg_bps_or_no_slower_at_the_stated_load_under_either_routing(problem: Problem) -> None:
    try:
        proposed = CgBp().place(problem)
    except InfeasiblePlacement:
        proposed = None
    try:
        found = ForesightPlacement().place(problem)
    except InfeasiblePlacement:
        assert largest_concurrency(problem) == 0, "one session fits, so it has to be served"
        return
    check_placement(problem, found)
    for server, held in zip(problem.servers, found.ranges, strict=True):
        assert server.block_cap is None or held.n_blocks <= server.block_cap
    if proposed is None or found.ranges == proposed.ranges:
        return
    ours_s = validation_s(problem, found, ForesightRouting())
    for routing in (ForesightRouting(), WsRr()):
        assert ours_s <= validation_s(problem, proposed, routing) * (1 + 1e-9)


@given(problems(), st.integers(0, 1000))
def test_changed_windows_still_hold_every_block_within_memory_and_caps(problem: Problem, seed: int) -> None:
    ranges = plan(problem, 1).ranges
    if Placement("", ranges, ()).uncovered(problem.model.n_blocks):
        return
    rng, neighbours = random.Random(seed), Neighbours(problem, random.Random(seed))
    for number in range(20):
        if number % 2 and problem.n_servers > 1:
            left, right = rng.sample(range(problem.n_servers), 2)
            changed = neighbours.with_border(ranges, left, right, rng.choice((-1, 1)))
        else:
            changed = neighbours.draw(ranges)
        if changed is None:
            continue
        assert changed != ranges
        ranges = changed
        used = [problem.model.block_bytes * held.n_blocks for held in ranges]
        free = tuple(s.memory_bytes - u for s, u in zip(problem.servers, used, strict=True))
        check_placement(problem, Placement("changed", ranges, free))
        for server, held, room in zip(problem.servers, ranges, free, strict=True):
            assert server.block_cap is None or held.n_blocks <= server.block_cap
            assert room >= held.n_blocks * problem.design_cache_bytes * (1 - 1e-9)
