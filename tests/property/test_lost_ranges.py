"""Chains over a part of the model among the remaining servers."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies import Placement, Problem, RequestSpec, SystemState
from policies.problem import Hop, service_s
from policies.subrange import SubrangeRouter
from policies.wsrr import WsRr
from tests.property.test_system import N_BLOCKS, systems
from tests.support.effort import n_drawn


@settings(max_examples=n_drawn(60), deadline=None)
@given(st.data(), systems())
def test_a_lost_range_gets_the_cheapest_chain_among_those_that_are_left(
    data: st.DataObject, made: tuple[Problem, Placement]
) -> None:
    problem, placement = made
    first = data.draw(st.integers(0, N_BLOCKS - 1))
    last = data.draw(st.integers(first + 1, N_BLOCKS))
    alive = data.draw(st.frozensets(st.integers(0, problem.n_servers - 1)))
    request = RequestSpec(data.draw(st.integers(0, 1)), 3, 4)
    router = SubrangeRouter(WsRr().bind, problem, placement)
    route = router.route(request, SystemState(placement.cache_bytes), 0.0, alive, first, last)
    room = problem.model.cache_bytes(request.n_tokens)
    costs_s = []
    for n in range(1, last - first + 1):
        for servers in product(sorted(alive), repeat=n):
            hops: list[Hop] = []
            at = first
            for j in servers:
                held = placement.ranges[j]
                if at < last and held.first <= at < held.last:
                    hops.append(Hop(j, at, min(held.last, last)))
                    at = hops[-1].last
            fits = all(hop.n_blocks * room <= placement.cache_bytes[hop.server] for hop in hops)
            if at == last and len(hops) == n and fits:
                costs_s.append(service_s(problem, request, hops)[1])
    if route is None:
        assert not costs_s
        return
    assert (route.hops[0].first, route.hops[-1].last) == (first, last)
    assert {hop.server for hop in route.hops} <= alive
    for hop in route.hops:
        assert placement.ranges[hop.server].first <= hop.first < hop.last <= placement.ranges[hop.server].last
    assert service_s(problem, request, route.hops)[1] == pytest.approx(min(costs_s))
