"""The sessions of a server: the blocks that it hosts, the sessions on them, and the room of their caches."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass, field
from typing import Any

from nodes import wire
from nodes.admission import Admission, HostedBlocks, Need, Refused
from nodes.clock import Clock
from nodes.compute import Compute, ComputeError
from nodes.forwarding import Forwarding, Place
from nodes.limits import ServerLimits, ServerSocket, cut, shown
from nodes.parts import Sender, Sending
from nodes.prefixes import Page, reusable, split_ids

log = logging.getLogger(__name__)

_ENDED_REMEMBERED = 10_000


@dataclass
class Session:
    """One session on blocks ``[first, last)``. Its next step begins at ``position``, or goes back before it."""

    key: str
    first: int
    last: int
    max_tokens: int
    state: Any
    used_at_s: float
    cached_tokens: int
    """Tokens for which ``state`` has cache now."""
    position: int = 0
    begins_at: int = 0
    """It has found the caches of so many tokens, and cannot go back before them."""
    end: int = 0
    """The position after all steps that have come."""
    n_running: int = 0
    """Steps that have come and are not computed."""
    steps: list[asyncio.Task[None]] = field(default_factory=list)
    """Each computes and answers a step, in the order in which they came."""
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by the step that is computed."""
    ids: tuple[bytes, ...] = ()
    """The ids of its prompt's pages with which it was opened."""
    place: Place | None = None
    """Its place in a chain of servers that forward; ``None`` for hub-spoke."""


@dataclass
class Counters:
    """Totals since start; the metrics page shows them."""

    opened: int = 0
    refused: int = 0
    closed: int = 0
    expired: int = 0
    preempted: int = 0
    steps: int = 0
    errors: int = 0
    connections: int = 0
    compute_s: float = 0.0


@dataclass
class Connection:
    """A WebSocket from a client or another server, and its sessions on this server."""

    number: int
    client: str
    """The other end's address."""
    socket: ServerSocket
    transport: asyncio.Transport
    sender: Sender
    sessions: dict[str, Session] = field(default_factory=dict)
    ended: OrderedDict[str, tuple[str, str]] = field(default_factory=OrderedDict)
    """Sessions that the server has ended: error code and message for later requests, by session."""
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    """Steps that are pending."""
    replies: list[Sending] = field(default_factory=list)
    """Answers to other requests that wait to be sent."""
    openings: set[asyncio.Task[None]] = field(default_factory=set)
    """Openings that wait for the session's cache."""
    pending_bytes: int = 0
    """Payloads of pending steps."""


