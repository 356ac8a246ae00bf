"""Connections with servers that can end: they are lost, and made again when a session needs them.

As on the network ``memory``: the end of a connection follows what its server has written, and a new connection takes
the handshakes of TCP and of WebSockets.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

from netem.flows import SYN_BYTES
from nodes import framesizes
from policies.problem import Placement, Problem
from testbed.control.placing import followers
from testbed.fast.events import EventQueue
from testbed.fast.links import Links
from testbed.fast.sending import Sending

_Waiting = deque[Callable[["Wire | None"], None]]
_Pair = tuple[int, int]
"""A source (a client, or a server as in ``testbed.fast.sending``) and a server, by their numbers."""


class Wire:
    """A connection. ``is_made``: its handshakes are over. ``is_served``: the server's end is there. ``is_there``: the source has not heard of its end."""

    __slots__ = ("_lost", "_n_asked", "is_made", "is_served", "is_there", "n_heard", "server", "source")

    def __init__(self, source: int, server: int) -> None:
        self.source, self.server = source, server
        self.is_served = self.is_there = self.is_made = True
        self.n_heard = 0
        """How many ends of connections had been heard of when this one was."""
        self._lost: dict[int, Callable[[], None]] = {}
        self._n_asked = 0

    def ask(self, lost: Callable[[], None]) -> int:
        """Notes a request that waits for its answer; returns its number. ``lost`` is called if none can come."""
        self._n_asked += 1
        self._lost[self._n_asked] = lost
        return self._n_asked

    def answered(self, number: int) -> None:
        """Notes that the answer to a request has come, or that nobody waits for it."""
        self._lost.pop(number, None)

    def fail(self) -> None:
        """Fails all requests that wait, in the order in which they were asked."""
        lost, self._lost = self._lost, {}
        for call in lost.values():
            call()


