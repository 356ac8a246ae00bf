"""Runs in which servers failed: what is counted, and what is left out of the comparison with the model."""

from __future__ import annotations

import json
from typing import Any

import pytest

from nodes.records import Completed, Detected, Failed, Replayed, Rerouted
from testbed.page.report import write_report
from testbed.records.events import FaultHappened, FaultOver, ServerBegun
from testbed.results import finish_run
from testbed.results.failures import commonest
from testbed.results.figures import _held
from testbed.results.logs import read_logs
from testbed.results.slow import SlowServers
from testbed.results.text import summary_text
from tests.support.runs import rows_of
from tests.unit.results.conftest import MakeRun, SyntheticRun, perfect_hop

CHAIN = [(0, 0, 2), (1, 2, 4)]
NOTICED_S = 7.0
"""How long after its last step to the dead server the client sends the replay."""


def events(run: SyntheticRun, *lines: dict[str, Any]) -> None:
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (run.path / "events.jsonl").write_text(text, encoding="utf-8")


def test_reasons_that_differ_in_numbers_alone_count_as_one_but_names_do_not() -> None:
    full = "no room within 2 s (no-capacity: {} asked for, 200.0 MB free)"
    reasons = [
        (full.format("370.0 MB"), 1),
        ("s-0 is gone", 2),
        (full.format("1,500 MB"), 2),
        (full.format("60 kB"), 1),
        ("s-1 is gone", 1),
    ]
    assert commonest(reasons, 2) == {full.format("370.0 MB"): 4, "s-0 is gone": 2}


@pytest.fixture
def recovered(make_run: MakeRun) -> SyntheticRun:
    """Request 0 takes the modelled times. Request 1 loses server 0 at its token 1; server 1 replaces it."""
    run = make_run(lengths=((2, 3), (2, 3)))
    run.serve(0, 0.0, CHAIN)
    run.arrive(1, 100.0)
    run.admit(1, CHAIN, 100.0, 100.1)
    first = perfect_hop(0, 0, 2, 100.1, 2, prompt=True)
    ready_s = run.token(1, 0, 100.1, [first, perfect_hop(1, 2, 4, first[6], 2, prompt=True)])
    replay = (*perfect_hop(1, 0, 2, ready_s + NOTICED_S, 3, prompt=True), 3)
    again_s = run.token(1, 1, ready_s, [replay, perfect_hop(1, 2, 4, replay[6])])
    run.log(Replayed(1, replay[6], [(1, 0, 2)], 3, 0.0, 0.0, 0.0, 1))
    last = perfect_hop(1, 0, 2, again_s)
    end_s = run.token(1, 2, again_s, [last, perfect_hop(1, 2, 4, last[6])])
    run.log(Completed(1, end_s))
    events(
        run,
        {"event": "fault", "at_s": ready_s, "kind": "kill", "server": "s0", "applies": True},
        {"event": "fault", "at_s": ready_s, "kind": "kill", "server": "s0", "applies": False},
        {
            "event": "replayed",
            "at_s": replay[6],
            "request": 1,
            "hops": [["s1", 0, 2]],
            "tokens": 3,
            **{
                "client": "c1",
                "took_s": 0.9,
                "failed_at_s": ready_s,
                "detected_at_s": ready_s,
                "attempts": 1,
            },
            "recovery_s": 7.8,
            "floor_s": 0.9,
        },
        {"event": "begun", "at_s": ready_s + 9.0, "server": "s0", "blocks": [0, 2]},
    )
    plan = json.loads((run.path / "plan.json").read_text())
    plan["decisions"] = {"n_decisions": 3, "n_stale_decisions": 1, "n_misled_decisions": 0}
    plan["leaks"] = {"sessions": 0, "cache_bytes": 0.0, "descriptors": 2, "namespaces": 1}
    (run.path / "plan.json").write_text(json.dumps(plan))
    return run


def test_recoveries_are_counted_and_set_beside_their_floor(recovered: SyntheticRun) -> None:
    summary = finish_run(recovered.path, recovered.experiment)
    assert (summary["n_faults"], summary["n_replays"], summary["n_stale_decisions"]) == (1, 1, 1)
    assert (summary["recovery_s"]["mean"], summary["recovery_floor_s"]["mean"]) == (7.8, 0.9)
    rows = rows_of(recovered.path / "requests.parquet")
    assert [row["n_recoveries"] for row in rows] == [0, 1]
    text = " ".join(summary_text(summary).split())
    assert (summary["n_faults_without_effect"], summary["n_faults_never_came"]) == (1, 0)
    assert (
        "1 fault, 1 more found nothing to do; sessions recovered 1 time in 7.800 s (p50), 7.800 s (max); floor 0.900 s (p50)"
        in text
    )
    assert "1 of 3 routing decisions was made on a wrong view" in text
    assert "left behind at the end: 2 descriptors, 1 namespace" in text


