"""Which requests of two runs compare, and what is said of the others."""

from __future__ import annotations

from pathlib import Path

import pytest

from testbed.errors import UserError
from testbed.studies.compare import compare_command
from tests.support.run_tables import MakeRun, failed, request


def test_every_request_of_either_run_is_compared_or_listed_with_its_reason(make_run: MakeRun) -> None:
    a = make_run("a", [request(0), request(1), request(2), failed(3, "no-chain"), request(4)])
    b = make_run("b", [request(1), request(2, n_output_tokens=9), request(3), request(4), request(5)])
    answer, text = compare_command(a, b, None)
    aligned = answer["aligned"]
    assert [row["request"] for row in answer["requests"]] == [1, 4]
    assert (aligned["n_compared"], aligned["only_a"], aligned["only_b"]) == (2, [0], [5])
    assert aligned["other_lengths"] == [{"request": 2, "a": [2, 3], "b": [2, 9]}]
    ends = {"a": {"status": "failed", "reason": "no-chain"}, "b": {"status": "completed", "reason": ""}}
    assert aligned["not_completed"] == [{"request": 3, **ends}]
    for sentence in (
        "left out: 1 request in A alone (0)",
        "left out: 1 request in B alone (5)",
        "left out: 1 request with other lengths in the two runs (2)",
        "left out: 1 request, failed [no-chain] in A, completed in B (3)",
    ):
        assert sentence in text


def test_a_text_that_ended_early_is_compared_with_one_of_as_many_tokens(make_run: MakeRun) -> None:
    early = {"n_output_tokens": 30, "n_tokens_done": 3}
    a = make_run("a", [request(0, **early), request(1, **early), request(2)])
    b = make_run("b", [request(0, n_output_tokens=30), request(1), request(2)])
    answer, _ = compare_command(a, b, None)
    assert [(row["request"], row["n_output_tokens"]) for row in answer["requests"]] == [(1, 3), (2, 3)]
    assert answer["aligned"]["other_lengths"] == [{"request": 0, "a": [2, 3], "b": [2, 30]}]


def test_requests_that_ended_alike_are_listed_in_one_line(make_run: MakeRun) -> None:
    a = make_run("a", [request(n) for n in range(9)])
    b = make_run("b", [failed(n, "timeout") if n in (1, 2, 3, 7) else request(n) for n in range(9)])
    _, text = compare_command(a, b, None)
    assert "left out: 4 requests, completed in A, failed [timeout] in B (1-3, 7)" in text


def test_tokens_of_requests_that_are_left_out_do_not_count(make_run: MakeRun) -> None:
    a = make_run("a", [request(0), request(1)])
    b = make_run("b", [request(0), failed(1, "timeout")])
    answer, _ = compare_command(a, b, None)
    assert answer["tokens"]["decode"]["a"]["n"] == answer["tokens"]["decode"]["b"]["n"] == 2
    assert {row["hop_compute_s"]["a"]["n"] for row in answer["hops"] if row["kind"] == "prefill"} == {1}


def test_requests_with_other_arrivals_clients_or_chains_are_counted(make_run: MakeRun) -> None:
    a = make_run("a", [request(n) for n in range(4)])
    b = make_run(
        "b",
        [
            request(0, arrival_at_s=7.0),
            request(1, arrival_at_s=7.0, chain="1:0-4"),
            request(2, client="client-1", arrival_at_s=7.0),
            request(3),
        ],
    )
    answer, text = compare_command(a, b, None)
    aligned = answer["aligned"]
    assert (aligned["n_other_arrival"], aligned["n_other_chain"], aligned["n_other_client"]) == (3, 1, 1)
    assert "3 of 4 compared requests arrive at another time" in text


def test_runs_without_a_request_to_compare_are_refused_in_a_sentence(make_run: MakeRun) -> None:
    a = make_run("a", [request(0), request(1)])
    others = {
        "no request in common": make_run("b", [request(7)]),
        "no request has the same lengths in both runs (request 0: 2 input and 3 output": make_run(
            "c", [request(0, n_output_tokens=8), request(1, n_input_tokens=8)]
        ),
        "no request completed in both runs: of 2,": make_run("d", [failed(0, "x"), failed(1, "x")]),
    }
    for sentence, b in others.items():
        with pytest.raises(UserError) as caught:
            compare_command(a, b, None)
        assert sentence in str(caught.value)
        assert "\n" not in str(caught.value)


def test_nothing_is_written_where_runs_cannot_be_compared(make_run: MakeRun, tmp_path: Path) -> None:
    a, b = make_run("a", [request(0)]), make_run("b", [request(1)])
    with pytest.raises(UserError):
        compare_command(a, b, tmp_path / "out")
    assert not (tmp_path / "out").exists()
