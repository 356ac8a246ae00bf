"""Policies that learn and know where they are: what they get, when, and the two shipped examples."""

from __future__ import annotations

from statistics import fmean
from typing import Any, ClassVar

import pytest

from policies.cgbp import CgBp
from policies.interfaces import wants_of
from policies.learning import BanditRouter
from policies.outcomes import MOST_KNOWN, Outcome, Outcomes
from policies.problem import Hop, Placement, PolicyError, Problem, RequestSpec, Route
from policies.registry import offering, resolve_placement
from policies.state import SystemState
from policies.wsrr import WsRr
from testbed.control.placing import place
from testbed.experiments.policy import PolicyChoice
from testbed.experiments.sources import Document
from testbed.simulator.cases import scenario_case
from testbed.simulator.engine import Simulation, simulate

SERVERS = [
    {"hardware": "a100", "site": "Here", "count": 2, "cost_per_hour": 2},
    {"hardware": "a100", "site": "There", "cost_per_hour": 1},
]
SCENARIO: dict[str, Any] = {
    "seed": 3,
    "model": {"profile": "bloom-176b", "n_blocks": 6},
    "servers": SERVERS,
    "clients": [{"site": "Here"}, {"site": "There"}],
    "sites": [{"name": "Here", "region": "west"}],
    "network": {
        "kind": "clusters",
        "pairs": [
            {"sites": ["Here", "Here"], "rtt": "5 ms", "rate": "1 Gbit/s"},
            {"sites": ["There", "There"], "rtt": "5 ms", "rate": "1 Gbit/s"},
            {"sites": ["Here", "There"], "rtt": "60 ms", "rate": "100 Mbit/s"},
        ],
    },
    "workload": {"rate": 1, "n_requests": 20, "n_input_tokens": 5, "n_output_tokens": 4},
    "compute": {"batching": "none"},
}
SLOW = {"fault": [{"kind": "slow", "server": "a100-0", "at": "0 s", "for": "10 min", "factor": 20}]}


class Watching(WsRr):
    """WS-RR that keeps what the last router was given."""

    name = "watching"
    wants = ("places", "seed", "requests")
    seen: ClassVar[list[tuple[float, Outcome]]] = []
    asked: ClassVar[list[Any]] = []
    problems: ClassVar[list[Problem]] = []

    def bind(self, problem: Problem, placement: Placement) -> Any:
        self.problems.append(problem)
        self.seen.clear()  # the engine fast begins anew where sessions turn out to meet
        self.asked.clear()
        return Watched(super().bind(problem, placement), self)


class Watched:
    def __init__(self, router: Any, policy: Watching) -> None:
        self.router, self.policy = router, policy
        self.unplaced: list[Outcome] = []

    def observe(self, outcome: Outcome) -> None:
        self.unplaced.append(outcome)

    def route(self, request: RequestSpec, state: SystemState, now_s: float) -> Route | None:
        self.policy.seen += [(now_s, outcome) for outcome in self.unplaced]
        self.unplaced = []
        self.policy.asked.append(state.who)
        found: Route | None = self.router.route(request, state, now_s)
        return found


def served(
    routing: str, changes: tuple[str, ...] = (), *, is_virtual: bool = False, **more: Any
) -> Simulation:
    choice = PolicyChoice(None, "whole-model", routing)
    case = scenario_case(Document({**SCENARIO, **more}, "learning"), choice, changes, None)
    return simulate(case, "testbed", is_virtual=is_virtual, live=False)


def watched(changes: tuple[str, ...] = (), *, is_virtual: bool = False, **more: Any) -> Simulation:
    Watching.seen, Watching.asked, Watching.problems = [], [], []
    policy = Watching()
    with offering([("routing", policy)]) as names:
        return served(names["routing", id(policy)], changes, is_virtual=is_virtual, **more)


def mean_s(simulation: Simulation) -> float:
    times = [row.ended_at_s - row.arrival_at_s for row in simulation.rows if row.ended_at_s is not None]
    assert len(times) == len(simulation.rows)
    return fmean(times)


