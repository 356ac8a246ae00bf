"""Servers that share their time among sessions: expected times, the replay, and Foresight's use of both."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from statistics import fmean

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from benchmarks.foresight import SCARCE, drawn
from policies import (
    Hop,
    InfeasiblePlacement,
    Placement,
    PolicyError,
    Problem,
    RequestSpec,
    SystemState,
    foresight_sharing,
)
from policies import sharing as sharing_module
from policies.cgbp import CgBp
from policies.checks import check_placement
from policies.foresight import ForesightPlacement
from policies.foresight_routing import ForesightRouting
from policies.foresight_sharing import Cost, IsBehind, Limits, SharedSearch, _Trial, ranked
from policies.neighbours import Ranges
from policies.problem import Batching, BlockRange, Route
from policies.replay import ReplayedRequest, replay
from policies.search import likely_requests, typical_lengths
from policies.shared_replay import replay_shared
from policies.sharing import Cycle, Sharing
from policies.workload import RequestPlan
from testbed.control.placing import place
from testbed.experiments import load_experiment
from testbed.experiments.policy import PolicyChoice
from testbed.fast.engine import simulate_fast
from testbed.simulator.cases import scenario_case
from testbed.studies.score.suite import read_suite
from tests.support.effort import n_drawn
from tests.support.problems import make_problem, placed, problems

SLOPED = 0.001


def never(cost: Cost) -> bool:
    """A placement that costs so much is not behind."""
    return False


def shared(problem: Problem, batching: Batching = "continuous", slope_s: float = SLOPED) -> Problem:
    servers = tuple(replace(server, session_slope_s=slope_s) for server in problem.servers)
    return replace(problem, servers=servers, batching=batching)


def test_one_session_is_as_fast_as_alone_and_more_are_slower() -> None:
    problem = shared(make_problem([100.0], n_output_tokens=10, prefill_slope_s=0.002))
    sharing = Sharing(problem)
    cycle = sharing.cycle(0, (Hop(0, 0, 4),))
    assert cycle == pytest.approx(Cycle(0.1, 0.04))
    times_s = [sharing.at(cycle).step_s(0, 4, n) for n in range(1, 40)]
    assert times_s[0] == pytest.approx(0.04)
    assert times_s == sorted(times_s)
    # Never more than a step of all sessions, one that is met, and half a prompt.
    for n, time_s in enumerate(times_s, 1):
        assert time_s <= 2 * (0.04 + 4 * SLOPED * (n - 1)) + 4 * 0.002 / 2 + 1e-9


def test_serial_servers_are_slower_than_batching_ones() -> None:
    problem = make_problem([100.0], n_output_tokens=10)
    cycle = Cycle(0.1, 0.04)
    together_s, in_turn_s = (
        Sharing(shared(problem, kind)).at(cycle).step_s(0, 4, 20) for kind in ("continuous", "serial")
    )
    assert in_turn_s > 3 * together_s


def test_a_session_goes_where_fewer_are() -> None:
    problem = make_problem([100.0, 100.0], n_output_tokens=10)
    placement = placed(problem, [(0, 4), (0, 4)], [60.0, 60.0])
    state = SystemState(placement.cache_bytes)
    for number in range(3):
        state.open(number, [Hop(0, 0, 4)], 1.0, 10.0)
    request = RequestSpec(0, 1, 10)
    servers = []
    for one in (problem, shared(problem)):
        route = ForesightRouting().bind(one, placement).route(request, state, 0.0)
        assert route is not None
        servers.append(route.hops[0].server)
    assert servers == [0, 1]


def test_nobody_is_let_in_without_room_however_overdue_others_are() -> None:
    # Room for one session; with others there it lasts longer than the state expects.
    problem = shared(make_problem([100.0], n_output_tokens=9, cache_bytes_per_token=1.0), slope_s=1.0)
    placement = placed(problem, [(0, 4)], [2 * 4 * 10.0])
    requests = likely_requests(problem, "test", 30)
    done = replay_shared(problem, placement, ForesightRouting().bind(problem, placement), requests)
    spans = [(d.plan.arrival_at_s + d.waiting_s, d.plan.arrival_at_s + d.time_s) for d in done]
    for start_s, _ in spans:
        assert sum(a <= start_s < b - 1e-9 for a, b in spans) <= 2
    assert max(d.waiting_s for d in done) > 0


def test_outputs_are_those_of_past_requests_and_inputs_few() -> None:
    samples = tuple((n, 2 * n) for n in range(1, 40))
    problem = replace(make_problem([100.0]), length_samples=samples, reserved_output_tokens=100)
    requests = likely_requests(problem, "test", 200)
    assert {plan.n_input_tokens for plan in requests} <= {n for n, _ in typical_lengths(problem)}
    assert {plan.n_output_tokens for plan in requests} <= {n for _, n in samples}
    assert len({plan.n_output_tokens for plan in requests}) > 30
    assert {plan.known.n_output_tokens for plan in requests} == {100}


@pytest.mark.parametrize(
    ("scenario", "rate", "placement", "concurrency"),
    [
        ("chain-7b", 4.0, "chain-composition", None),
        ("helix-24", 1.4, "cg-bp", 40),
        ("abovenet", 0.3, "cg-bp", None),
        ("abovenet", 0.3, "chain-composition", None),
    ],
)
def test_the_replay_is_near_the_engine(
    scenario: str, rate: float, placement: str, concurrency: int | None
) -> None:
    """The mean time per token is within 35 % of what the fast engine has, step by step."""
    changes = [f"workload.rate={rate}", "workload.n_requests=60", "policy.queue=fifo"]
    changes += ["compute.batching=continuous"]
    if concurrency is not None:
        changes.append(f"policy.design_concurrency={concurrency}")
    experiment = scenario_case(scenario, PolicyChoice(None, placement, "foresight"), changes, 0).experiment
    made = place(experiment)
    served = simulate_fast(experiment, made).requests
    replayed = replay_shared(experiment.problem, made.placement, made.router, experiment.workload.requests)
    engine_s = fmean(r.time_s / r.plan.n_output_tokens for r in served if r.time_s is not None)
    replay_s = fmean(d.time_s / d.plan.n_output_tokens for d in replayed)
    assert abs(replay_s / engine_s - 1) < 0.35


def test_sessions_whose_steps_are_over_before_they_come_back_do_not_wait() -> None:
    """One server of ten computes a tenth of a token's cycle: two sessions seldom meet there, and each waits little."""
    problem = shared(make_problem([100.0], n_output_tokens=10, prefill_slope_s=0.0), slope_s=0.0)
    sharing = Sharing(problem)
    cycle = Cycle(elsewhere_s=0.4, on_servers_s=0.04)
    assert sharing.at(cycle).step_s(0, 4, 2) == pytest.approx(0.04)
    assert sharing.at(Cycle(0.0, 0.04)).step_s(0, 4, 2) > 1.5 * 0.04


