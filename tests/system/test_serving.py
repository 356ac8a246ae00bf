"""``testbed serve`` as its users see it: over HTTP, and in the run that it leaves."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from nodes.eventlog import read_log
from nodes.records import Token
from testbed.serving.app import CLIENT_HEADER, INDEX_HEADER
from testbed.serving.text import SMALL, StubCodec
from testbed.studies.bundle.command import bundle_command
from testbed.studies.bundle.reproduce import reproduce_bundle
from tests.support.runs import (
    PATIENCE_S,
    Testbed,
    assert_one_sentence,
    assert_tables_hold_the_whole_log,
    processes,
    rows_of,
    wait_until,
)
from tests.support.serving import Serving, serving

QUICK = ("--network", "loopback", "--time-scale", "50", "--no-report")
"""A token takes 9 ms."""
SLOW = ("--network", "loopback", "--time-scale", "5", "--no-report", "--no-twin")
"""A token takes 90 ms."""
MODEL = "bloom-176b"
PAGE = "http://localhost:3000"
HELLO = {"model": MODEL, "prompt": "Hello there", "max_tokens": 5}


@pytest.fixture
def run(tmp_path: Path) -> Testbed:
    """Other commands than the one that serves."""
    return Testbed(tmp_path / "commands")


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("serving") / "run"
    two = ("--set", 'clients=[{site="Cluster0"}, {site="Cluster1", name="far"}]')
    with serving(folder, "clustered", *QUICK, "--no-twin", *two, "--cors", PAGE) as testbed:
        yield testbed


@contextlib.contextmanager
def streaming(testbed: Serving, **fields: Any) -> Iterator[http.client.HTTPResponse]:
    """A stream that is read by the body, line by line."""
    connection = http.client.HTTPConnection(*testbed.address, timeout=PATIENCE_S)
    try:
        body = json.dumps({**HELLO, "stream": True, **fields})
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        assert response.status == 200, response.read()
        yield response
    finally:
        connection.close()


def events_of(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    lines = (run_dir / "events.jsonl").read_text(encoding="utf-8").splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


def test_a_run_that_served_has_every_request_as_a_row_and_a_twin_beside_it(
    run: Testbed, tmp_path: Path
) -> None:
    with serving(tmp_path / "run", "clustered", *QUICK, "--page") as testbed:
        page = json.loads((testbed.run_dir / "page.json").read_text(encoding="utf-8"))["url"]
        with urlopen(page) as response:
            assert b"<!doctype html>" in response.read()
        first = testbed.ask("/v1/completions", {**HELLO, "max_tokens": 8}, X_Request_Id="mine")
        assert (first.status, first.headers["X-Request-Id"], first.headers[INDEX_HEADER]) == (
            200,
            "mine",
            "0",
        )
        assert first.headers["X-Testbed-Time-Scale"] == "50"
        second = testbed.ask(
            "/v1/chat/completions",
            {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3},
        )
        n_prompt = second.json["usage"]["prompt_tokens"]
        said = testbed.end()
    assert "2 of 2 requests completed" in said
    assert "no twin" not in said, said
    rows = rows_of(tmp_path / "run" / "requests.parquet")
    lengths = [(row["n_input_tokens"], row["n_tokens_done"], row["status"]) for row in rows]
    n_first = first.json["usage"]["prompt_tokens"]
    assert lengths == [(n_first, 8, "completed"), (n_prompt, 3, "completed")]
    twin = rows_of(tmp_path / "run" / "twin" / "requests.parquet")
    assert [(row["n_input_tokens"], row["n_tokens_done"]) for row in twin] == [(n_first, 8), (n_prompt, 3)]
    for row, model in zip(rows, twin, strict=True):
        assert row["arrival_at_s"] == pytest.approx(model["arrival_at_s"])
        assert row["ttft_s"] >= 0.9 * model["ttft_s"]
    assert_tables_hold_the_whole_log(tmp_path / "run")
    again = run("report", str(tmp_path / "run"), "--json")
    assert again.code == 0
    assert json.loads(again.stdout)["n_requests"] == 2
    assert_one_sentence(run("up", str(tmp_path / "run" / "scenario.toml")), "testbed serve")
    bundle_command(tmp_path / "run", tmp_path / "bundle")
    _, text, code = reproduce_bundle(tmp_path / "bundle", 1)
    assert code == 0, text
    assert not processes(tmp_path)


def test_text_has_as_many_tokens_as_it_says(quick: Serving) -> None:
    answer = quick.ask("/v1/completions", {**HELLO, "max_tokens": 12}).json
    [choice] = answer["choices"]
    codec = StubCodec(SMALL)
    assert len(codec.encode(choice["text"])) == answer["usage"]["completion_tokens"] == 12
    assert answer["usage"]["prompt_tokens"] == len(codec.encode("Hello there"))
    assert (choice["finish_reason"], answer["object"]) == ("length", "text_completion")


def test_a_stream_has_a_chunk_per_token_and_its_usage_at_the_end(quick: Serving) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    answer = quick.ask("/v1/completions", {**HELLO, "stream": True, "stream_options": options})
    assert answer.headers["Content-Type"] == "text/event-stream"
    *chunks, usage, done = answer.events
    assert done is None
    assert usage["choices"] == []
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3, 4, 5]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 4 + ["length"]
    assert usage["usage"] == chunks[-1]["usage"]
    plain = quick.ask("/v1/completions", {**HELLO, "stream": True}).events
    assert len(plain) == 6
    assert not any("usage" in chunk for chunk in plain[:-1])


def test_prompts_may_be_tokens(quick: Serving) -> None:
    answer = quick.ask("/v1/completions", {**HELLO, "prompt": [5, 6, 7]}).json
    assert answer["usage"]["prompt_tokens"] == 3


def test_prompts_with_a_common_beginning_reuse_it_and_say_so_and_so_does_the_twin(tmp_path: Path) -> None:
    """Whole pages of 16 tokens are reused; whole and in a stream, with and without the name of the conversation."""
    kept = "--set", "cache.prefix=shared", "--set", "policy.routing=sticky"
    tokens, run_dir = list(range(100, 150)), tmp_path / "run"
    with serving(run_dir, "clustered", *QUICK, *kept) as testbed:
        asked = [
            testbed.ask("/v1/completions", {**HELLO, "prompt": prompt}, **named).json["usage"]
            for prompt, named in (
                (tokens, {"X_Session_ID": "talk"}),
                ([*tokens, 7, 8, 9], {"X_Session_ID": "talk"}),
                ([1, *tokens], {}),
            )
        ]
        streamed = {**HELLO, "prompt": tokens, "stream": True, "stream_options": {"include_usage": True}}
        asked.append(testbed.ask("/v1/completions", streamed).events[-2]["usage"])
        metrics = testbed.ask("/metrics").text
        first = {**HELLO, "prompt": [5] * 20, "max_tokens": 14}
        testbed.ask("/v1/completions", first)
        answer = wait_until(lambda: len(found := answer_to(run_dir, 4)) == 14 and found, "its log")
        further = {**HELLO, "prompt": [5] * 20 + answer + [9, 9]}
        asked.append(testbed.ask("/v1/completions", further).json["usage"])
    assert [usage["prompt_tokens_details"]["cached_tokens"] for usage in asked] == [0, 48, 0, 48, 32]
    assert re.search(r"vllm:prefix_cache_queries_total\{.*\} 204.0", metrics)
    assert re.search(r"vllm:prefix_cache_hits_total\{.*\} 96.0", metrics)
    for folder in (run_dir, run_dir / "twin"):
        reused = [row["n_cached_tokens"] for row in rows_of(folder / "requests.parquet")]
        assert reused == [0, 48, 0, 48, 0, 32], "the answer's tokens, too"
        places = [(row["conversation"], row["turn"]) for row in rows_of(folder / "requests.parquet")]
        assert places == [(0, 0), (0, 1), *[(None, None)] * 4]


def answer_to(run_dir: Path, request: int) -> list[int]:
    """The tokens of an answer, from the clients' logs."""
    records = [record for path in (run_dir / "events").glob("*.log") for record in read_log(path)[0]]
    return [record.token_id for record in records if isinstance(record, Token) and record.request == request]


