"""The open-loop load generator of one client: starts every request at its time, come what may."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence

from nodes.clock import Clock
from nodes.eventlog import EventLog, LogFullError
from nodes.records import AnyRecord, Arrived, Failed, Interrupted, Token
from nodes.recovery import Observer
from nodes.request import Request, SessionError
from nodes.session import HubSession


class LoadGenerator:
    """Runs requests concurrently, logs everything, and counts tokens for the progress view."""

    def __init__(
        self,
        clock: Clock,
        log: EventLog,
        make_session: Callable[[Request, LoadGenerator], HubSession],
        observer: Observer,
    ) -> None:
        self._clock = clock
        self._log = log
        self._make_session = make_session
        self._observer = observer
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
            if not task.cancelled() and task.exception() is None:  # else gather raises it at the end
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
        lengths = request.n_input_tokens, request.n_output_tokens
        self.record(Arrived(request.index, at_s, client, request.arrival_at_s, *lengths))

    async def _serve(self, request: Request) -> None:
        try:
            await self._make_session(request, self).run()
        except SessionError as error:
            with contextlib.suppress(LogFullError):  # remembered by record, raised by run
                self.record(Failed(request.index, self._clock.now_s(), str(error)))
        except asyncio.CancelledError:
            with contextlib.suppress(LogFullError):
                self.record(Interrupted(request.index, self._clock.now_s()))
            raise
        finally:
            del self._arrived_at_s[request.index]

    def record(self, record: AnyRecord) -> None:
        """Log what happened to a request, and tell ``observer`` of it.

        Raises ``LogFullError`` when it can no longer be stored.
        """
        try:
            self._log.write(record)
        except LogFullError as error:
            self._failure = error
            raise
        if isinstance(record, Token):
            self.n_tokens += 1
            if record.token:
                self.last_gap_s = record.at_s - record.ready_at_s
            else:
                self.last_ttft_s = record.at_s - self._arrived_at_s[record.request]
        self._observer(record)
