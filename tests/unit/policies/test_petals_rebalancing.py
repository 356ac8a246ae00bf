"""PETALS' rebalancing: which servers move where, and when they check."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies import BlockRange, PolicyError, Problem
from policies.online import SystemView
from policies.petals_rebalancing import PetalsRebalancing, rebalanced
from tests.support.problems import make_problem, placed, problems

# min(forward / ((m + 1) / 2), network): with two blocks and forward 150 every block gets 100.
RPS = 150.0


def problem_of(*forward_rps: float) -> Problem:
    return make_problem([99.0] * len(forward_rps), forward_rps=list(forward_rps))


def moved(problem: Problem, ranges: list[tuple[int, int]], server: int, **settings: float) -> object:
    held = tuple(BlockRange(*r) for r in ranges)
    return rebalanced(problem, held, server, PetalsRebalancing(**settings), Random(0))


def test_a_server_moves_to_the_weakest_blocks_when_that_raises_the_minimum_enough() -> None:
    # Blocks 0-1 have 300, blocks 2-3 have 100; with one of the three moved the minimum is 200.
    problem = problem_of(RPS, RPS, RPS, RPS)
    assert moved(problem, [(0, 2), (0, 2), (0, 2), (2, 4)], 0) == BlockRange(2, 4)


def test_a_server_stays_when_the_gain_is_too_small() -> None:
    # 100 now and 130 after it: 0.77 is not below 0.75.
    problem = problem_of(RPS, RPS * 0.3, RPS * 0.3, RPS, RPS * 0.3)
    ranges = [(0, 2), (0, 2), (0, 2), (2, 4), (0, 2)]
    assert moved(problem, ranges, 1) is None
    assert moved(problem, ranges, 1, balance_quality=0.79) == BlockRange(2, 4)


def test_a_server_stays_when_it_is_the_only_one_with_a_block() -> None:
    problem = problem_of(RPS, RPS, RPS * 9)
    assert moved(problem, [(0, 2), (2, 4), (2, 4)], 0) is None


def test_it_stays_even_if_the_block_that_it_alone_holds_would_be_in_its_new_range_too() -> None:
    # Moving to blocks 2-4 would raise the minimum from 10 to about 100, and keep block 2.
    problem = make_problem([99.0] * 3, n_blocks=5, forward_rps=[200.0, 1500.0, 15.0])
    assert moved(problem, [(0, 3), (0, 2), (3, 5)], 0) is None
    # With another one for block 2 it goes.
    problem = make_problem([99.0] * 4, n_blocks=5, forward_rps=[200.0, 1500.0, 15.0, 15.0])
    assert moved(problem, [(0, 3), (0, 2), (3, 5), (1, 3)], 0) is not None


def test_a_server_stays_when_it_is_on_its_best_place() -> None:
    problem = problem_of(RPS, RPS, RPS, RPS)
    ranges = [(0, 2), (0, 2), (2, 4), (2, 4)]
    assert [moved(problem, ranges, j) for j in range(4)] == [None] * 4


def test_a_move_counts_the_moves_that_others_would_make_after_it() -> None:
    # Server 3's coming would make both ends equal; the minimum stays what one of the two slow ones gives.
    problem = problem_of(RPS * 4, RPS, RPS, RPS)
    assert moved(problem, [(0, 2), (2, 4), (2, 4), (2, 4)], 1) is None


@given(problems(), st.randoms(use_true_random=False), st.data())
def test_a_move_keeps_the_number_of_blocks_and_never_uncovers_one(
    problem: Problem, random: Random, data: st.DataObject
) -> None:
    n_blocks = problem.model.n_blocks
    pair = st.tuples(st.integers(0, n_blocks), st.integers(0, n_blocks))
    ranges = [
        BlockRange(min(p), max(p))
        for p in data.draw(st.lists(pair, min_size=problem.n_servers, max_size=problem.n_servers))
    ]
    holders = [j for j, held in enumerate(ranges) if held.n_blocks]
    covered = {b for r in ranges for b in range(r.first, r.last)}
    for server in holders:
        target = rebalanced(problem, tuple(ranges), server, PetalsRebalancing(), random)
        if target is None:
            continue
        assert target.n_blocks == ranges[server].n_blocks
        assert 0 <= target.first < target.last <= n_blocks
        after = [target if j == server else held for j, held in enumerate(ranges)]
        if len(covered) == n_blocks:
            assert {b for r in after for b in range(r.first, r.last)} == covered


def start() -> tuple[Problem, SystemView]:
    problem = problem_of(RPS, RPS, RPS, RPS)
    placement = placed(problem, [(0, 2), (0, 2), (0, 2), (2, 4)], [8.0] * 4)
    return problem, SystemView(0, 0.0, 0.0, placement)


def test_the_first_server_that_checks_moves_and_the_others_then_stay() -> None:
    problem, view = start()
    controller = PetalsRebalancing().bind(problem, view.placement)
    n_moved = 0
    for _ in range(40):
        new = controller.check(controller.next_check_at_s, view)
        if new is not None:
            n_moved += 1
            assert (new.policy, new.cache_bytes) == (view.placement.policy, view.placement.cache_bytes)
            view = view._replace(placement=new)
    assert n_moved == 1
    assert sorted(view.placement.ranges) == [(0, 2), (0, 2), (2, 4), (2, 4)]


def test_every_server_checks_once_per_period_on_average_and_the_seed_decides_when() -> None:
    def instants(seed: int) -> list[float]:
        problem, view = start()
        view = view._replace(moving=(0, 1, 2, 3))
        controller = PetalsRebalancing(seed=seed, period_s=60.0).bind(problem, view.placement)
        found = []
        while controller.next_check_at_s < 60_000:
            found.append(controller.next_check_at_s)
            assert controller.check(found[-1], view) is None
        return found

    first = instants(1)
    assert first == instants(1)
    assert first != instants(2)
    assert all(a < b for a, b in pairwise(first))
    assert 0.9 < len(first) / (4 * 1000) < 1.1


def test_a_server_that_is_still_moving_does_not_check() -> None:
    problem, view = start()
    controller = PetalsRebalancing().bind(problem, view.placement)
    view = view._replace(moving=(0, 1, 2, 3))
    assert [controller.check(controller.next_check_at_s, view) for _ in range(20)] == [None] * 20


def test_servers_without_blocks_never_check() -> None:
    problem, view = start()
    empty = replace(view.placement, ranges=(BlockRange(0, 0),) * 4)
    assert PetalsRebalancing().bind(problem, empty).next_check_at_s == float("inf")


def test_a_period_must_be_positive() -> None:
    problem, view = start()
    with pytest.raises(PolicyError, match="petals-rebalancing needs a period_s above 0, not 0"):
        PetalsRebalancing(period_s=0).bind(problem, view.placement)
