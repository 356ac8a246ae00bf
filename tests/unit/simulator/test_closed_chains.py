"""Chains that are closed while a server still has a step of theirs: server-to-server, where caches grow."""

from __future__ import annotations

import json
from pathlib import Path

import testbed as tb

TWO_HOPS = """
name = "two-hops"
[model]
name = "small"
n_blocks = 4
hidden_size = 64
value_bytes = 2
block_size = "1 MB"
cache_per_token = "1 kB"
petals_cache_tokens = 4096
[hardware.narrow]
memory = "2.33 MB"                # of which its caches have 330 kB: 165 tokens of two blocks
decode = "1 ms"
prefill_base = "1 ms"
prefill_per_token = "0.01 ms"
petals_forward_rps = 1000
petals_network_rps = 1000
[hardware.slow]
base = "narrow"
memory = "1 GB"
prefill_base = "30 ms"
[[servers]]
hardware = "narrow"
site = "a"
[[servers]]
hardware = "slow"
site = "b"
[clients]
site = "c"
[network]
kind = "clusters"
pairs = [
    { sites = ["a", "b"], rtt = "10 ms", rate = "1000000 Gbit/s" },
    { sites = ["a", "c"], rtt = "11 ms", rate = "1000000 Gbit/s" },
    { sites = ["b", "c"], rtt = "13 ms", rate = "1000000 Gbit/s" },
]
[workload]
arrivals = "listed"
requests = [[0, 30, 40], [0.5, 100, 10]]
[compute]
batching = "continuous"
chunk_tokens = 10
[cache]
mode = "paged"
high_water = 1.0
[policy]
placement = "fixed:PLACEMENT"
routing = "ws-rr"
communication = "server-to-server"
design_concurrency = 1
"""


def test_a_preempted_sessions_prompt_is_dropped_where_its_chain_is_closed(tmp_path: Path) -> None:
    """The first server needs the second request's cache while its prompt is computed, in chunks, on the other server."""
    placement, path = tmp_path / "placement.json", tmp_path / "two-hops.toml"
    placement.write_text(json.dumps([[1, 2], [3, 2]]))
    path.write_text(TWO_HOPS.replace("PLACEMENT", str(placement)))
    fast, virtual = tb.simulate(str(path)), tb.simulate(str(path), engine="virtual")
    assert (fast.engine, virtual.engine) == ("fast", "virtual")
    assert fast.requests["n_preemptions"].to_pylist() == [0, 1]
    for column in ("n_preemptions", "preempted_tokens"):
        assert fast.requests[column].to_pylist() == virtual.requests[column].to_pylist()
    for column in ("ttft_s", "e2e_s", "preempted_s"):
        pairs = zip(fast.requests[column].to_pylist(), virtual.requests[column].to_pylist(), strict=True)
        assert all(abs(one - other) < 1e-7 for one, other in pairs), column
