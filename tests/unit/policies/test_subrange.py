"""Routing over a lost range, and servers that join."""

from __future__ import annotations

import pytest

from policies import BlockRange, Hop, Placement, PolicyError, Problem, RequestSpec, SystemState
from policies.cgbp import CgBp
from policies.fixed import FixedRouting
from policies.joining import among, join, spread
from policies.online import moves
from policies.petals import PetalsPlacement
from policies.registry import ROUTINGS
from policies.subrange import SubrangeRouter, restrict
from policies.wsrr import WsRr
from tests.support.problems import forwarded, make_problem

REQUEST = RequestSpec(0, 1, 1)


def placed(*ranges: tuple[int, int], room: float = 1000.0) -> Placement:
    return Placement("test", tuple(BlockRange(*r) for r in ranges), (room,) * len(ranges))


def problem(n: int, n_blocks: int = 6, **options: object) -> Problem:
    return make_problem([1000.0] * n, n_blocks=n_blocks, **options)  # type: ignore[arg-type]


def test_a_part_of_the_model_is_a_smaller_problem_with_the_same_servers() -> None:
    part, placement = restrict(problem(4), placed((0, 4), (2, 6), (4, 6), (0, 2)), 2, 5, {0, 1, 3})
    assert part.model.n_blocks == 3
    assert part.servers == problem(4).servers
    assert placement.ranges == (BlockRange(0, 2), BlockRange(0, 3), BlockRange(0, 0), BlockRange(0, 0))
    assert placement.cache_bytes == (1000.0,) * 4


@pytest.mark.parametrize("name", ROUTINGS)
def test_every_routing_policy_routes_a_lost_range_as_it_is(name: str) -> None:
    p, placement = problem(4), placed((0, 4), (1, 3), (3, 6), (2, 6))
    router = SubrangeRouter(ROUTINGS[name]().bind, p, placement)
    state = SystemState(placement.cache_bytes)
    route = router.route(REQUEST, state, 0.0, frozenset({1, 3}), 1, 5)
    assert route is not None
    assert route.hops == (Hop(1, 1, 3), Hop(3, 3, 5))


def test_the_last_replacement_may_stop_before_its_range_ends() -> None:
    p, placement = problem(2), placed((0, 6), (0, 6))
    router = SubrangeRouter(WsRr().bind, p, placement)
    state = SystemState(placement.cache_bytes)
    route = router.route(REQUEST, state, 0.0, frozenset({1}), 2, 4)
    assert route is not None
    assert route.hops == (Hop(1, 2, 4),)


def test_a_range_that_nobody_left_holds_has_no_chain() -> None:
    p, placement = problem(3), placed((0, 3), (3, 6), (2, 5))
    router = SubrangeRouter(WsRr().bind, p, placement)
    state = SystemState(placement.cache_bytes)
    assert router.route(REQUEST, state, 0.0, frozenset({0, 2})) is None
    assert router.route(REQUEST, state, 0.0, frozenset({0, 2}), 0, 5) is not None
    assert router.route(REQUEST, state, 0.0, frozenset()) is None


def test_the_state_of_the_whole_system_counts_in_a_part() -> None:
    p = problem(2, cache_bytes_per_token=1.0)
    placement = placed((0, 6), (0, 6), room=8.0)  # a session of two tokens over two blocks needs 4
    state = SystemState(placement.cache_bytes)
    router = SubrangeRouter(WsRr().bind, p, placement)
    both = frozenset({0, 1})
    assert [hop.server for hop in router.route(REQUEST, state, 0.0, both, 2, 4).hops] == [0]  # type: ignore[union-attr]
    state.open("other", [Hop(0, 0, 3)], 2.0, 50.0)
    assert [hop.server for hop in router.route(REQUEST, state, 0.0, both, 2, 4).hops] == [1]  # type: ignore[union-attr]


def test_routers_are_made_once_for_the_same_servers_and_anew_after_a_change() -> None:
    p, made = problem(2), []

    class Counting(WsRr):
        def bind(self, problem: Problem, placement: Placement) -> object:  # type: ignore[override]
            made.append(placement.ranges)
            return super().bind(problem, placement)

    placement = placed((0, 6), (0, 3))
    router = SubrangeRouter(Counting().bind, p, placement)  # type: ignore[arg-type]
    state = SystemState(placement.cache_bytes)
    for _ in range(3):
        router.route(REQUEST, state, 0.0, frozenset({0, 1}))
    assert len(made) == 1
    router.replace(placed((0, 6), (3, 6)))
    router.route(REQUEST, state, 0.0, frozenset({0, 1}))
    assert made[1] == (BlockRange(0, 6), BlockRange(3, 6))
    for first in range(5):
        for last in range(first + 1, 6):
            for alive in ({0}, {1}, {0, 1}):
                for _ in range(2):
                    router.route(REQUEST, state, 0.0, frozenset(alive), first, last)
    assert len(router._known) <= 128


