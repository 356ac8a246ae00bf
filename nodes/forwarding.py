"""Server-to-server forwarding, a server's part: what a step gives goes straight to the session's next server.

The client opens a session on every hop over its own connections (``join``), so that they end with these,
and gives each hop the next server's number and a token that only the next hop's session has. It pushes a
step's hidden states to the first hop; every server computes and pushes on; the last one answers the
client. A push is answered as soon as it has arrived, so that whoever sent it knows; a server whose push is
not taken tells the client. Clients name servers by number: where these are, only the orchestrator says.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nodes import wire
from nodes.clock import Clock
from nodes.connection import Connection, ConnectionLost, ServerError
from nodes.limits import cut
from nodes.parts import Sender
from nodes.rules import RecoveryRules
from nodes.watchdog import Overdue, Watchdog

_TOLD_REMEMBERED = 10_000


@dataclass(eq=False)
class Place:
    """A session's place in its chain. ``owner`` is where the server keeps the session.

    ``token`` lets others push into it; ``peer`` and ``next_token`` say where its outputs go: an empty
    ``next_token`` to the client, as answers to its request ``join_id``.
    """

    owner: Any
    client: Sender
    join_id: int
    token: str
    peer: int
    next_token: str

    async def answer(self, frame: wire.Answer) -> None:
        """Send the client a frame with ``join_id``, if it is still there."""
        with contextlib.suppress(ConnectionError):
            await self.client.send(frame)

    async def fail(self, code: str, message: str) -> None:
        """Send the client an error."""
        await self.answer(wire.Error(self.join_id, code, message))


class Forwarding:
    """The chains that sessions of one server belong to. ``peers`` are its connections to all servers.

    A push that has not been answered for as long as ``rules`` give a step is not waited for any longer.
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
        """Sessions that are part of chains."""
        return len(self._places)

    def check(self, join: wire.Join) -> None:
        """Raises ``FrameError`` if no session can take that place."""
        if not join.token or join.token in self._places:
            raise wire.FrameError(wire.BAD_FRAME, "the token is empty or taken", join.id)
        if join.next_token and join.peer >= len(self.peers):
            raise wire.FrameError(
                wire.BAD_FRAME, f"there is no server number {join.peer} to forward to", join.id
            )

    def join(self, place: Place) -> Place:
        """Take pushes for the session at ``place`` from now on."""
        self._places[place.token] = place
        return place

    def leave(self, place: Place) -> None:
        """Its session has ended."""
        del self._places[place.token]

    def place(self, token: str) -> Place | None:
        """The place of the session that ``token`` opens; ``None`` if it is not here any more."""
        return self._places.get(token)

    def tell(self, place: Place, code: str, message: str) -> None:
        """Have the client told why its session is not at ``place`` any more.

        What is still pushed to it is as good as taken: nobody else need say that it was not.
        """
        self._told[place.token] = None
        if len(self._told) > _TOLD_REMEMBERED:
            self._told.popitem(last=False)
        task = asyncio.ensure_future(place.fail(code, message))
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)

    def has_told(self, token: str) -> bool:
        """Whether the client has been told that the session of ``token`` is gone."""
        return token in self._told

    async def pass_on(
        self, place: Place, position: int, n_tokens: int, timings: bytes, answer: bytes
    ) -> None:
        """Bring a step's ``answer`` to the next server, or to the client if this is the last one."""
        if self._places.get(place.token) is not place:  # closed while it computed: nobody waits for it
            return
        if not place.next_token:
            await place.answer(wire.Result(place.join_id, position, timings, answer))
            return
        connection = self.peers[place.peer]
        limit_s = self.rules.step_limit_s(n_tokens)
        try:
            with self._watchdog.limit(limit_s):
                generation = await connection.ready()
                push = wire.Push(connection.next_id(), place.next_token, position, n_tokens, timings, answer)
                await connection.ask(push, generation=generation)
        except Overdue:
            await place.fail(wire.NOT_PASSED_ON, f"no answer for {limit_s:g} s")
        except (ConnectionLost, ServerError) as error:
            await place.fail(wire.NOT_PASSED_ON, cut(error))

    def close(self) -> None:
        self._watchdog.close()
        for task in self._telling:
            task.cancel()
