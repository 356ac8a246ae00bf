"""Servers that change their blocks while the fast engine serves requests."""

from __future__ import annotations

import pytest

from policies import Hop, Placement, PolicyError, Problem
from policies.cgbp import CgBp
from policies.online import TwoTimeScale
from policies.rules import RecoveryRules
from policies.wsrr import WsRr
from testbed.fast.outcome import Disturbed
from testbed.records.summary import MoveRow
from tests.support.problems import make_problem, placed
from tests.support.simulation import Always, Scripted, arrivals, run_fast

LOAD_BPS = 16.0
"""A block of 10 bytes takes five seconds."""


def two_servers() -> tuple[Problem, Placement, Placement]:
    """Both hold everything at first; then the first holds only the second half, and the cache for it."""
    problem = make_problem([999.0, 999.0], rtt_s=[[0.5, 1.0]], decode_s=[0.0, 0.0], input_rtt_s=8.0)
    old = placed(problem, [(0, 2), (0, 4)], [50.0, 50.0])
    return problem, old, placed(problem, [(2, 4), (0, 4)], [50.0, 50.0])


def moved_at(move: MoveRow) -> tuple[float, float, float, float]:
    return move.decided_at_s, move.closed_at_s, move.drained_at_s, move.open_at_s


def test_a_draining_server_finishes_its_sessions_then_loads_then_opens() -> None:
    problem = make_problem([999.0, 999.0], rtt_s=[[0.5, 0.5]], decode_s=[0.0, 0.01], input_rtt_s=8.0)
    old = placed(problem, [(0, 2), (0, 4)], [50.0, 50.0])
    new = placed(problem, [(2, 4), (0, 4)], [50.0, 50.0])
    half = [Hop(0, 0, 2), Hop(1, 2, 4)]
    whole = [Hop(1, 0, 4)]
    # The first goes through server 0; what comes later finds it draining, loading, and with other blocks.
    answers = {0.0: half, 3.0: whole, 10.0: whole, 30.0: [Hop(1, 0, 4)]}
    routing = Always(lambda request, state, now_s: answers[now_s])
    online = Scripted({2.0: new})
    run = run_fast(problem, old, arrivals(*answers), routing, online=online, load_bps=LOAD_BPS)
    assert [r.status for r in run.requests] == ["completed"] * 4
    # Its session ends at 0.5 + 16 and the closing is there after 0.25 s more; two blocks load for 10 s.
    [move] = run.moves
    assert (move.server, move.old, move.new) == (0, (0, 2), (2, 4))
    assert moved_at(move) == pytest.approx((2.0, 2.0, 16.75, 26.75))


def test_a_session_that_a_draining_server_cannot_wait_for_is_for_the_system_itself() -> None:
    problem, old, new = two_servers()
    routing = Always(lambda request, state, now_s: [Hop(0, 0, 2), Hop(1, 2, 4)])
    rules = RecoveryRules(give_up_s=5.0)
    with pytest.raises(
        Disturbed, match="s0 cuts the sessions that have not ended 5 s after it began to move"
    ):
        run_fast(problem, old, arrivals(0.0), routing, online=Scripted({2.0: new}), recovery=rules)


def test_a_draining_server_takes_no_new_sessions() -> None:
    problem, old, new = two_servers()
    taken: list[int] = []
    run = run_fast(
        problem,
        old,
        arrivals(0.0, 3.0, 40.0),
        online=Scripted({2.0: new}),
        load_bps=LOAD_BPS,
        on_cache=lambda at_s, server, change: taken.append(server) if change > 0 else None,
    )
    assert [r.status for r in run.requests] == ["completed"] * 3
    # Server 1 alone is the cheapest chain from the start; nobody ever needs server 0.
    assert set(taken) == {1}
    assert moved_at(run.moves[0]) == (2.0, 2.0, 2.0, 12.0)


def test_a_draining_server_goes_on_serving_the_blocks_that_it_keeps() -> None:
    # Server 0 keeps block 1; sessions on block 0 finish first. Loading block 2 takes 5 s.
    problem = make_problem([999.0, 999.0], rtt_s=[[0.0, 0.0]], decode_s=[0.0, 0.0], input_rtt_s=8.0)
    old = placed(problem, [(0, 2), (0, 4)], [50.0, 50.0])
    new = placed(problem, [(1, 3), (0, 4)], [50.0, 50.0])
    routing = Always(
        lambda request, state, now_s: [Hop(0, 0, 2), Hop(1, 2, 4)] if now_s < 1 else [Hop(0, 1, 2)]
    )
    run = run_fast(
        problem, old, arrivals(0.0, 5.0, 14.0), routing, online=Scripted({2.0: new}), load_bps=LOAD_BPS
    )
    assert [(r.status, r.n_rejections) for r in run.requests] == [("completed", 0)] * 3
    # The session from 5 s is still there when loading begins, and when it ends.
    assert moved_at(run.moves[0]) == (2.0, 2.0, 16.0, 21.0)


