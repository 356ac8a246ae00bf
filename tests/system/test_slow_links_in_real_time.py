"""As ``test_slow_links``, with real processes in real time: readers of a served testbed hang up behind slow links.

On ``loopback``. On ``fabric`` the kernel's acknowledgements wait for the same links, and its timers decide how long that takes.
"""

from __future__ import annotations

import contextlib
import http.client
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.runs import rows_of
from tests.support.serving import Serving, serving

SCENARIO = """
name = "slow"
[model]
name = "small"
n_blocks = 2
hidden_size = 1024
value_bytes = 2
petals_cache_tokens = 64
block_size = "1 GB"
cache_per_token = "32 kB"
[[servers]]
hardware = "a100"
site = "home"
name = "s0"
[[clients]]
site = "user"
name = "c0"
[network]
kind = "clusters"
pairs = [
    { sites = ["home", "user"], rtt = "20 ms", rate = "5 Mbit/s" },
    { sites = ["home", "home"], rtt = "1 ms", rate = "1 Gbit/s" },
    { sites = ["user", "user"], rtt = "1 ms", rate = "1 Gbit/s" },
]
[workload]
arrivals = "listed"
requests = [[0, 20, 2], [10, 20, 2]]
[recovery]
connect_timeout = "3 s"
request_timeout = "3 s"
[policy]
name = "proposed"
design_concurrency = 8
"""
LONG = 1000
"""A prompt of so many tokens takes 3.3 s on the link: longer than the limits."""


def test_readers_who_hang_up_behind_a_slow_link_disturb_nobody(tmp_path: Path) -> None:
    path = tmp_path / "slow.toml"
    path.write_text(SCENARIO, encoding="utf-8")
    options = ("--network", "loopback", "--no-twin", "--no-report", "--max-model-len", "1200")
    with serving(tmp_path / "run", str(path), *options) as served, ThreadPoolExecutor(8) as pool:
        stays = [pool.submit(_complete, served, LONG)]
        _hang_up(served, LONG, after_s=1.0)
        stays.append(pool.submit(_complete, served, 5))
        assert [asked.result() for asked in stays] == [200, 200]
        _hang_up(served, LONG, after_s=0.5)
        served.end()
    summary = json.loads((tmp_path / "run" / "summary.json").read_text(encoding="utf-8"))
    statuses = sorted(row["status"] for row in rows_of(tmp_path / "run" / "requests.parquet"))
    assert statuses == ["cancelled"] * 2 + ["completed"] * 2
    assert not any(summary["leaks"].values()), summary["leaks"]
    events = (tmp_path / "run" / "events.jsonl").read_text(encoding="utf-8")
    assert "unreachable" not in events and "detected" not in events
    for log in (tmp_path / "run" / "logs").glob("*.log"):
        assert "Traceback" not in log.read_text(encoding="utf-8"), log


def _body(n_tokens: int) -> str:
    return json.dumps({"model": "small", "prompt": [5] * n_tokens, "max_tokens": 2, "stream": True})


def _complete(served: Serving, n_tokens: int) -> int:
    return served.ask("/v1/completions", json.loads(_body(n_tokens))).status


def _hang_up(served: Serving, n_tokens: int, after_s: float) -> None:
    """Asks, and closes the connection when nothing has come for ``after_s``."""
    reader = http.client.HTTPConnection(*served.address, timeout=after_s)
    with contextlib.closing(reader), contextlib.suppress(TimeoutError):
        reader.request("POST", "/v1/completions", _body(n_tokens), {"Content-Type": "application/json"})
        reader.getresponse().read()
        pytest.fail("the prompt takes longer than that")
