"""Servers that change their blocks while the mode ``real`` serves requests."""

from __future__ import annotations

import pytest

from policies import Hop, Placement, PolicyError, Problem, RequestSpec, service_s
from policies.cgbp import CgBp
from policies.online import TwoTimeScale
from policies.petals_rebalancing import PetalsRebalancing
from policies.wsrr import WsRr
from testbed.moving.steering import Move
from tests.support.problems import make_problem, placed
from tests.support.simulation import Always, Scripted, arrivals, run_real

LOAD_BPS = 16.0
"""A block of 10 bytes takes five seconds."""


def two_servers() -> tuple[Problem, Placement, Placement]:
    """Both hold everything at first; then the first holds only the second half, and the cache for it."""
    problem = make_problem([999.0, 999.0], rtt_s=[[0.5, 1.0]], decode_s=[0.0, 0.0], input_rtt_s=8.0)
    old = placed(problem, [(0, 2), (0, 4)], [50.0, 50.0])
    return problem, old, placed(problem, [(2, 4), (0, 4)], [50.0, 50.0])


def moved_at(move: Move) -> tuple[float, float, float, float]:
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
    run = run_real(problem, old, arrivals(*answers), routing, online=online, load_bps=LOAD_BPS)
    assert [(r.status, r.n_cuts) for r in run.requests] == [("completed", 0)] * 4
    # Its session ends at 0.5 + 16 and the closing is there after 0.25 s more; two blocks load for 10 s.
    [move] = run.moves
    assert (move.server, move.old, move.new) == (0, (0, 2), (2, 4))
    assert moved_at(move) == pytest.approx((2.0, 2.0, 16.75, 26.75))


