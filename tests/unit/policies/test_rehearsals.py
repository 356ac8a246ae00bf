"""Rehearsals: what a placement is told of itself by the simulator, and what it cannot be told."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar

import pytest

from policies import rehearsed as rehearsed_module
from policies.cgbp import CgBp
from policies.foresight_sharing import SharedSearch
from policies.interfaces import Want
from policies.outcomes import Outcome, Times, WhoAsks, outcome_of
from policies.problem import BlockRange, Hop, Placement, PolicyError, Problem
from policies.registry import offering
from policies.rehearsal import Rehearsal
from policies.rehearsed import RehearsedForesight, _Rehearsals
from policies.search import likely_requests
from policies.workload import RequestPlan, Turn
from policies.wsrr import WsRr
from testbed.control.placing import RememberedPlacements, place
from testbed.errors import UserError
from testbed.experiments import load_experiment
from testbed.experiments.policy import PolicyChoice
from testbed.experiments.sources import Document
from testbed.fast.rehearsal import rehearsal
from testbed.simulator.cases import Case, scenario_case
from testbed.simulator.engine import REFERENCE, TESTBED, Simulation, simulate
from testbed.studies.score.suite import read_suite
from tests.support.problems import make_problem
from tests.unit.policies.test_learning import SCENARIO as OF_TWO_SITES

ROOT = Path(__file__).resolve().parents[3]
SCENARIO: dict[str, Any] = {
    **OF_TWO_SITES,
    "model": {"profile": "bloom-176b", "n_blocks": 12},
    "servers": [
        {"hardware": "a100", "site": "Here", "count": 2},
        {"hardware": "mig-1g", "site": "There", "count": 2},
    ],
    "workload": {
        "rate": 1,
        "n_requests": 20,
        "n_input_tokens": 50,
        "n_output_tokens": {"p50": 6, "p95": 18, "max": 20},
        "lengths": "hidden",
        "known_lengths": [[50, 2], [50, 6], [60, 18]],
    },
    "compute": {"batching": "continuous"},
}

Ask = Callable[[Problem, Placement], object]


class Rehearses(CgBp):
    """CG-BP's placement, which calls ``ask`` with it first."""

    name = "rehearses"
    wants: ClassVar[tuple[Want, ...]] = ("rehearsal",)
    sees_join_order = False

    def __init__(self, ask: Ask) -> None:
        super().__init__()
        self.ask = ask
        self.answers: list[Any] = []

    def place(self, problem: Problem, design_concurrency: int | None = None) -> Placement:
        placement = super().place(problem, design_concurrency)
        self.answers.append(self.ask(problem, placement))
        return placement


def answers(
    ask: Ask, changes: Sequence[str] = (), mode: str = TESTBED, routing: str = "ws-rr", **more: Any
) -> tuple[list[Any], Simulation]:
    policy = Rehearses(ask)
    with offering([("placement", policy)]) as names:
        choice = PolicyChoice(None, names["placement", id(policy)], routing)
        case = scenario_case(Document({**SCENARIO, **more}, "rehearsed"), choice, changes, None)
        served = simulate(case, mode, live=False)
    return policy.answers, served


def given(problem: Problem) -> Rehearsal:
    assert problem.rehearsal is not None
    return problem.rehearsal


def some(problem: Problem, n_requests: int = 20) -> list[RequestPlan]:
    return likely_requests(problem, "rehearsals", n_requests)


def rehearsed(problem: Problem, placement: Placement) -> Sequence[Outcome]:
    return given(problem)(placement, some(problem))


def told_and_served(changes: Sequence[str] = ()) -> tuple[Sequence[Outcome], Simulation]:
    """Returns a rehearsal, and the simulation of a workload with the same requests."""
    asked: list[RequestPlan] = []

    def ask(problem: Problem, placement: Placement) -> Sequence[Outcome]:
        asked.extend(some(problem))
        return rehearsed(problem, placement)

    (told,), _ = answers(ask, changes)
    listed = {
        "arrivals": "listed",
        "requests": [
            [p.arrival_at_s, p.n_input_tokens, p.n_output_tokens, p.client, p.max_new_tokens] for p in asked
        ],
        "lengths": "hidden",
        "known_lengths": [[50, 2], [50, 6], [60, 18]],
    }
    return told, answers(lambda *_: None, changes, workload=listed)[1]


