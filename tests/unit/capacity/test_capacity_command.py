from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from testbed.errors import UserError
from testbed.experiments.policy import PolicyChoice
from testbed.simulator.cases import scenario_case
from testbed.simulator.engine import simulate
from testbed.studies.capacity import command
from testbed.studies.capacity.command import RUNS, Options, capacity_command
from testbed.studies.capacity.measures import load_measures

ONE_SERVER = (
    'servers=[{hardware="a100",site="Cluster1",count=1,memory="13.4 GB"}]',
    *("model.n_blocks=10", "policy.queue=fifo", "workload.arrivals=constant", "workload.rate=0.3"),
    *("policy.design_concurrency=1", "workload.n_input_tokens=140", "workload.n_output_tokens=8"),
)
"""Room for one session at a time; the next one begins as soon as the last has ended."""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # runs are kept there


def capacity(slo: str, *overrides: str, target: str = "clustered", **options: Any) -> dict[str, Any]:
    answer, text, code = capacity_command(target, Options(slo, overrides=overrides, **{"jobs": 1, **options}))
    return {**answer, "text": text, "code": code}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The capacity of the one server with the usual edge."""
    return capacity("queue_p99=10ms", *ONE_SERVER, n_runs=2, out=tmp_path_factory.mktemp("found"))


def test_one_session_at_a_time_serves_as_many_as_its_time_says(found: dict[str, Any]) -> None:
    case = scenario_case("clustered", PolicyChoice(), [*ONE_SERVER, "workload.n_requests=1"], None)
    time_s = simulate(case, "testbed").rows[0].times.e2e_s
    assert time_s is not None
    (row,) = found["policies"]
    assert 0.96 / time_s < row["max_rate"] <= 1 / time_s, "freeing the server takes a message"
    assert row["max_rate"] < row["broken_at"] <= 1.02 * row["max_rate"]
    assert (
        row["limited_by"] == "queue_p99" and row["drains_at_broken"] is False and row["metastable"] is False
    )
    assert row["goodput_rps"] == pytest.approx(row["max_rate"], rel=0.02) and found["code"] == 0
    assert "arrivals seem never to drain" in found["text"]


def test_seeds_that_change_nothing_have_no_interval(found: dict[str, Any]) -> None:
    (row,) = found["policies"]
    assert row["same_run"] and row["max_rate"] is not None and not row["is_wide"]
    assert row["low"] is row["high"] is row["goodput_rps_ci95"] is row["runs_needed"] is None
    assert row["at_max"]["queue_p99"]["ci95_s"] is row["at_broken"]["queue_p99"]["ci95_s"] is None
    assert "no seed changes anything in its runs, so they have no interval" in found["text"]


def test_two_workers_find_the_same_as_one_and_rows_stay_in_order(tmp_path: Path) -> None:
    given: dict[str, Any] = {
        "policies": ("proposed", "petals"),
        "n_runs": 2,
        "width": 0.5,
        "most_requests": 40,
    }
    slo = "ttft_p95=20s,tpot_p95=0.7s"
    one = capacity(slo, "workload.n_output_tokens=2", "workload.n_requests=20", **given)
    two = capacity(
        slo, "workload.n_output_tokens=2", "workload.n_requests=20", **given, jobs=2, out=tmp_path / "two"
    )
    assert two["n_computed"] == one["n_computed"] > 0 == two["n_found"]
    assert one["policies"] == two["policies"]
    assert [row["policy"] for row in one["policies"]] == list(given["policies"])


def test_a_policy_that_cannot_place_is_a_row_with_its_reason() -> None:
    answer = capacity("ttft_p95=5s", "servers.1.count=0", n_runs=2)
    (row,) = answer["policies"]
    assert (row["max_rate"], row["limited_by"], answer["code"]) == (None, "placement", 0)
    assert "on no server" in row["reason"] and row["reason"] in " ".join(answer["text"].split())


def test_a_wider_edge_and_fewer_requests_ask_for_less(found: dict[str, Any]) -> None:
    wide = capacity("queue_p99=10ms", *ONE_SERVER, n_runs=2, width=0.2, most_requests=40)
    (row,), (fine,) = wide["policies"], found["policies"]
    assert row["n_rates"] < fine["n_rates"] and row["broken_at"] <= 1.2 * row["max_rate"]
    assert row["max_rate"] <= fine["max_rate"] < row["broken_at"] and wide["width_ratio"] == 0.2
    few = capacity("queue_p99=10ms", *ONE_SERVER, "workload.n_requests=20", n_runs=1, most_requests=40)
    assert few["policies"][0]["n_requests"] == 40


def test_no_rate_and_every_rate_are_said() -> None:
    (row,) = capacity("tpot_mean=1ms", "workload.n_output_tokens=2", n_runs=1)["policies"]
    assert row["max_rate"] is None and row["reason"].startswith("no rate keeps it: at 0.0015625 requests/s")
    (row,) = capacity("setup_mean=1h", "workload.rate=0.001", "workload.n_output_tokens=2", n_runs=1)[
        "policies"
    ]
    assert row["max_rate"] == 1.024 and "every rate up to 1.024 requests/s" in row["reason"]


TWO_CLIENTS = "clients=[{site='Cluster0',name='EU'},{site='Cluster2',name='APAC',n_input_tokens=400}]"


def test_the_clients_that_miss_an_objective_are_named_and_costs_are_there_where_prices_are() -> None:
    few = {"n_runs": 1, "most_requests": 20, "width": 0.5}
    short = (TWO_CLIENTS, "workload.n_output_tokens=2", "workload.n_requests=20")
    prices = ("servers.0.cost_per_hour=4", "servers.1.cost_per_hour=1")
    answer = capacity("ttft_p95=9s", *short, *prices, **few)
    (row,) = answer["policies"]
    at_edge = row["at_broken"]["ttft_p95"]
    assert row["limited_at"] == at_edge["missed_at"] == ["APAC"]
    assert at_edge["clients"]["EU"]["value_s"] < 9 < at_edge["clients"]["APAC"]["value_s"]
    assert "ttft_p95 is missed at APAC (" in answer["text"] and "of 2 clients" in answer["text"]
    assert row["costs"]["cost_per_million_tokens"]["value"] > 0
    assert "per million output tokens, at" in " ".join(answer["text"].split())
    (row,) = capacity("tpot_mean=1ms", *short, **few)["policies"]
    assert set(row["limited_at"]) == {"EU", "APAC"} and "costs" not in row
    assert row["reason"].endswith(f"tpot_mean is missed at {', '.join(row['limited_at'])}")
    (row,) = capacity("tpot_mean=1ms", *short[1:], **few)["policies"]
    assert row["limited_at"] == [] and "clients" not in row["at_broken"]["tpot_mean"], "a single client"


def test_a_recording_is_stretched_with_as_many_requests_as_it_has(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 10_000 * i, "input_length": 10, "output_length": 2, "hash_ids": []} for i in range(20)
    ]
    trace.write_text("\n".join(map(json.dumps, lines)) + "\n")
    recorded = (
        "workload.arrivals=trace",
        f"workload.file={trace}",
        "workload.draw=first",
        "workload.n_requests=20",
        "workload.n_output_tokens=2",
    )
    answer = capacity("ttft_p95=20s", *recorded, n_runs=2)
    (row,) = answer["policies"]
    assert row["n_requests"] == 20 and row["max_rate"] > 0.1 and row["same_run"]
    assert "all runs use the first 20 of the 20 recorded requests" in answer["text"]
    (alone,) = capacity("ttft_p95=20s", *recorded, n_runs=1, out=Path("alone"))["policies"]
    assert alone["max_rate"] == row["max_rate"] and not alone["same_run"]


def test_no_more_seeds_are_asked_for_than_a_recording_has_windows(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 10_000 * i, "input_length": 140, "output_length": 2 + 6 * (i // 10), "hash_ids": []}
        for i in range(20)
    ]
    trace.write_text("\n".join(map(json.dumps, lines)) + "\n")
    recorded = (
        *ONE_SERVER[:3],
        "policy.design_concurrency=1",
        *("workload.arrivals=trace", f"workload.file={trace}", "workload.n_requests=10"),
        *("workload.rate=0.3", "workload.n_input_tokens=trace", "workload.n_output_tokens=trace"),
    )
    given: dict[str, Any] = {"width": 0.2}
    answer = capacity("queue_p99=10ms", *recorded, n_runs=2, **given)
    (row,) = answer["policies"]
    assert answer["drawn"] == {"draw": "windows", "n_requests": 10, "n_recorded": 20}
    assert "requests 1 to 10 of 20" in answer["arrivals"] or "requests 11 to 20 of 20" in answer["arrivals"]
    text = " ".join(answer["text"].split())
    assert "each run uses a window of its own: 10 of the 20 recorded requests" in text
    assert row["is_wide"] and row["runs_needed"] is None and not row["same_run"]
    assert "the recording has only 2 windows, too few to make it narrower" in text
    answer = capacity("queue_p99=10ms", *recorded, n_runs=1, **given)
    assert "requests: " in answer["text"] and "the first 10 of 20 requests" in answer["text"]
    with pytest.raises(UserError, match="3 seeds need as many windows of 10 requests"):
        capacity("queue_p99=10ms", *recorded, "workload.draw=windows", n_runs=3, **given)


QUICK: dict[str, Any] = {"n_runs": 2, "width": 0.2, "most_requests": 10}
SHORT = (
    *ONE_SERVER[:-2],
    "workload.n_requests=10",
    "workload.n_input_tokens=146",
    "workload.n_output_tokens=2",
)
"""Sessions of as many tokens, and so with as little room for them, but of few steps."""


def stopped_after(n_runs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on, Ctrl-C arrives while the run after ``n_runs`` others is measured."""
    n_left = n_runs

    def measure(*given: Any) -> dict[str, float | int | None]:
        nonlocal n_left
        n_left -= 1
        if n_left < 0:
            raise KeyboardInterrupt
        return load_measures(*given)

    monkeypatch.setattr(command, "load_measures", measure)


