"""Expected waits for links, and what policies and replays make of them."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from statistics import fmean
from typing import Any

import pytest

from policies import Hop, Placement, Problem, RequestSpec, SystemState
from policies.flow import HUB, Rates
from policies.foresight_routing import ForesightRouting
from policies.interfaces import RoutingPolicy
from policies.joining import among
from policies.link_rates import LinkRates, Passage, Queue
from policies.link_waits import LinkWaits
from policies.registry import ROUTINGS
from policies.search import STATED, Trials
from policies.shared_replay import replay_shared
from policies.swarm_routing import SwarmRouting
from testbed.control.placing import place
from testbed.control.view import RouterView
from testbed.experiments import load_experiment
from testbed.experiments.experiment import Experiment
from testbed.experiments.sources import Document
from testbed.fast.engine import simulate_fast
from testbed.simulator.cases import Case
from testbed.simulator.engine import REFERENCE, TESTBED, simulate
from tests.support.problems import make_problem, placed
from tests.support.small_model import SMALL_HARDWARE, SMALL_MODEL

TOKEN_BYTES, WINDOW_BYTES = 10_000.0, 1e7
N_INPUT, N_OUTPUT = 1000, 11


def slow(problem: Problem, rate_bps: float = 8e7, **links: Any) -> Problem:
    """The same with links of one rate, on which a prompt takes a second and a token a millisecond."""
    rates = tuple((rate_bps,) * problem.n_servers for _ in problem.clients)
    across = tuple((rate_bps,) * problem.n_servers for _ in problem.servers)
    return replace(problem, links=LinkRates(rates, rates, across, TOKEN_BYTES, WINDOW_BYTES, **links))


def two_servers(**links: Any) -> tuple[Problem, Placement]:
    """Two equal servers that hold all blocks; a request takes 2.5 s alone, and one comes every second."""
    problem = make_problem(
        [1e6, 1e6], n_input_tokens=N_INPUT, n_output_tokens=N_OUTPUT, rtt_s=[[0.06, 0.06]], input_rtt_s=2.0
    )
    return slow(problem, **links), placed(problem, [(0, 4), (0, 4)], [1e6, 1e6])


def waits_of(problem: Problem) -> LinkWaits:
    waits = LinkWaits.of(problem)
    assert waits is not None
    return waits


def opened(problem: Problem, placement: Placement, servers: list[int], now_s: float = 0.0) -> SystemState:
    """Sessions on these servers whose prompts are sent now."""
    state, waits = SystemState(placement.cache_bytes), waits_of(problem)
    for key, server in enumerate(servers):
        hops, request = (Hop(server, 0, 4),), RequestSpec(0, N_INPUT, N_OUTPUT)
        found = waits.of_request(request, hops, state, now_s)
        state.open(key, hops, 1.0, now_s + 3.0 + found.all_s, found.passages)
    return state


def test_links_without_rates_or_hardly_used_ones_make_nobody_wait() -> None:
    problem, _ = two_servers()
    assert LinkWaits.of(problem) is not None
    assert LinkWaits.of(replace(problem, links=None)) is None
    assert LinkWaits.of(slow(problem, 1e15)) is None
    assert LinkWaits.of(replace(problem, request_rate=0.001)) is None


@pytest.mark.parametrize("scenario", ["clustered", "abovenet", "bellcanada", "gts-ce"])
@pytest.mark.parametrize("rate", [0.1, 0.5, 1.0])
def test_links_of_the_papers_scenarios_change_no_decision(scenario: str, rate: float) -> None:
    problem = load_experiment(scenario, [f"workload.rate={rate}"]).problem
    assert problem.links is not None
    assert LinkWaits.of(problem) is None


def test_a_token_waits_longer_the_more_sessions_there_are_and_the_slower_the_link() -> None:
    problem, _ = two_servers()
    waits = waits_of(problem)
    pace = waits.pace(0, (Hop(0, 0, 4),))
    assert pace.token_s == pytest.approx(0.1)
    link, half = (Queue("up", 0, 0, rate_bps) for rate_bps in (8e7, 4e7))
    times_s = [waits.token_wait_s(link, n, pace) for n in range(20)]
    assert times_s[0] == 0.0
    assert times_s == sorted(times_s)
    assert times_s[1] > 0.02
    assert waits.token_wait_s(half, 1, pace) > 1.5 * times_s[1]


def test_what_a_token_waits_for_is_at_most_the_window() -> None:
    problem, _ = two_servers()
    assert problem.links is not None
    narrow = replace(problem, links=replace(problem.links, window_bytes=1e5))
    link, times_s = Queue("up", 0, 0, 8e7), []
    for one in (problem, narrow):
        waits = waits_of(one)
        times_s.append(waits.token_wait_s(link, 3, waits.pace(0, (Hop(0, 0, 4),))))
    assert times_s[1] < times_s[0] / 2


def test_a_prompt_waits_for_what_is_left_of_those_before_it() -> None:
    problem, placement = two_servers()
    state = opened(problem, placement, [0, 0])
    waits, request = waits_of(problem), RequestSpec(0, N_INPUT, N_OUTPUT)

    def waited_s(server: int, now_s: float) -> float:
        return waits.of_request(request, (Hop(server, 0, 4),), state, now_s).first_s

    assert waited_s(1, 0.0) == 0.0
    assert waited_s(0, 0.0) == pytest.approx(2.0)  # it comes to the way back when the others have passed that
    assert waited_s(0, 1.5) == pytest.approx(0.5)
    state.close(0)
    state.close(1)
    assert waited_s(0, 0.0) == 0.0
    assert not state.used_queues()


@pytest.mark.parametrize("routing", [ForesightRouting(), SwarmRouting()])
def test_of_two_equal_ways_the_idle_one_is_used(routing: RoutingPolicy) -> None:
    problem, placement = two_servers()
    request, chosen = RequestSpec(0, N_INPUT, N_OUTPUT), []
    for one, servers in ((replace(problem, links=None), []), (problem, [0]), (problem, [1])):
        state = opened(problem, placement, servers)
        router = routing.bind(one, placement)
        if isinstance(routing, SwarmRouting):  # it takes turns, by the latencies that it has seen
            for _ in range(2):
                router.route(request, state, 0.0)
        route = router.route(request, state, 0.0)
        assert route is not None
        chosen.append(route.hops[0].server)
    assert chosen == [0, 1, 0]


def test_a_link_that_is_shared_makes_both_ways_busy() -> None:
    shared = (((0,), (0,)),)
    problem, placement = two_servers(shared_bps=(8e7,), up_shared=shared, down_shared=(((), ()),))
    state = opened(problem, placement, [0])
    found = waits_of(problem).of_request(RequestSpec(0, N_INPUT, N_OUTPUT), (Hop(1, 0, 4),), state, 0.0)
    assert found.first_s == pytest.approx(1.0)


def test_with_forwarding_a_chain_waits_on_the_links_between_servers_and_on_one_way_back() -> None:
    problem, _ = two_servers()
    waits = waits_of(replace(problem, forwarding=True))
    ways = waits.ways(0, (Hop(0, 0, 2), Hop(1, 2, 4)))
    assert [(way[0].kind, way[0].row, way[0].column) for way in ways] == [
        ("up", 0, 0),
        ("across", 0, 1),
        ("down", 0, 1),
    ]
    assert [way[0].kind for way in waits_of(problem).ways(0, (Hop(0, 0, 2), Hop(1, 2, 4)))] == [
        "up",
        "down",
    ] * 2


def test_routers_see_the_use_of_links_as_of_the_last_report() -> None:
    problem, placement = two_servers()
    view, waits, hops = RouterView(placement.cache_bytes, 10.0), waits_of(problem), (Hop(0, 0, 4),)
    found = waits.of_request(RequestSpec(0, N_INPUT, N_OUTPUT), hops, view.state(0, 1.0), 1.0)
    view.hold(0, hops, 1.0, 60.0, 1.0, found.passages)
    assert not view.state(1, 9.0).used_queues()
    assert len(view.state(1, 11.0).used_queues()) == 2
    view.release(0, 12.0)
    assert not view.state(1, 21.0).used_queues()


def test_some_of_the_servers_keep_their_links() -> None:
    problem = make_problem([1e6] * 3)
    rates = ((1e6, 2e6, 3e6),)
    across = tuple(tuple(1e6 * (10 * i + j) for j in range(3)) for i in range(3))
    links = LinkRates(
        rates, rates, across, 1.0, 1.0, (5.0,), (((), (), (0,)),), (((), (), ()),), (((),) * 3,) * 3
    )
    some = among(replace(problem, links=links), [0, 2]).links
    assert some is not None
    assert some.up_bps == ((1e6, 3e6),)
    assert some.across_bps == ((0.0, 2e6), (20e6, 22e6))
    assert some.up(0, 1) == (Queue("up", 0, 1, 3e6), Queue("shared", 0, 0, 5.0))


def test_helix_counts_what_the_slower_direction_of_a_clients_link_carries() -> None:
    problem, _ = two_servers()
    assert problem.links is not None
    links = replace(problem.links, down_bps=((4e7, 8e7),))
    rates = Rates(
        replace(problem, links=links, servers=tuple(replace(s, decode_s=0.0) for s in problem.servers))
    )
    assert [rates.server_tps(j, 4) for j in (0, 1)] == [pytest.approx(500), pytest.approx(1000)]
    assert rates.link_tps(HUB, 0) > 1e9


HOMES: dict[str, Any] = {
    "name": "homes",
    "model": SMALL_MODEL,
    "hardware": {"small": SMALL_HARDWARE | {"memory": "2 GB", "decode": "5 ms"}},
    "servers": [{"hardware": "small", "site": site} for site in ("A", "B")],
    "clients": [{"site": "user"}],
    "network": {
        "kind": "clusters",
        "pairs": [
            {"sites": list(sites), "rtt": "20 ms", "rate": "1 Gbit/s"}
            for sites in (("A", "user"), ("B", "user"), ("A", "B"))
        ],
    },
    "sites": [{"name": "A", "up": "40 Mbit/s"}, {"name": "B", "up": "40 Mbit/s", "down": "200 Mbit/s"}],
    "workload": {
        "arrivals": "poisson",
        "rate": 0.3,
        "n_requests": 40,
        "n_input_tokens": 1000,
        "n_output_tokens": 60,
    },
    "calibration": {"set": "none"},
}


def homes(**policy: Any) -> Experiment:
    return load_experiment(Document(HOMES | {"policy": policy}))


def test_the_problem_of_an_experiment_has_the_rates_of_its_links() -> None:
    links = homes(name="proposed").problem.links
    assert links is not None
    assert (links.up_bps, links.down_bps, links.across_bps) == (((1e9, 2e8),), ((4e7, 4e7),), ())
    assert [queue.rate_bps for queue in links.up(0, 1)] == [2e8, 2e8]
    assert [queue.rate_bps for queue in links.up(0, 0)] == [1e9]
    assert 8192 < links.token_bytes < 1.1 * 8192
    forwarding = homes(name="proposed", communication="server-to-server").problem.links
    assert forwarding is not None
    assert forwarding.across_bps[0][1] == forwarding.across_bps[1][0] == 4e7
    assert [queue.kind for queue in forwarding.across(0, 1)] == ["across", "shared", "shared"]


def test_the_replay_expects_what_the_engine_measures_on_busy_links() -> None:
    """Time to the first token and time per token, within 20 %; without waits for links they are far less."""
    experiment = homes(name="proposed")
    made = place(experiment)
    served = simulate_fast(experiment, made).requests
    engine_s = fmean(r.ttft_s for r in served if r.ttft_s is not None)
    per_token_s = fmean(r.time_s / r.plan.n_output_tokens for r in served if r.time_s is not None)
    problem, requests = experiment.problem, experiment.workload.requests
    for waits, least, most in ((waits_of(problem), 0.8, 1.2), (None, 0.0, 0.7)):
        done = replay_shared(problem, made.placement, made.router, requests, waits=waits)
        assert least < fmean(d.ttft_s for d in done) / engine_s < most
        assert least < fmean(d.time_s / d.plan.n_output_tokens for d in done) / per_token_s < most


def test_foresights_routing_uses_both_homes_where_ws_rr_uses_one() -> None:
    per_token_s = {}
    for routing in ("ws-rr", "foresight"):
        experiment = homes(placement="cg-bp", routing=routing)
        served = simulate_fast(experiment, place(experiment)).requests
        per_token_s[routing] = fmean(
            r.time_s / r.plan.n_output_tokens for r in served if r.time_s is not None
        )
    assert per_token_s["foresight"] < 0.7 * per_token_s["ws-rr"]


def test_trials_of_other_routings_wait_for_links_too() -> None:
    experiment = homes(name="proposed")
    problem, placement = experiment.problem, place(experiment).placement
    with_s, without_s = (
        Trials(one, ROUTINGS["ws-rr"]().bind, (STATED,)).per_token_s(placement, ["one"])[0][0]
        for one in (problem, replace(problem, links=None))
    )
    assert with_s > 1.5 * without_s


def test_mode_reference_expects_no_waits() -> None:
    case = Case(homes(placement="cg-bp", routing="foresight"))
    chains = {mode: {row.chain for row in simulate(case, mode).rows} for mode in (REFERENCE, TESTBED)}
    assert len(chains[REFERENCE]) == 1
    assert len(chains[TESTBED]) == 2


def test_the_use_of_a_link_is_that_of_all_passages_one_by_one() -> None:
    """Also after sessions have ended in another order than they began, and where prompts overtake each other."""
    chance, queue = Random(1), Queue("up", 0, 0, 1e6)
    state, there = SystemState([1e9]), {}
    n_waited = 0
    for key in range(300):
        arrives_at_s = key + chance.uniform(0, 5)
        begins_at_s = arrives_at_s + chance.choice([0.0, 2.0])
        ends_at_s = begins_at_s + chance.uniform(0.1, 9)
        until_s = ends_at_s + chance.choice([0.0, 20.0])
        passage = Passage(queue, arrives_at_s, begins_at_s, ends_at_s, chance.uniform(0.1, 3), until_s)
        state.open(key, (), 1.0, until_s, (passage,))
        there[key] = passage
        if len(there) > 12:
            ended = chance.choice(list(there))
            state.close(ended)
            del there[ended]
        at_s = key + chance.choice([0.0, 1.0, 6.0])
        counted = [p for p in there.values() if p.arrives_at_s <= at_s and not key < p.until_s <= at_s]
        waited_s = 0.0
        for p in counted:  # one after the other: sum() rounds otherwise since Python 3.12
            if p.ends_at_s > at_s:
                waited_s += p.busy_s * min((p.ends_at_s - at_s) / (p.ends_at_s - p.begins_at_s), 1.0)
        assert state.use(queue, key, at_s) == (len(counted), waited_s)
        n_waited += waited_s > 0
    assert n_waited > 100