@pytest.mark.parametrize("is_virtual", [False, True], ids=["fast", "virtual"])
def test_outcomes_are_what_clients_measured_and_come_when_that_was_known(is_virtual: bool) -> None:
    simulation = watched(is_virtual=is_virtual)
    rows = {row.request: row for row in simulation.rows}
    assert len(Watching.seen) > 10
    ends = [outcome.finished_at_s for _, outcome in Watching.seen]
    assert ends == sorted(ends)
    for now_s, outcome in Watching.seen:
        row = rows[outcome.request]
        assert outcome.age_s(now_s) >= 0 and not outcome.has_failed
        assert outcome.finished_at_s == pytest.approx(row.ended_at_s)
        assert outcome.wait_s == pytest.approx(row.times["queue_s"], abs=1e-6)
        assert outcome.ttft_s == pytest.approx(row.times["ttft_s"])
        assert outcome.tpot_s == pytest.approx(row.times["tpot_s"])
        assert (outcome.n_output_tokens, outcome.hops[0].server) == (4, int(str(row.chain).partition(":")[0]))


def test_both_engines_report_the_same_outcomes_in_the_same_order() -> None:
    seen = []
    for is_virtual in (False, True):
        watched(("workload.rate=3",), is_virtual=is_virtual)
        seen.append(
            [(o.request, o.hops, round(o.ttft_s or 0, 4), round(o.e2e_s, 4)) for _, o in Watching.seen]
        )
    assert seen[0] == seen[1] and seen[0]


def test_a_failure_is_an_outcome_without_times() -> None:
    full = ("workload.rate=50", "backoff.give_up=200 ms", *(f"servers.{n}.memory=7944 MB" for n in (0, 1)))
    simulation = watched(full)
    failed = [row for row in simulation.rows if row.status == "failed"]
    outcomes = [outcome for _, outcome in Watching.seen if outcome.has_failed]
    assert failed and outcomes
    assert all(o.ttft_s is None and o.n_output_tokens == 0 and o.wait_s == o.e2e_s for o in outcomes)


