"""Server-to-server communication where servers can end: what servers pass on, and what a client hears of its chain."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from nodes import framesizes
from testbed.fast.connections import Connections, Wire
from testbed.fast.events import EventQueue
from testbed.fast.sending import Sending
from testbed.fast.steps import ChainSession, Key


class Passing:
    """Passes steps on over connections that can be lost. ``arrive(session)`` is called when one has come to a server."""

    def __init__(
        self,
        queue: EventQueue,
        connections: Connections,
        send: Sending,
        token_bytes: int,
        arrive: Callable[[ChainSession], None],
    ) -> None:
        self._queue = queue
        self._connections = connections
        self._send = send
        self._token_bytes = token_bytes
        self._arrive = arrive
        self._waiting: dict[tuple[Key, int], tuple[int, int, Callable[[Wire | None], None]]] = {}
        """What waits for a connection, by session and server: (source, server, call)."""

    def listen(self, session: ChainSession) -> None:
        """Lets a client hear of the ends of all connections of its chain, until it is over."""
        for at, wire in enumerate(session.wires):
            assert wire is not None, "connections can be lost"
            if wire.is_there:
                session.listeners.append((wire, wire.ask(partial(self._hear, session, at))))
        lost = [(wire.n_heard, at) for at, wire in enumerate(session.wires) if wire and not wire.is_there]
        session.news += [at for _, at in sorted(lost)]

    def _hear(self, session: ChainSession, at: int) -> None:
        """The client learns that hop number ``at`` is lost. It acts on the first such news when it waits for a result."""
        if not session.is_over:
            session.news.append(at)
            if session.is_away:
                self.fail(session)

    def fail(self, session: ChainSession) -> None:
        """Has a client act on what it has heard first."""
        for wire, number in session.listeners:
            wire.answered(number)
        session.cut(session.news[0], session.asked_at_s)

    def push(self, session: ChainSession) -> None:
        """Passes the present step to the next hop, or notifies the client that this is not possible."""
        at, session.sent_at_s = session.at, self._queue.now_s
        source = self._connections.from_server(session.hops[at].server)
        to, call = session.hops[at + 1].server, partial(self._push, session, at, source)
        self._waiting[session.keys[at], session.hops[at].server] = source, to, call
        self._connections.ready(source, to, call)

    def close(self, key: Key, server: int) -> None:
        """A session is closed on ``server``, which passes nothing of it on any more."""
        if (waiting := self._waiting.pop((key, server), None)) is not None:
            self._connections.cancel(*waiting)

    def _push(self, session: ChainSession, at: int, source: int, wire: Wire | None) -> None:
        self._waiting.pop((session.keys[at], session.hops[at].server), None)
        if wire is None:
            self._not_passed_on(session, at)
            return
        session.at = at + 1
        number = wire.ask(partial(self._not_passed_on, session, at))
        arrival = self._arrives, session, at + 1, wire, number
        if session.ways:
            size = session.ways[at + 1].size_there(session.parts[session.part].n_tokens * self._token_bytes)
            self._send.up(self._queue.at, source, session.hops[at + 1].server, size, *arrival)
        else:
            self._queue.at(self._queue.now_s + session.delay.up_s, *arrival)

    def _arrives(self, session: ChainSession, at: int, wire: Wire, number: int) -> None:
        """A push reaches the server of hop number ``at``."""
        if not wire.is_served:
            return
        is_known, server = session.is_open(at), session.hops[at].server
        answer = framesizes.OK if is_known else framesizes.ERROR
        self._send.down(
            self._queue.at, wire.source, server, answer, self._answered, session, at, wire, number, is_known
        )
        if is_known:
            self._arrive(session)

    def _answered(self, session: ChainSession, at: int, wire: Wire, number: int, is_known: bool) -> None:
        wire.answered(number)
        if not is_known:
            self._not_passed_on(session, at - 1)

    def _not_passed_on(self, session: ChainSession, at: int) -> None:
        """Has the server of hop number ``at``, if the session is still there, notify the client that it cannot push."""
        if session.is_open(at):
            client, server = session.plan.client, session.hops[at].server
            self._send.notify(client, server, self._hear, session, at + 1)
