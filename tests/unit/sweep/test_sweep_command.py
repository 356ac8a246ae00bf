from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from testbed.codeversion import code_version
from testbed.errors import RunError, UserError
from testbed.experiments.policy import PolicyChoice
from testbed.experiments.provenance import read_provenance
from testbed.experiments.slo import Objectives
from testbed.records.requests import OPTIONAL, request_columns
from testbed.results.plots import save_both
from testbed.rundir import HALF_WRITTEN, STUDY, half_written, not_a_run
from testbed.simulator import engine
from testbed.simulator.cases import scenario_case
from testbed.simulator.engine import simulate
from testbed.simulator.summary import summarize_simulation
from testbed.studies.sweep import command, executors, figures, runs
from testbed.studies.sweep.command import PAGE, RUNS, TABLES, sweep_command
from testbed.studies.sweep.engines import engines_of, engines_text
from testbed.studies.sweep.kept import REQUESTS, STORED
from testbed.studies.sweep.measures import FAIRNESS, label_of
from testbed.studies.sweep.runs import Record, Run, Runner, Setup, case_of, key_of
from testbed.studies.sweep.store import Lines
from testbed.studies.sweep.study import Options, read_study
from testbed.studies.sweep.table import RESULTS
from tests.support.full_disk import files_no_longer_than

POLICIES = "policy=petals,proposed"
RATES = "workload.rate=0.5,0.1"
FEW = ("workload.n_requests=5", "workload.n_output_tokens=16")


def sweep(out: Path, *over: str, jobs: int = 1, target: str = "clustered", **options: Any) -> dict[str, Any]:
    given = Options(over=over, **{"overrides": FEW, **options})
    answer, _, answer["code"] = sweep_command(target, given, out, "local", jobs)
    return answer