def test_a_rehearsal_is_what_the_simulator_makes_of_the_same_requests() -> None:
    """Told is what a simulation of a workload with these requests measures."""
    told, served = told_and_served()
    for outcome, row in zip(told, served.rows, strict=True):
        assert (outcome.request, outcome.n_output_tokens) == (row.request, row.n_output_tokens)
        assert outcome.wait_s == row.times["queue_s"]
        assert outcome.ttft_s == pytest.approx(row.times["ttft_s"])
        assert outcome.tpot_s == pytest.approx(row.times["tpot_s"])
        assert not outcome.has_failed


@pytest.mark.parametrize(
    "changes",
    [
        ["seed=4"],
        ["workload.n_requests=7"],
        [
            'fault=[{kind="kill",server="a100-0",at="3 s",for="1 min"},{kind="slow",server="a100-1",at="1 s",for="1 h",factor=9}]'
        ],
        ['network.event=[{site="There",at="2 s",rtt="900 ms"}]'],
        ["backoff.jitter=0.5", "seed=9"],
        ["network.jitter='2 ms'", "network.loss=0.01", "seed=9"],
        ['decoding={drafter="model",tokens=3,acceptance=0.6}', "seed=9"],
    ],
)
def test_a_rehearsal_knows_nothing_of_what_is_to_come(changes: list[str]) -> None:
    """Neither of the requests, nor of faults, changes of links and draws."""
    same = [change for change in changes if any(key in change for key in ("jitter", "loss", "decoding"))]
    before, after = (answers(rehearsed, some)[0] for some in (same, changes))
    assert before == after and len(before[0]) == 20


@pytest.mark.parametrize(
    "drawn", ["network.jitter='2 ms'", 'decoding={drafter="model",tokens=3,acceptance=0.6}']
)
@pytest.mark.parametrize("seed", [0, 1])
def test_what_a_rehearsal_draws_no_run_does(drawn: str, seed: int) -> None:
    told, served = told_and_served([drawn, f"seed={seed}"])
    assert [one.tpot_s for one in told] != pytest.approx([row.times["tpot_s"] for row in served.rows])


def test_only_placements_that_want_them_have_rehearsals() -> None:
    class Plain(Rehearses):
        wants = ()

    policy = Plain(lambda problem, _: problem.rehearsal)
    with offering([("placement", policy)]) as names:
        choice = PolicyChoice(None, names["placement", id(policy)], "ws-rr")
        simulate(scenario_case(Document(SCENARIO, "x"), choice, (), None), TESTBED, live=False)
    assert policy.answers == [None]


@pytest.mark.parametrize(
    ("mode", "changes"),
    [
        (TESTBED, ['compute.batching="serial"']),
        (REFERENCE, ['compute.batching="none"', 'workload.lengths="known"']),
    ],
)
def test_where_the_fast_engine_cannot_serve_there_are_none(mode: str, changes: list[str]) -> None:
    found, _ = answers(lambda problem, _: problem.rehearsal, changes, mode)
    assert found == [None]


def test_a_placement_that_breaks_a_rule_is_refused_in_a_rehearsal_too() -> None:
    said: list[str] = []

    def ask(problem: Problem, placement: Placement) -> None:
        ranges = (BlockRange(0, 5), *(BlockRange(0, 0),) * 3)
        with pytest.raises(PolicyError) as refused:
            given(problem)(Placement("mine", ranges, problem.room_bytes(ranges)), some(problem))
        said.append(str(refused.value))

    answers(ask)
    assert "leaves blocks 5-11 on no server" in said[0]


def test_servers_that_are_absent_are_no_part_of_a_rehearsal() -> None:
    servers = [{**SCENARIO["servers"][0], "present": False}, {"hardware": "a100", "site": "There"}]
    (told,), _ = answers(rehearsed, servers=servers)
    assert {hop.server for outcome in told for hop in outcome.hops} == {0}, (
        "the only one that the policy sees"
    )