def test_a_stopped_search_prints_what_it_has_and_goes_on_from_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    whole = capacity("queue_p99=10ms", *SHORT, **QUICK, out=tmp_path / "whole")
    (row,) = whole["policies"]
    assert not whole["stopped"] and not row["stopped"] and whole["n_found"] == 0
    with monkeypatch.context() as patched:
        stopped_after(5, patched)
        part = capacity("queue_p99=10ms", *SHORT, **QUICK)
    (some,) = part["policies"]
    assert (part["code"], part["stopped"], some["stopped"], part["n_computed"]) == (130, True, True, 5)
    assert (some["max_rate"], some["broken_at"], some["n_rates"]) == (0.6, None, 2)
    assert some["reason"] == "stopped: every rate judged so far keeps it, up to 0.6 requests/s"
    assert some["runs_needed"] is None and some["engine"] == "fast" and some["reason"] in part["text"]
    said = f"stopped; {part['out']} keeps 5 runs: the same command goes on"
    assert said in capsys.readouterr().err
    again = capacity("queue_p99=10ms", *SHORT, **QUICK)
    assert again["out"] == part["out"] and again["n_found"] == 5
    assert again["policies"] == whole["policies"]
    assert again["n_found"] + again["n_computed"] == whole["n_computed"]
    assert f"{again['n_computed']} computed, 5 found in {again['out']}" in again["text"]


