"""Several rounds of drafts in flight: their law, what a run says about them, and that nothing is lost with a server."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from testbed.errors import ScenarioError, UserError
from testbed.experiments import changed, load_experiment
from testbed.results.speculation import speculation_of, speculation_text
from testbed.runs.session import run_quietly
from testbed.simulator.cases import Case
from testbed.simulator.engine import Simulation, simulate
from testbed.studies.explain.account import account
from tests.unit.simulator.test_drafted_runs import DRAFTS, WIDE
from tests.unit.simulator.test_paged_runs import SCARCE

ONE_HOP = """
name = "one-hop"
[model]
name = "small"
n_blocks = 4
hidden_size = 16
block_size = "1 GB"
cache_per_token = "100 kB"
[hardware.gpu]
base = "a100"
decode = "5 ms"
prefill_base = "1 ms"
[[servers]]
hardware = "gpu"
site = "a"
memory = "40 GB"
[clients]
site = "b"
[network]
kind = "clusters"
pairs = [{ sites = ["a", "b"], rtt = "400 ms", rate = "1000000 Gbit/s" }]
[workload]
n_requests = 1
n_input_tokens = 10
n_output_tokens = 97
rate = 1.0
[decoding]
drafter = "ngram"
acceptance = 1.0
tokens = 3
"""

MEMORY = ("network.backend=memory",)
"""In virtual time all networks have the same times; this one needs no processes."""


def simulated(scenario: str, *sets: str) -> Simulation:
    return simulate(Case(load_experiment(scenario, sets)), "testbed")


def tpot_s(scenario: str, *sets: str) -> float:
    (row,) = simulated(scenario, *sets).rows
    return row.times.tpot_s or math.nan


@pytest.fixture
def one_hop(tmp_path: Path) -> str:
    path = tmp_path / "one-hop.toml"
    path.write_text(ONE_HOP)
    return str(path)


@pytest.mark.parametrize("most", [2, 3, 6])
def test_rounds_that_all_agree_follow_one_another_at_the_servers_pace(one_hop: str, most: int) -> None:
    """24 rounds of 4 tokens. Each group of rounds leaves as the one before it comes back, a step of the server apart."""
    round_s = 96 / 24 * tpot_s(one_hop)
    problem = load_experiment(one_hop).problem
    step_s = problem.servers[0].step_s(50, 4, range(4))
    assert round_s == pytest.approx(0.4 + step_s, rel=1e-3)
    expected_s = 24 / most * round_s + (most - 1) * step_s
    measured_s = 96 * tpot_s(one_hop, f"decoding.in_flight={most}")
    assert measured_s == pytest.approx(expected_s, rel=1e-3)


def test_servers_that_send_to_each_other_compute_rounds_at_the_same_time(tmp_path: Path) -> None:
    """Two servers beside each other: while the second computes a round, the first computes the next one."""
    path = tmp_path / "two-hops.toml"
    second = '[[servers]]\nhardware = "gpu"\nsite = "a"\nmemory = "2.9 GB"\n'
    text = ONE_HOP.replace('memory = "40 GB"', 'memory = "2.9 GB"').replace("[clients]", second + "[clients]")
    near = '{ sites = ["a", "a"], rtt = "0 ms", rate = "1000000 Gbit/s" }'
    text = text.replace("400 ms", "1 ms").replace('Gbit/s" }]', f'Gbit/s" }}, {near}]')
    path.write_text(text.replace('decode = "5 ms"', 'decode = "50 ms"'))
    how = ("policy.communication=server-to-server", "policy.name=proposed", "policy.design_concurrency=1")
    one_s, two_s, three_s = (tpot_s(str(path), *how, f"decoding.in_flight={most}") for most in (1, 2, 3))
    (row,) = simulated(str(path), *how).rows
    assert [hop.n_blocks for hop in row.hops] == [2, 2]
    # Of 24 rounds the last one ends when each server has computed 24, and the second waits for the first one's first.
    assert two_s == pytest.approx(one_s / 2 * 25 / 24, rel=5e-3)
    assert three_s == pytest.approx(two_s, rel=5e-3)


def test_drafting_goes_on_while_a_round_is_away(one_hop: str) -> None:
    """A round needs 4 tokens of 25 ms for its guess and drafts, all of it while the first one is away."""
    slow = "decoding.draft_token=25 ms", "decoding.in_flight=2"
    one_s, two_s = 24 * 4 * tpot_s(one_hop, slow[0]), 24 * 4 * tpot_s(one_hop, *slow)
    step_s = load_experiment(one_hop).problem.servers[0].step_s(50, 4, range(4))
    assert one_s == pytest.approx(24 * (0.075 + 0.4 + step_s), rel=1e-3)
    # Two rounds per round trip: the second leaves 100 ms behind the first, and both wait for nothing else.
    assert two_s == pytest.approx(0.075 + 12 * (0.4 + step_s) + 0.1, rel=2e-3)


def test_a_drafted_round_is_sent_before_the_client_computes_the_next_head(one_hop: str) -> None:
    """The client needs 30 ms per round, a step of the server less: the second answer is there when the first is computed."""
    slow = "compute.hub_token=30 ms"
    step_s = load_experiment(one_hop).problem.servers[0].step_s(50, 4, range(4))
    assert step_s < 0.03
    two_s = 24 * 4 * tpot_s(one_hop, slow, "decoding.in_flight=2")
    # Each of the two goes out anew as soon as its tokens are known; the second is computed behind the first.
    assert two_s == pytest.approx(12 * (0.4 + step_s + 0.03) + 0.03, rel=1e-3)


@pytest.mark.parametrize("communication", ["hub-spoke", "server-to-server"])
@pytest.mark.parametrize("acceptance", [0.0, 0.5, 0.9])
def test_the_rounds_that_count_are_those_of_one_at_a_time(acceptance: float, communication: str) -> None:
    more = "workload.n_requests=3", "workload.n_output_tokens=40", f"decoding.acceptance={acceptance}"
    more += (f"policy.communication={communication}",)
    one, three = (
        simulated("clustered", *DRAFTS, *more, f"decoding.in_flight={most}").rows for most in (1, 3)
    )
    for row, other in zip(one, three, strict=True):
        for name in ("n_rounds", "n_drafted", "n_accepted", "n_tokens_done", "chain"):
            assert getattr(row, name) == getattr(other, name), name
        assert row.n_given_up is None
        assert other.n_given_up
    decoding = load_experiment("clustered", [*DRAFTS, *more]).problem.decoding
    figures = speculation_of(decoding, three)
    (text,) = speculation_text(figures)
    assert f"{figures.tokens_per_round:.2f} tokens per round in {figures.n_rounds} rounds; " in text
    assert text.endswith(f"; {figures.n_given_up} rounds more were sent ahead in vain")


@pytest.mark.parametrize("communication", ["hub-spoke", "server-to-server"])
def test_preempted_sessions_start_over_with_their_oldest_round(communication: str) -> None:
    more = f"policy.communication={communication}", "decoding.in_flight=3"
    rows = simulated("clustered", *SCARCE, *DRAFTS, *more).rows
    assert sum(row.n_preemptions for row in rows) > 3
    assert all(row.n_tokens_done == 32 for row in rows)


@pytest.mark.parametrize(
    ("replay", "communication", "network"),
    [
        ("at_once", "hub-spoke", "memory"),
        ("step_by_step", "hub-spoke", "memory"),
        ("at_once", "server-to-server", "auto"),
        ("step_by_step", "server-to-server", "memory"),
    ],
)
def test_servers_that_are_killed_while_rounds_are_away_cost_no_token(
    tmp_path: Path, replay: str, communication: str, network: str
) -> None:
    few = "workload.n_requests=4", "workload.n_output_tokens=64", "churn.mtbf=1 s", "churn.mttr=5 s"
    more = f"recovery.replay={replay}", f"policy.communication={communication}", "model.hidden_size=112"
    how = "decoding.in_flight=3", f"network.backend={network}"
    summary = run_quietly(load_experiment("churn", [*DRAFTS, *how, *few, *more]), tmp_path / "run")
    assert summary.n_completed == 4 and summary.n_replays > 3
    assert summary.speculation.n_given_up > 20


def test_a_run_says_what_was_sent_ahead(tmp_path: Path) -> None:
    more = "workload.n_requests=2", "workload.rate=0.01", "decoding.in_flight=2", "decoding.acceptance=0.9"
    run_quietly(load_experiment("clustered", [*DRAFTS, *WIDE, *more, *MEMORY]), tmp_path / "run")
    answer = account(tmp_path / "run", 0)
    parts: dict[str, Any] = answer["parts"]
    assert sum(parts.values()) == pytest.approx(answer["e2e_s"])
    assert parts["ahead_s"] < 0 <= parts["behind_s"]
    assert abs(parts["rest_s"]) < 1e-6
    assert abs(parts["compute_slower_s"]) < 1e-6
    flight_s = parts["ahead_s"] + parts["behind_s"]
    assert answer["e2e_s"] - flight_s == pytest.approx(answer["own_chain_alone"]["e2e_s"], rel=0.01)


@pytest.mark.parametrize("communication", ["hub-spoke", "server-to-server"])
def test_the_closed_model_knows_when_rounds_were_sent(tmp_path: Path, communication: str) -> None:
    more = "workload.n_requests=4", "decoding.in_flight=2", "decoding.acceptance=0.9", "decoding.tokens=8"
    more += (f"policy.communication={communication}",)
    summary = run_quietly(load_experiment("clustered", [*DRAFTS, *more, *MEMORY]), tmp_path / "run")
    assert summary.emulation_error["tpot_s"].mean_abs_ratio < 2e-3
    assert summary.closed_model_lacks == ["rounds of drafts that were sent ahead in vain"]


def test_without_several_rounds_all_is_as_before() -> None:
    few = "workload.n_requests=3", "workload.n_output_tokens=16", *DRAFTS
    assert load_experiment("clustered", [*few, "decoding.in_flight=1"]) == load_experiment("clustered", few)
    simulation = simulated("clustered", *few, "decoding.in_flight=2")
    assert (simulation.engine, simulation.why) == (
        "virtual",
        "decoding.in_flight can disturb a session midway",
    )
    several = load_experiment("clustered", [*few, "decoding.in_flight=2"])
    assert changed(several, {}) == several


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (
            ["decoding.drafter=petals"],
            r"is 2, but .* one at a time: leave it out, or choose drafter = \"model\"",
        ),
        (["cache.prefix=shared", "cache.hub_history=1 GB"], "leave it out, or leave out cache.hub_history"),
    ],
)
def test_where_rounds_go_one_at_a_time_more_are_refused(sets: list[str], message: str) -> None:
    with pytest.raises(ScenarioError, match=rf"decoding\.in_flight: .*{message}"):
        load_experiment("clustered", [*DRAFTS, "decoding.in_flight=2", *sets])
    with pytest.raises(UserError, match=r"decoding\.in_flight: must be at least 1"):
        load_experiment("clustered", [*DRAFTS, "decoding.in_flight=0"])
