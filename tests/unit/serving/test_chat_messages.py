"""What ``testbed chat`` asks its endpoint for, and what it says when that refuses."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from testbed.cli.main import app
from testbed.runs.chat import _ChatRun
from testbed.runs.serve import ServeOptions, experiment_to_serve
from testbed.runs.session import RunOptions

TOKENS_PER_MESSAGE = 40
LIMIT = 200


@pytest.fixture
def endpoint() -> Iterator[ThreadingHTTPServer]:
    """An endpoint that answers "fine", refuses what ends with "no", and keeps (headers, body) of every message."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer(200, {"data": [{"id": "m", "max_model_len": LIMIT}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append((dict(self.headers), body))
            if body["messages"][-1]["content"].endswith("no"):
                self.answer(400, {"error": {"message": "too long"}})
            else:
                self.answer(200, {"choices": [{"delta": {"content": "fine"}}]})

        def answer(self, status: int, content: Any) -> None:
            data = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.send_header("X-Testbed-Request", "0")
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    asked: list[Any] = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.asked = asked  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def talked(endpoint: Any, folder: Path, *lines: str, max_tokens: int | None = None) -> str:
    """What a chat of ``lines`` shows."""
    shown: list[str] = []
    options = ServeOptions.local(0)
    experiment = experiment_to_serve("clustered", [], replace(options, max_model_len=LIMIT))
    run = _ChatRun(experiment, None, RunOptions(live=False), options, shown.append, lines)
    run._bound = SimpleNamespace(getsockname=lambda: endpoint.server_address)  # type: ignore[assignment]
    run.codec = SimpleNamespace(chat=lambda turns: [0] * TOKENS_PER_MESSAGE * len(turns))  # type: ignore[assignment]
    run.run_dir, run.max_tokens = folder, max_tokens
    run._talk()
    assert run.failure is None
    return "".join(shown)


def test_an_answer_has_what_room_is_left_unless_a_length_is_given(endpoint: Any, tmp_path: Path) -> None:
    talked(endpoint, tmp_path, "one", "two", "/new", "three")
    talked(endpoint, tmp_path, "four", max_tokens=256)
    asked = [(body["messages"][-1]["content"], body["max_tokens"]) for _, body in endpoint.asked]
    assert asked == [("one", 160), ("two", 80), ("three", 160), ("four", 256)]


def test_every_conversation_has_a_name_of_its_own(endpoint: Any, tmp_path: Path) -> None:
    talked(endpoint, tmp_path, "one", "two", "/new", "three")
    one, two, three = (headers["X-Session-ID"] for headers, _ in endpoint.asked)
    assert one == two != three


def test_another_conversation_is_advised_only_where_there_is_one_already(
    endpoint: Any, tmp_path: Path
) -> None:
    assert talked(endpoint, tmp_path, "no") == "too long\n\n"
    said = talked(endpoint, tmp_path, "one", "no")
    assert "too long; /new begins another conversation" in said


def test_a_tokenizer_can_be_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given: list[ServeOptions] = []

    def chatted(scenario: str, overrides: Any, options: ServeOptions, *_: Any, **__: Any) -> int:
        given.append(options)
        return 0

    monkeypatch.setattr("testbed.runs.chat.chat_command", chatted)
    app(["chat", "bloom-tiny", "--random-weights", "--tokenizer", str(tmp_path)], standalone_mode=False)
    assert [options.tokenizer for options in given] == [tmp_path]