def test_a_draining_server_takes_no_new_sessions() -> None:
    problem, old, new = two_servers()
    taken: list[int] = []
    run = run_real(
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
    run = run_real(
        problem, old, arrivals(0.0, 5.0, 14.0), routing, online=Scripted({2.0: new}), load_bps=LOAD_BPS
    )
    assert [(r.status, r.n_attempts) for r in run.requests] == [("completed", 1)] * 3
    # The session from 5 s is still there when loading begins, and when it ends.
    assert moved_at(run.moves[0]) == (2.0, 2.0, 16.0, 21.0)


def test_a_server_whose_room_shrinks_loads_only_when_what_is_held_fits_the_new_room() -> None:
    problem = make_problem([999.0], rtt_s=[[0.0]], decode_s=[0.0], input_rtt_s=8.0, n_blocks=2)
    old = placed(problem, [(0, 2)], [6.0])
    new = placed(problem, [(0, 2)], [3.0])
    cache: list[tuple[float, int, float]] = []
    run = run_real(
        problem,
        old,
        arrivals(0.0, 1.0, 2.0, 3.0),
        online=Scripted({2.5: new}),
        load_bps=LOAD_BPS,
        on_cache=lambda *change: cache.append(change),
    )
    # Three sessions of two bytes; with 3 bytes only one may be left, which is so at 9.
    assert moved_at(run.moves[0]) == (2.5, 2.5, 9.0, 9.0)
    assert [r.n_cuts for r in run.requests] == [0] * 4
    # The fourth is refused at 3, 4 and 6 and lets itself in at 10, when the last of the three has ended.
    assert [change for change in cache if change[0] > 9] == [(10.0, 0, -2.0), (10.0, 0, 2.0)]


def test_an_opening_that_reaches_a_closed_server_is_refused_and_tried_elsewhere() -> None:
    problem = make_problem([999.0, 999.0], rtt_s=[[2.0, 2.0]], decode_s=[0.0, 0.5])
    old = placed(problem, [(0, 4), (0, 4)], [50.0, 50.0])
    new = placed(problem, [(1, 3), (0, 4)], [50.0, 50.0])
    # The chain is handed out at 0 and reaches server 0 at 1, which has closed at 0.5.
    run = run_real(problem, old, arrivals(0.0), WsRr(), online=Scripted({0.5: new}), load_bps=LOAD_BPS)
    [r] = run.requests
    assert r.route is not None
    assert (r.status, r.n_attempts, r.route.hops) == ("completed", 2, (Hop(1, 0, 4),))
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
    run = run_real(problem, old, plans, Watched(), online=online, load_bps=LOAD_BPS)
    assert [m.server for m in run.moves] == [2, 0]
    assert run.moves[1].closed_at_s == run.moves[0].open_at_s
    assert all(not placement.uncovered(4) for placement in bound)
    assert bound[-1].ranges == new.ranges
    assert all(r.status == "completed" and r.n_cuts == 0 for r in run.requests)


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
    run = run_real(problem, old, arrivals(0.0, 90.0), online=online, load_bps=LOAD_BPS)
    assert [m.closed_at_s for m in run.moves] == closed_at_s
    assert sorted(m.server for m in run.moves[:2]) == [0, 2]


def test_a_cut_session_replays_what_it_had_on_another_chain() -> None:
    problem = make_problem(
        [999.0, 999.0], rtt_s=[[0.0, 0.5]], decode_s=[0.25, 0.5], prefill_slope_s=0.25, n_output_tokens=11
    )
    old = placed(problem, [(0, 4), (0, 4)], [99.0, 99.0])
    new = placed(problem, [(0, 3), (0, 4)], [99.0, 99.0])
    plans = arrivals(0.0, n_input=2, n_output=11)
    online = Scripted({7.5: new}, drains=False)
    run = run_real(problem, old, plans, session_setup_s=1.0, online=online, load_bps=LOAD_BPS)
    [r] = run.requests
    # Prompt sent at 1.0, first token at 3.0, then one per second: five tokens by 7.5.
    assert r.ttft_s == 3.0
    assert (r.status, r.n_cuts, r.n_attempts) == ("completed", 1, 2)
    assert r.route is not None and r.route.hops == (Hop(1, 0, 4),)
    # The new chain opens in a round trip, without another session setup; its prompt is 2 + 5 tokens.
    rest_s = service_s(problem, RequestSpec(0, 7, 6), r.route.hops)[1]
    assert r.ended_at_s == pytest.approx(7.5 + 0.5 + rest_s)
    assert (r.waiting_s, r.setup_s) == (0.0, 1.0)


def test_a_session_that_is_cut_before_its_first_token_starts_over() -> None:
    problem = make_problem([999.0, 999.0], rtt_s=[[0.0, 0.5]], decode_s=[0.25, 0.5], input_rtt_s=5.0)
    old = placed(problem, [(0, 4), (0, 4)], [99.0, 99.0])
    new = placed(problem, [(0, 3), (0, 4)], [99.0, 99.0])
    online = Scripted({2.0: new}, drains=False)
    run = run_real(problem, old, arrivals(0.0), session_setup_s=1.0, online=online, load_bps=LOAD_BPS)
    [r] = run.requests
    assert (r.waiting_s, r.setup_s, r.ttft_s) == (2.0, 1.5, 8.5)


def test_a_cut_frees_the_session_on_its_other_servers_and_cuts_nobody_else() -> None:
    problem = make_problem([999.0] * 3, rtt_s=[[0.5] * 3], input_rtt_s=20.0)
    old = placed(problem, [(0, 2), (2, 4), (0, 4)], [99.0] * 3)
    new = placed(problem, [(1, 3), (2, 4), (0, 4)], [99.0] * 3)
    both, alone = [Hop(0, 0, 2), Hop(1, 2, 4)], [Hop(2, 0, 4)]
    routing = Always(lambda request, state, now_s: both if now_s == 0.0 else alone)
    cache: list[tuple[float, int, float]] = []
    run = run_real(
        problem,
        old,
        arrivals(0.0, 1.0),
        routing,
        online=Scripted({4.0: new}, drains=False),
        load_bps=LOAD_BPS,
        on_cache=lambda *change: cache.append(change),
    )
    assert [r.n_cuts for r in run.requests] == [1, 0]
    assert [c for c in cache if 4.0 <= c[0] < 5.0] == [(4.0, 0, -2.0), (4.25, 1, -2.0), (4.25, 2, 4.0)]


def test_a_server_that_does_not_drain_loads_all_of_its_blocks() -> None:
    problem = make_problem([999.0, 999.0])
    old = placed(problem, [(0, 3), (0, 4)], [9.0, 9.0])
    new = placed(problem, [(1, 4), (0, 4)], [9.0, 9.0])
    times = []
    for drains in (True, False):
        online = Scripted({2.0: new}, drains=drains)
        run = run_real(problem, old, arrivals(0.0, 60.0), online=online, load_bps=LOAD_BPS)
        times.append(run.moves[0].open_at_s - run.moves[0].drained_at_s)
    assert times == [5.0, 15.0]


def test_serial_servers_forget_what_they_computed_for_cut_sessions() -> None:
    problem = make_problem([999.0, 999.0], n_blocks=1, rtt_s=[[0.0, 0.0]], decode_s=[100.0, 1.0])
    old = placed(problem, [(0, 1), (0, 1)], [99.0, 9.0])
    new = placed(problem, [(0, 1), (0, 1)], [98.0, 9.0])
    answers = {0.0: 0, 2.0: 1, 20.0: 0}
    routing = Always(lambda request, state, now_s: [Hop(answers[now_s], 0, 1)])
    plans = [*arrivals(0.0, n_output=3), *arrivals(0.0, 20.0)[1:]]
    online = Scripted({2.0: new}, drains=False)
    run = run_real(problem, old, plans, routing, online=online, load_bps=LOAD_BPS, serial_compute=True)
    # Prompts take no compute here: one token was there at 0, and two more follow on server 1.
    assert [(r.ttft_s, r.ended_at_s, r.n_cuts) for r in run.requests] == [(0.0, 3.0, 1), (0.0, 20.0, 0)]


def test_a_check_sees_the_mean_since_the_last_one_and_who_waits_counts() -> None:
    # One session at a time; each takes 4 s. Two arrive at 0, one at 6.
    problem = make_problem([999.0], rtt_s=[[0.0]], decode_s=[0.0], input_rtt_s=4.0)
    placement = placed(problem, [(0, 4)], [4.0])
    online = Scripted({2.0: None, 10.0: None, 20.0: None})
    run = run_real(problem, placement, arrivals(0.0, 0.0, 6.0, 30.0), online=online)
    # The second is refused at 0, 1, 3 and, because the third is faster, at 7; it is served from 15 on.
    assert [r.ended_at_s for r in run.requests] == [4.0, 19.0, 10.0, 34.0]
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
        run_real(problem, old, arrivals(0.0, 60.0), online=online)


def test_a_server_cannot_be_moved_again_before_it_has_arrived() -> None:
    problem, old, new = two_servers()
    online = Scripted({2.0: new, 3.0: old})
    with pytest.raises(PolicyError, match="scripted moves s0 again before it has arrived"):
        run_real(problem, old, arrivals(0.0, 60.0), online=online, load_bps=LOAD_BPS)


def test_a_policy_that_does_not_let_time_go_on_is_stopped() -> None:
    class Stuck(Scripted):
        def check(self, now_s: float, view: object) -> None:
            return None

    problem, old, _ = two_servers()
    with pytest.raises(PolicyError, match=r"wants to be asked at 2.0 s after it was at 2.0 s"):
        run_real(problem, old, arrivals(0.0, 60.0), online=Stuck({2.0: None}))


def test_two_time_scale_makes_room_when_the_load_grows() -> None:
    # Placed for one session at a time, which takes 9 s; then one comes every 3 s.
    problem = make_problem([60.0] * 4, decode_s=[0.5] * 4, n_output_tokens=5, cache_bytes_per_token=1.0)
    old = CgBp().place(problem, 1)
    plans = arrivals(*(3.0 * i for i in range(200)), n_output=5)
    fixed = run_real(problem, old, plans)
    policy = TwoTimeScale(period_s=30.0, patience_s=60.0)
    run = run_real(problem, old, plans, online=policy, load_bps=80.0)
    assert run.moves
    assert all(r.status == "completed" and r.n_cuts == 0 for r in run.requests)
    assert sum(r.waiting_s for r in run.requests) < sum(r.waiting_s for r in fixed.requests) / 10


def test_petals_rebalancing_cuts_sessions_and_all_of_them_still_complete() -> None:
    problem = make_problem([999.0] * 4, forward_rps=[150.0] * 4, decode_s=[0.1] * 4, n_output_tokens=60)
    old = placed(problem, [(0, 2), (0, 2), (0, 2), (2, 4)], [900.0] * 4)
    plans = arrivals(*(2.0 * i for i in range(60)), n_output=60)
    run = run_real(problem, old, plans, online=PetalsRebalancing(), load_bps=LOAD_BPS)
    assert [(m.old, m.new) for m in run.moves] == [((0, 2), (2, 4))]
    assert all(r.status == "completed" for r in run.requests)
    assert any(r.n_cuts for r in run.requests)


def test_a_load_that_oscillates_at_the_threshold_moves_servers_a_few_times_at_most() -> None:
    # Requests of 16 s: 40 bursts of 100 s with three or so at a time, and 100 s with one.
    problem = make_problem([40.0] * 6, rtt_s=[[0.1] * 6], decode_s=[0.1] * 6, input_rtt_s=8.0)
    placement = CgBp().place(problem, 3)
    at_s = [200.0 * burst + n * 5.0 for burst in range(40) for n in range(20)]
    decided = []
    for patience_s in (120.0, 0.0):  # longer than a burst, and none
        online = TwoTimeScale(period_s=10.0, patience_s=patience_s)
        run = run_real(problem, placement, arrivals(*at_s), online=online, load_bps=LOAD_BPS)
        assert {r.status for r in run.requests} == {"completed"}
        decided.append({move.decided_at_s for move in run.moves})
    patient, hasty = map(len, decided)
    assert patient <= 1
    assert hasty > 40
