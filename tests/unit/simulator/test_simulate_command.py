"""``testbed simulate`` from the command line's side: what scripts read, and what users are told."""

from __future__ import annotations

import copy
import errno
import itertools
import json
import math
import os
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from testbed import terminal
from testbed.cli.main import app
from testbed.errors import RunError, UserError
from testbed.experiments import load_experiment
from testbed.results import tables
from testbed.results.logs import RunRecords
from testbed.results.model import hop_table
from testbed.results.requests import request_rows
from testbed.results.tables import request_table
from testbed.simulator import engine
from testbed.simulator.text import comparison_text
from testbed.studies.bundle.command import bundle_command
from testbed.studies.compare.load import load_run
from tests.support.own_modules import write_module
from tests.unit.simulator.test_instance import DOCUMENT

MEANS = {"per_token_ms", "ttft_ms", "rest_ms", "waiting_ms", "max_concurrent"}
SHORT = ("--set", "workload.n_output_tokens=8")
FIRST_LINES = "from policies.problem import BlockRange, Hop, Placement, Route\n"
ROUTER = (
    FIRST_LINES
    + """
class Mine:
    name = "mine"
    def bind(self, problem, placement):
        self.placement = placement
        return self
    def route(self, request, state, now_s):
        {body}
"""
)


def write_instance(folder: Path, name: str = "one.json", **changes: Any) -> str:
    """A feasible instance of two A100 in ``folder``; ``changes`` replace its keys."""
    document = copy.deepcopy(DOCUMENT)
    document["servers"][1] = {**document["servers"][0], "decode_ms": 4.0}
    document.update(changes)
    (folder / name).write_text(json.dumps(document), encoding="utf-8")
    return str(folder / name)


def run(*arguments: str) -> int:
    code = app(["simulate", *arguments], standalone_mode=False)
    return int(code or 0)


