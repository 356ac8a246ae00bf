"""A serving testbed for tests: the command as a process, asked over HTTP."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from tests.support.runs import PATIENCE_S, Running, wait_until


@dataclass
class Answer:
    """What came back: a JSON body, or the events of a stream."""

    status: int
    headers: dict[str, str]
    text: str

    @property
    def json(self) -> Any:
        return json.loads(self.text)

    @property
    def events(self) -> list[Any]:
        """The data of every event of a stream; ``[DONE]`` as ``None``."""
        lines = [line.removeprefix("data: ") for line in self.text.split("\n\n") if line]
        return [None if line == "[DONE]" else json.loads(line) for line in lines]


@dataclass
class Serving:
    """A testbed that serves at ``url``."""

    command: Running
    url: str
    run_dir: Path

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.url.removeprefix("http://").removesuffix("/v1").rpartition(":")
        return host, int(port)

    def ask(self, path: str, body: Any = None, **headers: str) -> Answer:
        """A GET, or a POST of ``body``: as JSON unless it is bytes."""
        data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        request = Request(
            self.url.removesuffix("/v1") + path, data, {"Content-Type": "application/json", **named}
        )
        try:
            with urlopen(request, timeout=PATIENCE_S) as response:
                return Answer(response.status, dict(response.headers), response.read().decode())
        except HTTPError as error:
            with error:
                return Answer(error.code, dict(error.headers), error.read().decode())

    def end(self) -> str:
        """As Ctrl-C does; returns what was said on the way. Fails unless it ends with 0."""
        self.command.interrupt()
        outcome = self.command.wait(PATIENCE_S)
        assert outcome.code == 0, outcome.stderr
        return outcome.stderr


@contextlib.contextmanager
def serving(folder: Path, scenario: str, *options: str) -> Iterator[Serving]:
    """``testbed serve`` into ``folder``, on any free port; it is ended, if the body has not done that.

    Without its page, whose process takes time to begin, unless that is asked for.
    """
    page = () if "--page" in options else ("--no-page",)
    said = folder.with_name(f"{folder.name}-said")
    command = Running(["serve", scenario, "--port", "0", "--out", str(folder), *page, *options], said)
    try:
        wait_until(lambda: "\n" in command.stdout or command.ended(), "the endpoint's address", PATIENCE_S)
        yield Serving(command, command.stdout.splitlines()[0], folder)
    finally:
        if command.process.poll() is None:
            command.interrupt()
            command.wait(PATIENCE_S)
