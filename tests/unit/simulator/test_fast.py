"""The simulator's engine ``fast``: openings, refusals, retries, what routers see."""

from __future__ import annotations

from dataclasses import replace

import pytest

from policies import Hop, PolicyError, RequestSpec, service_s
from policies.workload import Backoff, QueueRules, RequestPlan
from tests.support.problems import make_problem, placed
from tests.support.simulation import Always, arrivals, run_fast

ONE_SERVER = [Hop(0, 0, 4)]


def test_a_session_opens_on_all_hops_at_once_and_then_takes_its_service_time() -> None:
    problem = make_problem([99.0, 99.0], rtt_s=[[0.1, 0.4]], n_output_tokens=3, input_rtt_s=0.5)
    placement = placed(problem, [(0, 2), (2, 4)], [99.0, 99.0])
    run = run_fast(problem, placement, arrivals(5.0, n_output=3), session_setup_s=2.0)
    [r] = run.requests
    assert r.route is not None
    first_s, all_s = service_s(problem, RequestSpec(0, 1, 3), r.route.hops)
    # The farther server answers after 0.4 s.
    assert (r.status, r.waiting_s, r.n_rejections) == ("completed", 0.0, 0)
    assert r.setup_s == pytest.approx(0.4 + 2.0)
    assert r.ttft_s == pytest.approx(2.4 + first_s)
    assert r.time_s == pytest.approx(2.4 + all_s)


def test_opening_takes_the_initial_delay_where_that_is_longer() -> None:
    problem = replace(make_problem([99.0], rtt_s=[[0.1]]), initial_delay_s=0.7)
    run = run_fast(problem, placed(problem, [(0, 4)], [99.0]), arrivals(0.0))
    assert run.requests[0].setup_s == 0.7


def test_a_refused_session_asks_again_after_one_two_four_seconds_and_never_enters_before_there_is_room() -> (
    None
):
    # Cache for one session; it holds it from 0.25 to 9.25 (its own 8.5 s and half a round trip).
    problem = make_problem([99.0], rtt_s=[[0.5]], decode_s=[0.0], input_rtt_s=8.0)
    placement = placed(problem, [(0, 4)], [4.0])
    cache: list[tuple[float, int, float]] = []
    routing = Always(lambda request, state, now_s: ONE_SERVER)
    run = run_fast(
        problem, placement, arrivals(0.0, 1.0), routing, on_cache=lambda *change: cache.append(change)
    )
    assert [r.status for r in run.requests] == ["completed", "completed"]
    # Each attempt costs a round trip, then the backoff: 1, 2, 4, 8 s.
    assert [at_s for at_s, _ in routing.asked] == [0.0, 1.0, 2.5, 5.0, 9.5]
    assert (run.requests[1].waiting_s, run.requests[1].n_rejections) == (8.5, 3)
    assert cache == [(0.25, 0, 4.0), (8.75, 0, -4.0), (9.75, 0, 4.0)]


def test_in_the_coordinators_queue_it_is_woken_when_the_closing_has_reached_the_servers() -> None:
    # As above, without retries: the first ends at 8.5, and its server knows at 8.75.
    problem = make_problem([99.0], rtt_s=[[0.5]], decode_s=[0.0], input_rtt_s=8.0)
    placement = placed(problem, [(0, 4)], [4.0])
    run = run_fast(problem, placement, arrivals(0.0, 1.0), queue=QueueRules("fifo", 0.0, 0.0, 60.0))
    assert [(r.waiting_s, r.n_rejections) for r in run.requests] == [(0.0, 0), (7.75, 0)]


def test_in_the_queue_a_session_that_lasts_longer_than_expected_still_holds_its_room() -> None:
    # Two sessions fit. Together they take longer than routers expect of each alone: the third comes between.
    problem = make_problem([99.0], rtt_s=[[0.5]], decode_s=[1.0])
    problem = replace(problem, servers=(replace(problem.servers[0], session_slope_s=1.0),))
    placement = placed(problem, [(0, 4)], [84.0])
    requests = arrivals(0.0, 0.1, 0.0, n_output=20)
    expected_s = 0.5 + service_s(problem, requests[0].known, ONE_SERVER)[1]
    requests[2] = replace(requests[2], arrival_at_s=expected_s + 1.0)
    polled = run_fast(problem, placement, requests, batching="continuous")
    assert [r.n_rejections for r in polled.requests][:2] == [0, 0]
    assert polled.requests[2].n_rejections > 0
    queued = run_fast(
        problem, placement, requests, batching="continuous", queue=QueueRules("fifo", 0.0, 0.0, 60.0)
    )
    assert [r.n_rejections for r in queued.requests] == [0, 0, 0]
    assert 0.0 < queued.requests[2].waiting_s < polled.requests[2].waiting_s


