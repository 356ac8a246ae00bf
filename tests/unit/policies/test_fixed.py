"""Placements and routes that a user gives."""

from __future__ import annotations

import math

import pytest

from policies import BlockRange, Hop, PolicyError, RequestSpec, SystemState
from policies.fixed import FixedPlacement, FixedRouting
from tests.support.problems import make_problem

PLACEMENT = FixedPlacement((BlockRange(0, 3), BlockRange(2, 4), BlockRange(0, 0)))


def test_a_fixed_placement_leaves_what_its_blocks_do_not_need_to_caches() -> None:
    placement = PLACEMENT.place(make_problem([40.0, 20.0, 7.0]))
    assert placement.ranges == (BlockRange(0, 3), BlockRange(2, 4), BlockRange(0, 0))
    assert placement.cache_bytes == (10.0, 0.0, 0.0), "no session can use a server without blocks"


def test_a_fixed_route_waits_until_its_fullest_server_has_room() -> None:
    problem = make_problem([40.0, 30.0, 7.0])  # caches of 10, 10 and 0 bytes; one byte per block and session
    placement = PLACEMENT.place(problem)
    router = FixedRouting({"": ["s0", 1]}).bind(problem, placement)
    state = SystemState(placement.cache_bytes)
    hops = (Hop(0, 0, 3), Hop(1, 3, 4))
    route = router.route(RequestSpec(0, 1, 1), state, 0.0)
    assert route is not None and (route.hops, route.wait_s) == (hops, 0.0)
    for key in range(3):
        state.open(key, hops, 1.0, 5.0 + key)
    route = router.route(RequestSpec(0, 1, 1), state, 1.0)
    assert route is not None and route.wait_s == 4.0


def test_a_request_that_never_fits_on_a_fixed_route_has_none() -> None:
    problem = make_problem([40.0, 30.0, 7.0])
    router = FixedRouting({"": [0, 1]}).bind(problem, PLACEMENT.place(problem))
    state = SystemState((10.0, 10.0, 7.0))
    assert router.route(RequestSpec(0, 10, 10), state, 0.0) is None


@pytest.mark.parametrize(
    ("from_one", "held", "said"),
    [
        (
            True,
            BlockRange(-1, 3),
            "the fixed placement has [0, 4] for s1, but needs [first block, number of blocks]",
        ),
        (
            True,
            BlockRange(2, 5),
            "has [3, 3] for s1, but needs [first block, number of blocks], with blocks from 1 to 4",
        ),
        (
            False,
            BlockRange(-1, 3),
            "has [-1, 3] for s1, but needs [first block, block after the last], from 0 to 4",
        ),
    ],
)
def test_a_range_outside_the_model_is_named_as_the_user_wrote_it(
    from_one: bool, held: BlockRange, said: str
) -> None:
    placement = FixedPlacement((BlockRange(0, 4), held), from_one=from_one)
    with pytest.raises(PolicyError) as caught:
        placement.place(make_problem([40.0, 20.0]))
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("chains", "said"),
    [
        ({"": ["s9"]}, "names server 's9', which does not exist; servers: s0, s1, s2"),
        ({"": [0]}, "ends before block 3; the model has 4"),
        ({"": [1, 0]}, r"needs block 0 on s1, which holds blocks 2-3"),
        ({"nobody": [0, 1]}, "is for 'nobody', which is no client"),
        ({"c1": [0, 1]}, "has no chain for c0"),
    ],
)
def test_a_fixed_route_that_cannot_be_gone_is_refused_when_it_is_bound(
    chains: dict[str, list[str | int]], said: str
) -> None:
    problem = make_problem([40.0, 30.0, 7.0], rtt_s=[[0.1] * 3, [0.2] * 3])
    with pytest.raises(PolicyError, match=said):
        FixedRouting(chains).bind(problem, PLACEMENT.place(problem))


def test_clients_can_have_chains_of_their_own() -> None:
    problem = make_problem([60.0, 60.0], rtt_s=[[0.1] * 2, [0.2] * 2])
    placement = FixedPlacement((BlockRange(0, 4), BlockRange(0, 4))).place(problem)
    router = FixedRouting({"c1": [1], "": [0]}).bind(problem, placement)
    state = SystemState(placement.cache_bytes)
    chosen = [router.route(RequestSpec(client, 1, 1), state, 0.0) for client in (0, 1)]
    assert [route.hops[0].server for route in chosen if route] == [0, 1]
    assert all(route and route.cost_s < math.inf for route in chosen)