def rows(out: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = pq.read_table(out / RESULTS).to_pylist()
    return found


def test_a_row_per_run_sorted_with_what_simulate_measures(tmp_path: Path) -> None:
    answer = sweep(tmp_path, RATES, POLICIES, n_runs=2, slo="ttft=4s")
    assert (answer["n_runs"], answer["n_computed"], answer["statuses"], answer["code"]) == (
        8,
        8,
        {"ok": 8},
        0,
    )
    assert str(not_a_run(tmp_path)).endswith(f"{tmp_path / PAGE} shows them"), "it holds no run directories"
    table = rows(tmp_path)
    places = [(row["workload.rate"], row["policy"], row["seed"]) for row in table]
    assert places == sorted(places) and len(set(places)) == 8
    last = table[-1]
    changes = [*FEW, "workload.rate=0.5"]
    served = simulate(scenario_case("clustered", PolicyChoice("proposed"), changes, 1), "testbed")
    summary = summarize_simulation(served, Objectives({"ttft": 4.0}))
    for name in ("ttft_s", "tpot_s", "per_token_s", "queue_s"):
        for statistic in ("mean", "p50", "p95", "p99"):
            assert last[f"{name}_{statistic}"] == summary["metrics"][name][statistic]
    assert last["goodput_rps"] == summary["goodput_rps"]
    assert last["n_completed"] == last["n_requests"] == 5 and last["n_failed"] == 0
    span_s = max(row.ended_at_s or 0 for row in served.rows)
    assert last["tokens_per_s"] == pytest.approx(5 * 16 / span_s)
    assert last["engine"] == "fast" and last["status"] == "ok" and last["reason"] == ""


@pytest.mark.renders
def test_lines_a_map_and_the_front_are_drawn(tmp_path: Path) -> None:
    sweep(tmp_path, RATES, "workload.n_output_tokens=4,8", POLICIES, metrics="ttft_s", overrides=FEW[:1])
    drawn = {path.name: path.read_bytes() for path in (tmp_path / "figures").iterdir()}
    over = ("workload.n_output_tokens", "workload.rate")
    names = ("pareto", "ttft_s_mean-map", *(f"ttft_s_mean-over-{key}" for key in over))
    assert sorted(drawn) == sorted(f"{name}.{ending}" for name in names for ending in ("pdf", "png"))
    for name, content in drawn.items():
        assert len(content) > 5_000 and content.startswith(b"%PDF" if name.endswith("pdf") else b"\x89PNG")


def test_a_map_states_the_metric_and_marks_at_the_top_of_a_figure_are_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    labels: dict[str, list[str]] = {}
    limits: dict[str, tuple[float, float]] = {}

    def save(plt: Any, figure: Any, folder: Path, name: str, **options: Any) -> Path:
        labels[name] = [axes.get_ylabel() for axes in figure.axes]
        limits[name] = figure.axes[0].get_ylim()
        return save_both(plt, figure, folder, name, **options)

    monkeypatch.setattr(figures, "save_both", save)
    axes = ("workload.rate=0.1,0.11", "workload.n_output_tokens=4,8")
    sweep(tmp_path, *axes, metrics=f"ttft_s,{FAIRNESS}", overrides=("workload.n_requests=12",))
    assert label_of("ttft_s_mean") in labels["ttft_s_mean-map"]
    low, high = limits[f"{FAIRNESS}-over-workload.rate"]
    most = max(row[FAIRNESS] for row in rows(tmp_path))
    assert low == 0 and high >= 1.04 * most


def test_goodput_is_under_the_scenario_s_own_objectives_where_none_are_given(tmp_path: Path) -> None:
    sweep(tmp_path / "given", slo="ttft=4s")
    sweep(tmp_path / "own", overrides=(*FEW, "workload.slo=ttft=4s"))
    sweep(tmp_path / "axis", "workload.slo=ttft=4s,ttft=1s")
    of = {name: [row["goodput_rps"] for row in rows(tmp_path / name)] for name in ("given", "own", "axis")}
    assert of["given"] == of["own"] and of["given"][0] > 0
    assert of["axis"] == [0.0, *of["given"]]


def test_the_engines_that_answered_are_stated_with_simulate_s_reasons(tmp_path: Path) -> None:
    few = ("workload.n_requests=2", "workload.n_output_tokens=2")
    given = Options(over=("compute.batching=none,serial",), overrides=few, n_runs=2)
    answer, text, _ = sweep_command("clustered", given, tmp_path, "local", 1)
    why = {
        batching: simulate(
            scenario_case("clustered", PolicyChoice(), [*few, f"compute.batching={batching}"], 0), "testbed"
        ).why
        for batching in ("none", "serial")
    }
    assert answer["engines"] == [
        {"engine": "fast", "engine_why": why["none"], "n_runs": 2, "is_of_all": False},
        {"engine": "virtual", "engine_why": why["serial"], "n_runs": 2, "is_of_all": True},
    ]
    assert (answer["engine"], answer["engine_why"]) == ("fast", why["none"])
    assert f"engine virtual (2 runs): {why['serial']}" in text.splitlines()
    assert f"Engine virtual (2 runs): {why['serial']}." in (tmp_path / TABLES[0]).read_text(encoding="utf-8")
    assert [row["engine_why"] for row in rows(tmp_path) if row["seed"] == 0] == [why["none"], why["serial"]]


def test_a_reason_that_not_all_runs_have_is_said_to_be_the_first_ones() -> None:
    reasons = ("links meet", "links meet", "no link meets")
    records = [Record("key", engine="fast", engine_why=why) for why in reasons]
    (share,) = engines_of(records)
    assert not share.is_of_all
    assert engines_text([share]) == ["engine fast: links meet (the first run's reason)"]


def test_the_same_seed_gives_every_policy_the_same_arrivals() -> None:
    setup = Setup("clustered", n_runs=2)
    ran = [
        case_of(setup, Run((), policy, 3)).experiment.workload.requests for policy in ("petals", "foresight")
    ]
    assert ran[0] == ran[1] != case_of(setup, Run((), "petals", 4)).experiment.workload.requests


def test_the_bytes_are_the_same_for_one_worker_and_for_two(tmp_path: Path) -> None:
    for jobs in (1, 2):
        sweep(tmp_path / str(jobs), RATES, POLICIES, n_runs=3, jobs=jobs)
    for name in (RESULTS, PAGE, *TABLES):
        assert (tmp_path / "1" / name).read_bytes() == (tmp_path / "2" / name).read_bytes(), name


def test_only_what_is_new_is_computed(tmp_path: Path) -> None:
    assert sweep(tmp_path, RATES, POLICIES)["n_computed"] == 4
    assert read_provenance(tmp_path)["code"] == code_version()
    before = (tmp_path / RESULTS).read_bytes()
    again = sweep(tmp_path, RATES, POLICIES)
    assert (again["n_computed"], again["n_found"]) == (0, 4)
    assert (tmp_path / RESULTS).read_bytes() == before
    assert sweep(tmp_path, "workload.rate=0.1,0.3,0.5", POLICIES)["n_computed"] == 2
    assert sweep(tmp_path, RATES, "policy=petals,proposed,cg-bprr")["n_computed"] == 2
    assert sweep(tmp_path, RATES, POLICIES, n_runs=2)["n_computed"] == 4
    assert sweep(tmp_path, RATES, POLICIES)["n_computed"] == 0
    assert (tmp_path / RESULTS).read_bytes() == before, "rows of other studies in the folder are left out"


def test_a_run_is_known_by_all_that_determines_it(tmp_path: Path) -> None:
    def key(*changes: str, policy: str = "petals", seed: int = 0, engine: str = "fast") -> str:
        setup = Setup("clustered", engine=engine)
        return key_of(case_of(setup, Run(changes, policy, seed)).experiment, setup)

    assert key() == key("workload.rate=0.1") == key("workload.rate=0.10"), (
        "the same run, however it is written"
    )
    keys = [key(), key("workload.rate=0.2"), key(policy="proposed"), key(seed=1), key(engine="virtual")]
    plan = tmp_path / "plan.json"
    for text in ("{}", "[]"):
        plan.write_text(text)
        keys.append(key(f"policy.placement=fixed:{plan}", "policy.routing=ws-rr", policy=None))  # type: ignore[arg-type]
    assert len(set(keys)) == len(keys)


def test_a_run_that_cannot_be_is_a_row_with_its_reason(tmp_path: Path) -> None:
    answer = sweep(tmp_path, "servers.1.count=0,2", POLICIES)
    table = rows(tmp_path)
    assert [row["status"] for row in table] == ["infeasible", "infeasible", "ok", "ok"]
    assert "leaves 28 of 70 blocks unplaced" in table[1]["reason"] and table[1]["ttft_s_mean"] is None
    assert answer["statuses"] == {"infeasible": 2, "ok": 2} and len(answer["reasons"]) == 2
    assert answer["code"] == 0, "that nothing fits is an answer"
    assert "unplaced" in (tmp_path / PAGE).read_text(encoding="utf-8")
    assert sweep(tmp_path, "servers.1.count=0,2", POLICIES)["n_computed"] == 0


def test_a_run_that_fails_is_a_row_and_what_may_not_last_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(case: Any, *rest: Any, **more: Any) -> Any:
        if case.policy == "petals":
            raise ZeroDivisionError("no idea")
        if case.experiment.seed == 1:
            raise UserError("a rule is broken")
        return simulate(case, *rest, **more)

    monkeypatch.setattr(runs, "simulate", broken)
    answer = sweep(tmp_path, POLICIES, n_runs=2)
    assert answer["code"] == 1 and answer["statuses"] == {"failed": 3, "ok": 1}
    said = [
        (row["policy"], row["seed"], row["reason"]) for row in rows(tmp_path) if row["status"] == "failed"
    ]
    assert said == [
        ("petals", 0, "ZeroDivisionError: no idea"),
        ("petals", 1, "ZeroDivisionError: no idea"),
        ("proposed", 1, "a rule is broken"),
    ]
    monkeypatch.setattr(runs, "simulate", simulate)
    again = sweep(tmp_path, POLICIES, n_runs=2)
    assert (again["n_computed"], again["statuses"]) == (2, {"failed": 1, "ok": 3})


def test_a_drawn_point_that_no_scenario_can_be_is_a_row(tmp_path: Path) -> None:
    table = tmp_path / "study.toml"
    scenario = tmp_path / "short.toml"
    text = "[workload]\narrivals = 'listed'\nrequests = [[0, 9, 9], [1, 9, 9], [2, 9, 9], [3, 9, 9]]\n"
    shipped = (Path(command.__file__).parents[3] / "scenarios" / "clustered.toml").read_text(encoding="utf-8")
    head, _, tail = shipped.partition("[workload]")
    scenario.write_text(head + text + tail[tail.index("[policy]") :], encoding="utf-8")
    table.write_text(
        'scenario = "short.toml"\n[design]\nkind = "random"\nn = 12\nseed = 1\n'
        'over = { "workload.n_requests" = { low = 2, high = 6, integer = true } }\n',
        encoding="utf-8",
    )
    answer = sweep(tmp_path / "out", target=str(table), overrides=())
    assert set(answer["statuses"]) == {"ok", "failed"}
    failed = [row for row in rows(tmp_path / "out") if row["status"] == "failed"]
    assert all(
        row["workload.n_requests"] > 4 and "there are only 4 requests" in row["reason"] for row in failed
    )


def test_a_placement_is_decided_once_for_all_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    class Counting(runs.RememberedPlacements):
        def get(self, experiment: Any, problem: Any, decide: Any) -> Any:
            def counted() -> Any:
                asked.append(experiment.policy.placement)
                return decide()

            return super().get(experiment, problem, counted)

    monkeypatch.setattr(runs, "RememberedPlacements", Counting)
    runner = Runner(Setup("clustered"))
    few = ("workload.n_requests=3",)
    found = {
        policy: [runner(Run(few, policy, seed)) for seed in range(3)] for policy in ("petals", "proposed")
    }
    assert asked == ["petals"] * 3 + ["cg-bp"], "servers join PETALS in an order that the seed draws"
    alone = [Runner(Setup("clustered"))(Run(few, "proposed", seed)) for seed in range(3)]
    assert [r.measures for r in alone] == [r.measures for r in found["proposed"]]


def test_of_a_recording_every_seed_takes_other_requests() -> None:
    setup = Setup("trace-replay", n_runs=2)
    first, second = (
        case_of(setup, Run(("workload.n_requests=20",), None, seed)).experiment for seed in (0, 1)
    )
    assert first.workload.sample is not None and first.workload.sample.draw == "windows"
    assert [r.n_output_tokens for r in first.workload.requests] != [
        r.n_output_tokens for r in second.workload.requests
    ]


def test_tables_page_and_text_say_that_policies_served_other_requests(tmp_path: Path) -> None:
    overrides = ("workload.n_requests=60", "workload.rate=20", "backoff.give_up='1 s'")
    options = Options(over=("policy=petals,proposed",), overrides=overrides, n_runs=2)
    answer, said, _ = sweep_command("clustered", options, tmp_path, "local", 1)
    of = {p: [row for row in rows(tmp_path) if row["policy"] == p] for p in ("petals", "proposed")}
    n_done = sum(row["n_completed"] for row in of["petals"])
    assert n_done < 120 == sum(row["n_completed"] for row in of["proposed"])
    note = f"Not all requests completed, at worst {n_done} of 120 (petals): means and percentiles are of those that did"
    note += ", and differences of times are not of the same requests."
    files = [(tmp_path / name).read_text(encoding="utf-8") for name in ("table.md", PAGE, "table.tex")]
    assert all(note in text for text in (said, *files))
    assert answer["notes"] == [note]
    assert "| policy | runs | of requests |" in files[0] and f"| petals | 2 | {n_done} of 120 |" in files[0]


def test_tables_say_how_runs_chose_recorded_requests(tmp_path: Path) -> None:
    options = Options(over=("workload.n_requests=5,40",), overrides=("workload.n_output_tokens=4",), n_runs=3)
    _, said, _ = sweep_command("trace-replay", options, tmp_path, "local", 1)
    text = (tmp_path / "table.md").read_text(encoding="utf-8")
    for words in (
        "3 runs: each run uses a window of its own: 5 of the 100 recorded requests.",
        "3 runs: each run draws 40 requests, in blocks, from the same 100 recorded ones",
    ):
        assert words in said and words in text
    assert "of requests" not in text


def test_tables_say_what_is_a_difference_and_what_is_none(tmp_path: Path) -> None:
    sweep(tmp_path, "workload.rate=0.5", "policy=petals,proposed,cg-bp+ws-rr", n_runs=12, metrics="tpot_s")
    text = (tmp_path / "table.md").read_text(encoding="utf-8")
    assert "| against petals |" in text and ", better |" in text
    csv = (tmp_path / "table.csv").read_text(encoding="utf-8").splitlines()
    header, first, second = (line.split(",") for line in csv[:3])
    by_name = dict(zip(header, second, strict=True))
    of_base = dict(zip(header, first, strict=True))
    assert (of_base["policy"], by_name["policy"]) == ("petals", "proposed")
    pairs = {
        p: [row["tpot_s_mean"] for row in rows(tmp_path) if row["policy"] == p]
        for p in ("petals", "proposed")
    }
    differences = [b - a for a, b in zip(pairs["petals"], pairs["proposed"], strict=True)]
    assert float(by_name["tpot_s_mean_difference"]) == pytest.approx(sum(differences) / 12)
    assert by_name["tpot_s_mean_verdict"] == "better"
    latex = (tmp_path / "table.tex").read_text(encoding="utf-8")
    assert latex.splitlines()[1:3] == ["\\begin{tabular}{llll}", "\\toprule"] and "$\\pm$" in latex
    assert "Many comparisons: of 1 " not in text, "one is not many"


PAPER = """
scenario = "clustered"
policies = ["petals", "proposed"]
labels = { petals = "PETALS" }
runs = 4

[set]
"workload.n_requests" = 5

[[axis]]
key = "workload.rate"
values = [0.1, 0.5]

[latex]
names = { "workload.rate" = "$\\\\lambda$ (1/s)", tpot_s_mean = "TPOT (s)", proposed = "\\\\textsc{Ours}" }
columns = ["tpot_s"]
digits = 2
intervals = false
"""


def test_a_table_for_a_paper_has_the_names_columns_and_digits_that_the_study_states(tmp_path: Path) -> None:
    (tmp_path / "study.toml").write_text(PAPER, encoding="utf-8")
    sweep_command(str(tmp_path / "study.toml"), Options(), tmp_path / "out", "local", 1)
    lines = (tmp_path / "out" / "table.tex").read_text(encoding="utf-8").splitlines()
    assert lines[:4] == [
        "% needs \\usepackage{booktabs}",
        "\\begin{tabular}{llll}",
        "\\toprule",
        "$\\lambda$ (1/s) & policy & TPOT (s) & against PETALS \\\\",
    ]
    first, second = (line.removesuffix(" \\\\").split(" & ") for line in lines[5:7])
    assert first[:2] == ["0.1", "PETALS"] and first[3] == "" and len(first[2]) == 4
    assert second[1] == "\\textsc{Ours}" and "$\\pm$" not in second[2] and "$\\pm$" in second[3]
    assert lines[-2:] == ["\\bottomrule", "\\end{tabular}"]
    page = (tmp_path / "out" / "table.md").read_text(encoding="utf-8")
    assert "Many comparisons: of 6 differences" in page and "With Holm's correction" in page


def test_names_for_latex_are_of_keys_metrics_and_policies(tmp_path: Path) -> None:
    file = tmp_path / "study.toml"

    def named(name: str, part: str = "") -> Any:
        text = PAPER.replace("tpot_s_mean", name)
        parts = (
            "[part.a]\n[part.b]\n[[part.b.axis]]\nkey = 'clients.0.count'\nvalues = [1, 2]\n" if part else ""
        )
        file.write_text(text + parts, encoding="utf-8")
        return read_study(str(file) + part, Options(over=("servers.0.count=3,4",))).latex.names

    assert named("tpot_s")["tpot_s_mean"] == named("tpot_s_mean")["tpot_s_mean"] == "TPOT (s)"
    for name in ("policy", "goodput_rps", '"servers.0.count"'):
        assert named(name)[name.strip('"')] == "TPOT (s)"
    assert named('"clients.0.count"', ":a")["clients.0.count"] == "TPOT (s)"
    for name, meant in (
        ('"worklod.rate"', "workload.rate"),
        ("propsed", "proposed"),
        ('"clients.0.count"', ""),
    ):
        with pytest.raises(UserError, match=f"latex.names: unknown key, metric or policy .*{meant}"):
            named(name)


def test_a_study_without_policies_names_the_scenarios_own(tmp_path: Path) -> None:
    file = tmp_path / "study.toml"
    file.write_text('scenario = "clustered"\n[latex]\nnames = { proposed = "Ours" }\n', encoding="utf-8")
    assert read_study(str(file), Options()).latex.names == {"proposed": "Ours"}


@pytest.mark.parametrize("labels", ['proposed = "A", petals = "A"', 'proposed = "petals"'])
def test_two_policies_of_one_label_are_refused(tmp_path: Path, labels: str) -> None:
    file = tmp_path / "study.toml"
    file.write_text(
        f'scenario = "clustered"\npolicies = ["petals", "proposed"]\nlabels = {{ {labels} }}\n',
        encoding="utf-8",
    )
    with pytest.raises(
        UserError, match=r"labels: two policies are called (A|petals); give one another label"
    ):
        read_study(str(file), Options())


def test_runs_that_are_all_the_same_have_no_interval(tmp_path: Path) -> None:
    same = ("workload.n_requests=3", "workload.arrivals=constant")
    sweep(tmp_path, "policy=proposed,cg-bprr", n_runs=3, overrides=same)
    assert "±" not in (tmp_path / "table.md").read_text(encoding="utf-8").split("| --- |")[1]


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    sweep(tmp_path / "a", RATES)
    for over, options, said in (
        (
            ("workload.n_input_tokens=5,6",),
            {},
            "another study, with axes workload.rate and not workload.n_input_tokens",
        ),
        ((RATES,), {"engine": "virtual"}, "another study, with engine fast and not virtual"),
        ((RATES,), {"target": "abovenet"}, "another study, with scenario clustered and not abovenet"),
    ):
        with pytest.raises(UserError, match=said):
            sweep(tmp_path / "a", *over, **options)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "letter.txt").write_text("")
    with pytest.raises(UserError, match="holds something else already"):
        sweep(tmp_path / "b", RATES)
    (tmp_path / "a" / STUDY).write_text("[]")
    with pytest.raises(UserError, match="does not describe a study"):
        sweep(tmp_path / "a", RATES)


