"""Whole runs whose servers forward to each other, and the same scenario with hub-spoke beside them."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from nodes.eventlog import read_log
from nodes.records import Token
from tests.support.runs import Outcome, Testbed, assert_tables_hold_the_whole_log, rows_of

SCENARIO = """
seed = 3
model = { profile = "bloom-176b", n_blocks = 9 }
servers = [{ hardware = "a100", site = "Here", count = 3 }, { hardware = "a100", site = "There", count = 3 }]
clients = [{ site = "Here" }]

[network]
kind = "clusters"
pairs = [
    { sites = ["Here", "Here"], rtt = "5 ms", rate = "1 Gbit/s" },
    { sites = ["There", "There"], rtt = "5 ms", rate = "1 Gbit/s" },
    { sites = ["Here", "There"], rtt = "60 ms", rate = "100 Mbit/s" },
]

[workload]
arrivals = "constant"
rate = 2
n_requests = 4
n_input_tokens = 5
n_output_tokens = 8

[policy]
placement = "fixed:PLACEMENT"
routing = "ws-rr"
communication = "server-to-server"
"""
REAL = ("--time-scale", "20", "--no-twin")
PLACEMENT = [[1, 3], [4, 3], [7, 3]] * 2
"""Two servers for every third of the model."""


@pytest.fixture
def thirds(tmp_path: Path) -> str:
    """A scenario in which every chain has three hops, and each has a stand-in."""
    placement = tmp_path / "placement.json"
    placement.write_text(json.dumps(PLACEMENT), encoding="utf-8")
    path = tmp_path / "thirds.toml"
    path.write_text(SCENARIO.replace("PLACEMENT", str(placement)), encoding="utf-8")
    return str(path)


def up(testbed: Testbed, *arguments: str) -> Outcome:
    outcome = testbed.up(*arguments, "--no-report", "--json")
    assert outcome.code == 0, outcome.stderr
    assert outcome.json()["leaks"] == {"sessions": 0, "cache_bytes": 0.0, "descriptors": 0, "namespaces": 0}
    assert_tables_hold_the_whole_log(outcome.run_dir)
    return outcome


def hops_of(outcome: Outcome) -> list[list[dict[str, Any]]]:
    """The rows of ``hops.parquet``, a list per token."""
    rows = rows_of(outcome.run_dir / "hops.parquet")
    return [list(hops) for _, hops in itertools.groupby(rows, key=lambda row: (row["request"], row["token"]))]


def token_ids(outcome: Outcome) -> dict[tuple[int, int], int]:
    """What every token was, from the clients' logs."""
    found = {}
    for path in (outcome.run_dir / "events").glob("*.log"):
        records, _ = read_log(path)
        found |= {(r.request, r.token): r.token_id for r in records if isinstance(r, Token)}
    return found


def assert_forwarded(outcome: Outcome) -> None:
    tokens = hops_of(outcome)
    assert len(tokens) == 4 * 8
    for hops in tokens:
        assert len(hops) == 3
        for before, after in itertools.pairwise(hops):
            assert after["sent_at_s"] == before["departed_at_s"] == before["received_at_s"]
            assert after["arrived_at_s"] > after["sent_at_s"]
            assert before["down_bytes"] == 0
        assert hops[-1]["down_bytes"] == hops[0]["up_bytes"] > 0
        assert hops[-1]["received_at_s"] > hops[-1]["departed_at_s"]


def test_servers_forward_and_give_the_tokens_of_hub_spoke(
    virtual: str, testbed: Testbed, thirds: str
) -> None:
    chain = up(testbed, thirds, "--network", virtual)
    assert_forwarded(chain)
    assert_hidden_states_take_what_their_links_take(chain)
    hub = up(testbed, thirds, "--network", virtual, "--set", "policy.communication=hub-spoke")
    assert token_ids(chain) == token_ids(hub)
    assert len(token_ids(hub)) == 4 * 8
    model_s = [outcome.json()["model"]["tpot_s"]["mean"] for outcome in (chain, hub)]
    assert model_s[0] < model_s[1], "a chain crosses the network once per hop, hub-spoke twice"
    compared = testbed("compare", str(chain.run_dir), str(hub.run_dir))
    assert compared.code == 0, compared.stderr
    assert "communication" in compared.stdout
    assert testbed("report", str(chain.run_dir)).code == 0
    assert (chain.run_dir / "report.html").stat().st_size > 0


def test_servers_forward_on_loopback_and_delay_what_they_send(testbed: Testbed, thirds: str) -> None:
    outcome = up(testbed, thirds, "--network", "loopback", *REAL)
    assert_forwarded(outcome)
    for hops in hops_of(outcome):
        for before, after in itertools.pairwise(hops):
            same_site = (before["server"] in HERE) == (after["server"] in HERE)
            assert after["arrived_at_s"] - after["sent_at_s"] >= (0.0025 if same_site else 0.03)


HERE = ("a100-0", "a100-1", "a100-2")


def assert_hidden_states_take_what_their_links_take(outcome: Outcome) -> None:
    """Of one token, from server to server: the delay, and less than 5 ms at the link's rate. Exact in virtual time."""
    for hops in hops_of(outcome):
        for before, after in itertools.pairwise(hops):
            same_site = (before["server"] in HERE) == (after["server"] in HERE)
            delay_s, rate_bps = (0.0025, 1e9) if same_site else (0.03, 100e6)
            took_s = after["arrived_at_s"] - after["sent_at_s"] - delay_s - 8 * after["up_bytes"] / rate_bps
            assert 0 <= took_s < 0.1 * (8 * after["up_bytes"] / rate_bps) + 1e-4, (took_s, after)


@pytest.mark.parametrize("network", ["fabric", "memory", "loopback"])
def test_sessions_outlive_a_server_that_forwards(
    testbed: Testbed, fabric: None, thirds: str, network: str
) -> None:
    # In real time so long that the kill comes in the midst of it on any machine.
    n_tokens, real = (80, ("--time-scale", "3", "--no-twin")) if network == "loopback" else (40, ())
    longer = ("--set", f"workload.n_output_tokens={n_tokens}")
    plain = up(testbed, thirds, "--network", "memory", *longer)
    fault = '{kind="kill", server="a100-1", after={request=1,tokens=3}, for="2 s"}'  # in the cheapest chain
    broken = up(testbed, thirds, "--network", network, *real, *longer, "--set", f"fault=[{fault}]")
    assert broken.json()["n_replays"] > 0, (broken.run_dir / "events.jsonl").read_text()
    assert token_ids(broken) == token_ids(plain)


@pytest.mark.parametrize("network", ["fabric", "memory", "loopback"])
def test_links_between_servers_change_while_they_forward(
    network: str, testbed: Testbed, fabric: None, thirds: str
) -> None:
    event = (
        '[{at="0 s", link=["Here","There"], rtt="400 ms"}, {at="0 s", link=["Here","Here"], rtt="400 ms"}]'
    )
    real = REAL if network == "loopback" else ()
    outcome = up(testbed, thirds, "--network", network, *real, "--set", f"network.event={event}")
    delays_s = [hops[1]["arrived_at_s"] - hops[1]["sent_at_s"] for hops in hops_of(outcome)]
    assert min(delays_s) >= 0.2
