"""What online policies do when servers die or join, and when the load is at the edge of the range."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from policies import BlockRange, Placement
from policies.cgbp import CgBp
from policies.online import (
    SystemView,
    TwoTimeScale,
    TwoTimeScaleController,
    can_spare,
    moves,
    rolling_order,
)
from policies.petals_rebalancing import PetalsRebalancing
from tests.support.problems import make_problem, placed
from tests.unit.policies.test_online import OTHER, PROBLEM, START, Recorded, ranges

EVERYBODY = frozenset({0, 1, 2, 3})
SMALL = make_problem([40.0] * 4)
"""Four servers of two blocks each beside some cache; the model has four blocks of 10 bytes."""


def pairs_of_blocks() -> Placement:
    return replace(placed(SMALL, [(0, 2), (2, 4), (0, 2), (2, 4)], [20.0] * 4), design_concurrency=2)


def watched(period_s: float = 10.0, patience_s: float = 50.0) -> TwoTimeScaleController:
    return TwoTimeScale(period_s=period_s, patience_s=patience_s).bind(SMALL, pairs_of_blocks())


def looks(
    controller: TwoTimeScaleController, now: Placement, alive: list[frozenset[int]], mean_active: float = 1.0
) -> list[Placement | None]:
    """Return the controller's results at its times, for these alive servers."""
    answers = []
    for there in alive:
        at_s = controller.next_check_at_s
        answers.append(controller.check(at_s, SystemView(1, mean_active, 1.0, now, (), there)))
        now = answers[-1] or now
    return answers


def test_blocks_that_nobody_alive_holds_are_taken_over_at_the_next_check() -> None:
    # Servers 1 and 3 held the second half; 0 and 2, which both hold the first, have room for three blocks.
    [answer] = looks(watched(), pairs_of_blocks(), [frozenset({0, 2})])
    assert answer is not None
    assert {b for j in (0, 2) for b in range(*answer.ranges[j])} == {0, 1, 2, 3}
    assert [answer.ranges[j] for j in (1, 3)] == [(2, 4), (2, 4)]  # for when they come back
    assert len(moves(pairs_of_blocks(), answer)) >= 1


def test_blocks_that_have_only_become_scarce_are_left_until_patience_ends() -> None:
    # Two servers with the first half and one with the second: nothing better for a chain through two.
    controller = watched(10.0, 30.0)
    there = frozenset({0, 1, 2})
    answers = looks(controller, pairs_of_blocks(), [there] * 4)
    assert answers[:2] == [None, None]
    final = next((answer for answer in answers if answer is not None), pairs_of_blocks())
    held = {b for j in there for b in range(*final.ranges[j])}
    assert held == {0, 1, 2, 3}


def test_a_server_that_comes_back_in_time_changes_nothing() -> None:
    recorded = Recorded({})
    controller = TwoTimeScale(recorded, period_s=10, patience_s=30).bind(SMALL, pairs_of_blocks())
    away = frozenset({0, 1, 2})
    assert looks(controller, pairs_of_blocks(), [EVERYBODY, away, away, EVERYBODY, away, away]) == [None] * 6
    assert recorded.asked == []


def test_a_server_that_has_joined_is_placed_with_the_others_after_patience() -> None:
    # It joined without a block; the placement for four is made when it has stayed.
    start = replace(placed(SMALL, [(0, 2), (2, 4), (0, 2), (0, 0)], [20.0] * 3 + [0.0]), design_concurrency=2)
    controller = TwoTimeScale(period_s=10, patience_s=30).bind(SMALL, start)
    answers = looks(controller, start, [EVERYBODY] * 3)
    assert answers[:2] == [None, None]
    assert answers[2] is not None
    assert answers[2].ranges[3].n_blocks > 0


@pytest.mark.parametrize(("quiet_looks", "asked"), [(0, [9]), (2, [2, 9])])
def test_a_load_that_is_another_one_counts_from_when_it_was_whoever_joins(
    quiet_looks: int, asked: list[int]
) -> None:
    start = replace(placed(SMALL, [(0, 2), (2, 4), (0, 2), (0, 0)], [20.0] * 3 + [0.0]), design_concurrency=2)
    recorded = Recorded(dict.fromkeys((2, 9), start))
    controller = TwoTimeScale(recorded, period_s=10, patience_s=30).bind(SMALL, start)
    looks(controller, start, [EVERYBODY] * quiet_looks, mean_active=1.0)
    looks(controller, start, [EVERYBODY] * 3, mean_active=6.3)
    assert recorded.asked == asked, (
        "placing for a server that joined, which moves nobody, is no reason to wait on"
    )


def test_if_too_few_servers_are_left_for_the_design_it_is_for_fewer_sessions() -> None:
    alive = frozenset({1, 3})
    controller = TwoTimeScale(period_s=10, patience_s=30).bind(
        SMALL, replace(pairs_of_blocks(), design_concurrency=9)
    )
    assert CgBp().place(make_problem([40.0] * 2), 5)
    [answer] = looks(controller, pairs_of_blocks(), [alive])
    assert answer is not None
    assert {b for j in alive for b in range(*answer.ranges[j])} == {0, 1, 2, 3}