def test_two_commands_do_not_write_into_one_folder(tmp_path: Path) -> None:
    sweep(tmp_path, RATES)
    with Lines(tmp_path / RUNS), pytest.raises(UserError, match="another command writes there now"):
        sweep(tmp_path, RATES)


def test_a_command_that_waits_for_the_folder_makes_it_no_folder_of_its_own_study(tmp_path: Path) -> None:
    with Lines(tmp_path / RUNS), pytest.raises(UserError, match="another command writes there now"):
        sweep(tmp_path, RATES)
    assert not (tmp_path / STUDY).exists()


def test_a_kill_while_the_study_is_noted_leaves_its_folder_to_the_same_command(tmp_path: Path) -> None:
    def killed(path: Path, *_: object) -> None:
        half_written(path).touch()
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(command, "write_json", killed)
        sweep(tmp_path, RATES)
    assert sweep(tmp_path, RATES)["n_computed"] == 2
    assert (tmp_path / STUDY).exists() and not list(tmp_path.glob(f"*{HALF_WRITTEN}"))


def test_a_stopped_command_shows_what_earlier_ones_have_stored_and_it_has_not_come_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stopped:
        def results(self, *_: object) -> Iterator[object]:
            raise KeyboardInterrupt
            yield

    sweep(tmp_path, "workload.rate=0.5:1:0.5")
    monkeypatch.setattr(command, "executor_of", lambda *_: Stopped())
    with pytest.raises(KeyboardInterrupt, match=r"1 of 3 runs are left"):
        sweep(tmp_path, "workload.rate=0.5:1.5:0.5")
    assert [row["workload.rate"] for row in rows(tmp_path)] == [0.5, 1.0]


