"""What several runs under several policies come to: percentiles, what is left out, gains paired by seed."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from testbed.cli.main import app
from testbed.simulator.answer import TIMES
from testbed.simulator.runs import add_gain

PAIR = ("--policy", "petals", "--policy", "proposed")
GIVE_UP = ("--set", 'backoff.give_up="5 s"')


SHORT = (
    "--set",
    "workload.n_requests=40",
    "--set",
    "workload.n_output_tokens=24",
    "--set",
    "workload.rate=1.5",
)
"""More requests per second than in the scenarios, but fewer, in fewer steps each."""


def simulated(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    app(["simulate", *SHORT, *arguments, "--json"], standalone_mode=False)
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def text(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    app(["simulate", *SHORT, *arguments], standalone_mode=False)
    return " ".join(capsys.readouterr().out.split())


def of_runs(policy: str, *per_token_ms: float | None, n_failed: int = 0) -> dict[str, Any]:
    """The object of a policy whose runs had these means, and nothing but them."""
    runs: list[dict[str, Any]] = []
    for value in per_token_ms:
        flat = dict.fromkeys(("p50", "p95", "p99"), value)
        means = dict.fromkeys((*TIMES, "max_concurrent"), value)
        percentiles = dict.fromkeys(TIMES, flat)
        runs.append({"feasible": True, "mean": means, "percentiles": percentiles, "n_failed": n_failed})
    return {"policy": policy, "runs": runs}


def gain_of(base: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
    add_gain(base, row)
    found: dict[str, Any] = row["gain"]
    return found


def test_a_gain_is_paired_by_seed_as_a_hand_calculation_has_it() -> None:
    # Differences 3, 2, 4: mean 3, s = 1; t of 2 degrees is 4.30265; 4.30265 / sqrt(3) = 2.48414.
    # The runs themselves lie 50 apart: unpaired intervals would be 20 times as wide.
    gain = gain_of(of_runs("old", 103.0, 52.0, 154.0), of_runs("new", 100.0, 50.0, 150.0))
    found = gain["mean"]["per_token_ms"]
    assert gain["against"] == "old" and found["n_runs"] == 3
    assert found["gain_ms"] == pytest.approx(3.0) and found["ci95_ms"] == pytest.approx(2.48414, abs=1e-5)
    assert found["ratio"] == pytest.approx(3 / 103) and found["verdict"] == "gain"
    assert gain["percentiles"]["ttft_ms"]["p99"] == found


@pytest.mark.parametrize(
    ("values", "verdict"),
    [((3.0, 2.0, 4.0), "loss"), ((-1.0, 2.0, 1.0), "unresolved"), ((0.0, 0.0, 0.0), "equal")],
)
def test_a_gain_is_one_only_if_its_interval_leaves_zero_out(values: tuple[float, ...], verdict: str) -> None:
    gain = gain_of(
        of_runs("old", 10.0, 20.0, 30.0), of_runs("new", *(10.0 * (i + 1) + v for i, v in enumerate(values)))
    )
    assert gain["mean"]["ttft_ms"]["verdict"] == verdict


def test_a_run_that_one_policy_lacks_is_in_no_pair() -> None:
    base, row = of_runs("old", 10.0, 20.0, None, 40.0), of_runs("new", 8.0, 17.0, 29.0, 1.0)
    row["runs"][3]["feasible"] = False
    found = gain_of(base, row)["mean"]["rest_ms"]
    assert found["n_runs"] == 2 and found["gain_ms"] == pytest.approx(2.5)
    row["runs"][0]["feasible"] = False
    assert gain_of(base, row)["mean"]["rest_ms"] is None


def test_a_gain_over_a_bootstrap_is_as_wide_as_the_recording_allows() -> None:
    row = of_runs("new", 100.0, 50.0, 150.0)
    row["drawn"] = {"draw": "bootstrap", "n_requests": 50, "n_recorded": 75}
    found = gain_of(of_runs("old", 103.0, 52.0, 154.0), row)["mean"]["per_token_ms"]
    # s = 1 with a variance of 1/3 + 50/75 = 1
    assert found["ci95_ms"] == pytest.approx(4.30265, abs=1e-5) and found["verdict"] == "unresolved"


def test_policies_are_compared_on_the_same_arrivals(capsys: pytest.CaptureFixture[str]) -> None:
    short = ("--set", "workload.n_output_tokens=8")
    petals, proposed = simulated(capsys, "clustered", "--runs", "3", *PAIR, *short)
    assert "gain" not in petals
    differences = [
        a["mean"]["per_token_ms"] - b["mean"]["per_token_ms"]
        for a, b in zip(petals["runs"], proposed["runs"], strict=True)
    ]
    assert [run["seed"] for run in petals["runs"]] == [run["seed"] for run in proposed["runs"]]
    assert proposed["gain"]["mean"]["per_token_ms"]["gain_ms"] == pytest.approx(sum(differences) / 3)


def test_a_policy_gains_nothing_over_itself(capsys: pytest.CaptureFixture[str]) -> None:
    same_rate = ("--policy", "proposed", "--policy", "cg-bprr", "--set", "workload.rate=0.001")
    same_rate += ("--runs", "3", "--set", "workload.n_requests=5")
    _, same = simulated(capsys, "clustered", *same_rate)
    found = same["gain"]["mean"]["per_token_ms"]
    assert found["gain_ms"] == found["ci95_ms"] == 0.0 and found["verdict"] == "equal"
    assert "per token: equal in every pair" in text(capsys, "clustered", *same_rate)


def test_percentiles_of_a_run_are_of_its_completed_requests(capsys: pytest.CaptureFixture[str]) -> None:
    (found,) = simulated(capsys, "clustered", *GIVE_UP, "--set", "workload.n_requests=60")
    times = [r["ttft_ms"] for r in found["requests"] if "status" not in r]
    assert len(times) == found["n_completed"] < found["n_requests"] == 60
    assert list(found["percentiles"]["ttft_ms"].values()) == pytest.approx(
        list(np.percentile(times, [50, 95, 99]))
    )


def test_percentiles_over_runs_have_the_interval_of_the_runs_percentiles(
    capsys: pytest.CaptureFixture[str],
) -> None:
    (found,) = simulated(capsys, "clustered", "--runs", "3")
    sample = [run["percentiles"]["ttft_ms"]["p95"] for run in found["runs"]]
    deviation = math.sqrt(sum((v - sum(sample) / 3) ** 2 for v in sample) / 2)
    assert found["percentiles"]["ttft_ms"]["p95"] == pytest.approx(sum(sample) / 3)
    assert found["percentiles_ci95"]["ttft_ms"]["p95"] == pytest.approx(
        4.302653 * deviation / math.sqrt(3), rel=1e-6
    )


def test_what_means_leave_out_is_counted_with_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    (found,) = simulated(capsys, "clustered", "--runs", "3", *GIVE_UP)
    assert found["n_requests"] == 120 and found["n_failed"] == 120 - found["n_completed"] > 0
    assert (
        found["n_failed"]
        == sum(run["n_failed"] for run in found["runs"])
        == sum(found["failed_because"].values())
    )
    keys = ("workload.n_requests=100", "workload.rate=20", "backoff.give_up='1 s'")
    keys += ("workload.n_output_tokens={distribution='uniform', low=20, high=100}",)
    more = ("--policy", "petals", *(word for key in keys for word in ("--set", key)))
    (spread,) = simulated(capsys, "clustered", *more)
    reasons = {r["reason"] for r in spread["requests"] if "reason" in r}
    assert len(reasons) > 1 and list(spread["failed_because"].values()) == [spread["n_failed"]]
    # Those who gave up waited longest, and are in no mean.
    assert found["mean_waiting_of_all_ms"] > found["mean"]["waiting_ms"]


def test_the_text_has_percentiles_gains_and_what_is_left_out_beside_the_means(
    capsys: pytest.CaptureFixture[str],
) -> None:
    few = ("clustered", "--runs", "3", *PAIR, *GIVE_UP)
    shown = text(capsys, *few)
    (_, found) = simulated(capsys, *few)
    for p in ("p50", "p95", "p99"):
        value, half = (found[key]["per_token_ms"][p] / 1e3 for key in ("percentiles", "percentiles_ci95"))
        assert f" {p} {value:.3f} ±{half:.3f}" in shown
    assert f"{found['n_completed']} of 120" in shown and "no room at the last attempt within 5 s" in shown
    assert "means and percentiles are of the others; the mean wait of all requests is" in shown
    assert "proposed against petals, paired by seed (not of the same requests: " in shown
    gain = found["gain"]["mean"]["per_token_ms"]
    assert f"per token {gain['gain_ms'] / 1e3:.3f} s less ±{gain['ci95_ms'] / 1e3:.3f}" in shown


def test_where_every_request_completed_nothing_is_said_to_be_left_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    shown = text(capsys, "clustered", "--runs", "2", *PAIR, "--set", "workload.n_requests=30")
    assert "of requests" not in shown and "left out" not in shown and "did not complete" not in shown


def test_means_without_the_session_setup_say_of_how_many_requests_they_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ("clustered", "--runs", "2", "--session-setup", "reference", *GIVE_UP)
    shown = text(capsys, *arguments)
    (found,) = simulated(capsys, *arguments)
    (bare,) = simulated(capsys, "clustered", "--runs", "2", *GIVE_UP)
    n_failed = found["n_failed_without_session_setup"]
    assert n_failed == bare["n_failed"] != found["n_failed"]
    assert f"{found['n_completed']} of 80" in shown and f"{80 - n_failed} of 80" in shown
