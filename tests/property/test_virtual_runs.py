"""Whole runs in virtual time on memory: whatever the scenario, everything is served, and twice the same."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from testbed.experiments import load_experiment
from testbed.runs.session import run_quietly
from tests.support.effort import n_drawn

RECORD = ("events/client-0.log", "events.jsonl", "hops.parquet", "requests.parquet", "trace.json")

SERVERS = (
    '[{ hardware = "a100", site = "Here", count = 2 }, { hardware = "a100", site = "There", count = 2 }]'
)


def scenario(
    rtt_ms: float, rate_mbps: float, jitter: bool, forwarding: bool, n_requests: int, serial: bool, seed: int
) -> str:
    return f"""
seed = {seed}
model = {{ profile = "bloom-176b", n_blocks = 30 }}
servers = {SERVERS}
clients = {{ site = "Here" }}
[network]
backend = "memory"
kind = "clusters"
jitter = "{rtt_ms / 4 if jitter else 0} ms"
pairs = [
    {{ sites = ["Here", "Here"], rtt = "{rtt_ms} ms", rate = "1 Gbit/s" }},
    {{ sites = ["There", "There"], rtt = "5 ms", rate = "1 Gbit/s" }},
    {{ sites = ["Here", "There"], rtt = "{2 * rtt_ms} ms", rate = "{rate_mbps} Mbit/s" }},
]
[workload]
rate = 1
n_requests = {n_requests}
n_input_tokens = {{ distribution = "uniform", low = 1, high = 30 }}
n_output_tokens = {{ distribution = "uniform", low = 1, high = 6 }}
[policy]
name = "proposed"
communication = "{"server-to-server" if forwarding else "hub-spoke"}"
[compute]
serial = {str(serial).lower()}
"""


FAULTS = st.lists(
    st.tuples(
        st.sampled_from(["kill", "stop", "slow"]), st.integers(0, 3), st.floats(0, 8), st.floats(0.1, 5)
    ),
    max_size=3,
)


def fault_tables(faults: list[tuple[str, int, float, float]]) -> str:
    factor = {"slow": "\nfactor = 3"}
    return "".join(
        f'\n[[fault]]\nkind = "{kind}"\nserver = "a100-{server}"\nat = "{at_s} s"\nfor = "{for_s} s"'
        + factor.get(kind, "")
        for kind, server, at_s, for_s in faults
    )


def run(text: str) -> tuple[dict[str, Any], list[bytes]]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "drawn.toml"
        path.write_text(text)
        summary = run_quietly(load_experiment(str(path)), Path(folder) / "run")
        return summary, [(Path(folder) / "run" / name).read_bytes() for name in RECORD]


@settings(max_examples=n_drawn(10), deadline=None)
@given(
    text=st.builds(
        scenario,
        st.floats(0, 200),
        st.floats(10, 1000),
        st.booleans(),
        st.booleans(),
        st.integers(1, 6),
        st.booleans(),
        st.integers(0, 1000),
    ),
    faults=FAULTS,
)
def test_a_run_serves_every_request_leaves_nothing_and_is_the_same_twice(
    text: str, faults: list[tuple[str, int, float, float]]
) -> None:
    text += fault_tables(faults)
    summary, record = run(text)
    assert summary["n_completed"] == summary["n_requests"], json.dumps(summary["policy"])
    assert not any(summary["leaks"].values()), summary["leaks"]
    assert summary["clock"] == "virtual"
    _, again = run(text)
    assert record == again