def lines(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    assert run(*arguments, "--json") == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_the_engine_is_said_once_for_all_runs_and_the_busiest_link_only_of_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = []
    for arguments in (("--runs", "3"), ()):
        monkeypatch.setattr(terminal, "_SAID", set())
        assert run("clustered", *SHORT, *arguments) == 0
        said.append([line for line in capsys.readouterr().err.splitlines() if line.startswith("engine")])
    (of_all,), (of_one,) = said
    assert "busiest" not in of_all and of_one.startswith(
        f"{of_all}; the busiest link, a100-0 to client-0, is used"
    )


def test_the_engine_is_said_with_its_policy_and_seed_where_these_differ(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terminal, "_SAID", set())
    some = ("--set", "workload.n_requests=5", "--set", "workload.n_output_tokens=4")
    assert run("churn", "--policy", "proposed", "--policy", "petals", "--runs", "2", *some) == 0
    said = [line for line in capsys.readouterr().err.splitlines() if "engine" in line]
    assert [line.partition("engine ")[0] for line in said] == [
        "churn, proposed: ",
        "churn, proposed: seed 1: ",
        "churn, petals: ",
        "churn, petals: seed 1: ",
    ]


def test_a_long_run_says_now_and_then_how_many_requests_have_ended(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    says = engine.Says(7, itertools.count(0.0, 4.0).__next__)
    for n_ended in range(1, 8):
        says(n_ended)
    assert capsys.readouterr().err.splitlines() == [
        "3 of 7 requests have ended after 12 s",
        "6 of 7 requests have ended after 24 s",
    ]
    few = ("clustered", "--set", "workload.n_requests=3", "--set", "workload.n_output_tokens=2")
    assert run(*few) == 0
    assert "have ended" not in capsys.readouterr().err
    monkeypatch.setattr(engine.Says, "EVERY_S", 0.0)
    assert run(*few) == 0
    said = [line for line in capsys.readouterr().err.splitlines() if "have ended" in line]
    assert said[-3:] == [f"{n} of 3 requests have ended after 0 s" for n in (1, 2, 3)]


def test_one_object_holds_placement_requests_means_and_bounds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (found,) = lines(capsys, write_instance(tmp_path), "--policy", "proposed", "--session-setup", "none")
    assert found["policy"] == "proposed" and found["feasible"] is True and "error" not in found
    assert len(found["placement"]) == 2
    assert all(first >= 1 and n >= 1 for first, n in found["placement"])
    assert [set(r) for r in found["requests"]] == [{"route", "waiting_ms", "time_ms", "ttft_ms"}] * 3
    assert set(found["mean"]) == MEANS
    assert found["mean"]["per_token_ms"] == pytest.approx(
        sum(r["time_ms"] for r in found["requests"]) / 3 / 128
    )
    bounds = found["bounds"]
    assert (bounds["applies"], bounds["why"]) == (True, None)
    assert bounds["lower_bound_per_token_ms"] <= found["mean"]["per_token_ms"]
    assert found["mean"]["per_token_ms"] <= bounds["theorem1_per_token_ms"]
    assert found["mean"]["rest_ms"] <= bounds["theorem1_per_token_ms"]
    assert found["decision_s"] > 0


def test_the_session_setup_is_petals_by_placement_and_shown_without_beside(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_instance(tmp_path)
    policies = ("--policy", "petals", "--policy", "petals-optimized-rr", "--policy", "proposed")
    found = lines(capsys, file, *policies, "--session-setup", "reference")
    assert [row["session_setup_ms"] for row in found] == [250_000, 250_000, 60_000]
    bare = lines(capsys, file, *policies)
    assert [row["session_setup_ms"] for row in bare] == [0, 0, 0]
    for with_it, without in zip(found, bare, strict=True):
        assert with_it["mean_without_session_setup"] == without["mean"]
        assert with_it["requests"][0]["time_ms"] == pytest.approx(
            without["requests"][0]["time_ms"] + with_it["session_setup_ms"]
        )


def test_several_instances_give_one_line_each_and_an_infeasible_one_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = [{**server, "memory_gb": 8.2} for server in DOCUMENT["servers"]]
    files = [write_instance(tmp_path), write_instance(tmp_path, "two.json", id="small", servers=small)]
    good, bad = lines(capsys, *files)
    assert (good["id"], good["feasible"]) == ("example", True)
    assert (bad["id"], bad["feasible"]) == ("small", False)
    assert "of 70 blocks unplaced" in bad["error"] and "GB of memory" in bad["error"]
    assert bad["placement"] is bad["requests"] is bad["mean"] is None


def test_an_infeasible_placement_is_the_only_answer_as_text_and_ends_with_its_reason(tmp_path: Path) -> None:
    small = [{**server, "memory_gb": 8.2} for server in DOCUMENT["servers"]]
    with pytest.raises(UserError, match="unplaced"):
        run(write_instance(tmp_path, servers=small))


def test_the_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        run("abovenet", "--seed", "3", "--out", str(tmp_path / folder), *SHORT)
    for name in ("requests.parquet", "hops.parquet", "scenario.toml"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name


def test_tables_have_the_columns_of_an_emulation_and_hops_add_up_to_the_request(tmp_path: Path) -> None:
    run("clustered", "--out", str(tmp_path / "o"), "--set", "calibration.set=petals-scattered", *SHORT)
    requests = pq.read_table(tmp_path / "o" / "requests.parquet")
    hops = pq.read_table(tmp_path / "o" / "hops.parquet")
    experiment, nothing = load_experiment("clustered"), RunRecords([], 0)
    emulated = request_table(request_rows(experiment, nothing, hop_table(experiment, nothing)))
    assert requests.column_names == emulated.column_names
    spent: dict[int, float] = {}
    for row in hops.to_pylist():
        parts = row["hop_client_s"] + row["hop_network_s"] + row["hop_compute_s"]
        assert parts == pytest.approx(row["received_at_s"] - row["sent_at_s"])
        spent[row["request"]] = spent.get(row["request"], 0.0) + parts
    for row in requests.to_pylist():
        assert row["queue_s"] + row["setup_s"] + spent[row["request"]] == pytest.approx(row["e2e_s"])
    summary = json.loads((tmp_path / "o" / "summary.json").read_text())
    assert summary["engine"] == "simulation" and summary["n_completed"] == requests.num_rows


def test_hops_add_up_with_forwarding_too(tmp_path: Path) -> None:
    forwarding = ("--set", "policy.communication=server-to-server")
    run("clustered", "--out", str(tmp_path / "o"), *forwarding, *SHORT)
    hops = pq.read_table(tmp_path / "o" / "hops.parquet").to_pylist()
    for row in pq.read_table(tmp_path / "o" / "requests.parquet").to_pylist():
        spent = sum(h["hop_network_s"] + h["hop_compute_s"] for h in hops if h["request"] == row["request"])
        assert row["queue_s"] + row["setup_s"] + spent == pytest.approx(row["e2e_s"])


def test_runs_count_seeds_up_and_state_a_confidence_interval(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (found,) = lines(capsys, "abovenet", "--runs", "3", "--seed", "5", "--out", str(tmp_path / "o"), *SHORT)
    assert [r["seed"] for r in found["runs"]] == [5, 6, 7]
    sample = [r["mean"]["per_token_ms"] for r in found["runs"]]
    mean = sum(sample) / 3
    deviation = math.sqrt(sum((v - mean) ** 2 for v in sample) / 2)
    assert found["mean"]["per_token_ms"] == pytest.approx(mean)
    assert found["mean_ci95"]["per_token_ms"] == pytest.approx(4.302653 * deviation / math.sqrt(3), rel=1e-6)
    assert sorted(p.name for p in (tmp_path / "o").iterdir()) == ["seed-5", "seed-6", "seed-7"]


def test_a_placement_and_a_route_can_be_fixed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_instance(tmp_path)
    (first,) = lines(capsys, file)
    (tmp_path / "plan.json").write_text(json.dumps(first), encoding="utf-8")
    fixed = ("--placement", f"fixed:{tmp_path / 'plan.json'}")
    (again,) = lines(capsys, file, *fixed, "--routing", "ws-rr")
    assert again["placement"] == first["placement"] and again["requests"] == first["requests"]
    chain = ",".join(map(str, first["requests"][0]["route"]))
    (routed,) = lines(capsys, file, *fixed, "--routing", f"fixed:{chain}")
    assert {tuple(r["route"]) for r in routed["requests"]} == {tuple(first["requests"][0]["route"])}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--runs", "2"), "--runs is only for scenarios"),
        (("--seed", "2"), "--seed is only for scenarios"),
        (("--set", "workload.rate=1"), "--set is only for scenarios"),
        (("--mode", "exact"), "--mode must be testbed or reference, not 'exact'"),
        (("--session-setup", "on"), "--session-setup must be reference or none, not 'on'"),
        (("--policy", "propose"), "there is no policy pair 'propose'; did you mean 'proposed'?"),
        (("--policy", "mine:Best"), "there is no module mine"),
        (
            ("--policy", "policies.wsrr:WsRr"),
            "has no method place(); pair it with one: PLACEMENT+policies.wsrr:WsRr",
        ),
        (
            ("--policy", "policies.cgbp:CgBp"),
            "has no method bind(); pair it with one: policies.cgbp:CgBp+ROUTING",
        ),
        (("--policy", "jffc"), "there is no policy pair 'jffc'; did you mean --routing jffc?"),
        (("--policy", "petals", "--routing", "ws-rr"), "--policy names both policies"),
        (("--design-concurrency", "many"), "--design-concurrency must be auto, searched or a whole number"),
        (("--placement", "fixed:none.json"), "none.json: cannot be read"),
        (("--routing", "fixed:9"), "names server 9, which does not exist"),
    ],
)
def test_what_does_not_go_together_gets_one_sentence(
    tmp_path: Path, arguments: tuple[str, ...], said: str
) -> None:
    with pytest.raises(UserError) as caught:
        run(write_instance(tmp_path), *arguments)
    assert said in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return Route((Hop(0, 0, 5),), 0.0, 1.0)", "request 0: routing policy own_router:Mine"),
        ("return 7", "request 0: routing policy own_router:Mine must return a Route"),
        ("return None + 1", "own_router.py:"),
    ],
)
def test_a_users_router_that_breaks_a_rule_is_stopped_with_its_name_and_the_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, said: str
) -> None:
    write_module(tmp_path, monkeypatch, "own_router", ROUTER.format(body=body))
    with pytest.raises(UserError) as caught:
        run(write_instance(tmp_path), "--routing", "own_router:Mine")
    assert said in str(caught.value)


