import json
import math

import pytest

from nodes.records import Completed, Failed, Interrupted
from testbed.errors import UserError
from testbed.experiments.experiment import Calibration
from testbed.experiments.slo import Objectives
from testbed.records.base import data_of
from testbed.records.events import BY_HAND, BY_SCENARIO, EventWriter, FaultHappened
from testbed.records.summary import ErrorFigures, RunSummary, Stats, read_summary
from testbed.results import finish_run
from testbed.results.report import report_body
from testbed.results.slo import parse_slo, parse_slo_statistics
from testbed.results.summary import RANDOM_LOSS
from testbed.results.text import summary_text
from tests.support.records import changed
from tests.support.runs import rows_of
from tests.unit.results.conftest import MakeRun, SyntheticRun, perfect_hop

CHAIN = [(0, 0, 2), (1, 2, 4)]
"""Log one request of 2 + 3 tokens: setup 0.1 s, prefill 2 x 0.56 s, decode 2 x 2 x 0.32 s, in total 2.5 s."""


def finish(run: SyntheticRun, objectives: dict[str, float] | None = None) -> RunSummary:
    summary = finish_run(run.path, run.experiment, None if objectives is None else Objectives(objectives))
    assert json.loads((run.path / "summary.json").read_text()) == data_of(summary)
    assert read_summary(run.path) == summary
    return summary


def test_a_request_that_goes_as_modelled_has_the_metrics_of_the_definition_and_no_error(
    make_run: MakeRun,
) -> None:
    run = make_run()
    run.serve(0, 0.0, CHAIN)
    summary = finish(run)
    expected = {
        "queue_s": 0.0,
        "setup_s": 0.1,
        "ttft_s": 1.22,
        "tpot_s": 0.64,
        "token_gap_s": 0.64,
        "per_token_s": 2.5 / 3,
        "e2e_s": 2.5,
    }
    for kind in ("metrics", "model", "model_unqueued"):
        assert {name: summary[kind][name]["mean"] for name in expected} == pytest.approx(expected), kind
    assert summary["metrics"]["token_gap_s"]["n"] == 2
    for name, error in summary["emulation_error"].items():
        assert list(dict(error).values()) == pytest.approx([0.0] * 5, abs=1e-9), name
    assert set(summary["emulation_error"]) == {
        *("token_gap_s", "hop_s", "queue_s", "ttft_s", "tpot_s", "per_token_s", "e2e_s")
    }
    assert summary["emulation_error_of"] == "closed model"


def test_queue_ends_where_the_successful_attempt_begins(make_run: MakeRun) -> None:
    run = make_run()
    run.arrive(0, 10.0, intended_at_s=9.75)
    run.reject(0, 10.1, 0)
    run.admit(0, [(0, 0, 4)], 11.1, 11.2)
    hop = perfect_hop(0, 0, 4, 11.2, n_tokens=2, prompt=True)
    end_s = run.token(0, 0, 11.2, [hop])
    run.log(Interrupted(0, end_s))
    metrics = finish(run)["metrics"]
    (row,) = rows_of(run.path / "requests.parquet")
    assert row["queue_s"] == pytest.approx(1.1)
    assert row["setup_s"] == pytest.approx(0.1)
    assert row["ttft_s"] == pytest.approx(end_s - 10)
    assert metrics["schedule_lag_s"]["mean"] == pytest.approx(0.25)
    assert metrics["decision_s"]["mean"] == pytest.approx(0.001)
    assert row["e2e_s"] is None and metrics["ttft_s"]["n"] == 0  # it did not complete


