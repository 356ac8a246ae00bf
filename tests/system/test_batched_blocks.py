"""Runs of real blocks that compute waiting sessions in one forward: every token is the whole model's."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import pytest

from tests.support.blocks import need_blocks
from tests.support.runs import Testbed, rows_of

need_blocks()

TIMEOUT_S = 300.0
"""Of a command: it imports torch twice, which a busy machine takes its time for."""
pytestmark = pytest.mark.timeout(TIMEOUT_S + 60)

TOGETHER = (
    *("bloom-tiny", "--compute", "blocks", "--network", "loopback", "--no-report", "--json"),
    *("--set", "compute.batching=continuous", "--set", "compute.chunk_tokens=6"),
    # All at once, on few servers: so many steps wait that some must be computed together.
    *("--set", "workload.rate=1000", "--set", "policy.design_concurrency=12"),
)


def sized(n_requests: int, n_output_tokens: int) -> tuple[str, ...]:
    sizes = {"n_requests": n_requests, "n_output_tokens": n_output_tokens}
    return tuple(word for key, n in sizes.items() for word in ("--set", f"workload.{key}={n}"))


def most_together(run_dir: Path) -> int:
    """The steps of the largest batch."""
    return max(hop["batch_steps"] for hop in rows_of(run_dir / "hops.parquet"))


NOTHING_LEFT = {"sessions": 0, "cache_bytes": 0, "descriptors": 0, "namespaces": 0}


def test_a_run_batches_and_its_trace_and_twin_know(testbed: Testbed) -> None:
    outcome = testbed.up(*TOGETHER, *sized(12, 8), timeout_s=TIMEOUT_S)
    assert outcome.code == 0, outcome.stderr
    summary = outcome.json()
    assert (summary["n_tokens_checked"], summary["n_tokens_altered"]) == (12 * 8, 0)
    assert summary["twin"]["e2e_s"]["n"] == 12
    assert summary["emulation_error_of"] is None  # the scenario's times were not measured with its blocks
    hops = rows_of(outcome.run_dir / "hops.parquet")
    assert most_together(outcome.run_dir) > 1
    # A prompt of 4 to 16 tokens comes in chunks: its last one, and at most one token of each other step.
    assert all(hop["batch_steps"] <= hop["batch_tokens"] <= 6 + hop["batch_steps"] - 1 for hop in hops)
    # A step's decodes all end with it: what they have in their caches adds up, and they began together.
    n_input = {row["request"]: row["n_input_tokens"] for row in rows_of(outcome.run_dir / "requests.parquet")}
    contexts: defaultdict[tuple[str, float, int], int] = defaultdict(int)
    for hop in hops:
        assert hop["arrived_at_s"] < hop["departed_at_s"] and hop["batch_began_at_s"] < hop["departed_at_s"]
        step = hop["server"], hop["batch_began_at_s"], hop["batch_context_tokens"]
        contexts[step] += n_input[hop["request"]] + hop["token"] - 1 if hop["token"] else 0
    assert all(cached == context_tokens for (_, _, context_tokens), cached in contexts.items())
    assert all(hop["model_compute_s"] > 0 for hop in hops)
    trace = json.loads((outcome.run_dir / "trace.json").read_text(encoding="utf-8"))
    events = trace["traceEvents"] if isinstance(trace, dict) else trace
    assert {event["args"]["batch_steps"] for event in events if event["name"] == "up"} == {
        hop["batch_steps"] for hop in hops
    }
    assert most_together(outcome.run_dir / "twin") > 1


@pytest.mark.parametrize("communication", ["hub-spoke", "server-to-server"])
def test_caches_that_grow_and_sessions_that_are_preempted_leave_the_tokens_alone(
    testbed: Testbed, communication: str
) -> None:
    small = ("--set", 'hardware.small.memory="700 kB"', "--set", 'hardware.large.memory="1100 kB"')
    paged = ("--set", "cache.mode=paged", "--set", "cache.page_tokens=4", "--no-twin")
    few = ("--set", "policy.design_concurrency=2", "--set", f"policy.communication={communication}")
    outcome = testbed.up(*TOGETHER, *small, *paged, *few, *sized(8, 16), timeout_s=TIMEOUT_S)
    assert outcome.code == 0, outcome.stderr
    summary = outcome.json()
    assert (summary["n_tokens_checked"], summary["n_tokens_altered"]) == (8 * 16, 0)
    assert most_together(outcome.run_dir) > 1
    assert summary["preemption"]["n_preemptions"] > 0
    assert summary["leaks"] == NOTHING_LEFT


def test_servers_that_forward_and_one_that_dies_leave_the_tokens_alone(
    testbed: Testbed, tmp_path: Path
) -> None:
    shipped = Path(__file__).parents[2] / "scenarios" / "bloom-tiny.toml"
    kill = '\n[[fault]]\nkind = "kill"\nserver = ["large-0", "large-2"]\nafter = { request = 2, tokens = 5 }\nfor = "1 s"\n'
    scenario = tmp_path / "failing.toml"
    scenario.write_text(shipped.read_text(encoding="utf-8") + kill, encoding="utf-8")
    forward = ("--set", "policy.communication=server-to-server", "--no-twin")
    outcome = testbed.up(str(scenario), *TOGETHER[1:], *forward, *sized(6, 30), timeout_s=TIMEOUT_S)
    assert outcome.code == 0, outcome.stderr
    summary = outcome.json()
    assert (summary["n_tokens_checked"], summary["n_tokens_altered"]) == (6 * 30, 0)
    assert most_together(outcome.run_dir) > 1
    assert summary["n_replays"] >= 1
    assert summary["leaks"] == NOTHING_LEFT