def test_a_stop_sequence_ends_the_text_and_the_session(quick: Serving) -> None:
    whole = quick.ask("/v1/completions", {**HELLO, "max_tokens": 1000, "stop": "e"})
    [choice] = whole.json["choices"]
    assert choice["finish_reason"] == "stop"
    assert "e" not in choice["text"]
    assert whole.json["usage"]["completion_tokens"] < 1000
    metrics = quick.ask("/metrics").text
    wait_until(lambda: 'finished_reason="stop"' in quick.ask("/metrics").text, "the stop to be counted")
    assert "vllm:num_requests_running" in metrics


def test_several_clients_are_several_places_to_ask_from(quick: Serving) -> None:
    names = [row["id"] for row in quick.ask("/v1/models").json["data"]]
    assert names == [MODEL, f"{MODEL}@client-0", f"{MODEL}@far"]
    assert quick.ask("/v1/completions", {**HELLO, "model": f"{MODEL}@far"}).status == 200
    by_header = quick.ask("/v1/completions", HELLO, **{CLIENT_HEADER: "far"})
    assert by_header.status == 200
    wrong = quick.ask("/v1/completions", {**HELLO, "model": f"{MODEL}@nobody"})
    assert wrong.status == 404
    assert "clients are client-0, far" in wrong.json["error"]["message"]
    index = int(by_header.headers[INDEX_HEADER])
    log = (quick.run_dir / "events" / "far.log").read_bytes()
    assert log.count(b"arrived") == 2 and index > 0