PLAN = RequestPlan(0, 0, 0.0, 5, 4)
NEXT = replace(PLAN, index=1)


@pytest.mark.parametrize(
    ("requests", "said"),
    [
        ([], "rehearses no requests; give a list of one or more"),
        ([(0, 0)], "rehearses request 0 as tuple; it must be a RequestPlan"),
        ([NEXT], "rehearses request 0 with the index 1; indices must be 0, 1, ... in the list's order"),
        ([replace(PLAN, client=2)], "from client 2; it must be a whole number from 0 to 1"),
        ([replace(PLAN, client=-1)], "from client -1; it must be a whole number from 0 to 1"),
        (
            [replace(PLAN, arrival_at_s=float("nan"))],
            "arrives at nan s; arrivals must be finite, at least 0, and",
        ),
        (
            [replace(PLAN, arrival_at_s=2.0), replace(NEXT, arrival_at_s=1.0)],
            "request 1, which arrives at 1.0 s",
        ),
        ([replace(PLAN, n_output_tokens=0)], "with 5 input and 0 output tokens; they must be whole numbers"),
        (
            [replace(PLAN, n_output_tokens=1.5)],
            "with 5 input and 1.5 output tokens; they must be whole numbers",
        ),
        ([replace(PLAN, n_input_tokens=-1)], "with -1 input and 4 output tokens; they must be whole numbers"),
        (
            [replace(PLAN, turn=Turn(0, 1, 0))],
            "as a turn after request 0; that must be one before it in the list",
        ),
        ([PLAN, replace(NEXT, turn=Turn(0, 1, 0))], "with 5 input tokens; they begin with all 5 + 4 tokens"),
    ],
)
def test_requests_that_cannot_be_are_refused_in_a_sentence(requests: list[Any], said: str) -> None:
    with pytest.raises(UserError) as refused:
        answers(lambda problem, placement: given(problem)(placement, requests))
    assert "placement policy object:cg-bp rehearses" in str(refused.value) and said in str(refused.value)


def test_nothing_but_a_placement_is_rehearsed() -> None:
    with pytest.raises(UserError, match="rehearses None; give a Placement"):
        answers(lambda problem, _: given(problem)(None, some(problem)))  # type: ignore[arg-type]


def test_a_placement_on_whose_links_clients_give_servers_up_cannot_be_rehearsed() -> None:
    slow = {
        **SCENARIO["network"],
        "pairs": [{**pair, "rate": "200 kbit/s"} for pair in SCENARIO["network"]["pairs"]],
    }
    said: list[str] = []

    def ask(problem: Problem, placement: Placement) -> None:
        prompts = [replace(PLAN, index=i, arrival_at_s=10.0 * i, n_input_tokens=50) for i in range(9)]
        with pytest.raises(PolicyError) as refused:
            given(problem)(placement, prompts)
        said.append(str(refused.value))

    changes = ["recovery.connect_timeout=5 s", "workload.n_requests=1"]
    answers(ask, changes, network=slow)
    assert "cannot rehearse this placement: nothing is heard of" in said[0]


def test_a_routing_that_wants_a_rehearsal_is_refused() -> None:
    policy = type("Wants", (WsRr,), {"wants": ("rehearsal",), "name": "wants"})()
    with offering([("routing", policy)]) as names:
        case = scenario_case(
            Document(SCENARIO, "x"), PolicyChoice(None, "cg-bp", names["routing", id(policy)]), (), None
        )
        with pytest.raises(
            UserError, match="wants a rehearsal, which only placement policies get; leave it out"
        ):
            simulate(case, TESTBED, live=False)


def test_what_was_decided_by_rehearsals_is_remembered_for_other_seeds_but_not_for_other_routings() -> None:
    policy = Rehearses(rehearsed)
    remembered = RememberedPlacements()
    with offering([("placement", policy)]) as names:
        for seed, routing in ((1, "ws-rr"), (2, "ws-rr"), (1, "shortest-path")):
            choice = PolicyChoice(None, names["placement", id(policy)], routing)
            case = scenario_case(Document(SCENARIO, "x"), choice, (), seed)
            place(case.experiment, placements=remembered, rehearse=rehearsal)
    assert len(policy.answers) == 2