def test_a_line_of_another_form_is_named_and_one_cut_short_is_computed_again(tmp_path: Path) -> None:
    sweep(tmp_path, RATES)
    path, before = tmp_path / RUNS, (tmp_path / RESULTS).read_bytes()
    path.write_bytes(path.read_bytes()[:-20])
    assert sweep(tmp_path, RATES)["n_computed"] == 1
    assert (tmp_path / RESULTS).read_bytes() == before
    assert all(json.loads(line) for line in path.read_text().splitlines())
    with open(path, "a") as file:
        file.write('{"key": 3}\n')
    with pytest.raises(UserError, match=r"line 3 is no result of this command \(.*\); remove that line"):
        sweep(tmp_path, RATES)


def test_a_disk_that_fills_up_keeps_what_was_measured(tmp_path: Path) -> None:
    rates = "workload.rate=0.1:2.4:0.1"
    # provenance.json, with a line per package that is installed, is shorter.
    with files_no_longer_than(20_000), pytest.raises(RunError, match=r"runs.jsonl: cannot be written"):
        sweep(tmp_path, rates)
    answer = sweep(tmp_path, rates)
    assert 0 < answer["n_found"] < 24 and answer["n_computed"] == 24 - answer["n_found"]


@pytest.mark.parametrize(
    ("over", "options", "said"),
    [
        (("workload.rat=1",), {}, r'workload.rat: unknown key \(did you mean "rate"\?\)'),
        (("workload.rate=1,-1",), {}, "workload.rate=-1: workload.rate: must be"),
        (("policy=petals,petalz",), {}, "policy petalz: there is no policy pair"),
        (("policy=cg-bp+nothing",), {}, "there is no routing policy 'nothing'"),
        ((), {"n_runs": 10**12}, "the study has 1,000,000,000,000 runs, but at most 1,000,000 are allowed"),
        (
            ("servers.0.count=1:2000:1", "servers.1.count=1:2000:1"),
            {},
            "the study has 4,000,000 runs",
        ),
        (
            ("workload.n_requests=2,3",),
            {},
            "workload.n_requests is an axis and set to one value, too: leave it out",
        ),
        (
            (),
            {"baseline": "petals"},
            "the baseline petals is none of the policies compared; give these with --over",
        ),
        ((), {"n_runs": 0}, "--runs must be at least 1"),
        ((), {"seed": -1}, "--seed must not be negative"),
        ((), {"engine": "slow"}, "--engine must be fast, virtual, real or reference"),
        ((), {"jobs": 0}, "--jobs must be at least 1"),
        ((), {"engine": "real", "jobs": 2}, "only one runs at a time"),
        ((), {"target": "clusterd"}, 'did you mean "clustered"'),
        (
            ("workload.rate=0.1,0.3",),
            {"target": "load-shift"},
            r"load-shift: workload.changes sets rates of its own, .* --set workload.changes=\[\]",
        ),
    ],
)
def test_what_makes_no_sense_gets_one_sentence_before_anything_is_made(
    tmp_path: Path, over: tuple[str, ...], options: dict[str, Any], said: str
) -> None:
    with pytest.raises(UserError, match=said) as caught:
        sweep(tmp_path / "out", *over, **options)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()
    with pytest.raises(UserError, match="--executor must be local or ray, not farm"):
        sweep_command("clustered", Options(), tmp_path / "out", "farm", None)


