from __future__ import annotations

import re
from dataclasses import replace
from functools import partial

import pytest

from policies import InfeasiblePlacement, PolicyError
from policies.cgbp import CgBp
from policies.design import choose_design_concurrency, memory_bound, single_request_s
from policies.feasibility import block_list
from policies.greedy import amortized_s, block_counts
from tests.support.problems import make_problem


def test_faster_servers_are_served_first_and_take_the_lowest_blocks() -> None:
    # s_m + s_c = 11: two blocks each; the second server is the faster one.
    problem = make_problem([22.0, 22.0], decode_s=[0.02, 0.01])
    placement = CgBp().place(problem, 1)
    assert placement.ranges == ((2, 4), (0, 2))
    assert placement.cache_bytes == (2.0, 2.0)


def test_a_server_without_room_for_a_block_takes_no_part() -> None:
    problem = make_problem([10.9, 44.0])
    placement = CgBp().place(problem, 1)
    assert placement.ranges == ((0, 0), (0, 4))
    assert placement.cache_bytes == (0.0, 4.0), "no session can use a server without blocks"


def test_with_forwarding_a_server_counts_with_its_way_from_the_others() -> None:
    # Server 1 is nearer to the client than server 2, but 0.5 s one way from the others.
    far_s, near_s = 1.0, 0.02
    problem = make_problem(
        [24.0] * 3,
        rtt_s=[[0.1, 0.2, 0.25]],
        server_rtt_s=[[0, far_s, near_s], [far_s, 0, far_s], [near_s, far_s, 0]],
    )
    assert CgBp().place(problem, 1).ranges == ((0, 2), (2, 4), (0, 2))
    forwarding = replace(problem, forwarding=True)
    assert CgBp().place(forwarding, 1).ranges == ((0, 2), (0, 2), (2, 4))
    # Half of the hops begin or end a chain; the others come from the two other servers alike.
    between_s = (far_s / 2 + near_s / 2) / 2
    times_s = amortized_s(forwarding, [2, 2, 2])
    assert times_s[0] == pytest.approx(0.01 + (0.1 / 2 + between_s / 2) / 2)
    assert times_s[1] == pytest.approx(0.01 + (0.2 / 2 + far_s / 2 / 2) / 2)
    # A server that holds all blocks serves from the client and back, whoever forwards.
    assert amortized_s(forwarding, [4, 4, 4]) == pytest.approx(amortized_s(problem, [4, 4, 4]))
    assert amortized_s(forwarding, [2, 0, 0]) == pytest.approx(amortized_s(problem, [2, 0, 0]))


def test_servers_left_over_double_the_blocks_with_the_least_capacity() -> None:
    # 4 blocks with room for two more sessions each; then 2 + 2 blocks; the last takes the weakest window.
    problem = make_problem([52.0, 22.0, 24.0, 22.0], decode_s=[0.01, 0.02, 0.03, 0.04], n_blocks=4)
    placement = CgBp().place(problem, 1)
    assert placement.ranges == ((0, 4), (0, 2), (2, 4), (0, 2))


def test_a_block_cap_is_honoured_unless_switched_off() -> None:
    problem = make_problem([44.0, 44.0], block_caps=[1, None])
    assert block_counts(problem, 1) == [1, 4]
    assert CgBp().place(problem, 1).ranges[0].n_blocks == 1
    assert CgBp(honour_block_cap=False).place(problem, 1).ranges[0].n_blocks == 4


def test_memory_that_falls_short_only_by_float_rounding_holds_the_block() -> None:
    assert (2.36 - 1.25) / 0.37 < 3
    problem = make_problem([2.36], n_blocks=1, block_bytes=1.25, cache_bytes_per_token=0.185)
    assert CgBp().place(problem, 3).ranges == ((0, 1),)


def test_what_does_not_fit_is_said_with_blocks_memory_and_remedies() -> None:
    problem = make_problem([22.0, 11.0], hardware=["big", "small"], block_bytes=10.0, n_blocks=3)
    with pytest.raises(InfeasiblePlacement) as caught:
        CgBp().place(problem, 2)
    assert str(caught.value) == (
        "CG-BP for |R| = 2 leaves 2 of 3 blocks unplaced: blocks 1-2 are on no server, because "
        "24 bytes of memory are missing; 2 more big servers or |R| <= 1 would do"
    )


