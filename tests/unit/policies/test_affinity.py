"""Routings that return to where the beginning of a prompt is kept, and what routers may know of that."""

from __future__ import annotations

import pytest

from policies import BlockRange, Hop, Placement
from policies.affinity import PrefixAware, Sticky
from policies.foresight_routing import ForesightRouting
from policies.interfaces import RoutingPolicy
from policies.prefixes import Asking, PrefixMap, service_after_s
from policies.problem import Problem, RequestSpec, service_s
from policies.state import SystemState
from policies.workload import RequestPlan, Turn
from policies.wsrr import WsRr
from tests.support.problems import make_problem

NEAR, FAR = (Hop(0, 0, 4),), (Hop(1, 0, 4),)


def problem_of() -> tuple[Problem, Placement]:
    """Two servers with the whole model; the second one is farther away."""
    problem = make_problem([99.0, 99.0], n_blocks=4, rtt_s=[[0.1, 0.3]], prefill_slope_s=0.01)
    return problem, Placement("by hand", (BlockRange(0, 4), BlockRange(0, 4)), (4000.0, 4000.0))


def state_of(asking: Asking | None) -> SystemState:
    state = SystemState((4000.0, 4000.0))
    state.asking = asking
    return state


REQUEST = RequestSpec(0, 200, 5)


def test_sticky_returns_to_the_chain_of_the_last_turn_while_it_has_room() -> None:
    problem, placement = problem_of()
    router = Sticky().bind(problem, placement)
    state = state_of(Asking(FAR, ()))
    found = router.route(REQUEST, state, 0.0)
    assert found is not None and found.hops == FAR
    state.open("other", FAR, 1000.0, 50.0)
    found = router.route(REQUEST, state, 0.0)
    assert found is not None and found.hops == NEAR
    ends_early = Hop(0, 0, 2), Hop(1, 2, 4)  # where it replaced a lost one
    for asking in (None, Asking((), ()), Asking((Hop(1, 0, 5),), ()), Asking(ends_early, ())):
        assert router.route(REQUEST, state_of(asking), 0.0) == WsRr().bind(problem, placement).route(
            REQUEST, state_of(None), 0.0
        )


@pytest.mark.parametrize("routing", [PrefixAware(), ForesightRouting()], ids=["prefix-aware", "foresight"])
@pytest.mark.parametrize(("n_held", "hops"), [(0, NEAR), (10, NEAR), (190, FAR)])
def test_requests_go_where_kept_caches_save_more_than_the_way_costs(
    n_held: int, hops: tuple[Hop, ...], routing: RoutingPolicy
) -> None:
    problem, placement = problem_of()
    found = routing.bind(problem, placement).route(REQUEST, state_of(Asking((), ((FAR, n_held),))), 0.0)
    assert found is not None and found.hops == hops
    assert found.cost_s == pytest.approx(
        service_after_s(problem, REQUEST, hops, n_held if hops == FAR else 0)
    )


def test_a_chain_that_is_too_busy_is_left_out_whatever_it_holds() -> None:
    problem, placement = problem_of()
    router, state = PrefixAware().bind(problem, placement), state_of(Asking((), ((FAR, 190),)))
    for number in range(PrefixAware.most_ahead):
        found = router.route(REQUEST, state, 0.0)
        assert found is not None and found.hops == FAR
        state.open(number, FAR, 0.001, 50.0)
    found = router.route(REQUEST, state, 0.0)
    assert found is not None and found.hops == NEAR


def test_what_is_kept_saves_its_prefill_and_transmission_and_nothing_else() -> None:
    problem, _ = problem_of()
    whole_s = service_s(problem, REQUEST, NEAR)[1]
    assert service_after_s(problem, REQUEST, NEAR, 0) == whole_s
    saved_s = [whole_s - service_after_s(problem, REQUEST, NEAR, n) for n in (50, 100, 199)]
    assert saved_s == sorted(saved_s) and saved_s[1] - saved_s[0] == pytest.approx(50 * 4 * 0.01)


def turn(number: int, n_input: int, conversation: int = 0) -> RequestPlan:
    return RequestPlan(
        number, 0, 0.0, n_input, 5, turn=Turn(conversation, number, number - 1 if number else None)
    )


def blocks(index: int, *ids: int) -> RequestPlan:
    return RequestPlan(index, 0, 0.0, 10 * len(ids), 5, block_ids=ids, block_tokens=10)


def test_a_conversations_chain_and_what_it_holds_are_known_once_they_are_reported() -> None:
    known = PrefixMap((1e6, 1e6), 1.0, age_s=10.0)
    known.served(turn(0, 40), FAR, 12.0)
    assert known.asking(turn(1, 60), 19.0) == Asking((), ())
    assert known.asking(turn(1, 60), 20.0) == Asking(FAR, ((FAR, 44),))
    assert known.asking(turn(0, 60, conversation=1), 20.0) == Asking((), ())


def test_prompts_that_begin_alike_are_known_by_their_blocks_and_the_longest_chain_comes_first() -> None:
    known = PrefixMap((1e6, 1e6), 1.0)
    known.served(blocks(0, 1, 2, 3), NEAR, 1.0)
    known.served(blocks(1, 1, 9), FAR, 2.0)
    assert known.asking(blocks(2, 1, 2, 3, 4), 3.0).chains == ((NEAR, 30), (FAR, 10))
    assert known.asking(blocks(2, 1, 2), 3.0).chains == ((NEAR, 19), (FAR, 10))
    assert known.asking(blocks(2, 2, 3), 3.0).chains == ()


def test_a_server_is_taken_to_keep_no_more_than_its_room() -> None:
    known = PrefixMap((4 * 30.0, 1e6), 1.0)
    known.served(blocks(0, 1, 2, 3), NEAR, 1.0)
    known.served(blocks(1, 7, 8), NEAR, 2.0)
    assert known.asking(blocks(2, 1, 2, 3), 3.0).chains == ((NEAR, 10),)
    assert known.asking(blocks(2, 7, 8, 9), 3.0).chains == ((NEAR, 20),)