def test_a_users_router_that_overbooks_a_server_is_stopped_with_server_and_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = "r = self.placement.ranges; return Route((Hop(0, 0, r[0].last), Hop(1, r[0].last, 70)), 0.0, 1.0)"
    write_module(tmp_path, monkeypatch, "own_overbooking", ROUTER.format(body=body))
    plan = {"placement": [[1, 59], [36, 35]]}  # 59 blocks leave room for a few sessions only
    (tmp_path / "plan.json").write_text(json.dumps(plan), encoding="utf-8")
    workload = {**DOCUMENT["workload"], "inter_arrival_ms": [0.0] * 30}
    with pytest.raises(UserError) as caught:
        run(
            write_instance(tmp_path, workload=workload),
            "--placement",
            "fixed:plan.json",
            "--routing",
            "own_overbooking:Mine",
        )
    assert "request 2: routing policy own_overbooking:Mine overbooks a100-0" in str(caught.value)
    assert "GB of cache" in str(caught.value)


def test_a_folder_that_holds_something_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(UserError, match="holds something already"):
        run("clustered", "--out", str(tmp_path))
    assert [p.name for p in tmp_path.iterdir()] == ["mine.txt"]


def test_a_simulation_that_could_not_be_written_whole_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, *_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(tables, "write_links", full)
    out = tmp_path / "out"
    with pytest.raises(RunError, match=r"links.parquet \(No space left on device\); make room, and choose"):
        run("abovenet", "--out", str(out), *SHORT)
    for reads in (lambda: load_run(out), lambda: bundle_command(out, tmp_path / "bundle")):
        with pytest.raises(UserError, match=r"summary\.json"):
            reads()