def test_a_server_whose_room_shrinks_loads_only_when_what_is_held_fits_the_new_room() -> None:
    problem = make_problem([999.0], rtt_s=[[0.0]], decode_s=[0.0], input_rtt_s=8.0, n_blocks=2)
    old = placed(problem, [(0, 2)], [6.0])
    new = placed(problem, [(0, 2)], [3.0])
    cache: list[tuple[float, int, float]] = []
    run = run_fast(
        problem,
        old,
        arrivals(0.0, 1.0, 2.0, 3.0),
        online=Scripted({2.5: new}),
        load_bps=LOAD_BPS,
        on_cache=lambda *change: cache.append(change),
    )
    # Three sessions of two bytes; with 3 bytes only one may be left, which is so at 9.
    assert moved_at(run.moves[0]) == (2.5, 2.5, 9.0, 9.0)
    # The fourth is refused at 3, 4 and 6 and lets itself in at 10, when the last of the three has ended.
    assert [change for change in cache if change[0] > 9] == [(10.0, 0, -2.0), (10.0, 0, 2.0)]


def test_an_opening_that_reaches_a_closed_server_is_refused_and_tried_elsewhere() -> None:
    problem = make_problem([999.0, 999.0], rtt_s=[[2.0, 2.0]], decode_s=[0.0, 0.5])
    old = placed(problem, [(0, 4), (0, 4)], [50.0, 50.0])
    new = placed(problem, [(1, 3), (0, 4)], [50.0, 50.0])
    # The chain is handed out at 0 and reaches server 0 at 1, which has closed at 0.5.
    run = run_fast(problem, old, arrivals(0.0), WsRr(), online=Scripted({0.5: new}), load_bps=LOAD_BPS)
    [r] = run.requests
    assert r.route is not None
    assert (r.status, r.n_rejections, r.route.hops) == ("completed", 1, (Hop(1, 0, 4),))
    assert r.waiting_s == 3.0


def test_servers_drain_one_after_another_and_every_block_stays_served() -> None:
    problem = make_problem([999.0] * 3, decode_s=[0.01, 0.02, 0.03], n_output_tokens=50)
    old = placed(problem, [(0, 4), (0, 3), (0, 3)], [900.0] * 3)
    new = placed(problem, [(0, 2), (0, 3), (1, 4)], [900.0] * 3)
    bound: list[Placement] = []

    class Watched(WsRr):
        def bind(self, problem: Problem, placement: Placement):  # type: ignore[no-untyped-def]
            bound.append(placement)
            return super().bind(problem, placement)

    plans = arrivals(*(float(t) for t in range(40)), n_output=50)
    online = Scripted({2.0: new})
    run = run_fast(problem, old, plans, Watched(), online=online, load_bps=LOAD_BPS)
    assert [m.server for m in run.moves] == [2, 0]
    assert run.moves[1].closed_at_s == run.moves[0].open_at_s
    assert all(not placement.uncovered(4) for placement in bound)
    assert bound[-1].ranges == new.ranges
    assert all(r.status == "completed" for r in run.requests)


@pytest.mark.parametrize(
    ("at_once", "closed_at_s"),
    [(1, [2.0, 12.0, 22.0, 32.0]), (2, [2.0, 2.0, 12.0, 12.0]), (4, [2.0, 2.0, 12.0, 12.0])],
)
def test_servers_move_together_only_as_far_as_every_block_stays_offered(
    at_once: int, closed_at_s: list[float]
) -> None:
    # Two pairs of servers change places: of each pair one must stay until others have come.
    problem = make_problem([999.0] * 4)
    old = placed(problem, [(0, 2), (0, 2), (2, 4), (2, 4)], [50.0] * 4)
    new = placed(problem, [(2, 4), (2, 4), (0, 2), (0, 2)], [50.0] * 4)
    online = Scripted({2.0: new}, at_once=at_once)
    run = run_fast(problem, old, arrivals(0.0, 90.0), online=online, load_bps=LOAD_BPS)
    assert [m.closed_at_s for m in run.moves] == closed_at_s
    assert sorted(m.server for m in run.moves[:2]) == [0, 2]