def test_first_and_further_tokens_weigh_as_the_objectives_say() -> None:
    """A chain that answers early is chosen for a client that must see its first token early, another for fast tokens."""
    early = replace(make_problem([100.0]).servers[0], decode_s=0.02, prefill_slope_s=0.01)
    fast = replace(early, decode_s=0.01, prefill_slope_s=0.1)
    base = make_problem([100.0, 100.0], n_input_tokens=10, n_output_tokens=100)
    problem = replace(base, servers=(early, fast), batching="continuous")
    placement = placed(problem, [(0, 4), (0, 4)], [1e4, 1e4])
    chosen = []
    for objectives in ((("ttft", 1.0), ("tpot", 0.1)), (("ttft", 10.0), ("tpot", 0.1)), ()):
        router = ForesightRouting().bind(replace(problem, objectives_s=objectives), placement)
        route = router.route(RequestSpec(0, 10, 100), SystemState(placement.cache_bytes), 0.0)
        assert route is not None
        chosen.append(route.hops[0].server)
    assert chosen == [0, 1, 1]


@settings(max_examples=n_drawn(10), deadline=None)
@given(problems(), st.sampled_from(["serial", "continuous"]))
def test_placements_hold_and_are_no_worse_than_the_proposed_ones(
    problem: Problem, batching: Batching
) -> None:
    problem = shared(problem, batching)
    try:
        rival = CgBp().place(problem)
    except InfeasiblePlacement:
        rival = None
    try:
        placement = ForesightPlacement().place(problem)
    except InfeasiblePlacement:
        assert rival is None
        return
    check_placement(problem, placement, "foresight")
    assert ForesightPlacement().place(problem).ranges == placement.ranges
    if rival is not None:
        search = SharedSearch(problem, "foresight")
        own, others = (search.judged(one, never) for one in (placement, rival))
        assert own is not None
        assert others is not None
        assert own <= others