def test_the_example_of_the_docs_takes_the_placement_that_is_the_fastest_in_a_rehearsal() -> None:
    text = (ROOT / "docs" / "policies.md").read_text(encoding="utf-8")
    (block,) = (part for part in text.split("```python\n")[1:] if "class BestOf" in part)
    names: dict[str, Any] = {}
    exec(block.partition("```")[0], names)
    means_s = []
    for policy in (
        names["BestOf"](),
        *(names[name]() for name in ("CgBp", "Exo", "SeparatePipelines", "Swarm")),
    ):
        with offering([("placement", policy)]) as offered:
            choice = PolicyChoice(None, offered["placement", id(policy)], "ws-rr")
            case = scenario_case(Document(SCENARIO, "x"), choice, ("workload.rate=20",), None)
            served = simulate(case, TESTBED, live=False)
        assert served.placement is not None
        means_s.append((served.placement.ranges, fmean(row.times["e2e_s"] or 1e9 for row in served.rows)))
    (best, mean_s), *others = means_s
    assert best in [ranges for ranges, _ in others] and len({ranges for ranges, _ in others}) > 1
    assert mean_s < 1.1 * min(other_s for _, other_s in others)


def outcome(
    plan: RequestPlan, first_s: float, hops: tuple[Hop, ...] = (), *, has_failed: bool = False
) -> Outcome:
    """Its first token comes after ``first_s``, unless it ``has_failed``, and each further one after 0.1 s."""
    first_at_s = plan.arrival_at_s + first_s
    times = Times(plan.arrival_at_s, None if has_failed else first_at_s, plan.n_output_tokens)
    who = WhoAsks(plan.index, None, 0, plan.arrival_at_s)
    ends_at_s = first_at_s + 0.1 * (plan.n_output_tokens - 1)
    return outcome_of(who, 0, hops, plan.n_input_tokens, times, ends_at_s, has_failed=has_failed)


@dataclass
class Answers:
    """Rehearsals whose requests miss, or are given up, as often as ``n_bad`` says of their number in the list of placements."""

    n_bad: Sequence[int]
    takes_s: Sequence[float]
    are_given_up: bool = False
    keeps_caches: bool = False
    asked: list[Placement] = field(default_factory=list)
    n_requests: set[int] = field(default_factory=set)

    def __call__(self, placement: Placement, requests: Sequence[RequestPlan]) -> Sequence[Outcome]:
        n = len(self.asked)
        self.asked.append(placement)
        self.n_requests.add(len(requests))
        n_bad, takes_s = self.n_bad[n], self.takes_s[n]
        return [
            outcome(plan, 100.0, has_failed=self.are_given_up)
            if plan.index < n_bad
            else outcome(plan, takes_s)
            for plan in requests
        ]


def choose(n_bad: Sequence[int], takes_s: Sequence[float], **how: Any) -> tuple[int, Answers]:
    """Returns which of Foresight's finalists is chosen, where rehearsals answer so."""
    servers = tuple(replace(server, session_slope_s=0.001) for server in PROBLEM.servers)
    answers = Answers(n_bad, takes_s, **how)
    problem = replace(
        PROBLEM, servers=servers, batching="continuous", objectives_s=(("ttft", 50.0), ("tpot", 1.0))
    )
    finalists = SharedSearch(problem, "foresight-rehearsed").finalists(None)
    found = RehearsedForesight().place(replace(problem, rehearsal=answers))
    assert [one.ranges for one in answers.asked] == [one.ranges for one in finalists[: len(answers.asked)]]
    assert len(finalists) == 3
    return [one.ranges for one in finalists].index(found.ranges), answers


PROBLEM = make_problem([100.0, 60.0, 60.0], n_output_tokens=10)


