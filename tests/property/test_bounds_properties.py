"""Bounds on random problems: whole simulated runs stay between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st

from policies import Placement, Problem
from policies.cgbp import CgBp
from policies.greedy import block_counts
from policies.links import Link
from policies.optimal_rr import OptimalRr
from policies.problem import BlockRange, Hop
from policies.replay import replay
from policies.workload import RequestPlan
from policies.wsrr import ShortestPath, WsRr
from testbed.fast.outcome import SimulatedRequest
from testbed.records.requests import COMPLETED, FAILED, RequestRow
from testbed.records.summary import Bounds
from testbed.results.bounds import bounds_of, bounds_text, in_ms
from testbed.simulator.rows import outcome_rows
from tests.support.effort import n_drawn
from tests.support.problems import make_problem, problems, with_one_for_all
from tests.support.simulation import experiment_of, run_fast, with_fields

ROUNDING = 1 + 1e-9


@st.composite
def served(draw: st.DrawFn) -> Problem:
    """Servers and links whose prefill has nothing to do with their decode steps."""
    problem = draw(problems())
    seconds = st.sampled_from([0.0, 0.001, 0.02, 0.3, 1.0])
    servers = tuple(
        replace(s, prefill_base_s=draw(seconds), prefill_slope_s=draw(seconds)) for s in problem.servers
    )
    input_rtt_s = tuple(tuple(draw(seconds) for _ in row) for row in problem.token_rtt_s)
    return replace(
        problem,
        servers=servers,
        input_rtt_base_s=input_rtt_s,
        initial_delay_s=draw(st.sampled_from([0.0, 0.07, 3.0])),
        hub_token_s=draw(st.sampled_from([0.0, 0.004])),
    )


def with_room(problem: Problem, concurrency: int = 1) -> Problem:
    """The problem, with a first server that holds the whole model if all servers together do not, for so many sessions."""
    if sum(block_counts(problem, concurrency)) >= problem.model.n_blocks:
        return problem
    return with_one_for_all(problem, concurrency * problem.design_cache_bytes)


@st.composite
def fitting(draw: st.DrawFn, problem: Problem) -> Placement:
    """Any placement that holds every block, with room for a session on each server.

    Servers may hold fewer blocks than they can, and the same as others.
    """
    most, n_blocks = block_counts(problem, 1), problem.model.n_blocks
    ranges, covered, others = [BlockRange(0, 0)] * len(most), 0, sum(most)
    for j in draw(st.permutations([j for j, count in enumerate(most) if count])):
        others -= most[j]
        if covered < n_blocks:  # at least what the others could not hold
            least = max(n_blocks - covered - others, 1)
            last = covered + draw(st.integers(least, min(most[j], n_blocks - covered)))
            count = draw(st.integers(last - covered, min(most[j], last)))
            covered = last
        else:
            count = draw(st.integers(0, most[j]))
            last = draw(st.integers(count, n_blocks))
        ranges[j] = BlockRange(last - count, last)
    return Placement("drawn", tuple(ranges), problem.room_bytes(ranges))


@st.composite
def requests_of(draw: st.DrawFn, problem: Problem, most: int) -> list[RequestPlan]:
    """Up to ``most`` requests of all clients, of at most the design lengths."""
    plans = []
    for i in range(draw(st.integers(1, most))):
        client = draw(st.integers(0, len(problem.clients) - 1))
        n_in = draw(st.integers(1, problem.n_input_tokens))
        n_out = draw(st.integers(1, problem.n_output_tokens + problem.n_input_tokens - n_in))
        plans.append(RequestPlan(i, client, draw(st.sampled_from([0.0, 0.5, 9.0])), n_in, n_out))
    return sorted(plans, key=lambda plan: plan.arrival_at_s)


def completed(problem: Problem, plans: Sequence[RequestPlan]) -> list[RequestRow]:
    """The rows of a run of which no more is known than that all requests completed."""
    ends = [
        SimulatedRequest(plan, COMPLETED, None, 0, 0.0, None, None, None, 0.0, n_done=plan.n_output_tokens)
        for plan in plans
    ]
    return outcome_rows(problem, ends)


@settings(max_examples=n_drawn(40))
@given(served(), st.integers(1, 6), st.sampled_from([WsRr, ShortestPath, OptimalRr]), st.data())
def test_no_client_of_up_to_r_sessions_takes_longer_than_theorem_1_says(
    problem: Problem, concurrency: int, routing: type[WsRr], data: st.DataObject
) -> None:
    problem = with_room(problem, concurrency)
    placement = CgBp().place(problem, concurrency)
    plans = data.draw(requests_of(problem, concurrency))
    policies = {"placement": "cg-bp", "routing": routing.name}
    bounds = bounds_of(experiment_of(problem, plans, **policies), placement, completed(problem, plans))
    assert bounds.applies, bounds.why
    assert isinstance(bounds.theorem1_by_client_s, dict)
    done = run_fast(problem, placement, plans, routing()).requests
    for client, name in enumerate(problem.clients):
        times_s = [(r.time_s, r.ttft_s, r.plan.n_output_tokens) for r in done if r.plan.client == client]
        per_token_s = [all_s / n for all_s, _, n in times_s if all_s is not None]
        rest_s = [(a - f) / (n - 1) for a, f, n in times_s if n > 1 and a is not None and f is not None]
        assert len(per_token_s) == len(times_s)
        if per_token_s:
            assert sum(per_token_s) / len(per_token_s) <= bounds.theorem1_by_client_s[name] * ROUNDING
        if len(rest_s) == len(per_token_s) > 0:
            assert sum(rest_s) / len(rest_s) <= bounds.theorem1_by_client_s[name] * ROUNDING
    event(f"clients: {len(bounds.theorem1_by_client_s)}")


@settings(max_examples=n_drawn(20))
@given(served(), st.data())
def test_no_run_is_faster_than_lemma_b1_says_whatever_its_placement(
    problem: Problem, data: st.DataObject
) -> None:
    problem = with_room(problem)
    placement = data.draw(fitting(problem))
    plans = data.draw(requests_of(problem, 6))
    done = run_fast(problem, placement, plans, max_attempts=40).requests
    assume(any(r.status == COMPLETED for r in done))
    bounds = bounds_of(experiment_of(problem, plans), placement, outcome_rows(problem, done))
    per_token_s = [r.time_s / r.plan.n_output_tokens for r in done if r.time_s is not None]
    least_s = bounds.lower_bound_per_token_s
    assert isinstance(least_s, float)
    assert sum(per_token_s) / len(per_token_s) >= least_s / ROUNDING


def guaranteed(
    problem: Problem, concurrency: int, plans: list[RequestPlan]
) -> tuple[list[RequestRow], Bounds, int]:
    """The rows of a run of CG-BP with WS-RR, its bounds, and how many requests were later than guaranteed."""
    placement = CgBp().place(problem, concurrency)
    experiment = experiment_of(problem, plans, placement="cg-bp", routing="ws-rr")
    done = replay(problem, placement, WsRr().bind(problem, placement), plans)
    lead_s = problem.initial_delay_s
    rows = outcome_rows(
        problem,
        [
            SimulatedRequest(
                d.plan, COMPLETED, d.route, 0, d.waiting_s, lead_s, d.ttft_s, d.time_s, d.time_s,
                cost_s=d.route.cost_s, wait_expected_s=d.route.wait_s,
            )
            for d in done
        ],
    )  # fmt: skip
    bounds = bounds_of(experiment, placement, rows, True)
    n_late = 0
    for row in rows:
        assert row.completion_bound_s is not None and row.times.e2e_s is not None
        n_late += row.times.e2e_s > row.completion_bound_s * ROUNDING
    return rows, bounds, n_late


@settings(max_examples=n_drawn(40))
@given(served(), st.integers(1, 4), st.data())
def test_a_request_that_finds_a_crowd_ends_within_the_guarantee_but_for_the_steps_of_the_backoff(
    problem: Problem, concurrency: int, data: st.DataObject
) -> None:
    problem = with_room(problem, concurrency)
    plans = data.draw(requests_of(problem, 12))
    rows, bounds, n_late = guaranteed(problem, concurrency, plans)
    for row in rows:
        assert row.completion_bound_s is not None and row.wsrr_cost_s is not None
        assert row.times.e2e_s is not None and row.times.queue_s is not None
        own_s = problem.initial_delay_s + row.n_output_tokens * problem.hub_token_s
        assert row.wsrr_cost_s + own_s <= row.completion_bound_s * ROUNDING
        rounded_s = row.times.queue_s - (row.wait_expected_s or 0.0)
        assert row.times.e2e_s - rounded_s <= row.completion_bound_s * ROUNDING
    assert (bounds.n_bounded, bounds.n_exceeded) == (len(plans), n_late)
    assert bounds.n_exceeded_by_backoff == n_late
    event(f"late: {n_late > 0}")


def test_a_request_that_would_have_begun_in_time_is_late_by_the_backoff_alone_whatever_chain_it_takes() -> (
    None
):
    """Two servers with room for one session each; the second is the slower one.

    The third request waits for the second server, which is expected to be free first, and asks at 7 s and at 15 s. Had
    it begun when that was free, it would have been in time; not so if it had begun there after the first server's end.
    """
    problem = make_problem(
        [21.0, 21.0],
        n_blocks=1,
        cache_bytes_per_token=1,
        decode_s=[1.0, 1.05],
        rtt_s=[[0.0, 0.0]],
        n_output_tokens=10,
    )
    plans = [RequestPlan(i, 0, 0.0, 1, n_out) for i, n_out in enumerate([10, 8, 8])]
    rows, bounds, n_late = guaranteed(problem, 1, plans)
    assert [row.chain for row in rows] == ["0:0-1", "1:0-1", "1:0-1"]
    assert rows[2].wait_expected_s == pytest.approx(7 * 1.05)
    assert rows[2].times.queue_s == 15.0
    assert rows[2].completion_bound_s == pytest.approx(9 + 7)
    assert (bounds.n_exceeded, bounds.n_exceeded_by_backoff, n_late) == (1, 1, 1)


@pytest.mark.parametrize(("late_s", "n_late"), [(0.9e-9, 0), (1e-6, 1)])
def test_a_request_is_not_late_by_the_rounding_of_instants_to_nanoseconds(late_s: float, n_late: int) -> None:
    problem = make_problem([21.0], n_blocks=1, cache_bytes_per_token=1, decode_s=[0.1], n_output_tokens=1)
    plans = [RequestPlan(0, 0, 0.0, 1, 1)]
    (row,), _, _ = guaranteed(problem, 1, plans)
    assert row.completion_bound_s is not None
    row.times.e2e_s = row.completion_bound_s + late_s
    experiment = experiment_of(problem, plans, placement="cg-bp", routing="ws-rr")
    assert bounds_of(experiment, CgBp().place(problem, 1), [row], True).n_exceeded == n_late


def two_servers() -> tuple[Problem, Placement, list[RequestPlan]]:
    """One block on two servers: A decodes fast and has a slow prefill, B has a fast prefill and decodes slowly."""
    problem = make_problem(
        [1000.0, 1000.0],
        n_blocks=1,
        decode_s=[0.001, 0.010],
        rtt_s=[[0.001, 0.010]],
        n_output_tokens=2,
    )
    slow, fast = problem.servers
    problem = replace(
        problem,
        servers=(replace(slow, prefill_base_s=1.0), replace(fast, prefill_base_s=0.001)),
        input_rtt_base_s=((0.001, 0.010),),
    )
    return problem, CgBp().place(problem, 1), [RequestPlan(0, 0, 0.0, 1, 2)]


def test_theorem_1_is_about_the_chain_that_routing_takes_not_the_one_that_decodes_fastest() -> None:
    problem, placement, plans = two_servers()
    (done,) = run_fast(problem, placement, plans).requests
    experiment = experiment_of(problem, plans, placement="cg-bp", routing="ws-rr")
    bounds = bounds_of(experiment, placement, outcome_rows(problem, [done]))
    assert done.route is not None and done.route.hops == (Hop(1, 0, 1),)
    assert done.time_s is not None and done.ttft_s is not None
    assert done.time_s - done.ttft_s == pytest.approx(0.020)
    assert isinstance(bounds.theorem1_per_token_s, float)
    # Theorem 1 serves A first, where the request takes 1.003 s; B's prefill, the cheapest, leaves 0.992 s of them.
    assert bounds.theorem1_per_token_s == pytest.approx(0.992)


def test_the_lower_bound_is_the_mean_over_requests_not_that_of_the_nearest_client() -> None:
    problem = make_problem([100.0], n_blocks=1, rtt_s=[[0.001], [1.0]], n_output_tokens=2, input_rtt_s=0.0)
    plans = [RequestPlan(i, client, 0.0, 1, 2) for i, client in enumerate([0, 1, 1, 1])]
    placement, rows = CgBp().place(problem, 4), completed(problem, plans)
    bounds = bounds_of(experiment_of(problem, plans), placement, rows)
    # A decode step of 10 ms and the round trip, and a prompt that takes nothing, over two tokens.
    assert bounds.lower_bound_by_client_s == pytest.approx({"c0": 0.011 / 2, "c1": 1.01 / 2})
    assert bounds.lower_bound_per_token_s == pytest.approx((0.011 + 3 * 1.01) / 8)
    for row in rows[2:]:
        row.status = FAILED
    of_completed = bounds_of(experiment_of(problem, plans), placement, rows)
    assert of_completed.lower_bound_per_token_s == pytest.approx((0.011 + 1.01) / 4), "as the run's mean"


def test_a_run_without_completed_requests_has_no_bounds() -> None:
    problem, placement, plans = two_servers()
    experiment = experiment_of(problem, plans, placement="cg-bp", routing="ws-rr")
    found = bounds_of(experiment, placement, [])
    assert (found.applies, found.why) == (False, "no request has completed")
    assert "lower_bound_per_token_s" not in found


def plain(**settings: Any) -> Bounds:
    """Bounds of a run to which Theorem 1 applies, but for ``settings``."""
    problem, placement, plans = two_servers()
    problem = replace(problem, **{k: settings.pop(k) for k in ("forwarding", "batching") if k in settings})
    experiment = experiment_of(problem, plans, placement="cg-bp", routing="ws-rr")
    return bounds_of(with_fields(experiment, **settings), placement, completed(problem, plans))


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"batching": "serial"}, "wait for each other's steps"),
        ({"forwarding": True}, "hub-spoke"),
        ({"routing": "petals"}, "need not take the cheapest chain"),
        ({"online": "two-time-scale"}, "changes the placement"),
        ({"state_age_s": 1.0}, "old state"),
        ({"links": {("c0", "s1"): Link(0.001, 1e9)}}, "wait for each other on links"),
        ({"requests": (RequestPlan(0, 0, 0.0, 40, 2),)}, "longer than the placement is designed for"),
        ({"requests": (RequestPlan(0, 0, 0.0, 1, 1, 2),)}, "does not know the requests' lengths"),
    ],
)
def test_a_bound_that_does_not_hold_is_withheld_with_the_reason(settings: dict[str, Any], why: str) -> None:
    assert plain().applies and plain().why is None
    found = plain(**settings)
    assert not found.applies
    assert why in str(found.why)
    assert "theorem1_per_token_s" not in found and "theorem1_ratio" not in found
    assert ("lower_bound_per_token_s" in found) == ("forwarding" not in settings)


def test_theorem_1_says_nothing_about_texts_that_end_before_their_tokens_are_reached() -> None:
    problem, placement, plans = two_servers()
    rows = completed(problem, plans)
    rows[0].n_tokens_done -= 1
    experiment = experiment_of(problem, plans, placement="cg-bp", routing="ws-rr")
    assert "does not know the requests' lengths" in str(bounds_of(experiment, placement, rows).why)


def test_the_line_on_bounds_has_both_or_the_reason() -> None:
    text = bounds_text(in_ms(plain()), 1)
    assert text == (
        "a client's time per token: at least 0.015 s with any placement and routing (Lemma B.1); at most 0.992 s with up "
        "to |R| = 1 session at once (Theorem 1)"
    )
    assert "no upper bound, since servers send to each other" in bounds_text(in_ms(plain(forwarding=True)), 1)


@pytest.mark.parametrize(
    ("rtts_s", "words"),
    [
        (
            (0.001, 1.0),
            "at least 0.005 s (c0) to 0.505 s (c1), and 0.380 s over all that completed, with any placement",
        ),
        ((0.002, 0.002), "at least 0.006 s with any placement"),
    ],
)
def test_the_line_on_bounds_has_the_least_of_clients_beside_the_mean_of_all_where_they_differ(
    rtts_s: tuple[float, ...], words: str
) -> None:
    problem = make_problem(
        [100.0], n_blocks=1, rtt_s=[[rtt] for rtt in rtts_s], n_output_tokens=2, input_rtt_s=0.0
    )
    plans = [RequestPlan(i, client, 0.0, 1, 2) for i, client in enumerate([0, 1, 1, 1])]
    placement, rows = CgBp().place(problem, 4), completed(problem, plans)
    text = bounds_text(in_ms(bounds_of(experiment_of(problem, plans), placement, rows)), 4)
    assert words in text
