"""The open-loop load generator of one client: starts every request at its time, whatever the others do."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence

from nodes.clock import Clock, on_tick
from nodes.eventlog import EventLog, LogFullError
from nodes.records import ENDED, AnyRecord, Arrived, Cancelled, Completed, Failed, Interrupted, Token
from nodes.recovery import Observer
from nodes.request import Request, SessionError
from nodes.session import HubSession


class LoadGenerator:
    """Serves requests concurrently, logs all records, and counts tokens for the progress view."""

    def __init__(
        self,
        clock: Clock,
        log: EventLog,
        make_session: Callable[[Request, LoadGenerator], HubSession],
        observer: Observer,
        client: str,
    ) -> None:
        self._clock = clock
        self._log = log
        self._make_session = make_session
        self._observer = observer
        self._client = client
        self._failure: LogFullError | None = None
        self.n_tokens = 0
        self.last_ttft_s = 0.0
        self.last_gap_s = 0.0
        self._arrived_at_s: dict[int, float] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        """Tasks of requests that have not ended, in the order of arrival."""
        self._ends: dict[int, bool] = {}
        """Requests that ``end`` is ending, with its ``enough``."""
        self._broken: asyncio.Future[None] | None = None
        """Gets the first error of a request; only if the workload stays open."""

    async def run(self, requests: Sequence[Request], *, stays_open: bool = False) -> None:
        """Serves all requests. Returns when each has ended; never if the workload ``stays_open``.

        Raises ``LogFullError`` when records can no longer be stored: the run is over then.
        """
        if stays_open:
            self._broken = asyncio.get_running_loop().create_future()
        try:
            for request in requests:
                await self._clock.sleep_until_s(on_tick(request.arrival_at_s))
                if self._failure is not None:
                    raise self._failure
                self.begin(request)
            if self._broken is not None:
                await self._broken
            await asyncio.gather(*self._tasks.values())
        finally:
            tasks = list(self._tasks.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if self._failure is not None:
            raise self._failure

    def begin(self, request: Request) -> None:
        """Serves ``request`` from now on. Raises ``LogFullError``."""
        index, at_s = request.index, self._clock.now_s()
        lengths = request.n_input_tokens, request.n_output_tokens
        self.record(Arrived(index, at_s, self._client, request.arrival_at_s, *lengths))

        def ended(task: asyncio.Task[None]) -> None:
            if task.cancelled():
                return
            error = task.exception()
            if error is None:
                self._tasks.pop(index, None)  # else gather raises it at the end
            elif self._broken is not None and not self._broken.done():
                self._broken.set_exception(error)

        self._tasks[index] = task = asyncio.create_task(self._serve(request))
        task.add_done_callback(ended)

    def end(self, index: int, *, enough: bool) -> None:
        """Ends a request: as completed if it has tokens ``enough``, else as cancelled.

        It may have ended already.
        """
        if index in self._arrived_at_s and index not in self._ends:
            self._ends[index] = enough
            # Not at once: a task that is cancelled before its first step records nothing.
            asyncio.get_running_loop().call_soon(self._tasks[index].cancel)

    async def _serve(self, request: Request) -> None:
        index = request.index
        try:
            await self._make_session(request, self).run()
        except SessionError as error:
            with contextlib.suppress(LogFullError):  # remembered by record, raised by run
                self.record(Failed(index, self._clock.now_s(), str(error)))
        except asyncio.CancelledError:
            enough, at_s = self._ends.get(index), self._clock.now_s()
            if index in self._arrived_at_s:  # else it had ended, and was only closing its chain
                with contextlib.suppress(LogFullError):
                    if enough is None:
                        self.record(Interrupted(index, at_s))
                    else:
                        self.record(Completed(index, at_s) if enough else Cancelled(index, at_s))
            if enough is None:
                raise
        finally:
            self._ends.pop(index, None)
            self._arrived_at_s.pop(index, None)

    def record(self, record: AnyRecord) -> None:
        """Logs a record, and passes it to the observer. Raises ``LogFullError`` if it cannot be stored."""
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
        elif isinstance(record, Arrived):
            self._arrived_at_s[record.request] = record.at_s
        elif isinstance(record, ENDED):
            self._arrived_at_s.pop(record.request, None)
        self._observer(record)
