"""What the engine ``fast`` keeps on any problem, workload and policy."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

from hypothesis import event, given
from hypothesis import strategies as st

from policies import BlockRange, Placement, Problem, RequestSpec, RoutingPolicy, service_s
from policies.checks import check_placement
from policies.online import OnlinePolicy, SystemView, moves, rolling_order
from policies.optimal_rr import OptimalRr
from policies.petals_code import PetalsCodeRouting
from policies.petals_routing import PetalsRouting
from policies.replay import replay
from policies.rules import RecoveryRules
from policies.workload import Backoff, RequestPlan
from policies.wsrr import ShortestPath, WsRr
from testbed.fast.outcome import FastRun, SimulatedRequest
from testbed.records.requests import COMPLETED, FAILED
from tests.support.problems import forwarded, placements, problems
from tests.support.simulation import run_fast

ROUTINGS = (WsRr, PetalsRouting, PetalsCodeRouting, OptimalRr, ShortestPath)


@st.composite
def covering(draw: st.DrawFn, problem: Problem) -> Placement:
    """Any placement that holds every block, within the servers' memory."""
    n_blocks = problem.model.n_blocks
    drawn = draw(placements(problem))
    ranges = list(drawn.ranges)
    missing = drawn.uncovered(n_blocks)
    if missing:
        ranges[draw(st.integers(0, problem.n_servers - 1))] = BlockRange(0, n_blocks)
    return replace(drawn, ranges=tuple(ranges))


@st.composite
def workloads(draw: st.DrawFn, problem: Problem) -> list[RequestPlan]:
    """Three to twelve requests, several at one instant included."""
    at_s = 0.0
    plans = []
    for i in range(draw(st.integers(3, 12))):
        at_s += draw(st.sampled_from([0.0, 0.05, 0.5, 3.0, 40.0]))
        client = draw(st.integers(0, len(problem.clients) - 1))
        plans.append(RequestPlan(i, client, at_s, draw(st.integers(1, 4)), draw(st.integers(1, 30))))
    return plans


class Restless:
    """Goes through the placements; refuses nothing that the rules allow."""

    name = "restless"
    drains = True
    at_once = 2

    def __init__(self, targets: list[Placement], every_s: float) -> None:
        self._targets, self._every_s = targets, every_s
        self.next_check_at_s = 0.0

    def bind(self, problem: Problem, placement: Placement) -> Restless:
        self._left = list(self._targets)
        self.adopted = [placement]
        self._n_blocks = problem.model.n_blocks
        self.next_check_at_s = self._every_s
        return self

    def check(self, now_s: float, view: SystemView) -> Placement | None:
        self.next_check_at_s = now_s + self._every_s if self._left else float("inf")
        if view.moving or not self._left:
            return None
        new = self._left.pop()
        changing = moves(view.placement, new)
        order = rolling_order(view.placement.ranges, new.ranges, changing, self._n_blocks)
        if len(order) < len(changing):
            return None
        self.adopted.append(new)
        return new


Situation = tuple[Problem, Placement, list[RequestPlan], type[RoutingPolicy], dict[str, Any]]


@st.composite
def situations(draw: st.DrawFn) -> Situation:
    # Memory for all: what is placed is what the servers offer.
    problem = draw(
        problems(block_bytes=1.0, cache_bytes_per_token=0.05).map(lambda p: _with_memory(p, 1000.0))
    )
    if draw(st.booleans()):
        problem = forwarded(problem, over_links=draw(st.booleans()))
    placement = draw(covering(problem))
    online: OnlinePolicy | None = None
    if draw(st.booleans()):
        targets = draw(st.lists(covering(problem), min_size=1, max_size=3))
        online = Restless(targets, draw(st.sampled_from([0.3, 2.0])))
    event(f"online: {online is not None}")
    options: dict[str, Any] = {
        "session_setup_s": draw(st.sampled_from([0.0, 2.0])),
        "backoff": Backoff(1.0, 60.0, draw(st.sampled_from([0.0, 5.0, 90.0]))),
        "state_age_s": draw(st.sampled_from([0.0, 0.7, 10.0])),
        "max_attempts": 40,
        "recovery": RecoveryRules(give_up_s=1e6),  # however long they drain
    }
    if online is not None:
        options |= {"online": online, "load_bps": draw(st.sampled_from([1.0, 1000.0]))}
    return problem, placement, draw(workloads(problem)), draw(st.sampled_from(ROUTINGS)), options


def _with_memory(problem: Problem, memory_bytes: float) -> Problem:
    """Servers with that memory, and prompts that take longer on the way than light does."""
    servers = tuple(replace(s, memory_bytes=memory_bytes) for s in problem.servers)
    input_rtt_s = tuple(tuple(rtt + 0.05 for rtt in row) for row in problem.raw_rtt_s)
    return replace(problem, servers=servers, input_rtt_base_s=input_rtt_s)


def served(situation: Situation, **more: Any) -> FastRun:
    problem, placement, plans, routing, options = situation
    return run_fast(problem, placement, plans, routing(), **options, **more)