def test_a_check_sees_the_mean_since_the_last_one_and_who_waits_counts() -> None:
    # One session at a time; each takes 4 s. Two arrive at 0, one at 6.
    problem = make_problem([999.0], rtt_s=[[0.0]], decode_s=[0.0], input_rtt_s=4.0)
    placement = placed(problem, [(0, 4)], [4.0])
    online = Scripted({2.0: None, 10.0: None, 20.0: None})
    run = run_fast(problem, placement, arrivals(0.0, 0.0, 6.0, 30.0), online=online)
    # The second is refused at 0, 1, 3 and, because the third is faster, at 7; it is served from 15 on.
    assert [r.plan.arrival_at_s + (r.time_s or 0.0) for r in run.requests] == [4.0, 19.0, 10.0, 34.0]
    assert [(v.n_active, v.mean_active, v.request_rate) for v in online.views] == [
        (2, 2.0, 1.0),
        (1, (2 * 2 + 1 * 2 + 2 * 4) / 8, 1 / 8),
        (0, 9 / 10, 0.0),
    ]


@pytest.mark.parametrize(
    ("new", "reason"),
    [
        ([(0, 2), (0, 2)], "online policy scripted|scripted leaves blocks 2-3 on no server"),
        ([(0, 2), (2, 4)], "cannot be reached one server after another without leaving a block on no server"),
    ],
)
def test_a_move_that_breaks_a_rule_ends_the_run(new: list[tuple[int, int]], reason: str) -> None:
    problem = make_problem([999.0, 999.0])
    old = placed(problem, [(2, 4), (0, 2)], [9.0, 9.0])
    online = Scripted({2.0: placed(problem, new, [9.0, 9.0])})
    with pytest.raises(PolicyError, match=reason):
        run_fast(problem, old, arrivals(0.0, 60.0), online=online)


def test_a_server_cannot_be_moved_again_before_it_has_arrived() -> None:
    problem, old, new = two_servers()
    online = Scripted({2.0: new, 3.0: old})
    with pytest.raises(PolicyError, match="scripted moves s0 again before it has arrived"):
        run_fast(problem, old, arrivals(0.0, 60.0), online=online, load_bps=LOAD_BPS)


def test_a_policy_that_does_not_let_time_go_on_is_stopped() -> None:
    class Stuck(Scripted):
        def check(self, now_s: float, view: object) -> None:
            return None

    problem, old, _ = two_servers()
    with pytest.raises(PolicyError, match=r"wants to be asked at 2.0 s after it was at 2.0 s"):
        run_fast(problem, old, arrivals(0.0, 60.0), online=Stuck({2.0: None}))


def test_two_time_scale_makes_room_when_the_load_grows() -> None:
    # Placed for one session at a time, which takes 9 s; then one comes every 3 s.
    problem = make_problem([60.0] * 4, decode_s=[0.5] * 4, n_output_tokens=5, cache_bytes_per_token=1.0)
    old = CgBp().place(problem, 1)
    plans = arrivals(*(3.0 * i for i in range(200)), n_output=5)
    fixed = run_fast(problem, old, plans)
    policy = TwoTimeScale(period_s=30.0, patience_s=60.0)
    run = run_fast(problem, old, plans, online=policy, load_bps=80.0)
    assert run.moves
    assert all(r.status == "completed" for r in run.requests)
    assert sum(r.waiting_s for r in run.requests) < sum(r.waiting_s for r in fixed.requests) / 10


def test_a_load_that_oscillates_at_the_threshold_moves_servers_a_few_times_at_most() -> None:
    # Requests of 16 s: 40 bursts of 100 s with three or so at a time, and 100 s with one.
    problem = make_problem([40.0] * 6, rtt_s=[[0.1] * 6], decode_s=[0.1] * 6, input_rtt_s=8.0)
    placement = CgBp().place(problem, 3)
    at_s = [200.0 * burst + n * 5.0 for burst in range(40) for n in range(20)]
    decided = []
    for patience_s in (120.0, 0.0):  # longer than a burst, and none
        online = TwoTimeScale(period_s=10.0, patience_s=patience_s)
        run = run_fast(problem, placement, arrivals(*at_s), online=online, load_bps=LOAD_BPS)
        assert {r.status for r in run.requests} == {"completed"}
        decided.append({move.decided_at_s for move in run.moves})
    patient, hasty = map(len, decided)
    assert patient <= 1
    assert hasty > 40
