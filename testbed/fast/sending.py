"""Sends small messages to servers and back: over simulated links, or with their delay alone.

Servers send to each other, too. As a source, server j has the number of clients plus j.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nodes import framesizes
from nodes.framesizes import FrameSize
from policies.problem import Problem
from testbed.fast.events import EventQueue
from testbed.fast.lines import Heard
from testbed.fast.links import Links

Planner = Callable[..., float]
"""``EventQueue.at`` or ``EventQueue.free_at``."""


class Sending:
    """Has functions called when messages arrive. ``links`` ``None``: messages take their link's delay alone.

    ``plan`` plans an arrival where messages take their link's delay alone.
    """

    def __init__(self, queue: EventQueue, problem: Problem, links: Links | None) -> None:
        self._queue, self._problem, self._links = queue, problem, links
        self._n_clients = len(problem.clients)

    def _up_s(self, source: int, server: int) -> float:
        if source < self._n_clients:
            return self._problem.up_s(source, server)
        return self._problem.across_s(source - self._n_clients, server)

    def _down_s(self, source: int, server: int) -> float:
        if source < self._n_clients:
            return self._problem.down_s(source, server)
        return self._problem.across_s(server, source - self._n_clients)

    def up(
        self, plan: Planner, source: int, server: int, frame: FrameSize, call: Callable[..., None], *args: Any
    ) -> None:
        """Sends a message from a source to a server."""
        if self._links is not None:
            self._links.up(source, server).send(frame, call, *args)
        else:
            plan(self._queue.now_s + self._up_s(source, server), call, *args)

    def down(
        self, plan: Planner, source: int, server: int, frame: FrameSize, call: Callable[..., None], *args: Any
    ) -> None:
        """As ``up``, from a server to a source."""
        if self._links is not None:
            self._links.down(source, server).send(frame, call, *args)
        else:
            plan(self._queue.now_s + self._down_s(source, server), call, *args)

    def tell(self, source: int, server: int, frame: FrameSize) -> None:
        """Sends a source a message whose arrival changes nothing but what others wait for."""
        if self._links is not None:
            self._links.down(source, server).tell(frame)

    def heard(self, client: int, server: int) -> Heard:
        """Returns what a client hears of a server. Without links it hears nothing besides answers."""
        return Heard() if self._links is None else self._links.heard(client, server)

    def notify(self, client: int, server: int, call: Callable[..., None], *args: Any) -> None:
        """Sends a client that its session has failed on a server."""
        self.down(self._queue.at, client, server, framesizes.ERROR, call, *args)

    def packet_up(
        self, source: int, server: int, n_bytes: int, call: Callable[..., None], *args: Any
    ) -> None:
        """Sends a bare packet of a connection from a source to a server."""
        if self._links is not None:
            self._links.up(source, server).packet(n_bytes, call, *args)
        else:
            self._queue.at(self._queue.now_s + self._up_s(source, server), call, *args)

    def packet_down(
        self, source: int, server: int, n_bytes: int, call: Callable[..., None], *args: Any
    ) -> None:
        """As ``packet_up``, from a server to a source."""
        if self._links is not None:
            self._links.down(source, server).packet(n_bytes, call, *args)
        else:
            self._queue.at(self._queue.now_s + self._down_s(source, server), call, *args)

    def end(self, source: int, server: int, call: Callable[..., None], *args: Any) -> None:
        """Ends the connection of a server that is gone; the source learns it behind all that was written."""
        if self._links is not None:
            self._links.up(source, server).unread()
            self._links.down(source, server).finish(call, *args)
        else:
            self._queue.at(self._queue.now_s + self._down_s(source, server), call, *args)

    def hang_up(self, source: int, server: int) -> None:
        """Closes the source's end of a connection whose server is gone, behind all that was written."""
        if self._links is not None:
            self._links.up(source, server).finish(_nothing)


def _nothing() -> None:
    """Nobody is there any more."""
