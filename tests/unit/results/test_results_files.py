import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from nodes.records import Failed
from testbed.errors import RunError, UserError
from testbed.experiments import dump_toml, load_experiment
from testbed.page.report import write_report
from testbed.results import finish_run, load_run
from tests.unit.results.conftest import MakeRun, SyntheticRun, perfect_hop

CHAIN = [(0, 0, 2), (1, 2, 4)]


@pytest.fixture
def mixed(make_run: MakeRun) -> SyntheticRun:
    """Two clients; two requests completed at the same time, one failed, one was killed while it decoded."""
    run = make_run(lengths=[(2, 3), (3, 4), (2, 3), (1, 3), (2, 3)], clients=[0, 1, 0, 1, 0])
    run.serve(0, 0.0, CHAIN)
    run.serve(1, 0.05, CHAIN)
    run.arrive(2, 2.0)
    run.log(Failed(2, 3.0, "server 1: <gone>"))
    run.serve(3, 3.0, CHAIN, n_tokens=2)
    return run


def rows(path: Path) -> list[dict[str, Any]]:
    return list(pq.read_table(path).to_pylist())


def test_the_requests_table_has_a_row_for_every_request_of_the_scenario(mixed: SyntheticRun) -> None:
    finish_run(mixed.path, mixed.experiment)
    table = rows(mixed.path / "requests.parquet")
    assert [(r["request"], r["client"], r["status"]) for r in table] == [
        (0, "c0", "completed"),
        (1, "c1", "completed"),
        (2, "c0", "failed"),
        (3, "c1", "unfinished"),
        (4, "c0", "not-started"),
    ]
    assert table[2]["reason"] == "s1: <gone>"
    assert [r["n_tokens_done"] for r in table] == [3, 4, 0, 2, 0]
    assert table[0]["chain"] == "0:0-2 1:2-4"
    assert table[3]["ttft_s"] is not None
    assert table[3]["e2e_s"] is None
    assert table[4]["arrived_at_s"] is None


def test_the_hops_table_adds_up_to_the_time_of_every_token(mixed: SyntheticRun) -> None:
    finish_run(mixed.path, mixed.experiment)
    parts: dict[int, float] = defaultdict(float)
    table = rows(mixed.path / "hops.parquet")
    for row in table:
        parts[row["request"]] += row["hop_client_s"] + row["hop_network_s"] + row["hop_compute_s"]
    assert len(table) == 2 * (3 + 4 + 2)
    assert {row["server"] for row in table} == {"s0", "s1"}
    for request in rows(mixed.path / "requests.parquet")[:2]:
        whole_s = request["e2e_s"] - request["queue_s"] - request["setup_s"]
        assert parts[request["request"]] == pytest.approx(whole_s, abs=1e-9)


def test_times_in_tables_carry_their_unit_in_the_name(mixed: SyntheticRun) -> None:
    finish_run(mixed.path, mixed.experiment)
    for name in ("requests.parquet", "hops.parquet"):
        schema = pq.read_schema(mixed.path / name)
        floats = [field.name for field in schema if str(field.type) == "double"]
        assert floats
        assert all(column.endswith("_s") for column in floats), floats


def test_the_same_logs_make_the_same_files_byte_for_byte(mixed: SyntheticRun) -> None:
    names = ("requests.parquet", "hops.parquet", "summary.json", "trace.json")
    finish_run(mixed.path, mixed.experiment)
    first = [(mixed.path / name).read_bytes() for name in names]
    finish_run(mixed.path, mixed.experiment)
    assert [(mixed.path / name).read_bytes() for name in names] == first


NAMES = ("summary.json", "requests.parquet", "hops.parquet", "links.parquet", "trace.json")


@pytest.mark.parametrize("broken", NAMES)
def test_a_file_that_cannot_be_written_is_named_and_the_others_are_written(
    mixed: SyntheticRun, broken: str
) -> None:
    names = {*NAMES}
    (mixed.path / broken).mkdir()
    with pytest.raises(RunError, match=rf"cannot write {re.escape(broken)} \(.*the logs are intact"):
        finish_run(mixed.path, mixed.experiment)
    assert {path.name for path in mixed.path.iterdir() if path.is_file()} == {
        *(names - {broken}),
        "plan.json",
    }


