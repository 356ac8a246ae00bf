"""The load generator of one client: starts every request at its time, and further turns of conversations after the last one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Sequence

import msgspec

from nodes.clock import Clock, on_tick
from nodes.eventlog import EventLog, LogFullError
from nodes.records import (
    ENDED,
    AnyRecord,
    Arrived,
    Cancelled,
    Completed,
    Failed,
    Interrupted,
    Released,
    Token,
)
from nodes.recovery import Observer
from nodes.request import EARLIER_TURN_FAILED, Request, SessionError
from nodes.session import HubSession


class LoadGenerator:
    """Serves requests concurrently, logs all records, and counts tokens for the progress view."""

    def __init__(
        self,
        clock: Clock,
        log: EventLog,
        make_session: Callable[[Request, LoadGenerator, HubSession | None], HubSession],
        observer: Observer,
        client: str,
        hold_s: float | None = None,
    ) -> None:
        """``make_session`` gets the session of the turn before, too. Its chain stays open for ``hold_s`` (``None``: it does not)."""
        self._clock = clock
        self._log = log
        self._make_session = make_session
        self._observer = observer
        self._client = client
        self._hold_s = hold_s
        self._failure: LogFullError | None = None
        self.n_tokens = 0
        self.last_ttft_s = 0.0
        self.last_gap_s = 0.0
        self._arrived_at_s: dict[int, float] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        """Tasks of requests that have not ended, in the order of arrival."""
        self._ends: dict[int, tuple[bool, str]] = {}
        """Requests that ``end`` is ending, with its ``enough`` and ``reason``."""
        self._broken: asyncio.Future[None] | None = None
        """Gets the first error of a request; only if the workload stays open."""
        self._sessions: dict[int, HubSession] = {}
        """Those of requests that have not ended and that another turn follows."""
        self._following: dict[int, Request] = {}
        """Further turns that have not begun, by the request before them."""
        self._held: dict[int, HubSession] = {}
        """Sessions whose chains may be open for turns that have not begun, by the requests of those turns."""

    async def run(self, requests: Sequence[Request], *, stays_open: bool = False) -> None:
        """Serves all requests. Returns when each has ended; never if the workload ``stays_open``.

        Raises ``LogFullError`` when records can no longer be stored: the run is over then.
        """
        if stays_open:
            self._broken = asyncio.get_running_loop().create_future()
        self._following = {
            r.turn.after: r for r in requests if r.turn is not None and r.turn.after is not None
        }
        following = {request.index for request in self._following.values()}
        try:
            for request in requests:
                if request.index in following:
                    continue
                await self._clock.sleep_until_s(on_tick(request.arrival_at_s))
                if self._failure is not None:
                    raise self._failure
                self.begin(request)
            if self._broken is not None:
                await self._broken
            while self._tasks:  # a turn that ends adds the task of the next one
                done, _ = await asyncio.wait(self._tasks.values(), return_when=asyncio.FIRST_EXCEPTION)
                for task in done:
                    if not task.cancelled():  # by ``end``
                        task.result()
        finally:
            tasks = list(self._tasks.values())
            for task in tasks:
                task.cancel()
            try:
                await asyncio.gather(*tasks, return_exceptions=True)
            finally:  # also if it is cancelled again, here as well
                held = self._held.values()
                await asyncio.gather(*(asyncio.shield(session.release()) for session in held))
        if self._failure is not None:
            raise self._failure

    def begin(self, request: Request) -> None:
        """Serves ``request`` from now on. Raises ``LogFullError``."""
        self._arrives(request)
        self._in_background(request.index, self._serve(request))

    def _arrives(self, request: Request) -> None:
        lengths = request.n_input_tokens, request.n_output_tokens
        turn = request.turn if request.generation.prompt else None
        place = (None, None) if turn is None else (turn.conversation, turn.number)
        at_s = self._clock.now_s(), self._client, request.arrival_at_s
        self.record(Arrived(request.index, *at_s, *lengths, *place))

    def _in_background(self, index: int, work: Coroutine[None, None, None]) -> None:
        def ended(task: asyncio.Task[None]) -> None:
            end, error = self._ends.pop(index, None), None
            if not task.cancelled():
                error = task.exception()
            elif index in self._arrived_at_s:  # else it had ended, and was only closing its chain
                at_s = self._clock.now_s()
                with contextlib.suppress(LogFullError):  # remembered by record, raised by run
                    self.record(Interrupted(index, at_s) if end is None else _ended(index, at_s, *end))
            self._arrived_at_s.pop(index, None)
            if error is None:
                self._tasks.pop(index, None)  # else ``run`` raises it
            elif self._broken is not None and not self._broken.done():
                self._broken.set_exception(error)

        self._tasks[index] = task = asyncio.create_task(work)
        task.add_done_callback(ended)

    def end(self, index: int, *, enough: bool, reason: str = "") -> None:
        """Ends a request: as completed if it has tokens ``enough``, else as failed for ``reason``, or without one as cancelled.

        It may have ended already.
        """
        if index in self._arrived_at_s and index not in self._ends:
            self._ends[index] = enough, reason
            self._tasks[index].cancel()

    def _follow(self, before: Completed | Failed) -> None:
        """Plans the turn after a request that has ended; if it failed, the whole conversation fails."""
        request = self._following.pop(before.request, None)
        if request is None:
            return
        session = self._sessions.pop(before.request)
        if isinstance(before, Failed):
            request = msgspec.structs.replace(request, arrival_at_s=before.at_s)
            self._arrives(request)
            self._sessions[request.index] = session
            self.record(Failed(request.index, before.at_s, EARLIER_TURN_FAILED))
            return
        turn = request.turn
        assert turn is not None, "it follows another turn"
        at_s = on_tick(before.at_s + turn.think_s)
        request = msgspec.structs.replace(request, arrival_at_s=at_s, history=tuple(session.tokens))
        self._held[request.index] = session

        async def later() -> None:
            closing: asyncio.Task[None] | None = None
            try:
                if self._hold_s is not None and turn.think_s > self._hold_s:
                    await self._clock.sleep_until_s(on_tick(before.at_s + self._hold_s))
                    self.record(Released(request.index, self._clock.now_s()))
                    # The turn comes when it is due, whether or not the servers have answered by then.
                    closing = asyncio.create_task(session.release())
                await self._clock.sleep_until_s(at_s)
                self._arrives(request)
                del self._held[request.index]
                await self._serve(request, session)
            finally:
                if closing is not None:
                    await closing

        self._in_background(request.index, later())

    async def _serve(self, request: Request, after: HubSession | None = None) -> None:
        index = request.index
        try:
            session = self._make_session(request, self, after)
            if index in self._following:
                self._sessions[index] = session
                session.stays_open = self._hold_s is not None
            await session.run()
        except SessionError as error:
            with contextlib.suppress(LogFullError):  # remembered by record, raised by run
                self.record(Failed(index, self._clock.now_s(), str(error)))

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
        if isinstance(record, Completed | Failed):
            self._follow(record)


def _ended(index: int, at_s: float, enough: bool, reason: str) -> Completed | Failed | Cancelled:
    if enough:
        return Completed(index, at_s)
    return Failed(index, at_s, reason) if reason else Cancelled(index, at_s)