def test_every_request_of_the_scenario_is_counted_whatever_became_of_it(make_run: MakeRun) -> None:
    run = make_run(lengths=[(2, 3)] * 5)
    run.serve(0, 0.0, CHAIN)
    run.arrive(1, 1.0)
    run.log(Failed(1, 5.0, "no room within 4 s"))
    run.serve(2, 10.0, CHAIN, n_tokens=2)
    run.log(Interrupted(2, 20.0))
    run.serve(3, 20.0, CHAIN, n_tokens=1)  # killed: nothing more in the log; request 4 never arrived
    summary = finish(run)
    names = ("n_requests", "n_completed", "n_failed", "n_cancelled", "n_interrupted", "n_not_started")
    assert [summary[name] for name in names] == [5, 1, 1, 0, 2, 1]
    assert "1 of 5 requests completed, 1 failed, 2 interrupted, 1 not started" in summary_text(summary)
    for kind in ("metrics", "model", "model_unqueued"):  # the same requests in each
        assert summary[kind]["ttft_s"]["n"] == 1
        assert summary[kind]["ttft_s"]["mean"] == pytest.approx(1.22)
        assert summary[kind]["e2e_s"]["n"] == 1
    assert summary["metrics"]["token_gap_s"]["n"] == 2 + 1


@pytest.mark.parametrize("some_tokens", [False, True])
def test_a_run_in_which_nothing_completed_still_has_a_summary_of_finite_numbers(
    make_run: MakeRun, some_tokens: bool
) -> None:
    run = make_run()
    if some_tokens:
        run.serve(0, 0.0, CHAIN, n_tokens=1)
    summary = finish(run)
    assert summary["n_completed"] == 0
    assert summary["goodput_rps"] is None
    assert summary["metrics"]["e2e_s"] == Stats()
    assert summary["emulation_error"]["e2e_s"] == ErrorFigures()
    assert (summary["metrics"]["hop_overhead_s"]["p50"] is None) == (not some_tokens)
    assert "0 of 1 requests completed" in summary_text(summary)
    json.dumps(data_of(summary), allow_nan=False)


def test_a_slow_token_shows_as_error_and_as_overhead_in_real_seconds(make_run: MakeRun) -> None:
    run = make_run(lengths=[(2, 2)], time_scale=4.0)
    run.in_real_time()
    run.arrive(0, 0.0)
    run.admit(0, [(0, 0, 4)], 0.0, 0.1)
    ready_s = run.token(0, 0, 0.1, [perfect_hop(0, 0, 4, 0.1 + 0.008, 2, prompt=True)])
    hop = perfect_hop(0, 0, 4, ready_s + 0.008)  # modelled: 0.3 + 0.04
    end_s = run.token(0, 1, ready_s, [hop], finished_at_s=hop[6] + 0.026)
    run.log(Completed(0, end_s))
    summary = finish(run)
    assert summary["emulation_error_of"] is None and summary["emulation_error"] == {}  # it has no twin
    assert summary["hop_model_error"]["token_gap_s"]["mean_abs_ratio"] == pytest.approx(0.034 / 0.34)
    assert summary["hop_model_error"]["hop_s"]["p99_abs_ratio"] == pytest.approx(0.1, rel=0.02)
    # Scenario seconds: 0.008 and 0.034. Four of them pass in a real one.
    assert summary["metrics"]["hop_overhead_s"]["p50"] == pytest.approx(0.021)
    assert summary["overhead_per_hop_s"] == pytest.approx(0.021 / 4)
    assert summary["metrics"]["hop_client_s"]["max"] == pytest.approx(0.034)
    assert "4 times faster" in summary_text(summary)


def test_what_the_model_leaves_out_stands_below_its_columns_also_without_errors(make_run: MakeRun) -> None:
    run = make_run()
    run.in_real_time()
    run.serve(0, 0.0, [(0, 0, 2), (1, 2, 4)])
    took = {"p50": 1.0, "max": 1.0}
    replays = {"n_replays": 1, "recovery_s": took, "recovery_floor_s": took}
    summary = changed(finish_run(run.path, run.experiment), closed_model_lacks=["jitter"], **replays)
    text = " ".join(summary_text(summary).split())
    assert "model mean" in text
    assert "no errors are stated: the run has no twin the closed model has no jitter" in text
    assert "most of the errors" not in text
    assert "its columns have recovered requests as if nothing failed own overhead" in text
    beside_twin = changed(summary, twin=data_of(summary)["metrics"])
    assert "twin mean" in summary_text(beside_twin) and "closed model" not in summary_text(beside_twin)
    parts_of_a_hop = report_body(beside_twin, [], [])
    assert "<p>The closed model has no jitter.</p>" in parts_of_a_hop


