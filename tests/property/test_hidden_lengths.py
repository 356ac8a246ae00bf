"""What nobody could know does not decide: true output lengths behind the same maxima change nothing before they show."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

from hypothesis import event, given
from hypothesis import strategies as st

from policies import Placement, Problem, RequestSpec, Route, Router, RoutingPolicy, SystemState
from policies.registry import ROUTINGS
from policies.workload import QueueRules, RequestPlan
from testbed.records.requests import COMPLETED
from tests.property.test_fast_engine import Situation, situations
from tests.support.simulation import run_fast

MOST = 60
Decision = tuple[float, RequestSpec, tuple[Any, ...] | None]


class Watched:
    """A routing policy, and what it decided."""

    name = "watched"

    def __init__(self, routing: RoutingPolicy) -> None:
        self._routing = routing
        self.decisions: list[Decision] = []

    def bind(self, problem: Problem, placement: Placement) -> Watched:
        self._router: Router = self._routing.bind(problem, placement)
        return self

    def route(self, request: RequestSpec, state: SystemState, now_s: float) -> Route | None:
        route = self._router.route(request, state, now_s)
        self.decisions.append((now_s, request, None if route is None else (route.hops, route.wait_s)))
        return route


def decided(
    situation: Situation, plans: list[RequestPlan], routing: str, queue: QueueRules | None
) -> tuple[list[Decision], float]:
    """All decisions, and when the first request was done."""
    problem, placement, _, _, options = situation
    watched = Watched(ROUTINGS[routing]())
    run = run_fast(problem, placement, plans, watched, **options, queue=queue)
    ends = [
        r.plan.arrival_at_s + r.time_s for r in run.requests if r.status == COMPLETED and r.time_s is not None
    ]
    return watched.decisions, min(ends, default=math.inf)


@given(
    situations().filter(lambda s: "online" not in s[-1]),
    st.integers(0, 99),
    st.sampled_from(sorted(ROUTINGS)),
    st.sampled_from([None, QueueRules("fifo", 0.0, 0.0, 60.0), QueueRules("backfill", 5.0, 0.0, 60.0)]),
)
def test_no_decision_depends_on_lengths_before_a_request_has_ended(
    situation: Situation, seed: int, routing: str, queue: QueueRules | None
) -> None:
    plans = situation[2]
    lengths = [plan.n_output_tokens for plan in plans]
    random.Random(seed).shuffle(lengths)
    runs = []
    for own in ([plan.n_output_tokens for plan in plans], lengths):
        hidden = [
            replace(plan, n_output_tokens=n, max_new_tokens=MOST) for plan, n in zip(plans, own, strict=True)
        ]
        runs.append(decided(situation, hidden, routing, queue))
    until_s = min(end_s for _, end_s in runs)
    first, second = ([d for d in decisions if d[0] < until_s] for decisions, _ in runs)
    event(f"decisions: {min(len(first), 3)}")
    assert first == second
    assert all(request.n_output_tokens == MOST for _, request, _ in first)
