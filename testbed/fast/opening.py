"""Opens sessions on all servers of a chain at once, and closes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from nodes import framesizes
from nodes.admission import Admission, Need
from nodes.chain import NotOpened, OpenHop, Refusal
from nodes.errors import ConnectionLost, ServerError
from policies.problem import Hop, Problem
from testbed.fast.connections import Connections, Wire
from testbed.fast.events import EventQueue
from testbed.fast.lines import Heard
from testbed.fast.outcome import Disturbed
from testbed.fast.sending import Sending
from testbed.fast.steps import Key


@dataclass(eq=False)
class SimulatedHop(OpenHop):
    """An open hop. Its server knows the session as ``cache_key``. ``wire`` ``None``: its connection cannot be lost."""

    cache_key: Key = (0, 0)
    wire: Wire | None = None

    @property
    def is_there(self) -> bool:
        """Whether the client can send to it."""
        return self.wire is None or self.wire.is_there


@dataclass(slots=True, eq=False)
class Opening:
    """An attempt to open a session on ``hops`` as ``key``, and what became of it.

    ``then`` is called with it once all servers have answered and, if one of them has refused, the others have confirmed
    that it is closed again.
    """

    client: int
    hops: Sequence[Hop]
    key: Key
    need: Need
    then: Callable[[Opening], None]
    pages: Sequence[bytes] = ()
    is_replacement: bool = False
    opened: list[SimulatedHop] = field(default_factory=list)
    """The hops whose servers have accepted it, in the order in which they did."""
    n_unanswered: int = 0
    failed: dict[int, NotOpened] = field(default_factory=dict)
    """By server: why it has not accepted it."""

    @property
    def refusal(self) -> Refusal | None:
        """Why it could not be opened, once all servers have answered."""
        failed = [self.failed[hop.server] for hop in self.hops if hop.server in self.failed]
        return Refusal.of(failed) if failed else None


class _Asked(NamedTuple):
    """A server was asked to open a session."""

    server: int
    at_s: float
    heard: Heard

    def ended(self, now_s: float) -> float:
        """Ends the wait for its answer; returns for how long at most nothing was heard of it, in seconds."""
        return self.heard.answered(self.at_s, now_s)


@dataclass(slots=True, eq=False)
class _Closing:
    """``then`` is called once all servers have confirmed it, or the client waits no longer."""

    n_unanswered: int
    then: Callable[[], None]

    def confirmed(self) -> None:
        self.n_unanswered -= 1
        if not self.n_unanswered:
            self.then()

    def overdue(self) -> None:
        if self.n_unanswered > 0:
            self.n_unanswered = 0  # those that still come change nothing
            self.then()


class Chains:
    """Opens and closes sessions on servers with these ``admissions``.

    ``free_at`` plans what gives room back, ``released(server)`` is called when that has happened. Without ``connections``
    none is ever lost. A server of which nothing is heard for ``limit_s`` while it is asked to open a session is taken for an
    absent one, which is not simulated here: ``Disturbed`` is raised then. After a refusal the client waits as long for the others to
    confirm that they have closed it.
    """

    def __init__(
        self,
        problem: Problem,
        queue: EventQueue,
        send: Sending,
        admissions: Sequence[Admission[Key]],
        free_at: Callable[..., float],
        released: Callable[[int], None],
        limit_s: float,
        connections: Connections | None = None,
    ) -> None:
        self._problem = problem
        self._queue = queue
        self._send = send
        self._admissions = admissions
        self._free_at = free_at
        self._released = released
        self._limit_s = limit_s
        self._connections = connections
        self.closed: Callable[[Key, int], None] | None = None
        """Called with a session's key and the server that has closed it."""

    def open(self, opening: Opening) -> None:
        """Sends an opening to all servers of a chain."""
        opening.n_unanswered = len(opening.hops)
        for hop in opening.hops:
            if self._connections is None:
                self._ask(opening, hop)
            else:
                self._connections.ready(
                    opening.client, hop.server, partial(self._ready, opening, hop, self._queue.now_s)
                )

    def _ready(self, opening: Opening, hop: Hop, begun_at_s: float, wire: Wire | None) -> None:
        self._check_limit(hop.server, self._queue.now_s - begun_at_s)
        if wire is None:
            self._lost(opening, hop.server)
        else:
            self._ask(opening, hop, wire)

    def _ask(self, opening: Opening, hop: Hop, wire: Wire | None = None) -> None:
        size = framesizes.opening(len(opening.pages), forwarding=self._problem.forwarding)
        asked = _Asked(hop.server, self._queue.now_s, self._send.heard(opening.client, hop.server))
        asked.heard.n_waiting += 1
        number = 0 if wire is None else wire.ask(partial(self._lost, opening, hop.server, asked=asked))
        self._send.up(
            *(self._queue.at, opening.client, hop.server, size, self._arrive),
            *(opening, hop, wire, number, asked),
        )

    def _lost(self, opening: Opening, server: int, asked: _Asked | None = None) -> None:
        """No answer can come from a server, as the client knows now."""
        if asked is not None:
            asked.ended(self._queue.now_s)
        error = ConnectionLost(f"{self._problem.servers[server].name}: the connection was lost")
        opening.failed[server] = NotOpened.of(server, error)
        self._queue.at(self._queue.now_s, self._ended, opening)

    def _arrive(self, opening: Opening, hop: Hop, wire: Wire | None, number: int, asked: _Asked) -> None:
        """An opening reaches a server. What the answer is, is known as soon as it is sent."""
        if wire is not None and not wire.is_served:
            return
        server, size = self._admissions[hop.server], framesizes.FOUND if opening.pages else framesizes.OK
        refused = server.admit(opening.key, hop.first, hop.last, opening.need, opening.pages)
        if refused is None:
            n_found, key = server.found_tokens(opening.key), opening.key
            opened = SimulatedHop(*hop, "", 0, opening.is_replacement, 0, n_found, len(opening.pages))
            opened.cache_key, opened.wire = key, wire
            opening.opened.append(opened)
        else:
            error, size = ServerError(refused.code, refused.reason), framesizes.ERROR
            opening.failed[hop.server] = NotOpened.of(hop.server, error)
        answer = opening, wire, number, asked
        self._send.down(self._queue.at, opening.client, hop.server, size, self._answered, *answer)

    def _answered(self, opening: Opening, wire: Wire | None, number: int, asked: _Asked) -> None:
        self._check_limit(asked.server, asked.ended(self._queue.now_s))
        if wire is not None:
            wire.answered(number)
        self._ended(opening)

    def _check_limit(self, server: int, silence_s: float) -> None:
        if silence_s > self._limit_s:
            raise Disturbed(
                f"nothing is heard of {self._problem.servers[server].name} for {silence_s:.3g} s while it opens a session, "
                f"and recovery.connect_timeout is {self._limit_s:g} s"
            )

    def _ended(self, opening: Opening) -> None:
        """A server has answered, or cannot; goes on once all have."""
        opening.n_unanswered -= 1
        if opening.n_unanswered:
            return
        if opening.failed:
            self.close(opening.client, opening.opened, then=partial(opening.then, opening))
        else:
            opening.then(opening)

    def close(
        self,
        client: int,
        hops: Sequence[SimulatedHop],
        pages: Sequence[bytes] | None = None,
        *,
        then: Callable[[], None] | None = None,
    ) -> None:
        """Notifies servers that a session is over, and that they may keep the caches of ``pages``.

        ``then`` is called once all have confirmed it, but no later than after the limit. Sessions of lost connections are closed
        already.
        """
        hops = [hop for hop in hops if hop.is_there]
        waits = None if then is None else _Closing(len(hops), then)
        for hop in hops:
            size = framesizes.CLOSE if pages is None else framesizes.keeping(len(pages) - hop.n_pages)
            number = 0 if hop.wire is None or waits is None else hop.wire.ask(waits.confirmed)
            self._send.up(
                self._free_at, client, hop.server, size, self._free, client, hop, pages, waits, number
            )
        if waits is not None and hops:
            self._queue.at(self._queue.now_s + self._limit_s, waits.overdue)
        elif waits is not None:
            waits.then()

    def _free(
        self,
        client: int,
        hop: SimulatedHop,
        pages: Sequence[bytes] | None,
        waits: _Closing | None,
        number: int,
    ) -> None:
        """A closing reaches a server."""
        if hop.wire is not None and not hop.wire.is_served:
            return
        admission, key = self._admissions[hop.server], hop.cache_key
        is_there = admission.cached_tokens(key) > 0  # else it has lost its cache
        if pages is not None and is_there:
            admission.keep(key, pages)
        else:
            admission.release(key)
        if self.closed is not None and is_there:
            self.closed(key, hop.server)
        if waits is None:
            self._send.tell(client, hop.server, framesizes.OK)
        else:
            self._send.down(
                self._free_at, client, hop.server, framesizes.OK, _confirmed, waits, hop.wire, number
            )
        self._released(hop.server)


def _confirmed(waits: _Closing, wire: Wire | None, number: int) -> None:
    if wire is not None:
        wire.answered(number)
    waits.confirmed()