def test_the_system_itself_serves_in_virtual_time(tmp_path: Path) -> None:
    answer = sweep(tmp_path, POLICIES, engine="virtual", overrides=("workload.n_requests=2",))
    assert answer["statuses"] == {"ok": 2}
    assert [row["engine"] for row in rows(tmp_path)] == [engine.VIRTUAL] * 2


def test_a_sweep_without_axes_is_one_point(tmp_path: Path) -> None:
    assert sweep(tmp_path)["n_runs"] == 1
    (row,) = rows(tmp_path)
    assert (row["policy"], row["seed"]) == ("proposed", 0)
    assert not [name for name in os.listdir(tmp_path / "figures") if "map" in name]


def test_ray_that_is_not_installed_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executors, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install '\.\[ray\]' in the checkout"):
        sweep_command("clustered", Options(), tmp_path / "out", "ray", None)
    with pytest.raises(UserError, match="leave out --executor ray"):
        sweep_command("clustered", Options(engine="real"), tmp_path / "out", "ray", None)
    assert not (tmp_path / "out").exists()


def test_a_worker_warns_of_a_scenario_once_and_not_with_every_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    late = ("workload.n_requests=2", "network.jitter='1 s'")
    sweep(tmp_path, "workload.rate=0.1,0.2,0.3,0.4", POLICIES, jobs=2, n_runs=2, overrides=late)
    assert 0 < capfd.readouterr().err.count("network.jitter 1 s is larger than") <= 2


