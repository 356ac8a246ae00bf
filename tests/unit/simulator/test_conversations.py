"""Conversations as the testbed serves them in virtual time."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from testbed.experiments import load_experiment
from testbed.records.requests import RequestRow
from testbed.simulator.cases import Case
from testbed.simulator.engine import simulate

SMALL = """
name = "talk"
[model]
name = "small"
n_blocks = 4
hidden_size = 64
value_bytes = 2
block_size = "100 MB"
cache_per_token = "1 kB"
[hardware.small]
memory = "250 MB"
decode = "1 ms"
prefill_base = "1 ms"
prefill_per_token = "100 us"
[[servers]]
hardware = "small"
site = "B"
[[servers]]
hardware = "small"
site = "C"
[clients]
site = "A"
[network]
kind = "clusters"
pairs = [
    { sites = ["A", "B"], rtt = "20 ms", rate = "1 Gbit/s" },
    { sites = ["A", "C"], rtt = "30 ms", rate = "1 Gbit/s" },
    { sites = ["B", "C"], rtt = "10 ms", rate = "1 Gbit/s" },
]
[workload]
arrivals = "constant"
rate = 0.5
n_requests = 6
n_input_tokens = 40
n_output_tokens = 5
turns = 3
think_time = "2 s"
n_further_tokens = 10
[policy]
name = "proposed"
design_concurrency = 1
"""


def served(folder: Path, *overrides: str) -> list[RequestRow]:
    path = folder / "talk.toml"
    path.write_text(SMALL)
    simulation = simulate(Case(load_experiment(str(path), overrides)), "testbed")
    assert simulation.engine == "virtual"
    return list(simulation.rows)


@pytest.mark.parametrize("communication", ["hub-spoke", "server-to-server"])
def test_a_turn_comes_after_the_last_answer_and_the_time_to_think(tmp_path: Path, communication: str) -> None:
    rows = served(tmp_path, f"policy.communication={communication}")
    assert {row.status for row in rows} == {"completed"}
    assert [(row.conversation, row.turn) for row in rows] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    for before, row in pairwise(rows):
        if row.turn:
            assert before.ended_at_s is not None
            assert row.arrival_at_s == row.arrived_at_s == pytest.approx(before.ended_at_s + 2, abs=1e-9)


def test_a_failed_turn_ends_its_conversation(tmp_path: Path) -> None:
    """A server is gone for a while in the middle of the second answer."""
    fault = "fault=[{kind='kill',server=['small-1'],after={request=1,tokens=2},for='1 s'}]"
    rows = served(tmp_path, fault, "recovery.mode=off")
    assert [row.status for row in rows[:3]] == ["completed", "failed", "failed"]
    assert rows[2].reason == "an earlier turn of its conversation failed"
    assert rows[2].ended_at_s == rows[1].ended_at_s
