"""Servers with real transformer blocks that die: the tokens are those of the whole model on one machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.blocks import need_blocks
from tests.support.runs import Testbed, assert_tables_hold_the_whole_log

need_blocks()

TIMEOUT_S = 300.0
"""Of a command: it imports torch twice, which a busy machine takes its time for."""
pytestmark = pytest.mark.timeout(TIMEOUT_S + 60)

FAULTS = """
[[fault]]
kind = "kill"
server = ["large-0", "large-2"]
after = { request = 2, tokens = 5 }
for = "1 s"

[[fault]]
kind = "slow"
server = "large-1"
at = "0.5 s"
factor = 3

[[fault]]
kind = "kill"
server = "small-1"
after = { request = 5, tokens = 8 }
"""


@pytest.mark.usefixtures("fabric")
def test_real_blocks_give_the_same_tokens_with_and_without_failures(testbed: Testbed, tmp_path: Path) -> None:
    shipped = Path(__file__).parents[2] / "scenarios" / "bloom-tiny.toml"
    scenario = tmp_path / "failing.toml"
    scenario.write_text(shipped.read_text(encoding="utf-8") + FAULTS, encoding="utf-8")
    options = ("--compute", "blocks", "--network", "fabric", "--no-report", "--json", "--no-twin")
    lengths = ("--set", "workload.n_requests=6", "--set", "workload.n_output_tokens=40")
    # The one run of real blocks that begins as a user's does: all others are forks of what has imported torch.
    outcome = testbed.up(str(scenario), *options, *lengths, timeout_s=TIMEOUT_S, anew=True)
    assert outcome.code == 0, outcome.stderr
    summary = outcome.json()
    assert (summary["n_completed"], summary["n_tokens_checked"], summary["n_tokens_altered"]) == (6, 240, 0)
    assert summary["n_replays"] >= 1
    assert summary["leaks"] == {"sessions": 0, "cache_bytes": 0, "descriptors": 0, "namespaces": 0}
    assert_tables_hold_the_whole_log(outcome.run_dir)
    lines = (outcome.run_dir / "events.jsonl").read_text(encoding="utf-8").splitlines()
    faults = [event for event in map(json.loads, lines) if event["event"] == "fault"]
    assert [fault["applies"] for fault in faults] == [True] * 4