def test_lost_packets_are_said_to_wait_for_timers_that_do_not_follow_the_time_scale(
    make_run: MakeRun,
) -> None:
    run = make_run(time_scale=20.0)
    run.in_real_time()
    run.serve(0, 0.0, [(0, 0, 2), (1, 2, 4)])
    lossy = {"closed_model_lacks": [RANDOM_LOSS], "network": "fabric"}
    for differs, is_said in (
        ({}, True),
        ({"network": "netem"}, True),
        ({"network": "loopback"}, False),
        ({"closed_model_lacks": []}, False),
        ({"time_scale": 1.0}, False),
    ):
        summary = changed(finish_run(run.path, run.experiment), **(lossy | differs))
        text = " ".join(summary_text(summary).split())
        assert ("the shortest, 0.2 s (real), counts as 4 s" in text) == is_said, differs


@pytest.mark.parametrize(
    ("network", "clock", "lacks", "is_said"),
    [
        ("fabric", "virtual", [RANDOM_LOSS], True),
        ("memory", "virtual", [RANDOM_LOSS], False),
        ("fabric", "real", [RANDOM_LOSS], False),
        ("fabric", "virtual", [], False),
    ],
)
def test_a_network_whose_windows_lost_packets_do_not_halve_in_virtual_time_says_so(
    make_run: MakeRun, network: str, clock: str, lacks: list[str], is_said: bool
) -> None:
    run = make_run()
    run.serve(0, 0.0, [(0, 0, 2), (1, 2, 4)])
    differs = {"closed_model_lacks": lacks, "network": network, "clock": clock}
    summary = changed(finish_run(run.path, run.experiment), **differs)
    text = " ".join(summary_text(summary).split())
    assert (f"TCP's windows are not halved on network {network}" in text) == is_said


def test_the_closed_form_knows_nothing_of_queueing_on_links(make_run: MakeRun) -> None:
    run = make_run(lengths=[(2, 2)] * 2)
    for index in (0, 1):
        run.arrive(index, 0.0)
        run.admit(index, [(0, 0, 4)], 0.0, 0.1)
    firsts = [perfect_hop(0, 0, 4, 0.1, 2, prompt=True)]
    s, a, b, sent, arrived, departed, received, up, down = firsts[0]
    firsts.append((s, a, b, sent, arrived + 0.2, departed + 0.2, received + 0.2, up, down))
    for index, first in enumerate(firsts):
        ready_s = run.token(index, 0, 0.1, [first])
        run.log(Completed(index, run.token(index, 1, ready_s, [perfect_hop(0, 0, 4, ready_s)])))
    summary = finish(run)
    assert summary["model"]["ttft_s"]["max"] == pytest.approx(0.1 + 0.62 + 0.2)
    assert summary["model"]["link_queue_s"]["max"] == pytest.approx(0.2)
    assert summary["model_unqueued"]["ttft_s"]["max"] == pytest.approx(0.1 + 0.62)
    assert summary["emulation_error"]["ttft_s"]["p99_abs_ratio"] == pytest.approx(0, abs=1e-9)


def test_goodput_counts_only_requests_within_every_objective_over_the_time_since_the_first_arrival(
    make_run: MakeRun,
) -> None:
    run = make_run(lengths=[(2, 3)] * 3)
    run.arrive(0, 2.0)
    run.log(Failed(0, 3.0, "server 0: gone"))
    run.serve(1, 10.0, CHAIN)
    run.serve(2, 17.5, [(0, 0, 4)])  # one hop: 0.1 + 0.62 + 2 x 0.34 = 1.4 s, first token after 0.72 s
    span_s = 16.9
    assert finish(run, {})["goodput_rps"] == pytest.approx(2 / span_s)
    assert finish(run, {"ttft": 1.0})["goodput_rps"] == pytest.approx(1 / span_s)
    assert finish(run, {"ttft": 5.0, "tpot": 0.3})["goodput_rps"] == 0
    assert "goodput 0.0000 requests/s met ttft <= 5 s, tpot <= 0.3 s" in summary_text(finish(run))