@pytest.mark.parametrize(
    ("path", "body", "status", "code"),
    [
        ("/v1/completions", b"{", 400, None),
        ("/v1/completions", {**HELLO, "model": "other"}, 404, "model_not_found"),
        ("/v1/completions", {**HELLO, "prompt": [1] * 5000}, 400, "context_length_exceeded"),
        ("/v1/completions", {**HELLO, "max_tokens": 5000}, 400, "context_length_exceeded"),
        ("/v1/completions", {**HELLO, "n": 2}, 400, None),
        ("/v1/chat/completions", {"model": MODEL, "messages": []}, 400, None),
        ("/v1/completions", None, 405, None),
        ("/v1/nothing", None, 404, None),
        ("/v1/completions", b"x" * (17 * 1024**2), 413, None),
    ],
)
def test_what_is_wrong_is_said_in_openais_form(
    quick: Serving, path: str, body: Any, status: int, code: str | None
) -> None:
    answer = quick.ask(path, body)
    assert (answer.status, answer.json["error"]["code"]) == (status, code)
    assert answer.json["error"]["message"]
    assert "X-Request-Id" in answer.headers


def test_a_page_of_an_allowed_origin_may_ask_from_a_browser(quick: Serving) -> None:
    def preflight(origin: str) -> tuple[int, dict[str, str | None]]:
        connection = http.client.HTTPConnection(*quick.address, timeout=PATIENCE_S)
        asks = {
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization,x-a",
        }
        connection.request("OPTIONS", "/v1/chat/completions", headers={"Origin": origin, **asks})
        response = connection.getresponse()
        response.read()
        connection.close()
        names = ("Allow-Origin", "Allow-Headers", "Allow-Methods")
        return response.status, {name: response.headers[f"Access-Control-{name}"] for name in names}

    status, allowed = preflight(PAGE)
    assert (status, allowed["Allow-Origin"], allowed["Allow-Headers"]) == (204, PAGE, "authorization,x-a")
    assert "POST" in str(allowed["Allow-Methods"])
    assert preflight("http://elsewhere.example")[0] == 405
    answer = quick.ask("/v1/completions", HELLO, Origin=PAGE)
    assert answer.headers["Access-Control-Allow-Origin"] == PAGE
    assert INDEX_HEADER in answer.headers
    streamed = quick.ask("/v1/completions", {**HELLO, "stream": True}, Origin=PAGE)
    assert streamed.headers["Access-Control-Allow-Origin"] == PAGE
    wrong = quick.ask("/v1/completions", {**HELLO, "n": 2}, Origin=PAGE)
    assert (wrong.status, wrong.headers["Access-Control-Allow-Origin"]) == (400, PAGE)
    assert (
        "Access-Control-Allow-Origin"
        not in quick.ask("/v1/completions", HELLO, Origin="http://x.example").headers
    )


