"""``testbed chat``: a conversation in the terminal with a served model, and the time of every hop beside it."""

from __future__ import annotations

import http.client
import json
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from nodes.eventlog import LogReader
from nodes.records import Arrived, Token
from testbed.errors import RunError
from testbed.experiments import Override
from testbed.runs.hoptimes import times_text
from testbed.runs.serve import ServedRun, ServeOptions, experiment_to_serve, say_ended
from testbed.runs.session import RunOptions
from testbed.serving.app import SESSION_HEADER

_USUAL_TOKENS = 256
_NEW, _END = "/new", ("/exit", "/quit")


class _RefusedError(Exception):
    """The endpoint does not accept the conversation, with the reason."""


def chat_command(
    scenario: str,
    overrides: Sequence[Override],
    options: ServeOptions,
    max_tokens: int | None,
    temperature: float,
    out: Path | None,
    lines: Iterable[str],
    *,
    report: bool,
    with_twin: bool,
    echo: Callable[[str], None],
) -> int:
    """Serve, and answer ``lines``, each a message of one conversation, until they end or the user interrupts.

    ``echo`` gets the endpoint's URL, the answers as they arrive, and the times after each. Returns the
    exit code. Raises ``TestbedError``.
    """
    experiment = experiment_to_serve(scenario, overrides, options)
    run_options = RunOptions(report=report, trace=False, with_twin=with_twin, live=False)
    run = _ChatRun(experiment, out, run_options, options, echo, lines)
    run.max_tokens, run.temperature = max_tokens, temperature
    code = say_ended(run.run())
    if run.failure is not None:
        raise run.failure
    return code


class _ChatRun(ServedRun):
    """A run with an endpoint and one conversation, in a thread of its own: waiting for a line blocks."""

    failure: RunError | None = None
    max_tokens: int | None = None
    """Longest answer in tokens; None: ``_USUAL_TOKENS``, or what is left of the model's limit."""
    temperature = 0.0

    def __init__(
        self,
        experiment: Any,
        out: Path | None,
        run_options: RunOptions,
        options: ServeOptions,
        echo: Callable[[str], None],
        lines: Iterable[str],
    ) -> None:
        super().__init__(experiment, out, run_options, options, lambda url: echo(f"endpoint: {url}\n"))
        self._show, self._lines = echo, lines
        self._logs: dict[Path, LogReader] = {}

    def _ready(self) -> None:
        super()._ready()
        threading.Thread(target=self._talk, name="chat", daemon=True).start()

    def _talk(self) -> None:
        address = self._bound.getsockname()[:2]
        names = [server.name for server in self.experiment.problem.servers]
        turns: list[dict[str, str]] = []
        session = uuid.uuid4().hex
        try:
            for line in self._lines:
                text = line.strip()
                if text in _END:
                    break
                if text == _NEW:
                    turns.clear()
                    session = uuid.uuid4().hex
                if not text or text == _NEW:
                    continue
                turns.append({"role": "user", "content": text})
                try:
                    number, answer = self._ask(address, turns, session)
                except _RefusedError as error:
                    turns.pop()
                    advice = f"; {_NEW} begins another conversation" if turns else ""
                    self._show(f"{error}{advice}\n\n")
                    continue
                turns.append({"role": "assistant", "content": answer})
                arrived_at_s, tokens = self._logged(number)
                if tokens:
                    self._show(f"\n\n{times_text(tokens, names, arrived_at_s)}\n\n")
        except (RunError, OSError, http.client.HTTPException, ValueError) as error:
            self.failure = error if isinstance(error, RunError) else RunError(f"the chat ended: {error}")
        finally:
            self.interrupt()

    def _ask(
        self, address: tuple[str, int], turns: Sequence[dict[str, str]], session: str
    ) -> tuple[int, str]:
        """Send the conversation ``session``; shows the answer as it arrives. Returns the request's number and the answer."""
        connection = http.client.HTTPConnection(*address)
        headers = {"Content-Type": "application/json", SESSION_HEADER: session}
        if self._of_endpoint.api_key is not None:
            headers["Authorization"] = f"Bearer {self._of_endpoint.api_key}"
        try:
            connection.request("GET", "/v1/models", headers=headers)
            model = json.loads(connection.getresponse().read())["data"][0]
            longest = self._longest(turns, model["max_model_len"])
            settings = {"max_tokens": longest, "temperature": self.temperature}
            body = {"model": model["id"], "messages": turns, "stream": True, **settings}
            connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
            response = connection.getresponse()
            if response.status != http.HTTPStatus.OK:
                raise _RefusedError(_message(json.loads(response.read())))
            answer = []
            for piece in _pieces(response):
                answer.append(piece)
                self._show(piece)
            return int(response.headers["X-Testbed-Request"]), "".join(answer)
        finally:
            connection.close()

    def _longest(self, turns: Sequence[dict[str, str]], most: int) -> int:
        """Return how many tokens the answer may have, if it has at most ``most`` with its prompt."""
        if self.max_tokens is not None:
            return self.max_tokens
        try:
            n_prompt = len(self.codec.chat([(turn["role"], turn["content"]) for turn in turns]))
        except ValueError:  # the endpoint says what is wrong
            n_prompt = 0
        return max(1, min(_USUAL_TOKENS, most - n_prompt))

    def _logged(self, request: int) -> tuple[float, list[Token]]:
        """Return when a request arrived, and its tokens."""
        for path in (self.run_dir / "events").glob("*.log"):
            records = [
                record
                for record in self._logs.setdefault(path, LogReader(path))
                if isinstance(record, Arrived | Token) and record.request == request
            ]
            if records:
                return records[0].at_s, [record for record in records if isinstance(record, Token)]
        return 0.0, []


def _pieces(response: http.client.HTTPResponse) -> Iterator[str]:
    """Yield the texts of a stream of events. Raises ``RunError`` for an event that is an error."""
    for line in response:
        data = line.decode().strip().removeprefix("data: ")
        if not data or data == "[DONE]":
            continue
        event = json.loads(data)
        if "error" in event:
            raise RunError(f"the model did not finish: {_message(event)}")
        yield from (choice["delta"].get("content") or "" for choice in event["choices"])


def _message(body: dict[str, Any]) -> str:
    return str(body.get("error", {}).get("message", body))
