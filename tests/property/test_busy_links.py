"""The fast engine on links beside the testbed itself in virtual time, on random small scenarios."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from testbed.experiments import load_experiment
from testbed.experiments.sources import Document
from testbed.simulator.cases import Case
from testbed.simulator.engine import Simulation, simulate
from tests.support.effort import n_drawn
from tests.support.small_model import SMALL_HARDWARE, SMALL_MODEL

BASE: dict[str, Any] = {
    "name": "links",
    "model": SMALL_MODEL,
    "hardware": {"small": SMALL_HARDWARE},
    "servers": [{"hardware": "small", "site": site} for site in ("B", "C")],
    "clients": [{"site": "A"}, {"site": "B"}],
    "workload": {"arrivals": "poisson", "n_requests": 6},
    "policy": {"name": "proposed", "design_concurrency": 1},
}
RATES = (8, 40, 200, 1000, 10_000)
"""Mbit/s."""
TIMES = ("queue_s", "ttft_s", "tpot_s", "per_token_s", "e2e_s")


@st.composite
def scenarios(draw: st.DrawFn) -> dict[str, Any]:
    """Two clients at a distance, and two servers with half of the model each and room for all, whose links are fast or busy, with prompts of one to some dozen messages."""
    pairs = [
        {
            "from": a,
            "to": b,
            "delay": f"{draw(st.integers(1, 90))} ms",
            "rate": f"{draw(st.sampled_from(RATES))} Mbit/s",
        }
        for a, b in (("A", "B"), ("B", "A"), ("B", "C"), ("C", "B"), ("C", "A"), ("A", "C"), ("B", "B"))
    ]
    workload = BASE["workload"] | {
        "rate": draw(st.sampled_from([0.5, 2, 10])),
        "n_input_tokens": draw(st.sampled_from([1, 20, 300])),
        "n_output_tokens": draw(st.integers(1, 10)),
    }
    policy = BASE["policy"] | {"communication": draw(st.sampled_from(["hub-spoke", "server-to-server"]))}
    compute = {"batching": draw(st.sampled_from(["none", "continuous"]))}
    network = {"kind": "clusters", "pairs": pairs}
    changes = {"network": network, "workload": workload, "policy": policy, "compute": compute}
    return BASE | changes | {"seed": draw(st.integers(0, 9))}


def figures(simulation: Simulation) -> dict[str, tuple[float, float]]:
    """The mean and the 99th percentile of every metric."""
    found = {}
    for name in TIMES:
        values = [row.times[name] for row in simulation.rows if row.times[name] is not None]
        if values:
            found[name] = float(np.mean(values)), float(np.percentile(values, 99))
    return found


@settings(max_examples=n_drawn(8), deadline=None)
@given(scenarios())
def test_where_messages_wait_for_links_means_are_within_one_percent_and_p99_within_three(
    scenario: dict[str, Any],
) -> None:
    case = Case(load_experiment(Document(scenario)))
    fast, system = simulate(case, "testbed"), simulate(case, "testbed", is_virtual=True, live=False)
    event(fast.why.partition("; ")[2].partition(",")[0])
    assert [row.chain for row in fast.rows] == [row.chain for row in system.rows]
    ours, others = figures(fast), figures(system)
    assert ours.keys() == others.keys()
    for name, (mean_s, p99_s) in ours.items():
        assert abs(mean_s - others[name][0]) <= 0.01 * others[name][0] + 1e-6, (name, ours, others)
        assert abs(p99_s - others[name][1]) <= 0.03 * others[name][1] + 1e-6, (name, ours, others)


@pytest.mark.parametrize(("batching", "seed"), [("none", 0), ("none", 3), ("continuous", 4)])
def test_each_request_takes_as_long_as_in_the_system_but_for_bytes_of_numbers(
    batching: str, seed: int
) -> None:
    """Prompts and results of 80 parts meet on slow links: what is written when, headers and confirmations included, decides."""
    sites = (("A", "A", 4), ("A", "B", 40), ("A", "C", 60), ("B", "C", 30), ("B", "B", 4), ("C", "C", 4))
    pairs = [{"sites": [a, b], "rtt": f"{rtt_ms} ms", "rate": "40 Mbit/s"} for a, b, rtt_ms in sites]
    lengths = {"n_requests": 5, "rate": 2, "n_input_tokens": 600, "n_output_tokens": 8}
    changes = {"network": {"kind": "clusters", "pairs": pairs}, "workload": BASE["workload"] | lengths}
    scenario = BASE | changes | {"compute": {"batching": batching}, "seed": seed}
    case = Case(load_experiment(Document(scenario)))
    fast, system = simulate(case, "testbed"), simulate(case, "testbed", is_virtual=True, live=False)
    for one, other in zip(fast.rows, system.rows, strict=True):
        assert one.chain == other.chain
        for name in ("queue_s", "ttft_s", "e2e_s"):
            # A part has up to two bytes more or less: 0.4 us at this rate.
            assert one.times[name] == pytest.approx(other.times[name], abs=1.5e-3), name