def test_a_model_is_described_by_its_name(quick: Serving) -> None:
    listed = quick.ask("/v1/models").json["data"]
    assert quick.ask(f"/v1/models/{MODEL}").json == listed[0]
    assert quick.ask(f"/v1/models/{MODEL}@far").json == listed[2]
    unknown = quick.ask("/v1/models/other")
    assert (unknown.status, unknown.json["error"]["code"]) == (404, "model_not_found")


def test_several_prompts_have_a_choice_each(quick: Serving) -> None:
    several = {**HELLO, "prompt": ["Hello there", [1, 2, 3]]}
    whole = quick.ask("/v1/completions", several)
    assert [choice["index"] for choice in whole.json["choices"]] == [0, 1]
    assert {choice["finish_reason"] for choice in whole.json["choices"]} == {"length"}
    assert whole.json["usage"]["completion_tokens"] == 10
    assert len(whole.headers[INDEX_HEADER].split(",")) == 2
    events = quick.ask("/v1/completions", {**several, "stream": True}).events
    assert events.pop() is None
    chunks = [event["choices"][0] for event in events]
    assert sorted(chunk["index"] for chunk in chunks) == [0] * 5 + [1] * 5
    assert [chunk["finish_reason"] for chunk in chunks].count("length") == 2


def test_a_body_that_is_packed_in_an_unknown_way_is_refused(quick: Serving) -> None:
    answer = quick.ask("/v1/completions", HELLO, Content_Encoding="x-other")
    assert answer.status == 415
    assert "Content-Encoding must be identity, gzip, deflate" in answer.json["error"]["message"]


def test_a_body_that_is_not_said_to_be_json_is_refused(quick: Serving) -> None:
    answer = quick.ask("/v1/completions", HELLO, Content_Type="text/plain")
    assert answer.status == 415


def test_the_endpoint_is_healthy_and_reports_its_version(quick: Serving) -> None:
    assert quick.ask("/health").status == quick.ask("/health/ready").status == 200
    assert quick.ask("/version").json["version"]


def test_bytes_that_are_no_http_harm_nobody(quick: Serving) -> None:
    for junk in (b"\0" * 5000, b"POST /v1/completions HTTP/1.1\r\nContent-Length: 99999\r\n\r\n{", b"GET "):
        with socket.create_connection(quick.address) as connection:
            connection.sendall(junk)
    assert quick.ask("/v1/completions", HELLO).status == 200


def test_a_reader_that_has_gone_ends_its_session_and_frees_its_caches(run: Testbed, tmp_path: Path) -> None:
    with serving(tmp_path / "run", "clustered", *SLOW) as testbed:
        with streaming(testbed, max_tokens=2000) as stream:
            assert stream.readline().startswith(b"data: ")
        [cancelled] = wait_until(lambda: events_of(testbed.run_dir, "cancelled"), "the session to end")
        assert cancelled["request"] == 0
        wait_until(lambda: "vllm:kv_cache_usage_perc{" in _idle(testbed), "caches to be free")
        with contextlib.closing(http.client.HTTPConnection(*testbed.address)) as waiting:
            body = json.dumps({**HELLO, "max_tokens": 2000})
            waiting.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            wait_until(lambda: _n_running(testbed) == 1, "the second request to run")
        wait_until(lambda: len(events_of(testbed.run_dir, "cancelled")) == 2, "the second session to end")
        testbed.end()
    rows = rows_of(tmp_path / "run" / "requests.parquet")
    assert [row["status"] for row in rows] == ["cancelled"] * 2
    summary = json.loads((tmp_path / "run" / "summary.json").read_text(encoding="utf-8"))
    assert summary["leaks"]["sessions"] == 0
    assert run("report", str(tmp_path / "run")).code == 0


def _idle(testbed: Serving) -> str:
    page = testbed.ask("/metrics").text
    is_free = 'vllm:kv_cache_usage_perc{model_name="bloom-176b"} 0.0' in page
    return page if is_free else ""


def _n_running(testbed: Serving) -> float:
    lines = testbed.ask("/metrics").text.splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith("vllm:num_requests_running{"))