def test_targets_of_one_name_are_told_apart_on_screen_and_on_disk(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [write_instance(tmp_path, "slow.json"), write_instance(tmp_path, "fast.json")]
    assert run(*files, "--out", str(tmp_path / "o")) == 0
    assert sorted(p.name for p in (tmp_path / "o").iterdir()) == ["fast", "slow"]
    text = capsys.readouterr().out
    assert "slow.json)" in text and "fast.json)" in text


def test_what_is_asked_for_twice_is_refused(tmp_path: Path) -> None:
    file = write_instance(tmp_path)
    with pytest.raises(UserError, match="is given twice"):
        run(file, file)
    with pytest.raises(UserError, match="the policy petals is given twice"):
        run(file, "--policy", "petals", "--policy", "petals")


def test_requests_that_do_not_complete_end_with_exit_code_1_and_are_counted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code = run("clustered", "--set", 'backoff.give_up="1 s"', "--slo", "ttft=5s", "--json")
    found = json.loads(capsys.readouterr().out)
    assert code == 1 and found["n_failed"] > 0 and found["goodput_rps"] > 0
    assert found["n_failed"] == sum("status" in request for request in found["requests"])


def test_a_scenario_states_its_objectives_and_the_command_line_others(
    capsys: pytest.CaptureFixture[str],
) -> None:
    stated = ("clustered", "--set", "workload.slo=ttft=5s,tpot=1s", "--json")
    run(*stated)
    by_scenario = json.loads(capsys.readouterr().out)["goodput_rps"]
    run(*stated, "--slo", "ttft=3s")
    by_option = json.loads(capsys.readouterr().out)["goodput_rps"]
    assert 0 < by_option < by_scenario
    problem = load_experiment("clustered", ["workload.slo=ttft=5s, tpot=1s"]).problem
    assert problem.objectives_s == (("ttft", 5.0), ("tpot", 1.0))
    with pytest.raises(UserError, match=r"workload\.slo: unknown objective 'tftt'; valid: queue, setup"):
        run("clustered", "--set", "workload.slo=tftt=5s")
    with pytest.raises(UserError, match=r"workload\.slo: ttft is given twice"):
        run("clustered", "--set", "workload.slo=ttft=5s,ttft=6s")


def test_a_design_concurrency_that_has_no_effect_is_said_to_have_none(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run("clustered", "--policy", "petals", "--design-concurrency", "5", *SHORT)
    assert "petals uses no design concurrency: 5 has no effect" in capsys.readouterr().out


def test_a_policy_that_ends_the_process_is_stopped_like_one_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_module(tmp_path, monkeypatch, "own_exit", ROUTER.format(body="raise SystemExit(0)"))
    with pytest.raises(UserError, match=r"routing policy own_exit:Mine failed at own_exit\.py"):
        run(write_instance(tmp_path), "--routing", "own_exit:Mine")


def test_what_a_policy_prints_is_no_part_of_the_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    body = "print('asked'); r = self.placement.ranges; return Route((Hop(0, 0, r[0].last), Hop(1, r[0].last, 70)), 0.0, 1.0)"
    write_module(tmp_path, monkeypatch, "own_prints", "print('imported')\n" + ROUTER.format(body=body))
    assert run(write_instance(tmp_path), "--routing", "own_prints:Mine", "--json") == 0
    out, err = capsys.readouterr()
    assert [json.loads(line)["n_requests"] for line in out.splitlines()]
    assert "imported" in err and "asked" in err


def test_the_resolved_scenario_of_a_fixed_placement_can_be_run_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run("clustered", "--out", "first", *SHORT)
    run("clustered", "--placement", "fixed:first/plan.json", "--routing", "ws-rr", "--out", "second", *SHORT)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    run("../second/scenario.toml", "--out", "third")
    tables = [(tmp_path / name / "requests.parquet").read_bytes() for name in ("first", "elsewhere/third")]
    assert tables[0] == tables[1]


TRACE = ("trace-replay", "--runs", "4", *SHORT, "--set", "workload.n_input_tokens=20")


def test_runs_over_a_trace_take_windows_of_their_own_as_long_as_there_are_enough(
    capsys: pytest.CaptureFixture[str],
) -> None:
    (found,) = lines(capsys, *TRACE, "--set", "workload.n_requests=25")
    assert found["drawn"] == {"draw": "windows", "n_requests": 25, "n_recorded": 100}
    assert found["mean_ci95"]["per_token_ms"] > 0 and found["same_run"] is False
    (found,) = lines(capsys, *TRACE, "--set", "workload.n_requests=26")
    assert found["drawn"] == {"draw": "bootstrap", "n_requests": 26, "n_recorded": 100}


@pytest.mark.parametrize(
    ("rate", "words"), [("", "listed; "), (",rate=2", "listed, stretched to 2 per second; ")]
)
def test_listed_requests_are_said_to_be_stretched_in_the_words_of_a_run(
    rate: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    listed = f'workload={{arrivals="listed",requests=[[0,1,2],[1,1,2]]{rate}}}'
    assert run("clustered", "--set", listed) == 0
    assert f"requests: {words}" in capsys.readouterr().out
    (found,) = lines(capsys, "clustered", "--set", listed)
    assert found["workload"] == load_experiment("clustered", [listed]).workload.source


def test_the_interval_of_a_bootstrap_is_as_wide_as_the_recording_allows(
    capsys: pytest.CaptureFixture[str],
) -> None:
    (found,) = lines(capsys, *TRACE)
    sample = [r["mean"]["per_token_ms"] for r in found["runs"]]
    mean = sum(sample) / 4
    variance = sum((v - mean) ** 2 for v in sample) / 3
    # t of 3 degrees of freedom; one run is the whole recording: 1/4 + 1
    assert found["mean_ci95"]["per_token_ms"] == pytest.approx(
        3.182446 * math.sqrt(variance * 1.25), rel=1e-6
    )


def test_an_interval_over_one_and_the_same_run_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for options in (
        (*TRACE, "--set", "workload.draw=first", "--set", "workload.n_requests=20"),
        (
            "clustered",
            "--runs",
            "3",
            "--set",
            "workload.arrivals=constant",
            "--set",
            "workload.n_requests=10",
        ),
    ):
        with pytest.raises(UserError, match="runs are the same, since the seed"):
            run(*options, "--json")
        assert capsys.readouterr().out == ""


def test_a_policy_whose_runs_are_one_and_the_same_has_no_interval_beside_one_that_has(
    capsys: pytest.CaptureFixture[str],
) -> None:
    policies = ("--policy", "proposed", "--policy", "petals")  # servers join in the seed's order under PETALS
    proposed, petals = lines(
        capsys, *TRACE, "--set", "workload.draw=first", "--set", "workload.n_requests=20", *policies
    )
    assert proposed["same_run"] and proposed["mean_ci95"]["per_token_ms"] is None
    assert not petals["same_run"] and petals["mean_ci95"]["per_token_ms"] > 0


def test_more_windows_than_a_trace_has_are_refused() -> None:
    with pytest.raises(UserError, match="have only 3; lower --runs"):
        run(*TRACE, "--set", "workload.n_requests=30", "--set", "workload.draw=windows")


def test_a_placement_that_searches_says_how_far_it_came(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (found,) = lines(capsys, write_instance(tmp_path), "--policy", "helix", "--session-setup", "none")
    bounds = found["bounds"]
    assert bounds["gap_ratio"] == pytest.approx(1 - bounds["flow_tps"] / bounds["flow_bound_tps"])


@pytest.mark.parametrize(
    ("gaps", "said"),
    [
        ([0.0], "milp: the search proved its placement optimal"),
        (
            [0.125],
            "milp: the search did not prove its placement optimal; its objective is within 12.5% of the best",
        ),
        (
            [0.0, 0.0, 0.25],
            "optimal in 2 of 3 runs; the search did not prove its placement optimal in 1 of 3 runs;",
        ),
    ],
)
def test_the_table_states_whether_a_placement_is_proven_optimal(
    gaps: list[float], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (row,) = lines(capsys, write_instance(tmp_path), "--policy", "proposed", "--session-setup", "none")
    runs = [
        {**row, "bounds": {**row["bounds"], "proven_optimal": float(not gap), "gap_ratio": gap}}
        for gap in gaps
    ]
    answer = {**runs[0], "policy": "milp"}
    if len(runs) > 1:
        answer |= {"runs": runs, "n_runs": len(runs)}
        answer |= {"mean_ci95": row["mean"], "percentiles_ci95": row["percentiles"]}
    assert said in " ".join(comparison_text([answer], 300).split())