def test_a_bracket_is_what_a_stopped_search_has(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = capacity("queue_p99=10ms", *SHORT, **QUICK)
    (row,) = whole["policies"]
    with monkeypatch.context() as patched:
        stopped_after(whole["n_computed"] - 1, patched)
        part = capacity("queue_p99=10ms", *SHORT, **QUICK, out=Path("part"))
    (some,) = part["policies"]
    assert some["max_rate"] <= row["max_rate"] < row["broken_at"] <= some["broken_at"] <= 2 * some["max_rate"]
    ends = f"kept at {some['max_rate']:g} and broken at {some['broken_at']:g} requests/s"
    assert some["reason"] == f"stopped: {ends}; the search had not ended"


def test_a_search_stopped_before_any_rate_was_judged_says_what_it_keeps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stopped_after(1, monkeypatch)
    with pytest.raises(
        KeyboardInterrupt, match=r"stopped; runs/capacity-clustered-\w+ keeps 1 run: the same"
    ):
        capacity("queue_p99=10ms", *SHORT, **QUICK)


def test_what_a_kill_cuts_short_is_run_again_and_the_rest_is_not() -> None:
    whole = capacity("queue_p99=10ms", *SHORT, **QUICK)
    file = Path(whole["out"], RUNS)
    content = file.read_bytes()
    lines = content.splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:3]) + lines[3][:20])
    again = capacity("queue_p99=10ms", *SHORT, **QUICK)
    assert again["n_found"] == 3 and again["policies"] == whole["policies"]
    assert sorted(file.read_bytes().splitlines()) != [] and file.read_bytes().count(b"\n") == len(lines)