def test_objectives_of_an_earlier_summary_are_kept_when_tables_are_made_again(make_run: MakeRun) -> None:
    run = make_run()
    run.serve(0, 0.0, CHAIN)
    first = finish(run, {"ttft": 1.0})
    assert first["goodput_rps"] == 0
    assert finish(run) == first


def test_concurrency_is_averaged_over_the_time_from_the_first_arrival_to_the_last_end(
    make_run: MakeRun,
) -> None:
    run = make_run(lengths=[(2, 3)] * 2)
    run.serve(0, 1.0, CHAIN)  # active from 1.0 to 3.5
    run.serve(1, 2.0, CHAIN)  # active from 2.0 to 4.5
    concurrency = finish(run)["achieved_concurrency"]
    assert concurrency == pytest.approx({"mean": 5.0 / 3.5, "max": 2})


def test_session_setup_is_shown_with_the_results_without_it_beside(make_run: MakeRun) -> None:
    run = make_run(lengths=[(2, 1)], calibration=Calibration(session_setup_s=60.0))
    run.arrive(0, 0.0)
    run.admit(0, [(0, 0, 4)], 0.0, 0.1)
    run.log(Completed(0, run.token(0, 0, 60.1, [perfect_hop(0, 0, 4, 60.1, 2, prompt=True)])))
    summary = finish(run)
    assert data_of(summary.calibration) == {"set": "none", "session_setup_s": 60.0}
    assert summary["metrics"]["ttft_s"]["mean"] == pytest.approx(60.72)
    assert summary["model"]["ttft_s"]["mean"] == pytest.approx(60.72)
    without = summary["without_session_setup"]
    assert without["ttft_s"]["mean"] == without["per_token_s"]["mean"] == pytest.approx(0.72)
    assert "session_setup adds 60 s" in summary_text(summary)


def test_what_is_left_without_session_setup_is_per_token_that_came(make_run: MakeRun) -> None:
    run = make_run(lengths=[(2, 10)], calibration=Calibration(session_setup_s=0.1))
    end_s = run.serve(0, 0.0, CHAIN, n_tokens=2)
    run.log(Completed(0, end_s))
    without = finish(run)["without_session_setup"]
    assert without["per_token_s"]["mean"] == pytest.approx((end_s - 0.1) / 2)


def test_a_run_without_session_setup_does_not_speak_of_it(make_run: MakeRun) -> None:
    run = make_run()
    run.serve(0, 0.0, CHAIN)
    assert "without_session_setup" not in finish(run)


def test_the_summary_says_what_was_run_and_how(make_run: MakeRun) -> None:
    run = make_run(time_scale=2.0)
    run.serve(0, 0.0, CHAIN)
    summary = finish(run)
    told = ("scenario", "seed", "network", "compute", "time_scale", "startup_s", "policy")
    assert {name: data_of(summary)[name] for name in told} == {
        "scenario": "synthetic",
        "seed": 7,
        "network": "fabric",
        "compute": "stub",
        "time_scale": 2.0,
        "startup_s": 0.5,
        "policy": {"placement": "cg-bp", "routing": "ws-rr", "design_concurrency": 5},
    }
    assert summary["decision"]["placement_s"] == 0.002
    assert summary["decision"]["routing_s"]["mean"] == 0.001
    assert summary["decision"]["control_plane_s"]["mean"] == 0.002
    text = summary_text(summary)
    assert "network fabric, compute stub, time scale 2, seed 7" in text