def spans(path: Path) -> dict[tuple[int, int], list[tuple[float, float]]]:
    by_thread: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for event in json.loads(path.read_text(encoding="utf-8"))["traceEvents"]:
        if event["ph"] == "X":
            by_thread[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    return by_thread


def test_spans_of_one_trace_thread_nest_or_lie_apart(make_run: MakeRun) -> None:
    run = make_run(lengths=[(2, 3)] * 6, clients=[0, 1] * 3)
    for index in range(6):
        run.serve(index, 0.01 * index, CHAIN)  # six sessions compute on a server at the same time
    finish_run(run.path, run.experiment)
    by_thread = spans(run.path / "trace.json")
    assert len(by_thread) > 6 + 2
    for thread in by_thread.values():
        stack: list[float] = []
        for start, end in sorted(thread, key=lambda span: (span[0], -span[1])):
            while stack and stack[-1] <= start + 1e-6:
                stack.pop()
            assert not stack or end <= stack[-1] + 1e-6
            stack.append(end)


def test_the_trace_has_sites_as_processes_and_servers_and_sessions_as_threads(mixed: SyntheticRun) -> None:
    finish_run(mixed.path, mixed.experiment)
    events = json.loads((mixed.path / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    sites = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    threads = {(sites[e["pid"]], e["args"]["name"]) for e in events if e["name"] == "thread_name"}
    assert set(sites.values()) == {"East", "North", "West"}
    assert {("East", "s0"), ("West", "s1"), ("North", "c0 request 0"), ("North", "c1 request 3")} <= threads
    computed = [e for e in events if e["ph"] == "X" and sites[e["pid"]] == "East"]
    assert len(computed) == 3 + 4 + 2
    assert computed[0]["name"] == "prefill r0"
    assert computed[0]["ts"] == pytest.approx((0.1 + 0.25) * 1e6)
    assert computed[0]["dur"] == pytest.approx(0.06 * 1e6)


def test_a_request_that_never_got_in_is_in_the_trace_with_its_reason(mixed: SyntheticRun) -> None:
    finish_run(mixed.path, mixed.experiment)
    events = json.loads((mixed.path / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    [failed] = [event for event in events if event["name"] == "request 2"]
    assert failed["dur"] == pytest.approx(1e6)
    assert failed["args"]["reason"] == "server 1: <gone>"


@pytest.mark.renders
def test_the_report_is_one_page_that_loads_nothing_and_lists_what_did_not_complete(
    mixed: SyntheticRun,
) -> None:
    finish_run(mixed.path, mixed.experiment)
    page = write_report(mixed.path, mixed.experiment).read_text(encoding="utf-8")
    sources = re.findall(r'(?:src|href)="([^"]{0,30})', page)
    assert len(sources) == 5
    assert all(source.startswith("data:image/png;base64,") for source in sources)
    assert "request 2: failed s1: &lt;gone&gt;" in page
    assert "request 3: unfinished" in page
    assert "request 4: not-started" in page
    drawn = {path.name for path in (mixed.path / "figures").iterdir()}
    names = ("token_gap_cdf", "token_error", "requests", "servers", "links")
    assert drawn == {f"{name}.{ending}" for name in names for ending in ("png", "pdf")}


def test_a_run_without_a_single_token_has_a_report_too(make_run: MakeRun) -> None:
    run = make_run()
    finish_run(run.path, run.experiment)
    page = write_report(run.path, run.experiment).read_text(encoding="utf-8")
    assert "request 0: not-started" in page
    assert "<img" not in page


def test_a_report_that_cannot_be_written_is_one_sentence(mixed: SyntheticRun) -> None:
    finish_run(mixed.path, mixed.experiment)
    (mixed.path / "report.html").mkdir()
    with pytest.raises(RunError, match=r"cannot write report\.html"):
        write_report(mixed.path, mixed.experiment)


def test_a_killed_run_is_read_back_with_the_experiment_that_it_ran(tmp_path: Path) -> None:
    experiment = load_experiment("clustered", ["workload.n_requests=2", "time_scale=3"])
    run = SyntheticRun(tmp_path / "killed", experiment)
    (run.path / "scenario.toml").write_text(dump_toml(experiment), encoding="utf-8")
    run.arrive(0, 0.0)
    run.admit(0, [(7, 0, 49), (8, 49, 70)], 0.0, 0.1)
    run.token(0, 0, 0.1, [perfect_hop(7, 0, 49, 0.1), perfect_hop(8, 49, 70, 1.0)])
    loaded = load_run(run.path)
    assert loaded == experiment
    summary = finish_run(run.path, loaded)
    assert (summary["n_requests"], summary["n_completed"], summary["n_interrupted"]) == (2, 0, 1)
    assert len(rows(run.path / "hops.parquet")) == 2


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a run directory"):
        load_run(tmp_path)


def test_a_trace_that_is_not_wanted_is_left_out_and_nothing_else_changes(mixed: SyntheticRun) -> None:
    whole = finish_run(mixed.path, mixed.experiment)
    there = {path.name for path in mixed.path.iterdir()}
    (mixed.path / "trace.json").unlink()
    assert finish_run(mixed.path, mixed.experiment, trace=False) == whole
    assert {path.name for path in mixed.path.iterdir()} == there - {"trace.json"}