class Connections:
    """One connection of each source with each server at most. Those with servers that are ``absent`` are made later.

    With forwarding, servers are connected from the start with those that can follow them in a chain. ``doubted``: clients and servers that have failed them and have not answered since.
    """

    def __init__(
        self,
        queue: EventQueue,
        problem: Problem,
        send: Sending,
        links: Links | None,
        absent: Collection[int],
        placement: Placement,
    ) -> None:
        self._queue, self._send, self._links = queue, send, links
        self._listens: dict[int, int] = {j: 0 for j in range(problem.n_servers) if j not in absent}
        """How often each server that is there has ended."""
        self._n_ends = [0] * problem.n_servers
        self._n_clients = len(problem.clients)
        pairs = [(i, j) for i in range(self._n_clients) for j in self._listens]
        if problem.forwarding:
            pairs += [
                (self.from_server(j), k)
                for j in self._listens
                for k in followers(placement, j)
                if k in self._listens
            ]
        self._wires = {pair: Wire(*pair) for pair in pairs}
        self._connecting: dict[_Pair, _Waiting] = {}
        """Who waits for a connection. The first one makes it."""
        self._n_heard = 0
        self._ended: list[Wire] = []
        """Those whose ends have arrived at this instant."""
        self.doubted: set[_Pair] = set()

    def ready(self, source: int, server: int, call: Callable[[Wire | None], None]) -> None:
        """Calls ``call`` with the connection as soon as it is there; with ``None`` if the server takes none."""
        pair = source, server
        if (wire := self._present(pair)) is not None and pair not in self._connecting:
            call(wire)
            return
        waiting = self._connecting.setdefault(pair, deque())
        waiting.append(call)
        if len(waiting) == 1:
            self._connect(pair, waiting)

    def cancel(self, source: int, server: int, call: Callable[[Wire | None], None]) -> None:
        """Lets ``call`` wait no more for a connection; if it was the one that makes it, that ends."""
        pair = source, server
        waiting = self._connecting.get(pair)
        if waiting is None or call not in waiting:
            return
        if call is not waiting[0]:
            waiting.remove(call)
            return
        if (wire := self._wires.get(pair)) is not None and not wire.is_made:
            del self._wires[pair]
        del self._connecting[pair]
        if others := deque(list(waiting)[1:]):
            self._connecting[pair] = others
            self._connect(pair, others)

    def from_server(self, server: int) -> int:
        """Returns a server's number as a source."""
        return self._n_clients + server

    def unconnected(self, servers: Sequence[int]) -> tuple[int, int] | None:
        """Returns the first two servers in a row that must connect before one can pass steps on to the other; ``None``: all can."""
        for server, following in pairwise(servers):
            if server != following and self._present((self.from_server(server), following)) is None:
                return server, following
        return None

    def _present(self, pair: _Pair) -> Wire | None:
        wire = self._wires.get(pair)
        return wire if wire is not None and wire.is_there else None

    def _connect(self, pair: _Pair, waiting: _Waiting, *, is_again: bool = False) -> None:
        """``is_again``: the server has ended while the source was connecting. aiohttp tries once more then."""
        self._send.packet_up(*pair, SYN_BYTES, self._asked, pair, waiting, is_again)

    def _asked(self, pair: _Pair, waiting: _Waiting, is_again: bool) -> None:
        """The first packet of a handshake reaches the server."""
        listener = self._listens.get(pair[1])
        self._send.packet_down(*pair, SYN_BYTES, self._accepted, pair, waiting, listener, is_again)

    def _accepted(self, pair: _Pair, waiting: _Waiting, listener: int | None, is_again: bool) -> None:
        """The source knows whether the server listens, which it may have stopped meanwhile."""
        if self._connecting.get(pair) is not waiting:
            return
        if listener is None or self._listens.get(pair[1]) != listener:
            self._connected(pair, waiting, None)
            return
        if self._links is not None:
            self._links.reconnect(*pair)
        wire = self._wires[pair] = Wire(*pair)
        wire.is_made = False
        if is_again:
            wire.ask(partial(self._connected, pair, waiting, None))
        else:
            wire.ask(partial(self._connect, pair, waiting, is_again=True))
        self._send.packet_up(*pair, 0, _nothing)
        self._send.up(self._queue.at, *pair, framesizes.UPGRADE, self._upgrade, wire, waiting)

    def _upgrade(self, wire: Wire, waiting: _Waiting) -> None:
        if wire.is_served:
            pair = wire.source, wire.server
            self._send.down(self._queue.at, *pair, framesizes.UPGRADED, self._upgraded, wire, waiting)

    def _upgraded(self, wire: Wire, waiting: _Waiting) -> None:
        wire.answered(1)
        wire.is_made = True
        self._connected((wire.source, wire.server), waiting, wire)

    def _connected(self, pair: _Pair, waiting: _Waiting, wire: Wire | None) -> None:
        """Lets go on who waits: all of them with a connection, else the first one, and the next one tries itself."""
        if self._connecting.get(pair) is not waiting:
            return  # the source has ended
        waiting.popleft()(wire)
        while wire is not None and waiting:
            waiting.popleft()(wire)
        if waiting:
            self._connect(pair, waiting)
        else:
            del self._connecting[pair]

    def begin(self, server: int) -> None:
        """Lets a server take connections from now on."""
        self._listens[server] = self._n_ends[server]

    def end(self, server: int) -> None:
        """Notes that a server ends now. Others learn it when the ends of their connections arrive."""
        source = self.from_server(server)
        self._connecting = {pair: waiting for pair, waiting in self._connecting.items() if pair[0] != source}
        for pair in [pair for pair in self._wires if pair[0] == source]:
            self._send.hang_up(*pair)
            del self._wires[pair]
        self._listens.pop(server, None)
        self._n_ends[server] += 1
        for wire in self._wires.values():
            if wire.server == server and wire.is_served:
                wire.is_served = False
                self._send.end(wire.source, server, self._hear, wire)

    def _hear(self, wire: Wire) -> None:
        """The end of a connection arrives. Those of one instant are known together."""
        if self._wires.get((wire.source, wire.server)) is not wire:
            return  # its source has ended
        if not self._ended:
            self._queue.at(self._queue.now_s, self._hear_all)
        self._ended.append(wire)

    def _hear_all(self) -> None:
        ended, self._ended = self._ended, []
        for wire in ended:
            self._n_heard += 1
            wire.is_there, wire.n_heard = False, self._n_heard
            self._send.hang_up(wire.source, wire.server)
        for wire in ended:
            wire.fail()


def _nothing(*_: Any) -> None:
    """Nobody waits for it."""
