"""Servers that change their blocks while others, or they themselves, die: the system itself, in virtual time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from policies import BlockRange, Placement
from policies.membership import MembershipRules
from policies.online import TwoTimeScale
from policies.petals_rebalancing import PetalsRebalancing
from testbed.experiments import load_experiment
from testbed.simulator.cases import Case
from testbed.simulator.engine import simulate
from tests.support.failing import fail, kill, pairs
from tests.support.problems import make_problem
from tests.support.simulation import Scripted, arrivals

LOAD_BPS = 16.0
"""A block of 10 bytes takes five seconds."""


def with_range(placement: Placement, server: int, first: int, last: int) -> Placement:
    ranges = list(placement.ranges)
    ranges[server] = BlockRange(first, last)
    return replace(placement, ranges=tuple(ranges))


def test_a_server_that_cuts_its_sessions_has_them_replayed_elsewhere_without_a_ban() -> None:
    problem, placement = pairs(3)
    moved = with_range(placement, 0, 2, 4)
    policy = Scripted({1.0: moved}, drains=False)
    run = fail((problem, placement), arrivals(0.0, 30.0, n_output=40), online=policy, load_bps=LOAD_BPS)
    request = run.requests[0]
    assert (request.status, request.n_recoveries) == ("completed", 1)
    assert [e["event"] for e in run.of_kind("moving", "drained", "moved")] == [
        "moving",
        "drained",
        "moved",
    ]
    [move] = run.moves
    assert (move.server, move.new, move.closed_at_s, move.open_at_s) == (0, (2, 4), 1.0, 11.0)


def test_a_draining_server_that_dies_begins_again_with_its_new_blocks() -> None:
    problem, placement = pairs(3)
    policy = Scripted({1.0: with_range(placement, 0, 2, 4)})
    run = fail(
        (problem, placement),
        arrivals(0.0, 30.0, n_output=40),
        kill(0, 3.0, for_s=10.0),
        online=policy,
        load_bps=LOAD_BPS,
    )
    assert [r.status for r in run.requests] == ["completed"] * 2
    assert [
        (e["event"], e["server"], round(e["at_s"], 6)) for e in run.of_kind("moving", "moved", "move-lost")
    ] == [("moving", "s0", 1.0), ("move-lost", "s0", 3.0)]
    [begun] = run.of_kind("begun")
    assert begun["blocks"] == [2, 4]
    assert list(run.moves) == []


def test_moves_that_have_not_begun_are_dropped_when_a_server_dies() -> None:
    # Two servers are to go on one after the other; while the first loads, another one dies.
    problem, placement = pairs(3)
    both = with_range(with_range(placement, 0, 2, 4), 2, 2, 4)
    policy = Scripted({1.0: with_range(placement, 0, 2, 4), 5.0: None, 60.0: None})
    assert both.ranges != placement.ranges
    run = fail(
        (problem, placement), arrivals(0.0, 70.0, n_output=4), kill(1, 2.0), online=policy, load_bps=LOAD_BPS
    )
    assert [r.status for r in run.requests] == ["completed"] * 2
    assert [sorted(view.alive or ()) for view in policy.views] == [
        [0, 1, 2, 3, 4, 5],
        [0, 2, 3, 4, 5],
        [0, 2, 3, 4, 5],
    ]
    assert policy.views[2].placement.ranges[0] == (2, 4)


def test_a_lost_move_takes_those_planned_after_it_along() -> None:
    # s2 is to hold the second half, and only then s1 the first. s2 dies as it loads: s1 stays where it is.
    problem = make_problem([1000.0] * 3, input_rtt_s=0.1, prefill_slope_s=0.005)
    placement = Placement("p", (BlockRange(0, 2), BlockRange(2, 4), BlockRange(0, 2)), (900.0,) * 3)
    policy = Scripted({1.0: with_range(with_range(placement, 2, 2, 4), 1, 0, 2), 60.0: None})
    run = fail((problem, placement), arrivals(0.0, 20.0), kill(2, 3.0), online=policy, load_bps=LOAD_BPS)
    assert [(e["event"], e["server"]) for e in run.of_kind("moving", "moved", "move-lost")] == [
        ("moving", "s2"),
        ("move-lost", "s2"),
    ]
    assert [r.status for r in run.requests] == ["completed"] * 2


def test_a_server_that_dies_before_its_turn_and_is_back_soon_after_is_not_moved() -> None:
    # s0 moves until 11 s; s2's turn would come then, one second before it is there again.
    problem, placement = pairs(3)
    policy = Scripted({1.0: with_range(with_range(placement, 0, 2, 4), 2, 2, 4), 60.0: None})
    run = fail(
        (problem, placement), arrivals(0.0, 30.0), kill(2, 3.0, for_s=9.0), online=policy, load_bps=LOAD_BPS
    )
    assert [(e["event"], e["server"]) for e in run.of_kind("moving", "moved", "move-lost")] == [
        ("moving", "s0"),
        ("moved", "s0"),
    ]
    assert [e["blocks"] for e in run.of_kind("begun")] == [[0, 2]]
    assert [r.status for r in run.requests] == ["completed"] * 2


def test_a_move_of_a_server_that_only_the_controller_takes_to_be_there_is_lost() -> None:
    problem, placement = pairs(3)
    policy = Scripted({10.0: with_range(placement, 2, 2, 4), 60.0: None})
    run = fail(
        (problem, placement),
        arrivals(0.0, 30.0),
        kill(2, 3.0, for_s=8.0),
        online=policy,
        load_bps=LOAD_BPS,
        membership=MembershipRules("announced", refresh_s=1000.0),
    )
    assert [(e["event"], e["at_s"]) for e in run.of_kind("moving", "moved", "move-lost")] == [
        ("moving", 10.0),
        ("move-lost", 10.0),
    ]
    assert [e["blocks"] for e in run.of_kind("begun")] == [[2, 4]]
    assert [r.status for r in run.requests] == ["completed"] * 2


def test_blocks_that_die_with_their_last_server_come_back_on_another_one() -> None:
    # s1 alone holds the second half; s2, whose blocks s0 holds too, takes it after the next check and 10 s of loading.
    problem = make_problem([120.0] * 3, input_rtt_s=0.1, prefill_slope_s=0.005, block_caps=[2] * 3)
    ranges = (BlockRange(0, 2), BlockRange(2, 4), BlockRange(0, 2))
    placement = Placement("p", ranges, (100.0,) * 3, 4)
    policy = TwoTimeScale(period_s=20.0)
    run = fail(
        (problem, placement), arrivals(0.0, n_output=60), kill(1, 3.0), online=policy, load_bps=LOAD_BPS
    )
    [request] = run.requests
    assert (request.status, request.n_recoveries) == ("completed", 1)
    assert [move.decided_at_s for move in run.moves] == [20.0] * len(run.moves)
    held = {b for move in run.moves for b in range(*move.new)}
    assert {2, 3} <= held


@pytest.mark.parametrize("policy", ["two-time-scale", "petals-rebalancing"])
def test_under_churn_every_request_completes_while_servers_move(policy: str) -> None:
    options = [
        f"policy.online='{policy}'",
        "policy.online_period='10 s'",
        "policy.load_rate='20 Gbit/s'",
        "servers.1.count=4",
        "workload.n_requests=15",
        "workload.n_output_tokens=64",
    ]
    simulation = simulate(Case(load_experiment("churn", options)), "testbed")
    assert [r.status for r in simulation.rows] == ["completed"] * 15
    assert sum(r.n_recoveries for r in simulation.rows) >= 2
    assert simulation.served.moves or policy == "two-time-scale"
    again = simulate(Case(load_experiment("churn", options)), "testbed")
    assert (again.rows, again.served.moves) == (simulation.rows, simulation.served.moves)


def test_petals_servers_that_come_back_find_others_in_their_place() -> None:
    problem, placement = pairs(3)
    policy = PetalsRebalancing(period_s=5.0, seed=2)
    run = fail(
        (problem, placement),
        arrivals(0.0, 10.0, 20.0, 90.0, n_output=30),
        kill(1, 1.0, for_s=60.0),
        kill(3, 2.0, for_s=60.0),
        online=policy,
        load_bps=LOAD_BPS,
    )
    assert [r.status for r in run.requests] == ["completed"] * 4
    assert {move.new for move in run.moves} >= {(2, 4)}