@given(situations())
def test_every_request_ends_in_exactly_one_state_and_its_parts_add_up(situation: Situation) -> None:
    problem, _, plans, _, options = situation
    run = served(situation)
    assert [r.plan for r in run.requests] == plans
    for r in run.requests:
        event(r.status)
        assert r.status in (COMPLETED, FAILED)
        assert (r.status == COMPLETED) == (r.reason == "")
        assert 0 <= r.n_rejections < 40
        assert (r.ttft_s is None) <= (r.status != COMPLETED)
        if r.status == COMPLETED:
            check_completed(problem, r, options)
    assert "online" in options or not run.moves


def check_completed(problem: Problem, r: SimulatedRequest, options: dict[str, Any]) -> None:
    assert r.ttft_s is not None and r.setup_s is not None and r.route is not None
    assert 0 <= r.waiting_s <= r.waiting_s + r.setup_s <= r.ttft_s <= (r.time_s or 0.0)
    assert r.setup_s >= options["session_setup_s"]
    request = RequestSpec(r.plan.client, r.plan.n_input_tokens, r.plan.n_output_tokens)
    first_s, all_s = service_s(problem, request, r.route.hops)
    slowest_s = max(problem.raw_rtt_s[r.plan.client][hop.server] for hop in r.route.hops)
    assert abs(r.setup_s - slowest_s - options["session_setup_s"]) < 1e-9
    before_s = r.waiting_s + r.setup_s
    assert abs(r.ttft_s - before_s - first_s) < 1e-9
    assert abs(r.time_s - before_s - all_s) < 1e-9


@given(situations())
def test_no_server_ever_holds_more_cache_than_its_placement_gives_it_at_that_time(
    situation: Situation,
) -> None:
    problem, placement, _, _, options = situation
    changes: list[tuple[float, int, float]] = []
    run = served(situation, on_cache=lambda *change: changes.append(change))
    online = options.get("online")
    adopted = online.adopted if isinstance(online, Restless) else [placement]
    for j in range(problem.n_servers):
        # The server's k-th move brings the room of the k-th placement that changes it.
        rooms = [b.cache_bytes[j] for a, b in pairwise(adopted) if j in moves(a, b)]
        own_moves = [m for m in run.moves if m.server == j]
        room_from = [(0.0, placement.cache_bytes[j])]
        for move, room in zip(own_moves, rooms, strict=False):
            room_from += [(move.closed_at_s, min(room_from[-1][1], room)), (move.open_at_s, room)]
        used = 0.0
        for at_s, server, change in changes:
            if server != j:
                continue
            used += change
            assert used >= -1e-9
            if change > 0 and not any(m.closed_at_s == at_s or m.open_at_s == at_s for m in own_moves):
                room = [room for from_s, room in room_from if from_s <= at_s][-1]
                assert used <= room * (1 + 1e-9)
        # From the moment that a server loads on, what is held fits the new room.
        for move, room in zip(own_moves, rooms, strict=False):
            held = sum(c for t, server, c in changes if server == j and t <= move.drained_at_s)
            assert held <= room * (1 + 1e-9) + 1e-9


@given(situations())
def test_the_same_arguments_give_the_same_run(situation: Situation) -> None:
    assert served(situation)[:2] == served(situation)[:2]  # deciding takes what it takes


@given(situations(), st.data())
def test_with_room_for_all_and_nothing_to_set_up_it_agrees_with_the_reference(
    situation: Situation, data: st.DataObject
) -> None:
    problem, placement, plans, routing, _ = situation
    zero = tuple((0.0,) * problem.n_servers for _ in problem.clients)
    problem = replace(problem, raw_rtt_s=zero)
    placement = replace(placement, cache_bytes=(1e6,) * problem.n_servers)
    setup_s = data.draw(st.sampled_from([0.0, 3.0]))
    reference = replay(problem, placement, routing().bind(problem, placement), plans, setup_s)
    real = run_fast(problem, placement, plans, routing(), session_setup_s=setup_s).requests
    for a, b in zip(reference, real, strict=True):
        assert b.status == COMPLETED and b.n_rejections == 0
        assert b.route is not None and b.route.hops == a.route.hops
        assert b.plan == a.plan
        assert abs(b.waiting_s - a.waiting_s) < 1e-9
        assert b.ttft_s is not None
        assert abs(b.ttft_s - a.ttft_s) < 1e-9
        assert abs(b.time_s - a.time_s) < 1e-9


@given(situations())
def test_a_session_is_served_only_after_every_server_of_its_chain_has_set_its_cache_aside(
    situation: Situation,
) -> None:
    problem = situation[0]
    changes: list[tuple[float, int, float]] = []
    for r in served(situation, on_cache=lambda *change: changes.append(change)).requests:
        if r.status != COMPLETED:
            continue
        assert r.route is not None
        n_tokens = r.plan.n_input_tokens + r.plan.n_output_tokens
        for hop in r.route.hops:
            at_s = r.plan.arrival_at_s + r.waiting_s + problem.raw_rtt_s[r.plan.client][hop.server] / 2
            need_bytes = hop.n_blocks * problem.model.cache_bytes(n_tokens)
            assert [
                c
                for t, j, c in changes
                if j == hop.server and abs(t - at_s) < 1e-9 and abs(c - need_bytes) < 1e-9
            ]


@given(problems().flatmap(lambda p: st.tuples(st.just(_with_memory(p, 1000.0)), covering(p))))
def test_the_placements_used_here_keep_the_rules(both: tuple[Problem, Placement]) -> None:
    check_placement(*both)