def test_a_stream_goes_on_over_a_server_that_is_killed(run: Testbed, tmp_path: Path) -> None:
    with serving(tmp_path / "run", "clustered", *SLOW, "--time-scale", "20") as testbed:
        with streaming(testbed, max_tokens=120) as stream:  # long enough for a command on a busy machine
            stream.readline()
            assert run("fault", "kill", _busy_server(testbed), "--run", str(testbed.run_dir)).code == 0
            rest = stream.read().decode()
        testbed.end()
    assert rest.endswith("data: [DONE]\n\n")
    assert '"error":' not in rest
    [row] = rows_of(tmp_path / "run" / "requests.parquet")
    assert (row["status"], row["n_tokens_done"], row["n_recoveries"]) == ("completed", 120, 1)


def _busy_server(testbed: Serving) -> str:
    """One that has a session."""
    lines = testbed.ask("/metrics").text.splitlines()
    busy = [line for line in lines if line.startswith("testbed_server_sessions{") and line.endswith(" 1.0")]
    return busy[0].split('"')[1]


def test_ctrl_c_ends_streams_with_an_error_and_keeps_the_trace_whole(tmp_path: Path) -> None:
    with serving(tmp_path / "run", "clustered", *SLOW) as testbed:
        with streaming(testbed, max_tokens=2000) as stream:
            stream.readline()
            testbed.command.process.send_signal(2)
            rest = stream.read().decode()
        assert testbed.command.process.wait(PATIENCE_S) == 1  # its request did not complete
    *_, error, done = [line.removeprefix("data: ") for line in rest.splitlines() if line]
    assert json.loads(error)["error"]["message"] == "the testbed ends"
    assert done == "[DONE]"
    [row] = rows_of(tmp_path / "run" / "requests.parquet")
    assert row["status"] == "interrupted"
    assert_tables_hold_the_whole_log(tmp_path / "run")


def test_without_room_requests_wait_or_are_rejected(tmp_path: Path) -> None:
    # The placement is made for one session of 148 tokens at a time.
    small = ("--set", "policy.design_concurrency=1", "--admission", "reject")
    with (
        serving(tmp_path / "run", "clustered", *SLOW, *small) as testbed,
        contextlib.ExitStack() as open_streams,
    ):
        answers = []
        for _ in range(100):
            connection = http.client.HTTPConnection(*testbed.address, timeout=PATIENCE_S)
            open_streams.callback(connection.close)
            body = json.dumps({**HELLO, "stream": True, "max_tokens": 120})
            connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            answers.append(connection.getresponse())
            if answers[-1].status != 200:
                break
        refused = answers[-1]
        assert refused.status == 429
        assert int(refused.headers["Retry-After"]) >= 1
        error = json.loads(refused.read())["error"]
        assert (error["type"], error["code"]) == ("rate_limit_error", "no_room")
        [failed] = wait_until(lambda: events_of(testbed.run_dir, "failed"), "the request to end")
        assert failed["request"] == len(answers) - 1
        assert re.search(r'finished_reason="error".*\} 1.0', testbed.ask("/metrics").text)
    *others, last = rows_of(tmp_path / "run" / "requests.parquet")
    assert (last["status"], last["reason"]) == ("failed", error["message"])
    assert "failed" not in {row["status"] for row in others}


def test_what_no_cache_can_hold_is_refused_at_once_and_is_not_offered(tmp_path: Path) -> None:
    with serving(tmp_path / "run", "clustered", *SLOW, "--max-model-len", "70000") as testbed:
        [row] = testbed.ask("/v1/models").json["data"]
        most = row["max_model_len"]
        assert 1000 < most < 60_000
        begun = {"prompt": [1], "max_tokens": most, "model": row["id"]}
        assert testbed.ask("/v1/completions", begun).status == 400
        answer = testbed.ask("/v1/completions", {**HELLO, "max_tokens": 60_000})
        assert (answer.status, answer.json["error"]["code"]) == (400, "context_length_exceeded")
        assert "more than any chain of these servers could hold" in answer.json["error"]["message"]