drawn_costs = st.lists(
    st.tuples(
        st.sampled_from([0.0, 0.004, 0.008, 0.012, 0.3, 1.0]), st.integers(1, 9) | st.floats(0.97, 1.05)
    ),
    min_size=1,
)


@settings(max_examples=n_drawn(300))
@given(drawn_costs, st.integers(1, 4))
def test_none_of_the_best_is_above_the_limits_that_those_before_it_set(
    drawn: list[tuple[float, float]], n: int
) -> None:
    costs: dict[Ranges, Cost] = {}
    for i, (missed, time) in enumerate(drawn):
        costs[(BlockRange(0, i + 1),)] = Cost(missed, time)
    under: dict[Ranges, Cost] = {}
    for ranges, cost in costs.items():
        if not Limits(under.values(), n).are_exceeded(cost):
            under[ranges] = cost
    assert ranked(under)[:n] == ranked(costs)[:n]


class _Judged(SharedSearch):
    """A search in which the times of placements are given; ``None`` of those of which is seen that they are behind."""

    def __init__(self, costs: dict[Ranges, Cost], *, is_cut: bool) -> None:
        self.costs, self.is_cut = costs, is_cut

    def judged(self, placement: Placement, is_behind: IsBehind) -> Cost | None:
        cost = self.costs[placement.ranges]
        return None if self.is_cut and is_behind(cost) else cost


@settings(max_examples=n_drawn(300))
@given(drawn_costs)
def test_the_best_judged_is_the_one_that_whole_costs_of_all_decide(drawn: list[tuple[float, float]]) -> None:
    costs: dict[Ranges, Cost] = {(BlockRange(0, i + 1),): Cost(*one) for i, one in enumerate(drawn)}
    placements = [Placement("drawn", ranges, (1.0,)) for ranges in costs]
    cut, whole = (_Judged(costs, is_cut=is_cut)._best_judged(placements) for is_cut in (True, False))
    assert cut == whole