def test_while_a_session_waits_another_may_take_the_room() -> None:
    # The first is done at 2.0; the second is refused at 0.5 and asks at 1.5 and 3.5; the third comes at 2.5.
    problem = make_problem([99.0], rtt_s=[[0.0]], decode_s=[0.0], input_rtt_s=2.0)
    placement = placed(problem, [(0, 4)], [4.0])
    run = run_fast(problem, placement, arrivals(0.0, 0.5, 2.5))
    assert [r.waiting_s for r in run.requests] == [0.0, 7.0, 0.0]


def test_the_room_of_a_session_that_ends_now_is_free_for_one_that_arrives_now() -> None:
    problem = make_problem([99.0], rtt_s=[[0.0]], decode_s=[0.0], input_rtt_s=2.0)
    run = run_fast(problem, placed(problem, [(0, 4)], [4.0]), arrivals(0.0, 2.0, 4.0))
    assert [r.waiting_s for r in run.requests] == [0.0, 0.0, 0.0]


def test_a_refusal_on_one_hop_frees_what_the_others_had_reserved() -> None:
    problem = make_problem([99.0, 99.0], rtt_s=[[0.2, 1.0]], input_rtt_s=50.0)
    placement = placed(problem, [(0, 2), (2, 4)], [99.0, 2.0])
    cache: list[tuple[float, int, float]] = []
    run = run_fast(
        problem,
        placement,
        arrivals(0.0, 10.0),
        backoff=Backoff(give_up_s=1.0),
        on_cache=lambda *change: cache.append(change),
    )
    assert [r.status for r in run.requests] == ["completed", "failed"]
    mine = [change for change in cache if 10.0 <= change[0] < 12.0]
    # Server 0 says yes at 10.1; server 1's no is back at 11.0; the closing reaches server 0 at 11.1.
    assert mine == [(10.1, 0, 2.0), (pytest.approx(11.1), 0, -2.0)]


def test_a_request_fails_before_a_retry_that_would_start_too_late() -> None:
    problem = make_problem([99.0], rtt_s=[[0.5]], input_rtt_s=100.0)
    placement = placed(problem, [(0, 4)], [4.0])
    run = run_fast(problem, placement, arrivals(0.0, 1.0), backoff=Backoff(give_up_s=5.0))
    r = run.requests[1]
    # Refused at 1.5, 3.0, 5.5; the next attempt would be at 9.5, more than 5 s after the arrival.
    assert (r.status, r.n_rejections, r.waiting_s) == ("failed", 2, 4.5)
    assert (r.ttft_s, r.setup_s) == (None, None)
    assert r.reason == "no room at the last attempt within 5 s (no-capacity: 4 B asked for, 0 B free)"


@pytest.mark.parametrize("give_up_s", [0.0, 20.0])
def test_a_request_without_a_chain_or_too_big_for_its_server_does_not_wait_for_ever(give_up_s: float) -> None:
    problem = make_problem([99.0], rtt_s=[[0.0]])
    placement = placed(problem, [(0, 4)], [8.0])
    plans = [RequestPlan(0, 0, 0.0, 1, 1), RequestPlan(1, 0, 0.0, 9, 9)]
    limit_s, ended_at_s = (give_up_s, 15.0) if give_up_s else (300.0, 243.0)  # as recovery.give_up
    for routing, refusal in (
        (None, "no route covers the model"),
        (Always(lambda request, state, now_s: ONE_SERVER), "never-fits: 36 B asked for, 8 B free"),
    ):
        run = run_fast(problem, placement, plans, routing, backoff=Backoff(give_up_s=give_up_s))
        assert [r.status for r in run.requests] == ["completed", "failed"]
        assert run.requests[1].reason == f"no room at the last attempt within {limit_s:g} s ({refusal})"
        # Asked at 0, 1, 3, 7, 15, 31, 63, 123, ...
        assert run.requests[1].waiting_s == ended_at_s


def test_a_session_fails_after_the_last_attempt_to_open_it() -> None:
    problem = make_problem([99.0], input_rtt_s=1e6)
    placement = placed(problem, [(0, 4)], [4.0])
    run = run_fast(problem, placement, arrivals(0.0, 1.0), max_attempts=3)
    assert (run.requests[1].status, run.requests[1].n_rejections) == ("failed", 2)
    assert run.requests[1].reason.startswith("3 attempts to open a session failed (no-capacity: ")


