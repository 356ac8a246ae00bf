"""Sends small messages between clients and servers: over simulated links, or with their delay alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nodes import framesizes
from nodes.framesizes import FrameSize
from policies.problem import Problem
from testbed.fast.events import EventQueue
from testbed.fast.links import Links

Planner = Callable[..., float]
"""``EventQueue.at`` or ``EventQueue.free_at``."""


class Sending:
    """Has functions called when messages arrive. ``links`` ``None``: messages take their link's delay alone.

    ``plan`` plans an arrival where messages take their link's delay alone.
    """

    def __init__(self, queue: EventQueue, problem: Problem, links: Links | None) -> None:
        self._queue, self._problem, self._links = queue, problem, links

    def up(
        self, plan: Planner, client: int, server: int, frame: FrameSize, call: Callable[..., None], *args: Any
    ) -> None:
        """Sends a message from a client to a server."""
        if self._links is not None:
            self._links.up(client, server).send(frame, call, *args)
        else:
            plan(self._queue.now_s + self._problem.up_s(client, server), call, *args)

    def down(
        self, plan: Planner, client: int, server: int, frame: FrameSize, call: Callable[..., None], *args: Any
    ) -> None:
        """As ``up``, from a server to a client."""
        if self._links is not None:
            self._links.down(client, server).send(frame, call, *args)
        else:
            plan(self._queue.now_s + self._problem.down_s(client, server), call, *args)

    def notify(self, client: int, server: int, call: Callable[..., None], *args: Any) -> None:
        """Sends a client that its session has failed on a server."""
        self.down(self._queue.at, client, server, framesizes.ERROR, call, *args)