def test_kept_requests_are_the_rows_of_every_run_with_its_axes(tmp_path: Path) -> None:
    given = {"policies": ("petals", "cg-bp+ws-rr"), "n_runs": 2}
    first, again, late = tmp_path / "first", tmp_path / "again", tmp_path / "late"
    sweep(first, RATES, keep="requests", **given)
    kept: list[dict[str, Any]] = pq.read_table(first / REQUESTS).to_pylist()
    assert [row["request"] for row in kept] == 8 * [0, 1, 2, 3, 4]
    runs_of = [(row["workload.rate"], row["policy"], row["seed"]) for row in kept[::5]]
    assert runs_of == [(row["workload.rate"], row["policy"], row["seed"]) for row in rows(first)]
    for row, start in zip(rows(first), range(0, 40, 5), strict=True):
        times_s = [request["ttft_s"] for request in kept[start : start + 5]]
        assert sum(times_s) / 5 == pytest.approx(row["ttft_s_mean"])
    assert set(kept[0]) == {"workload.rate", "policy", "seed", *request_columns()} - {*OPTIONAL}
    assert sweep(first, RATES, keep="requests", **given)["n_computed"] == 0
    sweep(again, RATES, keep="requests", jobs=2, **given)
    assert (first / REQUESTS).read_bytes() == (again / REQUESTS).read_bytes()
    sweep(late, RATES, **given)
    assert not (late / REQUESTS).exists() and (late / RESULTS).read_bytes() == (first / RESULTS).read_bytes()
    assert sweep(late, RATES, keep="requests", **given)["n_computed"] == 8, "their requests were not kept"
    assert (late / REQUESTS).read_bytes() == (first / REQUESTS).read_bytes()