def test_a_key_is_asked_for_where_one_is_set(tmp_path: Path) -> None:
    named = ("--served-model-name", "my-model", "--cors", "*")
    with serving(tmp_path / "run", "clustered", *SLOW, "--api-key", "s3cret", *named) as testbed:
        assert (
            testbed.ask("/v1/models", Origin="http://a.example").headers["Access-Control-Allow-Origin"] == "*"
        )
        [row] = testbed.ask("/v1/models", Authorization="bearer s3cret").json["data"]
        assert row["id"] == "my-model"
        assert testbed.ask("/v1/models").status == 401
        assert testbed.ask("/metrics", Authorization="Bearer other").status == 401
        assert testbed.ask("/v1/models", Authorization="Bearer s3cret").status == 200
        assert testbed.ask("/health").status == 200
        testbed.end()
    assert not rows_of(tmp_path / "run" / "requests.parquet")


def test_the_workload_of_the_scenario_may_be_served_too(tmp_path: Path) -> None:
    own = (
        "--set",
        "workload.n_requests=3",
        "--set",
        "workload.rate=2",
        "--set",
        "workload.n_output_tokens=4",
    )
    with serving(tmp_path / "run", "clustered", *QUICK, "--workload", "also", *own) as testbed:
        assert testbed.ask("/v1/completions", HELLO).status == 200
        wait_until(lambda: _n_ended(testbed) == 4, "all requests to end")
        testbed.end()
    rows = rows_of(tmp_path / "run" / "requests.parquet")
    assert [row["status"] for row in rows] == ["completed"] * 4
    assert [row["n_tokens_done"] for row in rows] == [4, 4, 4, 5]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text(encoding="utf-8"))
    assert summary["emulation_error_of"] == "twin"
    twin = rows_of(tmp_path / "run" / "twin" / "requests.parquet")
    assert [row["arrival_at_s"] for row in twin] == sorted(row["arrival_at_s"] for row in rows)
    assert sorted(row["n_tokens_done"] for row in twin) == [4, 4, 4, 5]


def _n_ended(testbed: Serving) -> float:
    lines = testbed.ask("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:request_success_total{"))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--host", "0.0.0.0"), "--api-key"),
        (("--host", "nowhere.invalid"), "--api-key"),
        (("--admission", "queue"), "--admission must be wait or reject"),
        (("--tokenizer", "/nonexistent"), "has no tokenizer.json"),
        (("--api-key", "k", "--no-auth"), "contradict"),
        (("--max-model-len", "100000"), "do not fit into one step"),
        (("--max-model-len", "100000000"), "testbed: --max-model-len must be at most 10,000,000"),
        (("--set", "clock=virtual"), "real time"),
    ],
)
def test_what_cannot_be_served_is_one_sentence(
    run: Testbed, tmp_path: Path, options: tuple[str, ...], expected: str
) -> None:
    outcome = run("serve", "clustered", "--port", "0", "--out", str(tmp_path / "run"), *options)
    assert_one_sentence(outcome, expected)
    assert not (tmp_path / "run").exists()


def test_a_port_that_is_taken_is_one_sentence(run: Testbed, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        outcome = run("serve", "clustered", "--port", str(port), "--out", str(tmp_path / "run"))
    assert_one_sentence(outcome, f"port {port}", "give another port")
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("orphans")
def test_a_serving_testbed_that_is_killed_leaves_a_run_that_can_be_reported(
    run: Testbed, tmp_path: Path
) -> None:
    with serving(tmp_path / "run", "clustered", *QUICK) as testbed:
        assert testbed.ask("/v1/completions", HELLO).status == 200
        testbed.command.process.kill()
        testbed.command.process.wait()
    assert run("clean", "--out", str(tmp_path)).code == 0
    wait_until(lambda: not processes(tmp_path), "processes to end")
    outcome = run("report", str(tmp_path / "run"), "--json")
    assert json.loads(outcome.stdout)["n_completed"] == 1


def test_slow_readers_do_not_hold_others_up(quick: Serving) -> None:
    body = json.dumps({**HELLO, "stream": True, "max_tokens": 4000}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            connection = stack.enter_context(socket.socket())
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            connection.connect(quick.address)
            connection.sendall(head.encode() + body)
        time.sleep(0.5)
        assert quick.ask("/v1/completions", HELLO).status == 200