def test_faults_by_hand_are_counted_and_named_where_errors_contain_them(make_run: MakeRun) -> None:
    run = make_run()
    run.serve(0, 0.0, CHAIN)
    writer = EventWriter(run.path)
    for kind, by, applies in (("slow", BY_HAND, True), ("stop", BY_SCENARIO, True), ("kill", BY_HAND, False)):
        writer.write(FaultHappened(at_s=0.1, server="s0", kind=kind, by=by, applies=applies, factor=2.0))
    writer.close()
    summary = finish(run)
    assert (summary["n_faults"], summary["n_faults_by_hand"]) == (2, 1)
    assert "by hand" not in summary_text(summary)
    text = " ".join(summary_text(changed(summary, emulation_error_of="twin")).split())
    assert "1 fault by hand, which the twin does not have: the errors contain what it changed" in text


def test_who_gives_up_counts_in_the_waiting_and_not_in_the_queue(make_run: MakeRun) -> None:
    run = make_run(lengths=((2, 3), (2, 3), (2, 3)))
    run.serve(0, 0.0, CHAIN)
    for index, end_s in ((1, 11.0), (2, 32.0)):
        run.arrive(index, float(index))
        run.reject(index, index + 0.1)
        run.log(Failed(index, end_s, "no room within 10 s"))
    summary = finish(run)
    assert summary["metrics"]["queue_s"]["n"] == 1
    assert summary["admission"]["n_never_admitted"] == 2
    assert (summary["admission"]["waited_s"]["n"], summary["admission"]["waited_s"]["max"]) == (3, 30.0)
    text = " ".join(summary_text(summary).split())
    assert "2 requests did not get admitted: the queue above is that of completed requests" in text
    assert "waited 13.333 s (mean), 30.000 s (max)" in text


def test_a_run_that_served_nothing_has_no_table_and_nothing_to_say_about_others(make_run: MakeRun) -> None:
    run = make_run(lengths=((2, 3), (2, 3)))
    run.arrive(0, 1.0)
    run.log(Interrupted(0, 1.0))
    text = summary_text(finish(run))
    assert "0 of 2 requests completed, 1 interrupted, 1 not started" in text
    assert "scenario seconds" not in text and "error:" not in text and "get admitted" not in text
    run.arrive(1, 2.0)
    run.log(Interrupted(1, 5.0))
    text = " ".join(summary_text(finish(run)).split())
    assert (
        "2 requests did not get admitted: all requests together waited 1.500 s (mean), 3.000 s (max)" in text
    )


def test_percentiles_are_over_all_values_and_the_deviation_is_the_samples_own(make_run: MakeRun) -> None:
    run = make_run(lengths=[(2, 1)] * 5)
    for index in range(5):
        run.arrive(index, 10.0 * index, intended_at_s=10.0 * index - index)
    lag = finish(run)["metrics"]["schedule_lag_s"]
    assert lag == pytest.approx(
        {
            "mean": 2.0,
            "std": math.sqrt(2),
            "min": 0.0,
            "p50": 2.0,
            "p90": 3.6,
            "p95": 3.8,
            "p99": 3.96,
            "max": 4.0,
            "n": 5,
        }
    )


def test_objectives_are_read_as_people_write_them() -> None:
    assert parse_slo("ttft=5s, tpot=250 ms") == Objectives({"ttft": 5.0, "tpot": 0.25})


@pytest.mark.parametrize("text", ["speed=5s", "ttft=fast", "ttft", ""])
def test_a_wrong_objective_is_refused_with_a_sentence_that_names_the_option(text: str) -> None:
    with pytest.raises(UserError, match="--slo"):
        parse_slo(text)


@pytest.mark.parametrize("metric", ["ttft", "tpot", "per_token", "e2e"])
def test_an_objective_that_no_request_can_meet_is_refused(metric: str) -> None:
    with pytest.raises(UserError, match=f"--slo: {metric} must be more than 0"):
        parse_slo(f"{metric}=0 s")
    with pytest.raises(UserError, match=f"--slo: {metric}_p95 must be more than 0"):
        parse_slo_statistics(f"{metric}_p95=0 s")
    assert parse_slo("queue=0 s") == Objectives({"queue": 0.0}), "no request waits at all"
