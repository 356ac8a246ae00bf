"""Server-to-server forwarding, a server's part: a step's result goes straight to the session's next server.

The client opens a session on every hop over its own connections (``Join``), so the sessions end with these.
Each ``Join`` names the next server's number and the secret token of the session there. The client pushes a
step's hidden states to the first hop. Every server computes and pushes its result on; the last one sends it
to the client. A push is answered on arrival, before it is computed. A server whose push fails notifies the
client. Clients name servers by number; the servers' addresses come from the orchestrator only.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from nodes import wire
from nodes.clock import Clock
from nodes.connection import Connection
from nodes.errors import ConnectionLost, ServerError
from nodes.limits import cut
from nodes.parts import Sender
from nodes.watchdog import Overdue, Watchdog
from policies.rules import RecoveryRules

_TOLD_REMEMBERED = 10_000


@dataclass(eq=False)
class Place:
    """A session's place in its chain. ``owner`` is the server's own reference to the session.

    Others push to the session with ``token``. Its results go to server number ``peer`` with ``next_token``,
    or, if ``next_token`` is empty, to the client as answers to its request ``join_id``.
    """

    owner: Any
    client: Sender
    join_id: int
    token: str
    peer: int
    next_token: str
    n_timings: int | None = None
    """How many hops a step has passed before it comes here; ``None`` before the first one."""
    _way: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by a round that has not left."""

    @contextlib.asynccontextmanager
    async def leaving(self, is_round: bool) -> AsyncIterator[Callable[[], object] | None]:
        """Lets rounds of a session leave one after another; yields what must be called when one has left."""
        if not is_round:
            yield None
            return
        await self._way.acquire()
        is_gone = False

        def left() -> None:
            nonlocal is_gone
            if not is_gone:
                is_gone = True
                self._way.release()

        try:
            yield left
        finally:
            left()

    def is_passed_after(self, n_timings: int) -> bool:
        """Returns whether a step may come here after ``n_timings`` hops: as many as before.

        Steps may go back, so that a chain which a client has closed to a ring would go round for ever.
        """
        self.n_timings = n_timings if self.n_timings is None else self.n_timings
        return n_timings == self.n_timings

    async def answer(self, frame: wire.Answer) -> None:
        """Sends the client a frame with ``join_id``; does nothing if the client has gone."""
        with contextlib.suppress(ConnectionError):
            await self.client.send(frame)

    async def fail(self, code: str, message: str) -> None:
        """Sends the client an error about its session."""
        await self.answer(wire.Error(self.join_id, code, message))


class Forwarding:
    """The places in chains of one server's sessions. ``peers`` are its connections to all servers, by number.

    A push fails if it is not answered within the limit that ``rules`` set for a step.
    """

    def __init__(self, clock: Clock) -> None:
        self.peers: Sequence[Connection] = ()
        self.rules = RecoveryRules()
        self._watchdog = Watchdog(clock)
        self._places: dict[str, Place] = {}
        self._told: OrderedDict[str, None] = OrderedDict()
        self._telling: set[asyncio.Task[None]] = set()

    @property
    def n_places(self) -> int:
        """The number of sessions that are part of chains."""
        return len(self._places)

    def check(self, join: wire.Join) -> None:
        """Raises ``FrameError`` if the token of ``join`` is empty or in use, or its next server unknown."""
        if not join.token or join.token in self._places:
            raise wire.FrameError(wire.BAD_FRAME, "the token is empty or in use", join.id)
        if join.next_token and join.peer >= len(self.peers):
            raise wire.FrameError(
                wire.BAD_FRAME, f"there is no server number {join.peer} to forward to", join.id
            )

    def join(self, place: Place) -> Place:
        """Accepts pushes for the session at ``place`` from now on; returns ``place``."""
        self._places[place.token] = place
        return place

    def leave(self, place: Place) -> None:
        """Removes the place of a session that has ended."""
        del self._places[place.token]

    def place(self, token: str) -> Place | None:
        """Returns the place with that token; ``None`` if its session has ended."""
        return self._places.get(token)

    def notify_of_end(self, place: Place, code: str, message: str) -> None:
        """Notifies the client, in the background, why its session at ``place`` was ended.

        Later pushes to that place are accepted and dropped: the sender need not report a failure as well.
        """
        self._told[place.token] = None
        if len(self._told) > _TOLD_REMEMBERED:
            self._told.popitem(last=False)
        task = asyncio.ensure_future(place.fail(code, message))
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)

    def has_notified(self, token: str) -> bool:
        """Returns whether ``notify_of_end`` was called for the place with that token."""
        return token in self._told

    async def pass_on(self, place: Place, push: wire.Push) -> None:
        """Sends a step's result to the next server, or to the client if this is the last one.

        ``push``: what this server was sent, with its own result and timing. Failures to push are reported to the client.
        """
        if self._places.get(place.token) is not place:  # closed during the step: nobody waits for the result
            return
        if not place.next_token:
            result = place.join_id, push.position, push.timings, push.payload
            if isinstance(push, wire.PushRound):
                await place.answer(wire.RoundResult(*result, push.number))
            else:
                await place.answer(wire.Result(*result))
            return
        connection = self.peers[place.peer]
        limit_s = self.rules.step_limit_s(push.n_tokens)
        try:
            with self._watchdog.limit(limit_s) as limit:
                generation = await connection.ready()
                push.id, push.token = connection.next_id(), place.next_token
                async with place.leaving(isinstance(push, wire.PushRound)) as left:
                    await connection.ask(push, generation=generation, limit=limit, on_left=left)
        except Overdue:
            await place.fail(wire.NOT_PASSED_ON, f"no answer for {limit_s:g} s")
        except (ConnectionLost, ServerError) as error:
            await place.fail(wire.NOT_PASSED_ON, cut(error))

    def close(self) -> None:
        self._watchdog.close()
        for task in self._telling:
            task.cancel()