def test_what_a_replay_takes_is_no_error_of_the_emulation(recovered: SyntheticRun) -> None:
    summary = finish_run(recovered.path, recovered.experiment)
    for name, error in summary["emulation_error"].items():
        assert list(dict(error).values()) == pytest.approx([0.0] * 5, abs=1e-9), name
    assert summary["metrics"]["hop_overhead_s"]["p50"] == pytest.approx(0.0, abs=1e-9)
    assert summary["metrics"]["hop_client_s"]["max"] < 1.0 < summary["metrics"]["token_gap_s"]["max"]
    rows = rows_of(recovered.path / "hops.parquet")
    (replay,) = [row for row in rows if row["replayed_tokens"]]
    assert (replay["request"], replay["token"], replay["server"], replay["replayed_tokens"]) == (
        1,
        1,
        "s1",
        3,
    )
    assert replay["model_compute_s"] == pytest.approx(2 * (0.02 + 0.005 * 3)), "it is a prompt of 3 tokens"
    assert replay["hop_client_s"] == pytest.approx(NOTICED_S)


def test_the_report_and_the_trace_show_faults_and_recoveries(recovered: SyntheticRun) -> None:
    finish_run(recovered.path, recovered.experiment)
    page = write_report(recovered.path, recovered.experiment).read_text(encoding="utf-8")
    assert "Red lines: a fault hit a server. Dots: a session recovered." in page
    trace = json.loads((recovered.path / "trace.json").read_text())["traceEvents"]
    assert [event["name"] for event in trace if event["ph"] == "i"] == ["kill s0", "begun s0"]


def test_a_run_without_faults_says_nothing_of_them(make_run: MakeRun) -> None:
    run = make_run()
    run.serve(0, 0.0, CHAIN)
    summary = finish_run(run.path, run.experiment)
    assert (summary["n_faults"], summary["n_replays"], summary["recovery_s"]["n"]) == (0, 0, 0)
    assert "fault" not in summary_text(summary)


def test_the_model_knows_when_servers_were_slow() -> None:
    slow = SlowServers(
        [
            FaultHappened(at_s=5.0, kind="slow", server="s1", factor=4.0),
            FaultHappened(at_s=6.0, kind="slow", server="s1", factor=9.0, applies=False),
            FaultHappened(at_s=6.0, kind="kill", server="s1"),
            ServerBegun(at_s=8.0, server="s1", blocks=(0, 2)),
            FaultHappened(at_s=9.0, kind="slow", server="s1", factor=2.0),
            FaultOver(at_s=10.0, kind="slow", server="s1"),
        ],
        ["s0", "s1"],
    )
    assert [slow.factor(1, at_s) for at_s in (4.0, 5.0, 7.0, 8.5, 9.5, 11.0)] == [
        1.0,
        4.0,
        4.0,
        1.0,
        2.0,
        1.0,
    ]
    assert slow.factor(0, 7.0) == 1.0


def test_a_session_is_with_a_lost_server_until_others_take_its_blocks(make_run: MakeRun) -> None:
    run = make_run(lengths=((2, 3),))
    run.arrive(0, 0.0)
    run.admit(0, CHAIN, 0.0, 0.1)
    run.log(Detected(0, 5.0, [0], (0, 2), 0, "gone", 4.0, False))
    for at_s, server in ((6.0, 2), (9.0, 1)):  # the first one dies before it has caught up
        run.log(Rerouted(0, at_s, (0, 2), [(server, 0, 2)], 1, 0.0, 0.0))
    run.log(Failed(0, 20.0, "server 1: gone, as is server 77"))
    [record] = read_logs(run.path).requests
    assert _held(record) == [(0, 0.1, 6.0), (1, 0.1, 20.0), (2, 6.0, 9.0)]
    finish_run(run.path, run.experiment)
    [row] = rows_of(run.path / "requests.parquet")
    assert row["reason"] == "s1: gone, as is server 77"


def test_the_end_of_a_halt_by_hand_is_no_fault(make_run: MakeRun) -> None:
    run = make_run()
    run.serve(0, 0.0, CHAIN)
    by_hand = {"event": "fault", "at_s": 1.0, "server": "s0", "applies": True, "by": "hand"}
    events(run, {**by_hand, "kind": "stop"}, {**by_hand, "kind": "cont"})
    assert finish_run(run.path, run.experiment)["n_faults"] == 1


@pytest.mark.parametrize(("late_s", "is_said"), [(0.05, False), (2.5, True)])
def test_requests_that_come_late_are_said(make_run: MakeRun, late_s: float, is_said: bool) -> None:
    run = make_run()
    run.arrive(0, late_s, intended_at_s=0.0)
    text = summary_text(finish_run(run.path, run.experiment))
    assert ("requests arrived up to 2.5 s after their time" in text) is is_said