def test_kept_requests_of_runs_without_a_result_are_none(tmp_path: Path) -> None:
    answer = sweep(tmp_path, policies=("whole-model",), keep="requests")
    assert answer["statuses"] == {"infeasible": 1}
    assert pq.read_table(tmp_path / REQUESTS).num_rows == 0


def test_a_kept_line_that_a_kill_cut_short_is_run_again(tmp_path: Path) -> None:
    sweep(tmp_path, RATES, keep="requests")
    before = (tmp_path / REQUESTS).read_bytes()
    (tmp_path / STORED).write_bytes((tmp_path / STORED).read_bytes()[:-10])
    assert sweep(tmp_path, RATES, keep="requests")["n_computed"] == 1
    assert (tmp_path / REQUESTS).read_bytes() == before


def test_policies_are_given_in_one_of_two_ways(tmp_path: Path) -> None:
    sweep(tmp_path, policies=("petals", "policies.cgbp:CgBp+policies.wsrr:WsRr"))
    assert [row["policy"] for row in rows(tmp_path)] == ["petals", "policies.cgbp:CgBp+policies.wsrr:WsRr"]
    with pytest.raises(UserError, match="leave one of the two out"):
        sweep(tmp_path, POLICIES, policies=("petals",))
    with pytest.raises(UserError, match="--keep must be requests, not all"):
        sweep(tmp_path, keep="all")