def test_more_seeds_begin_with_those_that_are_kept() -> None:
    few = capacity("queue_p99=10ms", *SHORT, **QUICK)
    more = capacity("queue_p99=10ms", *SHORT, **{**QUICK, "n_runs": 3})
    assert more["out"] == few["out"] and more["n_found"] == few["n_computed"]


def test_runs_that_cannot_be_kept_are_done_all_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    Path("runs").write_text("a file")
    answer = capacity("queue_p99=10ms", *SHORT, **QUICK)
    assert answer["policies"][0]["max_rate"] and "which are not kept" in answer["text"]
    assert "runs are not kept: " in capsys.readouterr().err
    with pytest.raises(UserError, match="is a file, but a folder belongs there"):
        capacity("queue_p99=10ms", *SHORT, **QUICK, out=Path("runs"))


def test_an_interval_that_is_wide_says_how_many_seeds_it_needs() -> None:
    drawn = ("workload.arrivals=poisson", "workload.n_requests=20", *SHORT[:3], *SHORT[4:-3], *SHORT[-2:])
    answer = capacity("queue_p90=1s", *drawn, n_runs=2, width=0.2, most_requests=20)
    (row,) = answer["policies"]
    assert row["max_rate"] is not None
    is_wide = row["low"] is None or row["high"] is None or row["high"] - row["low"] > row["max_rate"] / 3
    assert is_wide and row["is_wide"] and row["runs_needed"] > 2
    assert f"seeds are needed; the same command with --runs {row['runs_needed']} goes on" in answer["text"]


@pytest.mark.parametrize(
    ("slo", "overrides", "options", "said"),
    [
        ("ttft=5s", (), {}, "METRIC_STATISTIC"),
        ("ttf_p95=5s", (), {}, "METRIC_STATISTIC"),
        ("ttft_p96=5s", (), {}, "METRIC_STATISTIC"),
        ("ttft_p95=5", (), {}, "has no unit"),
        ("ttft_p95=5s,ttft_p95=6s", (), {}, "given twice"),
        ("ttft_p95=5s", (), {"n_runs": 0}, "--runs must be at least 1"),
        ("ttft_p95=5s", (), {"jobs": 0}, "--jobs must be at least 1"),
        ("ttft_p95=5s", (), {"seed": -1}, "--seed must not be negative"),
        ("ttft_p95=5s", ("seed=1",), {}, "leave seed out"),
        ("ttft_p95=5s", (), {"policies": ("petal",)}, "policy petal"),
        ("ttft_p95=5s", (), {"policies": ("petals", "petals")}, "given twice"),
        ("ttft_p95=5s", ("workload.changes=[{at='5 s',rate=2}]",), {}, "workload.changes"),
    ],
)
def test_options_of_capacity_that_cannot_be_are_refused_before_anything_runs(
    slo: str, overrides: tuple[str, ...], options: dict[str, Any], said: str
) -> None:
    with pytest.raises(UserError, match=said):
        capacity(slo, *overrides, **options)