class Sessions:
    """All sessions of a server. A session belongs to the connection that opened it and ends with it.

    Methods with a frame as argument raise ``FrameError`` when its sender broke the protocol.
    """

    def __init__(self, hosted: HostedBlocks, compute: Compute, clock: Clock, limits: ServerLimits) -> None:
        self.admission = Admission[tuple[int, str]](hosted, self._preempted, on_evicted=self._evicted)
        """Its keys are ``(connection's number, session)``."""
        self.compute = compute
        self.clock = clock
        self.limits = limits
        self.counters = Counters()
        self.forwarding = Forwarding(clock)
        self.phase = "serving"
        """The phase of a move to other blocks: see ``nodes.moving``."""
        self.released = asyncio.Event()
        """Set whenever a session has ended."""
        self.live: dict[int, Connection] = {}
        """Connections by number."""
        self._pages: dict[Page, Any] = {}
        """What the backend has kept of each kept page."""

    def drop(self, connection: Connection) -> None:
        """Cancels all pending work of a connection, and releases its sessions. Nothing more is sent over it."""
        connection.sender.end()
        for task in (*connection.tasks, *connection.openings):
            task.cancel()
        for key in list(connection.sessions):
            self._release(connection, key)

    def open(
        self, connection: Connection, frame: wire.Open | wire.Join
    ) -> wire.Answer | Awaitable[wire.Answer | None]:
        """Opens a session, with a place in a chain if ``frame`` is a ``Join``.

        Returns the answer, or an awaitable of it if the backend needs time to allocate the session's cache.
        The awaitable results in ``None`` if a chain's session was ended meanwhile: its client has been
        notified.
        """
        key, first, last, max_tokens = frame.session, frame.first, frame.last, frame.max_tokens
        hosted = self.admission.hosted
        if not hosted.holds(first, last):
            if self.admission.has_moved:  # the client got its chain before the blocks moved
                self.counters.refused += 1
                text = f"blocks {first} to {last} are not here any more"
                return wire.Error(frame.id, wire.NO_CAPACITY, text)
            raise wire.FrameError(
                wire.WRONG_BLOCKS,
                f"blocks {first} to {last} asked for, {hosted.first} to {hosted.last} are here",
                frame.id,
            )
        if key in connection.sessions:
            raise wire.FrameError(wire.BAD_FRAME, f"session {shown(key)} is open already", frame.id)
        if max_tokens < 1:
            raise wire.FrameError(wire.BAD_FRAME, "a session needs room for at least one token", frame.id)
        if max_tokens > self.limits.max_session_tokens:
            raise wire.FrameError(
                wire.BAD_FRAME,
                f"a session of {max_tokens} tokens; at most {self.limits.max_session_tokens} are allowed",
                frame.id,
            )
        if isinstance(frame, wire.Join):
            self.forwarding.check(frame)
        owner, need = (connection.number, key), self._need(frame)
        ids = self._ids(frame)
        refused = self._too_many(connection, frame) or self.admission.admit(owner, first, last, need, ids)
        if refused is not None:
            return self._refused(frame, refused)
        now_tokens = self.admission.cached_tokens(owner)
        try:
            state = self.compute.new_session(frame.client, first, last, now_tokens)
        except ComputeError as error:
            self.admission.release(owner)
            return self._refused(frame, self.admission.refusal(str(error), first, last, need))
        session = Session(key, first, last, max_tokens, state, self.clock.now_s(), now_tokens, ids=ids)
        connection.sessions[key] = session
        if isinstance(frame, wire.Join):
            place = Place(
                (connection, session),
                connection.sender,
                frame.id,
                frame.token,
                frame.peer,
                frame.next_token,
            )
            session.place = self.forwarding.join(place)
        opening = self.compute.opening(state)
        if opening is not None:
            return self._opened(connection, session, frame, opening)
        self.counters.opened += 1
        return self._ok(connection, frame)

    def _ids(self, frame: wire.Open | wire.Join) -> tuple[bytes, ...]:
        """Returns the ids of pages with which a session's prompt begins; none if it does not say."""
        if not isinstance(frame, wire.OpenPages | wire.JoinPages) or self.admission.kept is None:
            return ()
        ids = tuple(split_ids(frame.pages))
        most = reusable(frame.first_tokens or frame.max_tokens, self.admission.kept.page_tokens)
        if len(ids) > most:
            raise wire.FrameError(
                wire.BAD_FRAME,
                f"{len(ids)} pages of a prompt that has {most} before its last token",
                frame.id,
            )
        return ids

    def _ok(self, connection: Connection, frame: wire.Open | wire.Join) -> wire.Answer:
        if not isinstance(frame, wire.OpenPages | wire.JoinPages):
            return wire.Ok(frame.id)
        return wire.Found(frame.id, self.admission.found_tokens((connection.number, frame.session)))

    def _need(self, frame: wire.Open | wire.Join) -> Need:
        came = frame.arrived_at_s, frame.session
        return Need(frame.first_tokens or frame.max_tokens, frame.max_tokens, came)

    def _too_many(self, connection: Connection, frame: wire.Open | wire.Join) -> Refused | None:
        """Returns the refusal of a session if there are as many as the limits allow."""
        if len(connection.sessions) >= self.limits.max_sessions_per_connection:
            reason = "too many sessions on this connection"
        elif len(self.admission.account) >= self.limits.max_sessions:
            reason = "too many sessions on this server"
        else:
            return None
        return self.admission.refusal(reason, frame.first, frame.last, self._need(frame))

    def _refused(self, frame: wire.Open | wire.Join, refused: Refused) -> wire.Error:
        self.counters.refused += 1
        return wire.Error(frame.id, refused.code, cut(refused.reason))

    async def _opened(
        self, connection: Connection, session: Session, frame: wire.Open | wire.Join, opening: Awaitable[None]
    ) -> wire.Answer | None:
        failure: ComputeError | None = None
        try:
            await opening
        except ComputeError as error:
            failure = error
        if connection.sessions.get(session.key) is session:
            if failure is not None:
                self._release(connection, session.key)
                refused = self.admission.refusal(str(failure), frame.first, frame.last, self._need(frame))
                return self._refused(frame, refused)
            session.used_at_s = self.clock.now_s()
            self.counters.opened += 1
            return self._ok(connection, frame)
        if session.place is not None:
            return None
        ended = wire.NO_CAPACITY, f"session {shown(session.key)} was closed before it was open"
        return wire.Error(frame.id, *connection.ended.get(session.key, ended))

    def _grow(self, connection: Connection, session: Session, position: int, n_tokens: int) -> bool:
        """Reserves cache for ``n_tokens`` more from ``position`` on; frees what was reserved beyond.

        Returns False if ``session`` was preempted.
        """
        owner = connection.number, session.key
        if position < session.position:
            self.admission.go_back(owner, position)
        if not self.admission.grow(owner, position + n_tokens):
            return False
        wanted = self.admission.cached_tokens(owner)
        if wanted > session.cached_tokens:
            try:
                self.compute.grow(session.state, wanted)
            except ComputeError as error:
                self._preempt(connection, session.key, f"has no room: {error}")
                return False
            session.cached_tokens = wanted
        return True

    def _preempted(self, key: tuple[int, str]) -> None:
        self._preempt(self.live[key[0]], key[1], "made room for one that came before it")

    def _preempt(self, connection: Connection, key: str, reason: str) -> None:
        """Ends a session to free its cache.

        A chain's client is notified at once, others at their next request.
        """
        place = connection.sessions[key].place
        self.forget(connection, key, wire.PREEMPTED, reason)
        self.counters.preempted += 1
        if place is not None:
            self.forwarding.notify_of_end(place, wire.PREEMPTED, cut(f"it {reason}"))

    def close(self, connection: Connection, frame: wire.Close) -> wire.Answer:
        """Closes a session, and drops its steps: nobody waits for them.

        A session that the server has ended already counts as closed.
        """
        key = frame.session
        if key in connection.sessions:
            session = connection.sessions[key]
            for step in session.steps:
                step.cancel()
            if isinstance(frame, wire.Keep) and self.admission.kept is not None:
                size = self.admission.kept.page_tokens
                ids = (*session.ids, *split_ids(frame.pages))[: session.position // size]
                for number, page in self.admission.keep((connection.number, key), ids):
                    tokens = range(number * size, (number + 1) * size)
                    self._pages[page] = self.compute.kept(session.state, tokens)
            self._release(connection, key)
            self.counters.closed += 1
        elif key not in connection.ended:
            raise wire.FrameError(wire.UNKNOWN_SESSION, f"no session {shown(key)}", frame.id)
        return wire.Ok(frame.id)

    def _release(self, connection: Connection, key: str) -> None:
        session = connection.sessions.pop(key)
        if session.place is not None:
            self.forwarding.leave(session.place)
        self.compute.close_session(session.state)
        self.admission.release((connection.number, key))
        self.released.set()

    def _evicted(self, page: Page) -> None:
        if page in self._pages:
            self.compute.evicted(self._pages.pop(page))

    def _reuse(self, connection: Connection, session: Session, position: int) -> None:
        """Lets a session's first step begin at ``position``, if it has found the cache of that many tokens."""
        kept, owner = self.admission.kept, (connection.number, session.key)
        if kept is None or session.position or not 0 < position <= self.admission.found_tokens(owner):
            return
        n_pages, rest = divmod(position, kept.page_tokens)
        if rest == 0:
            pages = (Page(session.first, session.last, each) for each in session.ids[:n_pages])
            self.compute.reuse(session.state, [self._pages[page] for page in pages])
            session.position = session.end = session.begins_at = position

    def forget(self, connection: Connection, key: str, code: str, reason: str) -> None:
        """Ends a session that its client did not close. Later requests for it get ``code`` and ``reason``."""
        self._release(connection, key)
        connection.ended[key] = code, cut(f"session {shown(key)} {reason}")
        while len(connection.ended) > _ENDED_REMEMBERED:
            connection.ended.popitem(last=False)

    def check_step(self, connection: Connection, frame: wire.Step, is_pushed: bool = False) -> Session | None:
        """Checks a step and reserves cache for it.

        Returns its session, or ``None`` if the server has ended that session. Raises ``FrameError``.
        """
        key, position, n_tokens = frame.session, frame.position, frame.n_tokens
        session = connection.sessions.get(key)
        if session is None:
            if key in connection.ended:
                return None
            raise wire.FrameError(wire.UNKNOWN_SESSION, f"no session {shown(key)}", frame.id)
        if session.place is not None and not is_pushed:
            raise wire.FrameError(
                wire.BAD_FRAME, f"session {shown(key)} is part of a chain: push to it", frame.id
            )
        if n_tokens < 1 or len(frame.payload) != n_tokens * self.compute.token_bytes:
            raise wire.FrameError(
                wire.WRONG_SIZE,
                f"{len(frame.payload)} bytes for {n_tokens} hidden states of {self.compute.token_bytes} bytes",
                frame.id,
            )
        self._reuse(connection, session, position)
        is_behind = isinstance(frame, wire.Behind) and position == session.end
        if isinstance(frame, wire.Instead):
            self._give_up(connection, session, position)
        if not is_behind and (session.n_running or not session.begins_at <= position <= session.position):
            raise wire.FrameError(
                wire.WRONG_POSITION,
                f"session {shown(key)} is at position {session.position}, not {position}",
                frame.id,
            )
        if position + n_tokens > session.max_tokens:
            raise wire.FrameError(
                wire.WRONG_POSITION,
                f"session {shown(key)} has room for {session.max_tokens} tokens",
                frame.id,
            )
        if not self._grow(connection, session, position, n_tokens):
            return None
        session.position, session.end = min(session.position, position), position + n_tokens
        session.n_running += 1
        return session

    def _give_up(self, connection: Connection, session: Session, position: int) -> None:
        """Drops a session's steps, those that only wait for their answers to leave, too; another one takes their place."""
        if position <= session.position:
            for step in session.steps:
                step.cancel()
            session.n_running = 0
            self.admission.go_back((connection.number, session.key), position)

    @contextlib.asynccontextmanager
    async def expiring(self, connection: Connection) -> AsyncIterator[None]:
        """Closes the connection's idle sessions while the body runs."""

        async def watch() -> None:
            while True:
                now_s = self.clock.now_s()
                for session in list(connection.sessions.values()):
                    if not session.n_running and session.used_at_s + self.limits.idle_s <= now_s:
                        self._expire(connection, session.key)
                        if session.place is not None:
                            reason = "it was idle for too long"
                            self.forwarding.notify_of_end(session.place, wire.SESSION_EXPIRED, reason)
                await self.clock.sleep_until_s(now_s + self.limits.idle_s / 4)

        task = asyncio.ensure_future(watch())
        try:
            yield
        finally:
            task.cancel()

    def _expire(self, connection: Connection, key: str) -> None:
        self.forget(connection, key, wire.SESSION_EXPIRED, "was idle for too long")
        self.counters.expired += 1
        log.warning("session %s was idle for %g s: closed", shown(key), self.limits.idle_s)

    def end(self, key: tuple[int, str], code: str, reason: str) -> None:
        """Ends the session of ``admission`` with that key.

        A chain's client is sent the error at once, others at their next request.
        """
        connection = self.live[key[0]]
        session = connection.sessions[key[1]]
        self.forget(connection, key[1], code, reason)
        if session.place is not None:
            self.forwarding.notify_of_end(session.place, code, cut(f"it {reason}"))
