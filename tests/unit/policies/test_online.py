"""When a placement changes, and in which order its servers do."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies import BlockRange, InfeasiblePlacement, Placement, PolicyError, Problem
from policies.online import SystemView, TwoTimeScale, kept, loading_s, moves, rolling_order
from policies.petals import PetalsPlacement
from policies.registry import ONLINE, list_policies, resolve_online
from tests.support.problems import make_problem, placed


def ranges(*pairs: tuple[int, int]) -> tuple[BlockRange, ...]:
    return tuple(BlockRange(*pair) for pair in pairs)


@dataclass
class Recorded:
    """A placement policy with given results by |R|; it records the |R| of each call."""

    answers: dict[int, Placement]
    asked: list[int | None] = field(default_factory=list)
    name: str = "recorded"

    def place(self, problem: Problem, design_concurrency: int | None = None) -> Placement:
        self.asked.append(design_concurrency)
        if design_concurrency not in self.answers:
            raise InfeasiblePlacement("too much")
        return self.answers[design_concurrency]


# Three servers with room for all blocks twice; memory for far more than a hundred sessions.
PROBLEM = make_problem([10_000.0] * 3)
START = replace(placed(PROBLEM, [(0, 4), (0, 2), (2, 4)], [50.0] * 3), design_concurrency=4)
OTHER = replace(placed(PROBLEM, [(0, 4), (2, 4), (0, 2)], [50.0] * 3), design_concurrency=30)


def feed(policy: TwoTimeScale, means: list[float], start: Placement = START) -> list[Placement | None]:
    """Return the controller's results at its times, for these mean loads."""
    controller, answers, now = policy.bind(PROBLEM, start), [], start
    for mean_active in means:
        at_s = controller.next_check_at_s
        answers.append(controller.check(at_s, SystemView(round(mean_active), mean_active, 1.0, now)))
        assert controller.next_check_at_s == at_s + policy.period_s
        now = answers[-1] or now
    return answers


def test_online_policies_go_by_their_names_and_have_summaries() -> None:
    assert set(ONLINE) == {"two-time-scale", "petals-rebalancing"}
    assert isinstance(resolve_online("two-time-scale"), TwoTimeScale)
    rows = [row for row in list_policies() if row["kind"] == "online"]
    assert [row["name"] for row in rows] == list(ONLINE)
    assert all(row["summary"] for row in rows)


def test_placement_is_run_again_after_the_load_was_out_of_range_for_long_enough() -> None:
    # 25 sessions on average: |R| = 25 + 5.
    recorded = Recorded({30: OTHER})
    policy = TwoTimeScale(recorded, period_s=60, patience_s=180)
    assert feed(policy, [25, 25, 25, 25]) == [None, None, OTHER, None]
    # Inside the new design range nothing more happens.
    assert recorded.asked == [30]


def test_a_load_that_comes_back_in_time_changes_nothing() -> None:
    recorded = Recorded({})
    policy = TwoTimeScale(recorded, period_s=60, patience_s=180)
    assert feed(policy, [25, 25, 2, 25, 25, 2]) == [None] * 6
    assert recorded.asked == []


def test_time_above_the_range_does_not_count_as_time_below_it() -> None:
    recorded = Recorded({1: START})
    assert feed(TwoTimeScale(recorded, period_s=60, patience_s=180), [25, 25, 0.0, 0.0]) == [None] * 4
    assert recorded.asked == []


def test_the_mean_over_the_whole_time_outside_decides() -> None:
    recorded = Recorded({30: OTHER})
    feed(TwoTimeScale(recorded, period_s=60, patience_s=180), [20, 25, 30])
    assert recorded.asked == [30]


@pytest.mark.parametrize(("mean_active", "asks"), [(2.0, False), (3.0, False), (3.3, False), (4.0, True)])
def test_the_range_is_the_design_within_its_tolerance(mean_active: float, asks: bool) -> None:
    # 4 / 1.4 = 2.9 to 4 * 1.4 = 5.6; n + sqrt(n) rounds to 3, 5, 5 and 6.
    recorded = Recorded({6: OTHER})
    policy = TwoTimeScale(recorded, period_s=60, patience_s=60, tolerance_ratio=0.4)
    feed(policy, [mean_active])
    assert bool(recorded.asked) is asks


def test_no_more_sessions_are_designed_for_than_memory_holds_for_sure() -> None:
    # floor((3 * 60 - 10 * 7) / 7) = 15 sessions of one byte per block.
    problem = make_problem([60.0] * 3)
    recorded = Recorded({15: OTHER})
    controller = TwoTimeScale(recorded, patience_s=60).bind(problem, START)
    controller.check(60.0, SystemView(900, 900.0, 1.0, START))
    assert recorded.asked == [15]


