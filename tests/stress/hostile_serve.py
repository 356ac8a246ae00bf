"""Plays the endpoint's hostile cases against a ``testbed serve`` in a process of its own, on the loopback
network.

After each case its metrics must be zero again: no request, no session on any server, no cache in use.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.stress import hostile_http
from tests.stress.hostile_endpoint import MAX_REQUESTS, Witness, play
from tests.stress.hostile_http import AUTHORIZED, MAX_MODEL_LEN, MODELS, request
from tests.support.serving import serving

_OPTIONS = ("--network", "loopback", "--time-scale", "50", "--no-twin", "--no-report")
_TOKEN_S = 0.01
_PATIENCE_S = 20.0
_IDLE = re.compile(
    rb"^(?:vllm:num_requests_\w+|testbed_server_(?:sessions|cache_used_bytes))\{[^}]*\} (.*)$", re.M
)


class ServeTarget:
    """A serving testbed under attack. When it is closed, its run must end well."""

    name = "serve"
    cases = hostile_http.CASES

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._folder = tempfile.TemporaryDirectory()
        limits = ("--max-model-len", str(MAX_MODEL_LEN), "--max-requests", str(MAX_REQUESTS))
        run = serving(Path(self._folder.name, "run"), "clustered", *_OPTIONS, *limits)
        self._ending = contextlib.ExitStack()
        testbed = self._ending.enter_context(run)
        self._command, self._address = testbed.command, testbed.address
        self._loop = asyncio.new_event_loop()
        self._witness = Witness(self._address, MODELS[0])
        self._loop.run_until_complete(self._begin())
        self._n_open = self._descriptors()

    async def _begin(self) -> None:
        await self._witness.begin()
        await self._witness.is_served(_pause)

    def _descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self._command.process.pid}/fd"))

    def check(self, case: tuple[int, list[tuple[int, Any]]]) -> None:
        """Plays a case. Raises ``AssertionError`` if a promise is broken."""
        self._loop.run_until_complete(self._check(case[1]))

    async def _check(self, moves: list[tuple[int, Any]]) -> None:
        await play(moves, self._address, MODELS[0], _pause, self.counts)
        page = request("/metrics", b"", AUTHORIZED, method="GET")
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            values = [float(value) for value in _IDLE.findall((await self._witness.ask(page, _pause)).body)]
            assert len(values) > 2, "the metrics have other names"
            if not any(values):
                break
            assert time.monotonic() < deadline, f"not idle after the case: {values}"
            await asyncio.sleep(0.05)
        await self._witness.is_served(_pause)
        assert "Traceback" not in (printed := self._command.stderr), printed

    def n_left(self) -> int:
        """Returns how many descriptors more than at first the serving process has."""
        deadline = time.monotonic() + _PATIENCE_S
        while self._descriptors() > self._n_open and time.monotonic() < deadline:
            time.sleep(0.05)
        return self._descriptors() - self._n_open

    def close(self) -> None:
        """Ends the run. Raises ``AssertionError`` if it fails or leaves sessions, caches or connections."""
        self._witness.end()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()
        with self._ending:
            self._command.interrupt()
            code, printed = self._command.process.wait(_PATIENCE_S), self._command.stderr
        plan = Path(self._folder.name, "run", "plan.json").read_text(encoding="utf-8")
        self._folder.cleanup()
        assert code == 0, f"testbed serve ended with {code}: {printed}"
        assert "Traceback" not in printed, printed
        leaks = json.loads(plan)["leaks"]
        assert leaks is not None and not any(leaks.values()), leaks


async def _pause(n_tokens: int) -> None:
    await asyncio.sleep(_TOKEN_S * min(n_tokens, 2))