@pytest.mark.parametrize("name", ["helix-24-light", "homes-design"])
def test_the_placement_is_the_one_that_whole_replays_of_all_decide(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(foresight_sharing, "_MOST", 60)
    (setting,) = (one for one in read_suite("geo-1").settings if one.name == name)
    problem = load_experiment(setting.target, setting.changes).problem
    go_on, n_ended = _Trial.go_on, 0

    def counted(trial: _Trial) -> None:
        nonlocal n_ended
        n_ended += 1
        go_on(trial)

    monkeypatch.setattr(_Trial, "go_on", counted)
    placement = SharedSearch(problem, "foresight").run(None)
    n_cut, n_ended = n_ended, 0
    monkeypatch.setattr(Limits, "are_exceeded", lambda limits, cost, time_ratio=1.0: False)
    assert SharedSearch(problem, "foresight").run(None) == placement
    assert n_cut < 0.7 * n_ended


@settings(max_examples=n_drawn(20), deadline=None)
@given(
    problems(),
    st.sampled_from(["none", "serial", "continuous"]),
    st.sampled_from([(), (("ttft", 5.0), ("tpot", 0.5)), (("tpot", 0.2), ("ttft", 9.0))]),
    st.lists(st.tuples(st.integers(1, 60), st.sampled_from([1, 2, 9, 60])), max_size=9),
)
def test_no_request_of_a_replay_takes_less_than_the_least_time(
    problem: Problem,
    batching: Batching,
    objectives: tuple[tuple[str, float], ...],
    lengths: list[tuple[int, int]],
) -> None:
    most = max((n for _, n in lengths), default=None)
    known = {"length_samples": tuple(lengths), "reserved_output_tokens": most}
    problem = replace(shared(problem, batching), objectives_s=objectives, **(known if lengths else {}))
    search = SharedSearch(problem, "foresight")
    try:
        placements = search._seeds(None)
    except PolicyError:
        return
    for placement in placements:
        least = search._least(placement, "fit 0")
        with suppress(PolicyError):  # some request has no chain
            for done in search._trial(placement, "fit 0")._ends:
                assert 0 < least[done.plan.index] <= (1 + 1e-9) * search.time(done)


@given(
    st.integers(1, 60),
    st.sampled_from(["serial", "continuous"]),
    st.floats(0, 1),
    st.floats(0, 1),
    st.floats(0, 0.05),
)
@example(11, "serial", 0.0, 0.0, 0.0)  # the root is a point of the bisection
def test_expected_times_are_those_that_bisection_alone_finds(
    n_others: int, batching: Batching, elsewhere_s: float, more_s: float, prefill_slope_s: float
) -> None:
    problem = make_problem([100.0], n_output_tokens=10, prefill_slope_s=prefill_slope_s)
    cycle = Cycle(elsewhere_s, 0.04 + more_s)
    found_s = Sharing(shared(problem, batching)).expected_s(0, 4, n_others, cycle)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            sharing_module, "_close_bounds", lambda longer_s, low_s, over_s, high_s, under_s: (low_s, high_s)
        )
        assert Sharing(shared(problem, batching)).expected_s(0, 4, n_others, cycle) == found_s


def test_a_placement_at_the_edge_is_not_taken() -> None:
    """One that has room on two streams of a hundred requests, and takes ten times as long on most others."""
    (setting,) = (one for one in SCARCE if one.name == "mixed lengths, 1 A100 + 4 MIG, 0.1/s")
    problem, requests = drawn(setting, 19)
    placement = SharedSearch(problem, "foresight").run(None)
    done = replay(problem, placement, ForesightRouting().bind(problem, placement), requests)
    assert fmean(one.time_s / one.plan.n_output_tokens for one in done) < 1.3


def test_the_shared_search_judges_a_request_by_its_own_client_s_objectives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(foresight_sharing, "_MOST", 50)
    clients = "clients=[{site='Cluster0',name='a'}, {site='Cluster2',name='b',slo='ttft=9s'}]"
    options = [
        clients,
        "workload.slo='tpot=1s,setup=1s'",
        "compute.batching=continuous",
        "workload.n_requests=4",
    ]
    search = SharedSearch(load_experiment("clustered", options).problem, "foresight")
    slow_first, slow_later = (10.0, 12.0), (1.0, 99.0)
    plans = [RequestPlan(0, client, 0.0, 20, 10) for client in (0, 1)]
    done = [
        ReplayedRequest(plan, Route((), 0.0, 0.0), 0.0, *times_s)
        for plan in plans
        for times_s in (slow_first, slow_later)
    ]
    assert [search._cost_of([one]).missed for one in done] == [0.0, 1.0, 1.0, 0.0]


def test_the_shared_search_aims_at_the_objectives(monkeypatch: pytest.MonkeyPatch) -> None:
    """For early first tokens servers hold fewer blocks and more caches, so that chains are longer."""
    monkeypatch.setattr(foresight_sharing, "_FEWEST", 50)  # requests per replay: less certain, and faster
    monkeypatch.setattr(foresight_sharing, "_MOST", 150)
    base = load_experiment("helix-24", ["workload.rate=1.4", "workload.n_requests=10"]).problem
    early, fast = (
        SharedSearch(replace(base, objectives_s=objectives), "foresight").run(None)
        for objectives in ((("ttft", 5.0),), (("tpot", 0.25),))
    )
    assert max(held.n_blocks for held in early.ranges) < max(held.n_blocks for held in fast.ranges)