def test_nothing_is_decided_while_servers_are_moving() -> None:
    recorded = Recorded({30: OTHER})
    controller = TwoTimeScale(recorded, patience_s=60).bind(PROBLEM, START)
    assert controller.check(60.0, SystemView(25, 25.0, 1.0, START, (1,))) is None
    assert recorded.asked == []
    assert controller.check(120.0, SystemView(25, 25.0, 1.0, START)) == OTHER


def test_an_infeasible_or_unreachable_placement_leaves_everything_as_it_is() -> None:
    assert feed(TwoTimeScale(Recorded({}), patience_s=60), [25]) == [None]
    two = replace(placed(PROBLEM, [(0, 2), (2, 4), (0, 0)], [50.0] * 3), design_concurrency=4)
    swapped = replace(two, ranges=ranges((2, 4), (0, 2), (0, 0)))
    assert feed(TwoTimeScale(Recorded({30: swapped}), patience_s=60), [25], two) == [None]


def test_the_same_placement_for_another_load_is_no_move_but_a_new_design() -> None:
    recorded = Recorded({30: START})
    assert feed(TwoTimeScale(recorded, patience_s=60), [25, 25]) == [None, None]
    assert recorded.asked == [30]


def test_a_placement_that_was_not_designed_for_a_load_cannot_be_adapted() -> None:
    problem = make_problem([24.0, 24.0])
    with pytest.raises(PolicyError, match="two-time-scale needs a placement that was designed for a number"):
        TwoTimeScale().bind(problem, PetalsPlacement().place(problem))


def test_moves_are_the_servers_whose_blocks_or_room_differ() -> None:
    old = placed(PROBLEM, [(0, 4), (0, 2), (2, 4)], [1.0, 2.0, 3.0])
    new = placed(PROBLEM, [(0, 4), (1, 3), (2, 4)], [1.0, 2.0, 4.0])
    assert moves(old, new) == [1, 2]
    assert moves(old, old) == []


def test_only_blocks_that_are_not_there_yet_are_loaded() -> None:
    # Blocks of 10 bytes at 8 bit/s.
    assert loading_s(PROBLEM, 0, BlockRange(0, 3), BlockRange(1, 4), 8.0) == 10.0
    assert loading_s(PROBLEM, 0, BlockRange(0, 2), BlockRange(2, 4), 8.0) == 20.0
    assert loading_s(PROBLEM, 0, BlockRange(0, 0), BlockRange(1, 4), 8.0) == 30.0
    assert loading_s(PROBLEM, 0, BlockRange(0, 4), BlockRange(1, 2), 8.0) == 0.0


def test_the_server_that_can_best_be_spared_moves_first() -> None:
    # Server 0 alone holds block 3, until server 2 has come there.
    old, new = ranges((0, 4), (0, 3), (0, 3)), ranges((0, 2), (0, 3), (1, 4))
    assert rolling_order(old, new, [0, 2], 4) == [2, 0]


def test_a_server_goes_on_serving_what_it_keeps() -> None:
    # Nobody else holds block 1 or 2, but neither server ever lets go of its own.
    old, new = ranges((0, 3), (1, 4)), ranges((0, 2), (2, 4))
    assert [kept(a, b) for a, b in zip(old, new, strict=True)] == [(0, 2), (2, 4)]
    assert kept(BlockRange(0, 2), BlockRange(2, 4)) == (0, 0)
    assert rolling_order(old, new, [0, 1], 4) == [0, 1]


def test_the_order_stops_where_every_further_move_would_uncover_a_block() -> None:
    old, new = ranges((0, 2), (2, 4), (0, 1)), ranges((2, 4), (0, 2), (1, 2))
    assert rolling_order(old, new, [0, 1, 2], 4) == [2]


BLOCKS = 6
PAIRS = st.tuples(st.integers(0, BLOCKS), st.integers(0, BLOCKS)).map(lambda p: BlockRange(min(p), max(p)))


@given(st.lists(st.tuples(PAIRS, PAIRS), min_size=1, max_size=6), st.integers(0, 5))
def test_every_block_is_held_at_every_moment_of_a_rolling_order(
    both: list[tuple[BlockRange, BlockRange]], whole: int
) -> None:
    old, new = [pair[0] for pair in both], [pair[1] for pair in both]
    old[whole % len(old)] = BlockRange(0, BLOCKS)
    changing = [j for j in range(len(old)) if old[j] != new[j]]
    order = rolling_order(old, new, changing, BLOCKS)
    assert len(order) == len(set(order)) and set(order) <= set(changing)

    def is_covered(held: list[BlockRange]) -> bool:
        return {b for r in held for b in range(r.first, r.last)} == set(range(BLOCKS))

    now = list(old)
    for j in order:
        now[j] = kept(old[j], new[j])
        assert is_covered(now)
        now[j] = new[j]
    for j in set(changing) - set(order):
        assert not is_covered([kept(old[j], new[j]) if i == j else r for i, r in enumerate(now)])