def test_with_everybody_there_the_answers_are_those_without_membership() -> None:
    random = Random(3)
    means = [random.uniform(0, 60) for _ in range(60)]
    answers = []
    for alive in (None, frozenset({0, 1, 2})):
        policy = TwoTimeScale(Recorded(dict.fromkeys(range(200), OTHER)), period_s=60, patience_s=120)
        controller, now, seen = policy.bind(PROBLEM, START), START, []
        for mean in means:
            at_s = controller.next_check_at_s
            seen.append(controller.check(at_s, SystemView(1, mean, 1.0, now, (), alive)))
            now = seen[-1] or now
        answers.append([answer and (answer.ranges, answer.cache_bytes) for answer in seen])
    assert answers[0] == answers[1]
    assert any(answers[0])


def test_petals_rebalancing_sees_only_servers_that_are_there() -> None:
    # The second half has no server alive any more: the next one alive that checks goes there.
    policy = PetalsRebalancing(period_s=10.0, seed=1)
    controller = policy.bind(SMALL, pairs_of_blocks())
    view = SystemView(0, 0.0, 0.0, pairs_of_blocks(), (), frozenset({0, 2}))
    for _ in range(20):
        answer = controller.check(controller.next_check_at_s, view)
        if answer is not None:
            break
    assert answer is not None
    [moved] = moves(pairs_of_blocks(), answer)
    assert moved in (0, 2)
    assert answer.ranges[moved] == (2, 4)
    assert controller.check(controller.next_check_at_s, view._replace(alive=frozenset())) is None


def test_a_server_that_joins_begins_to_check_whether_it_should_move() -> None:
    start = placed(SMALL, [(0, 2), (2, 4), (0, 0), (0, 0)], [20.0, 20.0, 0.0, 0.0])
    joined = replace(start, ranges=ranges((0, 2), (2, 4), (0, 2), (0, 0)))
    controller = PetalsRebalancing(period_s=10.0).bind(SMALL, start)
    assert len(controller._checks) == 2
    controller.check(controller.next_check_at_s, SystemView(0, 0, 0, joined, (), frozenset({0, 1, 2, 3})))
    assert sorted(server for _, server in controller._checks) == [0, 1, 2]


def test_only_what_another_server_that_is_there_offers_can_be_spared() -> None:
    offered = ranges((0, 2), (2, 4), (0, 4))
    assert can_spare(offered, 0, BlockRange(0, 0))
    assert not can_spare(offered, 0, BlockRange(0, 0), {0, 1})
    assert not can_spare(offered, 2, BlockRange(0, 0), {0, 2})
    assert can_spare(offered, 2, BlockRange(2, 4), {0, 2})


def test_what_nobody_alive_holds_does_not_keep_others_from_moving() -> None:
    old, new = ranges((0, 2), (2, 4), (0, 2)), ranges((0, 2), (2, 4), (2, 4))
    assert rolling_order(old, new, [2], 4, alive={0, 2}) == [2]
    assert rolling_order(old, new, [2], 4, alive={2}) == []  # it is the last one with the first half
    assert rolling_order(ranges((0, 2), (0, 0), (0, 2)), new, [2], 4) == []


@pytest.mark.parametrize("period_looks", [1, 2, 3, 5, 10])
def test_a_load_that_oscillates_at_the_threshold_moves_nothing(period_looks: int) -> None:
    # |R| = 4 and 40 % of tolerance: the edge is at 3.3 sessions. The load crosses it 1,000 times or so.
    recorded = Recorded(dict.fromkeys(range(100), OTHER))
    policy = TwoTimeScale(recorded, period_s=60, patience_s=660, tolerance_ratio=0.4)
    controller = policy.bind(PROBLEM, START)
    for look in range(2000):
        mean = 4.5 if look // period_looks % 2 else 3.2
        view = SystemView(3, mean, 1.0, START)
        assert controller.check(controller.next_check_at_s, view) is None
    assert recorded.asked == []


def test_slow_oscillation_across_the_edge_moves_once_because_the_range_moves_with_it() -> None:
    # Long enough on either side to be believed: the new design range takes in both sides of the old edge.
    recorded = Recorded(dict.fromkeys(range(100), OTHER) | {4: START})
    policy = TwoTimeScale(recorded, period_s=60, patience_s=120, tolerance_ratio=0.4)
    controller, now, n_moves = policy.bind(PROBLEM, START), START, 0
    for look in range(2000):
        mean = 4.0 if look // 10 % 2 else 3.3
        answer = controller.check(controller.next_check_at_s, SystemView(3, mean, 1.0, now))
        n_moves += answer is not None
        now = answer or now
    assert n_moves == 1