def test_a_fixed_chain_whose_server_is_away_is_no_chain() -> None:
    p, placement = problem(2), placed((0, 6), (0, 6))
    router = SubrangeRouter(FixedRouting({"": [0]}).bind, p, placement)
    state = SystemState(placement.cache_bytes)
    assert router.route(REQUEST, state, 0.0, frozenset({1})) is None
    assert router.route(REQUEST, state, 0.0, frozenset({0})) is not None


def test_a_policy_that_fails_on_a_request_is_not_silenced() -> None:
    class Broken:
        name = "broken"

        def bind(self, problem: Problem, placement: Placement) -> Broken:
            return self

        def route(self, *_: object) -> None:
            raise PolicyError("broken")

    placement = placed((0, 6))
    router = SubrangeRouter(Broken().bind, problem(1), placement)
    with pytest.raises(PolicyError, match="broken"):
        router.route(REQUEST, SystemState(placement.cache_bytes), 0.0, frozenset({0}))


def test_a_problem_among_some_servers_renumbers_them_and_its_placement_is_spread_again() -> None:
    p = make_problem(
        [10.0, 20.0, 30.0], rtt_s=[[0.1, 0.2, 0.3]], decode_s=[1.0, 2.0, 3.0], join_order=[2, 1, 0]
    )
    some = among(p, [0, 2])
    assert [s.name for s in some.servers] == ["s0", "s2"]
    assert some.raw_rtt_s == ((0.1, 0.3),)
    assert some.join_order == (1, 0)
    assert len(some.server_rtt_s) == len(some.server_rtt_s[0]) == 2
    pushed, left = (forwarded(one, over_links=True).transmissions for one in (p, some))
    kept = among(forwarded(p, over_links=True), [0, 2]).transmissions
    assert pushed is not None and left is not None and kept is not None
    assert kept.up.of(0, 1, 3) == pushed.up.of(0, 2, 3)
    assert kept.across.of(1, 0, 3) == pushed.across.of(2, 0, 3)
    assert kept.instead_s(0, 0, 1, 3) == pushed.instead_s(0, 0, 2, 3) != left.instead_s(0, 0, 1, 3)
    whole = spread(Placement("x", (BlockRange(0, 2), BlockRange(2, 4)), (5.0, 6.0), 3), [0, 2], 3)
    assert whole.ranges == (BlockRange(0, 2), BlockRange(0, 0), BlockRange(2, 4))
    assert whole.cache_bytes == (5.0, 0.0, 6.0)
    assert whole.design_concurrency == 3


def test_one_that_joins_takes_the_blocks_with_the_least_throughput() -> None:
    p = make_problem([100.0, 100.0, 31.0], n_blocks=6, petals_cache_tokens=4, cache_bytes_per_token=0.5)
    before = Placement("petals", (BlockRange(0, 6), BlockRange(3, 6), BlockRange(0, 0)), (9.0, 9.0, 0.0))
    after = join(p, before, 2, {0, 1})
    assert after.ranges == (*before.ranges[:2], BlockRange(0, 2))  # floor(31 / (10 + 2)) = 2 blocks
    assert after.cache_bytes == (9.0, 9.0, 4.0)


def test_what_is_not_announced_does_not_count_for_one_that_joins() -> None:
    p = make_problem([100.0, 100.0, 31.0], n_blocks=6)
    before = Placement("petals", (BlockRange(0, 3), BlockRange(3, 6), BlockRange(0, 0)), (9.0, 9.0, 0.0))
    assert join(p, before, 2, {0}).ranges[2] == BlockRange(3, 5)
    assert join(p, before, 2, {1}).ranges[2] == BlockRange(0, 2)


def test_one_that_joins_a_placement_for_many_sessions_leaves_memory_for_them() -> None:
    p = make_problem([500.0, 500.0, 59.0], n_blocks=4)  # s_m 10, s_c 1
    before = CgBp().place(among(p, [0, 1]), 4)
    after = join(p, spread(before, [0, 1], 3), 2, {0, 1})
    assert after.ranges[2].n_blocks == 4  # floor(59 / (10 + 4)) = 4
    assert after.cache_bytes[2] == 59.0 - 40.0


def test_one_without_memory_for_a_block_joins_with_nothing() -> None:
    p = make_problem([100.0, 5.0])
    before = PetalsPlacement().place(p)
    after = join(p, before, 1, {0})
    assert after.ranges[1].n_blocks == 0 == after.cache_bytes[1]


def test_one_that_joins_with_nothing_does_not_move_when_the_placement_has_nothing_for_it_either() -> None:
    p = make_problem([100.0, 100.0, 5.0])
    joined = join(p, spread(CgBp().place(among(p, [0, 1]), 2), [0, 1], 3), 2, {0, 1})
    assert moves(joined, CgBp().place(p, 2)) == []