def test_without_any_server_that_could_hold_a_block_more_memory_is_the_remedy() -> None:
    with pytest.raises(
        InfeasiblePlacement, match=r"blocks 0-3 are on no server.*give the servers more memory"
    ):
        CgBp().place(make_problem([5.0, 5.0]), 1)


def test_blocks_are_listed_as_runs() -> None:
    assert block_list([0, 1, 2, 7, 9, 10]) == "0-2, 7, 9-10"


@pytest.mark.parametrize("concurrency", [0, -3])
def test_a_design_concurrency_below_one_is_refused(concurrency: int) -> None:
    with pytest.raises(PolicyError, match="at least 1"):
        CgBp().place(make_problem([100.0]), concurrency)


def test_design_concurrency_is_load_plus_its_root_rounded_half_up() -> None:
    # One server, T = 0.1 + 0.04 (first token) + 0.14 (second): lambda T = 2.24 at 8 requests/s.
    problem = make_problem([1000.0], n_output_tokens=2, request_rate=8.0, input_rtt_s=0.14)
    assert single_request_s(problem) == pytest.approx(0.28)
    chosen = choose_design_concurrency(problem)
    assert (chosen.value, chosen.wanted) == (4, 4)  # 2.24 + 1.497 = 3.74


def test_design_concurrency_stops_at_the_memory_bound_and_never_falls_below_one() -> None:
    # 5 block places of 10 + |R| bytes in 80 bytes: |R| <= 6.
    heavy = make_problem([80.0], request_rate=1e4, input_rtt_s=0.1)
    assert memory_bound(heavy) == 6
    assert choose_design_concurrency(heavy).value == 6
    assert choose_design_concurrency(make_problem([80.0], request_rate=1e-6)).value == 1


def test_the_single_request_estimate_ignores_block_caps_and_takes_the_slowest_client() -> None:
    problem = make_problem(
        [44.0], block_caps=[1], rtt_s=[[0.1], [0.3]], n_output_tokens=1, n_input_tokens=1, input_rtt_s=0.0
    )
    assert single_request_s(problem) == 0.0
    decoding = make_problem([60.0], block_caps=[1], rtt_s=[[0.1], [0.3]], n_output_tokens=2)
    assert single_request_s(decoding) == pytest.approx(0.34)


def test_a_memory_bound_below_one_is_infeasible_and_says_how_much_is_missing() -> None:
    # 3 blocks + 2 servers need 55 bytes; 22 + 31 are there, though |R| = 1 by hand would fit.
    problem = make_problem([22.0, 31.0], hardware=["small", "big"], n_blocks=3)
    assert memory_bound(problem) == 0
    with pytest.raises(InfeasiblePlacement) as caught:
        CgBp().place(problem)
    message = str(caught.value)
    assert "the memory bound gives |R| <= 0, because 2 bytes" in message
    assert "a design concurrency given by hand, at most 5, would do" in message
    assert CgBp().place(problem, 1).uncovered(3) == []


@pytest.mark.parametrize("n", [1, 3, 4])
@pytest.mark.parametrize("cap", [1, 2, 4, None])
def test_as_many_more_servers_as_are_advised_are_enough_and_fewer_are_not(n: int, cap: int | None) -> None:
    # A server holds up to five blocks; the model has 20.
    fleet = partial(make_problem, n_blocks=20)
    with pytest.raises(InfeasiblePlacement) as caught:
        CgBp().place(fleet([60.0] * n, block_caps=[cap] * n))
    advised = re.search(r"(\d+) more gpu server", str(caught.value))
    assert advised is not None
    enough = n + int(advised[1])
    assert CgBp().place(fleet([60.0] * enough, block_caps=[cap] * enough)).uncovered(20) == []
    if enough - 1 > n:
        with pytest.raises(InfeasiblePlacement):
            CgBp().place(fleet([60.0] * (enough - 1), block_caps=[cap] * (enough - 1)))
