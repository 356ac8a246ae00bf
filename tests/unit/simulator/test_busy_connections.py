"""The fast engine on links: where sessions can meet it goes step by step, and a session alone takes the same either way."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from testbed.experiments import load_experiment
from testbed.simulator.cases import Case
from testbed.simulator.engine import Simulation, simulate
from testbed.simulator.hops import hop_table

APART = (
    "workload.arrivals='constant'",
    "workload.rate=0.005",
    "workload.n_requests=3",
    "workload.n_output_tokens=9",
)
FORWARDING = "policy.communication='server-to-server'"


def simulated(folder: Path, *overrides: str, scenario: str = "clustered") -> Simulation:
    return simulate(Case(load_experiment(scenario, overrides)), "testbed", folder=folder)


@pytest.mark.parametrize(
    "options",
    [
        (),
        (FORWARDING,),
        ("calibration.set='petals-clustered'",),
        ("calibration.set='petals-clustered'", FORWARDING),
        ("compute.hub_token='7 ms'", "hardware.a100.context_slope='3 us'", "network.pairs.3.rate='7 Mbit/s'"),
    ],
    ids=["hub-spoke", "forwarding", "overheads", "overheads and forwarding", "slow links and slow clients"],
)
def test_a_session_alone_takes_the_same_in_closed_form_and_step_by_step_to_the_nanosecond(
    options: tuple[str, ...], tmp_path: Path
) -> None:
    """A server with batches computes the steps of one session as without, but the engine cannot know that."""
    closed = simulated(tmp_path, *APART, *options)
    stepped = simulated(tmp_path, *APART, *options, "compute.batching='continuous'")
    assert "in closed form" in closed.why and "step by step" in stepped.why
    for one, other in zip(closed.rows, stepped.rows, strict=True):
        assert one.chain == other.chain != ""
        for name in ("queue_s", "setup_s", "ttft_s", "e2e_s"):
            assert one.times[name] == pytest.approx(other.times[name], abs=0.5e-9), name
    tables = hop_table(closed), hop_table(stepped)
    for name in ("sent_at_s", "arrived_at_s", "departed_at_s", "received_at_s"):
        assert np.max(np.abs(getattr(tables[0], name) - getattr(tables[1], name))) < 1e-7, name
    found = [
        {(row.from_, row.to): (row.use_ratio, row.wait_s.p99) for row in run.links or ()}
        for run in (closed, stepped)
    ]
    assert found[0].keys() == found[1].keys() and found[0]
    for link, (use_ratio, wait_s) in found[0].items():
        assert use_ratio == pytest.approx(found[1][link][0]), link
        assert max(wait_s, found[1][link][1]) < 1e-4, "nothing but acknowledgements is waited for"


@pytest.mark.parametrize(
    ("sender", "waits_s", "takes_s"), [(1, (0.026, 0.053), 0.404), (0, (0.34, 0.36), 0.357)]
)
def test_on_a_sites_uplink_pairs_take_turns_but_not_the_messages_of_one(
    sender: int, waits_s: tuple[float, float], takes_s: float, tmp_path: Path
) -> None:
    """Tokens of client 0 while a prompt of 860 kB comes from another client of the site, or from itself (docs/networks.md)."""
    simulation = simulated(
        tmp_path,
        "clients=[{site='Cluster1', count=2}]",
        "servers=[{hardware='a100', site='Cluster0'}]",
        "model.n_blocks=10",
        "network={kind='clusters', pairs=[{sites=['Cluster1', 'Cluster0'], rtt='20 ms', rate='1 Gbit/s'}]}",
        "sites=[{name='Cluster1', up='20 Mbit/s'}]",
        f"workload={{arrivals='listed', requests=[[0, 1, 30, 0], [1.0, 30, 1, {sender}]]}}",
        "policy={placement='whole-model', routing='ws-rr'}",
    )
    hops = hop_table(simulation)
    up_s = hops.arrived_at_s - hops.sent_at_s
    tokens_s, (prompt_s,) = up_s[(hops.request == 0) & (hops.token > 0)], up_s[hops.request == 1]
    alone_s = np.min(tokens_s)
    assert waits_s[0] < np.max(tokens_s) - alone_s < waits_s[1]
    way_s = alone_s - 28_800 * 8 / 20e6
    assert prompt_s - way_s == pytest.approx(takes_s, abs=0.002)