def test_a_scenario_is_an_axis_and_labels_change_nothing(tmp_path: Path) -> None:
    study = tmp_path / "mine.toml"
    study.write_text(
        'scenario = "clustered"\npolicies = ["petals", "proposed"]\nruns = 4\nengine = "reference"\n'
        'set = { "workload.n_requests" = 5 }\nevery = { proposed = 2 }\nlabels = { proposed = "ours" }\n'
        'metrics = ["ttft_s"]\n'
        'published = [{ metric = "ttft_s", policy = "petals", value = 2, at = { scenario = "abovenet" } }]\n'
        'axis = [{ zip = { scenario = ["clustered", "abovenet"], "label.place" = ["here", "there"] } }]\n'
    )
    sweep(tmp_path / "out", target=str(study), overrides=())
    table = rows(tmp_path / "out")
    assert [(row["scenario"], row["policy"], row["seed"]) for row in table] == [
        (scenario, policy, seed)
        for scenario in ("abovenet", "clustered")
        for policy, seeds in (("petals", range(4)), ("proposed", (0, 2)))
        for seed in seeds
    ]
    assert {(row["scenario"], row["label.place"]) for row in table} == {
        ("clustered", "here"),
        ("abovenet", "there"),
    }
    there = case_of(Setup("abovenet"), Run(("workload.n_requests=5",), "petals", 0))
    of_petals = [row["ttft_s_mean"] for row in table if row["policy"] == "petals"][:4]
    served = simulate(there, "reference")
    assert of_petals[0] == pytest.approx(sum(row.times.ttft_s or 0 for row in served.rows) / 5)
    assert {row["engine"] for row in table} == {"reference"}
    text = (tmp_path / "out" / "table.md").read_text(encoding="utf-8")
    assert (
        "| scenario | place | policy | runs | time to first token, mean [s] | published (deviation) |" in text
    )
    mean_s = sum(of_petals) / 4
    [line] = [line for line in text.splitlines() if "| there | petals |" in line]
    assert f"| 2 ({100 * (mean_s / 2 - 1):+.1f} %) |" in line
    assert "| clustered | here | ours | 2 |" in text