@pytest.mark.parametrize(
    ("n_bad", "takes_s", "how", "chosen"),
    [
        ([0, 0, 0], [2.0, 2.0, 2.0], {}, 0),
        ([0, 0, 0], [2.0, 1.5, 1.49], {}, 1),
        ([3, 0, 0], [2.0, 2.0, 2.0], {}, 1),  # not clear, but what misses takes longer
        ([40, 20, 10], [1.0, 2.0, 3.0], {}, 2),
        ([10, 20, 40], [3.0, 2.0, 1.0], {}, 0),
        ([20, 5, 3], [1.0, 1.0, 30.0], {"are_given_up": True}, 1),
    ],
)
def test_another_finalist_is_taken_if_it_is_clearly_better(
    n_bad: list[int], takes_s: list[float], how: dict[str, Any], chosen: int
) -> None:
    found, answers = choose(n_bad, takes_s, **how)
    assert (found, answers.n_requests) == (chosen, {200})


@dataclass
class Bordered:
    """Rehearsals whose requests all go over two servers, and are the faster, the nearer the border between these is to ``best``."""

    best: int
    keeps_caches: bool = False
    borders: list[int] = field(default_factory=list)

    def __call__(self, placement: Placement, requests: Sequence[RequestPlan]) -> Sequence[Outcome]:
        border = placement.ranges[0].last
        self.borders.append(border)
        hops = Hop(0, 0, border), Hop(1, border, 20)
        return [outcome(plan, 10.0 + abs(border - self.best), hops) for plan in requests]


@pytest.mark.parametrize(("best", "n_left"), [(13, 100), (7, 100), (14, 2), (10, 100)])
def test_borders_are_moved_as_long_as_that_is_clearly_better(
    best: int, n_left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = replace(make_problem([300.0, 300.0], n_blocks=20, n_output_tokens=10), batching="continuous")
    search = _Rehearsals(problem, "foresight-rehearsed")
    monkeypatch.setattr(search, "_n_rehearsals", lambda *_: n_left)
    ranges = [(BlockRange(0, 10), BlockRange(10, 20)), (BlockRange(0, 20), BlockRange(0, 0))]
    halves, whole = (Placement("x", of, problem.room_bytes(of)) for of in ranges)
    answers = Bordered(best)
    found = search.best([halves, whole], answers)
    border = found.ranges[0].last
    assert found.ranges == (BlockRange(0, border), BlockRange(border, 20))
    assert answers.borders[:2] == [10, 20] and len(answers.borders) <= 2 + n_left
    assert border == (best if n_left == 100 else 11), "each step is tried down before up"


def test_requests_are_made_up_only_where_no_caches_are_kept_for_others() -> None:
    found, answers = choose([200, 0, 0], [9.0, 1.0, 1.0], keeps_caches=True)
    assert found == 0 and not answers.asked


def test_rehearsals_are_limited_by_what_they_have_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    for work, n_asked in ((4000, 3), (1200, 2), (500, 0)):
        monkeypatch.setattr(rehearsed_module, "_MOST_WORK", work)
        _, answers = choose([0, 0, 0], [1.0, 1.0, 1.0])
        assert len(answers.asked) == n_asked
        assert all(50 <= n < 200 for n in answers.n_requests)


def test_foresight_chooses_by_rehearsals_what_they_show_to_be_better(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two servers with equal parts of the model serve all of their sessions in turn, which no mean number of sessions shows."""
    monkeypatch.setattr(rehearsed_module, "_MOST", 100)
    (setting,) = (one for one in read_suite("geo-dev").settings if one.name == "abovenet")
    shares = []
    for pair in ("foresight", "foresight-rehearsed"):
        experiment = load_experiment(
            setting.target, [*setting.changes, "seed=101", f'policy={{name="{pair}"}}']
        )
        served = simulate(Case(experiment), TESTBED, live=False)
        limits = dict(experiment.objectives.common)
        shares.append(
            sum(
                all((row.times[f"{name}_s"] or 1e9) <= limit for name, limit in limits.items())
                for row in served.rows
            )
        )
    assert shares[1] > 1.3 * shares[0]
