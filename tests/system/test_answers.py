"""Capacity, advice and explanations through the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.runs import Running, Testbed

SHORT = ("--set", "workload.n_requests=30", "--set", "workload.n_output_tokens=16")
OFTEN = ("--set", "workload.rate=0.6")


def test_capacity_and_explain_answer_in_json(testbed: Testbed) -> None:
    short = ("--set", "workload.n_output_tokens=8", "--runs", "2", "--jobs", "1")
    done = testbed("capacity", "clustered", "--slo", "tpot_mean=1ms", *short, "--json")
    (row,) = json.loads(done.stdout)["policies"]
    assert done.code == 0 and row["max_rate"] is None and row["limited_by"] == "tpot_mean"
    assert {"policy", "max_rate", "low", "high", "limited_by", "goodput_rps", "reason"} <= row.keys()
    assert row["engine"] == "fast" and row["engine_why"] and row["runs_needed"] is None
    done = testbed("explain", "clustered", "--request", "3", "--set", "workload.n_requests=5", "--json")
    answer = json.loads(done.stdout)
    assert sum(answer["parts"].values()) - answer["e2e_s"] < 1e-9 and abs(answer["parts"]["rest_s"]) < 1e-6


def test_advice_is_given_in_json(testbed: Testbed) -> None:
    candidates = ("--budget", "4", "--candidates", "a100@Cluster1=3.5,mig-1g@Cluster0=0.5")
    done = testbed("advise", "clustered", *candidates, "--runs", "2", "--jobs", "1", "--json", *SHORT, *OFTEN)
    answer = json.loads(done.stdout)
    assert done.code == 0 and answer["method"] == "exact" and answer["n_tried"] == 11
    assert {"best", "first", "losses", "now", "tried", "candidates", "goal", "policy"} <= answer.keys()
    assert answer["best"]["add"] == {"a100@Cluster1": 1} and answer["losses"][0]["server"] == "a100-1"
    assert answer["engine"] == "fast" and answer["engine_why"]


def test_a_mistake_is_one_sentence(testbed: Testbed) -> None:
    done = testbed("capacity", "clustered", "--slo", "ttft=5s")
    assert done.code == 2 and done.stderr.count("\n") == 1 and "METRIC_STATISTIC" in done.stderr
    done = testbed("advise", "clustered", "--budget", "4", "--candidates", "a100x@Cluster1=1")
    assert done.code == 2 and done.stderr.count("\n") == 1 and 'unknown hardware "a100x"' in done.stderr


OWN = """
from policies.wsrr import WsRr

class Mine(WsRr):
    name = "mine"
"""


@pytest.mark.parametrize(
    "command",
    [
        ("capacity", "--slo", "tpot_mean=1ms", "--policy"),
        ("sweep", "--out", "out", "--over", "policy=proposed,"),
    ],
    ids=["capacity", "sweep"],
)
def test_a_policy_of_ones_own_in_the_current_folder_is_taken(
    command: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "own_policy_here.py").write_text(OWN, encoding="utf-8")
    *first, last = command
    name = "cg-bp+own_policy_here:Mine"
    last_two = [last, name] if last.startswith("--") else [last + name]
    small = ("--set", "workload.n_requests=5", "--set", "workload.n_output_tokens=8")
    options = ("--runs", "1", "--jobs", "1", *small)
    done = Running([first[0], "clustered", *first[1:], *last_two, *options], tmp_path).wait()
    assert done.code == 0, done.stderr
    found = done.stdout + "".join(path.read_text() for path in tmp_path.glob("out/*.md"))
    assert name in found