def test_outcomes_are_as_old_as_the_state() -> None:
    watched(("policy.state_age=5 s",))
    assert Watching.seen
    assert all(outcome.finished_at_s < 5 * (now_s // 5) for now_s, outcome in Watching.seen)


def test_places_seed_and_requests_are_there_for_those_that_want_them() -> None:
    watched()
    problem = Watching.problems[0]
    places = problem.places
    assert places is not None and problem.seed == 3
    assert places.server_sites == ("Here", "Here", "There") and places.client_regions == ("west", "There")
    assert places.server_regions == ("west", "west", "There") and places.cost_per_hour == (2, 2, 1)
    assert places.among([2]).server_sites == ("There",)
    assert [who.request for who in Watching.asked] == list(range(20))


def test_others_get_nothing_of_it() -> None:
    asked = []

    class Plain(WsRr):
        name = "plain"

        def bind(self, problem: Problem, placement: Placement) -> Any:
            assert (problem.places, problem.seed) == (None, None)
            router = super().bind(problem, placement)

            class Asked:
                def route(self, request: RequestSpec, state: SystemState, now_s: float) -> Route | None:
                    asked.append((state.who, state.outcomes))
                    return router.route(request, state, now_s)

            return Asked()

    policy = Plain()
    with offering([("routing", policy)]) as names:
        served(names["routing", id(policy)])
    assert set(asked) == {(None, None)}


@pytest.mark.parametrize("wants", ["places", ("place",), None, 7])
def test_a_want_that_does_not_exist_is_refused(wants: Any) -> None:
    with pytest.raises(PolicyError, match="must state a tuple of 'places', 'seed', 'requests'"):
        wants_of(type("Wrong", (WsRr,), {"wants": wants}))


def test_a_router_that_is_bound_later_gets_the_last_outcomes() -> None:
    outcomes = Outcomes()
    for n in range(MOST_KNOWN + 5):
        outcomes.add(Outcome(n, 0, None, (), 0.0, float(n), 1, 1, 0.0, 1.0, None, False))
    assert outcomes.since(0) == []
    outcomes.know(10.0)
    assert [o.request for o in outcomes.since(8)] == [8, 9]
    outcomes.know()
    assert [o.request for o in outcomes.since(0)][:2] == [5, 6] and not outcomes.since(outcomes.n_known)


def test_the_bandit_learns_which_chain_is_slower_than_modelled() -> None:
    changes = ('clients=[{site="Here"}]', "workload.n_requests=40")
    usual, bandit = (mean_s(served(routing, changes, **SLOW)) for routing in ("ws-rr", "bandit"))
    assert bandit < 0.7 * usual
    assert mean_s(served("bandit", changes, **SLOW)) == bandit, (
        "its draws follow from the seed and the request"
    )


def test_the_bandit_forgets_and_remembers_failures() -> None:
    case = scenario_case(
        Document(SCENARIO, "learning"), PolicyChoice(None, "whole-model", "bandit"), (), None
    )
    problem = case.experiment.problem
    router = BanditRouter(problem, place(case.experiment).placement, 0.0, 100.0)
    state, request = (
        SystemState(resolve_placement("whole-model").place(problem).cache_bytes),
        RequestSpec(0, 5, 4),
    )
    first = router.route(request, state, 0.0)
    assert first is not None
    router.observe(Outcome(0, 0, None, first.hops, 0.0, 1.0, 5, 0, 1.0, None, None, True))
    second = router.route(request, state, 1.0)
    assert second is not None and second.hops != first.hops
    assert router.route(request, state, 10_000.0) == first._replace(
        cost_s=pytest.approx(first.cost_s, rel=0.01)
    )
    router.observe(Outcome(1, 0, None, (), 0.0, 1.0, 5, 0, 1.0, None, None, True))


def test_region_first_stays_in_the_region_while_there_is_room() -> None:
    def chains(routing: str, **more: Any) -> list[tuple[int, str]]:
        return [(row.client == "client-1", str(row.chain)) for row in served(routing, **more).rows]

    far = {"servers": [SERVERS[1], {**SERVERS[0], "count": 1, "memory": "60 GB"}]}
    for is_there, chain in chains("region-first"):
        assert chain.startswith("2:" if is_there else ("0:", "1:"))
    assert {chain[0] for is_there, chain in chains("region-first", **far) if is_there} == {"0"}
    one_region = {"sites": [{"name": "Here", "region": "all"}, {"name": "There", "region": "all"}]}
    assert chains("region-first", **one_region) == chains("ws-rr")


def test_a_bandit_without_an_arm_has_no_chain() -> None:
    case = scenario_case(
        Document(SCENARIO, "learning"), PolicyChoice(None, "whole-model", "bandit"), (), None
    )
    placed = place(case.experiment)
    longer = RequestSpec(0, 10**9, 4)
    assert placed.router.route(longer, SystemState(placed.placement.cache_bytes), 0.0) is None
    assert placed.observes and Hop(0, 0, 6).n_blocks == 6


def test_a_placement_gets_the_places_of_the_servers_that_are_there() -> None:
    seen: list[Problem] = []

    class Looks(CgBp):
        name = "looks"
        wants = ("places", "seed")
        sees_join_order = False

        def place(self, problem: Problem, design_concurrency: int | None = None) -> Placement:
            seen.append(problem)
            return super().place(problem, design_concurrency)

    policies = Looks(), Watching()
    Watching.problems.clear()
    with offering([("placement", policies[0]), ("routing", policies[1])]) as names:
        halves = names["placement", id(policies[0])], names["routing", id(policies[1])]
        servers = [{**SERVERS[0], "present": False}, SERVERS[1]]
        changes = ("policy.design_concurrency=searched",)
        case = scenario_case(
            Document({**SCENARIO, "servers": servers}, "x"), PolicyChoice(None, *halves), changes, None
        )
        placed = place(case.experiment)
    assert {problem.places.server_sites for problem in seen if problem.places is not None} == {("There",)}
    assert {problem.seed for problem in seen} == {3} and placed.names_requests
    trials, last = Watching.problems[0], Watching.problems[-1]
    assert trials.places is not None and trials.places.cost_per_hour == (1,)
    assert last.places is not None and last.places.server_sites == ("Here", "Here", "There")
