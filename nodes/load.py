"""The open-loop load generator of one client: starts every request at its time, come what may."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nodes.clock import Clock
from nodes.eventlog import EventLog, LogFullError
from nodes.records import HopRecord
from nodes.request import Request, SessionError
from nodes.session import HubSession

Progress = Callable[[str, int, float], None]
"""Called with (state, request index, instant) whenever a request changes state."""

Recovered = Callable[[str, int, float, Mapping[str, Any]], None]
"""Called with (event, request index, instant, details) for what ``nodes.recovery`` tells."""

NewToken = Callable[[int, int], None]
"""Called with (request index, output tokens that are there) at every token."""


class LoadGenerator:
    """Runs requests concurrently, logs everything, and counts tokens for the progress view."""

    def __init__(
        self,
        clock: Clock,
        log: EventLog,
        make_session: Callable[[Request, LoadGenerator], HubSession],
        progress: Progress,
        recovered: Recovered = lambda *_: None,
        new_token: NewToken = lambda *_: None,
    ) -> None:
        self._clock = clock
        self._log = log
        self._make_session = make_session
        self._progress = progress
        self._recovered = recovered
        self._new_token = new_token
        self._failure: LogFullError | None = None
        self.n_tokens = 0
        self.last_ttft_s = 0.0
        self.last_gap_s = 0.0
        self._arrived_at_s: dict[int, float] = {}

    async def run(self, requests: Sequence[Request], client: str) -> None:
        """Serve all requests; returns when each has completed or failed.

        Raises ``LogFullError`` when measurements can no longer be stored: the run is over then.
        """
        tasks: dict[asyncio.Task[None], None] = {}  # in the order of arrival

        def ended(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and task.exception() is None:  # else it is heard of at the end
                tasks.pop(task, None)

        try:
            for request in requests:
                await self._clock.sleep_until_s(request.arrival_at_s)
                if self._failure is not None:
                    raise self._failure
                self._arrived(request, client)
                task = asyncio.create_task(self._serve(request))
                tasks[task] = None
                task.add_done_callback(ended)
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if self._failure is not None:
            raise self._failure

    def _arrived(self, request: Request, client: str) -> None:
        at_s = self._clock.now_s()
        self._arrived_at_s[request.index] = at_s
        details = {
            "client": client,
            "intended_at_s": request.arrival_at_s,
            "n_input_tokens": request.n_input_tokens,
            "n_output_tokens": request.n_output_tokens,
        }
        self.state(request, "arrived", at_s, details)

    async def _serve(self, request: Request) -> None:
        try:
            await self._make_session(request, self).run()
        except SessionError as error:
            with contextlib.suppress(LogFullError):  # remembered by _write, raised by run
                self.state(request, "failed", self._clock.now_s(), {"reason": str(error)})
        except asyncio.CancelledError:
            with contextlib.suppress(LogFullError):
                self.state(request, "interrupted", self._clock.now_s(), {})
            raise
        finally:
            del self._arrived_at_s[request.index]

    def state(self, request: Request, state: str, at_s: float, details: Mapping[str, Any]) -> None:
        self._write("state", request.index, state, at_s, dict(details))
        self._progress(state, request.index, at_s)

    def opening(self, request: Request, at_s: float, opened_at_s: float) -> None:
        self._write("opening", request.index, at_s, opened_at_s)

    def recovery(self, request: Request, event: str, at_s: float, details: Mapping[str, Any]) -> None:
        self._write("recovery", request.index, event, at_s, dict(details))
        self._recovered(event, request.index, at_s, details)

    def token(
        self,
        request: Request,
        index: int,
        ready_at_s: float,
        finished_at_s: float,
        hops: Sequence[HopRecord],
        token_id: int,
    ) -> None:
        self._write("token", request.index, index, ready_at_s, finished_at_s, hops, token_id)
        self.n_tokens += 1
        if index:
            self.last_gap_s = finished_at_s - ready_at_s
        else:
            self.last_ttft_s = finished_at_s - self._arrived_at_s[request.index]
        self._new_token(request.index, index + 1)

    def _write(self, *record: Any) -> None:
        try:
            self._log.write(*record)
        except LogFullError as error:
            self._failure = error
            raise