def test_two_clients_whose_openings_cross_refuse_each_other_until_they_give_up() -> None:
    # Each is near the server that the other is far from, and takes the last room there first.
    problem = make_problem([99.0, 99.0], rtt_s=[[0.1, 1.0], [1.0, 0.1]])
    placement = placed(problem, [(0, 2), (2, 4)], [2.0, 2.0])
    plans = [RequestPlan(0, 0, 0.0, 1, 1), RequestPlan(1, 1, 0.0, 1, 1)]
    run = run_fast(problem, placement, plans, backoff=Backoff(give_up_s=600.0))
    assert [r.status for r in run.requests] == ["failed", "failed"]
    apart = [plans[0], replace(plans[1], arrival_at_s=0.6)]
    run = run_fast(problem, placement, apart, backoff=Backoff(give_up_s=600.0))
    assert [r.status for r in run.requests] == ["completed", "completed"]


@pytest.mark.parametrize("jitter", [0.2, 1.0])
def test_two_clients_that_refuse_each_other_in_step_get_in_with_jitter(jitter: float) -> None:
    problem = make_problem([99.0, 99.0], rtt_s=[[0.1, 1.0], [1.0, 0.1]])
    placement = placed(problem, [(0, 2), (2, 4)], [2.0, 2.0])
    plans = [RequestPlan(0, 0, 0.0, 1, 1), RequestPlan(1, 1, 0.0, 1, 1)]
    for seed in range(5):
        backoff = Backoff(give_up_s=600.0, jitter_ratio=jitter, seed=seed)
        run = run_fast(problem, placement, plans, backoff=backoff)
        assert [r.status for r in run.requests] == ["completed", "completed"]


def test_a_session_counts_for_the_router_from_the_moment_its_chain_is_handed_out() -> None:
    problem = make_problem([99.0], rtt_s=[[2.0]])
    routing = Always(lambda request, state, now_s: ONE_SERVER)
    run_fast(problem, placed(problem, [(0, 4)], [99.0]), arrivals(0.0, 0.0, 1.0), routing)
    assert routing.asked == [(0.0, [0]), (0.0, [1]), (1.0, [2])]


def test_a_session_that_lasts_longer_than_modelled_is_still_seen() -> None:
    # Opening takes 2 s that the expected end does not have: expected 2.04, seen until 4.04.
    problem = make_problem([99.0], rtt_s=[[2.0]], input_rtt_s=2.0)
    routing = Always(lambda request, state, now_s: ONE_SERVER)
    run_fast(problem, placed(problem, [(0, 4)], [99.0]), arrivals(0.0, 3.0, 4.1), routing)
    assert [seen for _, seen in routing.asked] == [[0], [1], [1]]


def test_with_an_age_the_router_sees_the_last_report() -> None:
    # Reports at 0, 10, 20: of the sessions from 1.0 and 2.0 the first report that tells is that of 10 s.
    problem = make_problem([99.0], rtt_s=[[0.0]], input_rtt_s=15.0, decode_s=[0.0])
    routing = Always(lambda request, state, now_s: ONE_SERVER)
    at_s = (1.0, 2.0, 9.9, 10.0, 19.0, 20.5)
    run_fast(problem, placed(problem, [(0, 4)], [99.0]), arrivals(*at_s), routing, state_age_s=10.0)
    # At 20 s the sessions from 1 and 2 have ended (16 and 17 s), which the report of 20 s tells.
    assert [seen for _, seen in routing.asked] == [[0], [0], [0], [3], [3], [3]]
    assert [at for at, _ in routing.asked] == list(at_s)


def test_a_router_never_sees_what_the_asking_session_held_itself() -> None:
    # The second is refused at 1.2 and asks again at 2.2; the last report, of 1.15 s, has its first attempt.
    problem = make_problem([99.0], rtt_s=[[1.0]], input_rtt_s=50.0)
    routing = Always(lambda request, state, now_s: ONE_SERVER)
    run_fast(
        problem,
        placed(problem, [(0, 4)], [4.0]),
        arrivals(0.0, 0.2),
        routing,
        state_age_s=1.15,
        max_attempts=2,
    )
    assert routing.asked == [(0.0, [0]), (0.2, [0]), (pytest.approx(2.2), [1])]


def test_a_policy_that_fails_ends_the_run_and_names_the_request() -> None:
    def choose(request: RequestSpec, state: object, now_s: float) -> list[Hop]:
        if now_s > 2:
            raise PolicyError("out of ideas")
        return ONE_SERVER

    problem = make_problem([99.0])
    with pytest.raises(PolicyError, match="request 1: out of ideas"):
        run_fast(problem, placed(problem, [(0, 4)], [99.0]), arrivals(0.0, 3.0), Always(choose))
