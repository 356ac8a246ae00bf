"""Servers that change their blocks while the real mode runs: checks, drains, cuts, loads."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from policies.interfaces import Router
from policies.online import OnlinePolicy, can_spare, kept, loading_s
from policies.problem import BlockRange, Placement, Problem
from testbed.moving.steering import Load, Move, Steering
from testbed.simulation.events import EventQueue
from testbed.simulation.servers import Key, Servers


class Online(NamedTuple):
    """An online policy, how servers load blocks (bits per second), and how routers for placements are made."""

    policy: OnlinePolicy
    load_bps: float
    bind: Callable[[Placement], Router]


class Mover:
    """Asks the controller at its times and brings the servers to what it decides.

    With ``drains`` servers go in rolling order: the next one begins as soon as fewer than ``at_once``
    are under way and every block is still offered when it offers only what it keeps. It loads when the
    sessions that are left need no more than these blocks and its new room: then blocks and caches
    fit its memory before, during and after. Otherwise all begin at once; ``cut`` is told the sessions
    that are lost. ``changed`` is told the placement that new sessions can use, whenever it changes.
    """

    def __init__(
        self,
        problem: Problem,
        placement: Placement,
        online: Online,
        servers: Servers,
        queue: EventQueue,
        load: Load,
        changed: Callable[[Placement], None],
        cut: Callable[[int, list[Key]], None],
    ) -> None:
        self._problem = problem
        self._online = online
        self._policy = online.policy
        self._servers = servers
        self._queue = queue
        self._load = load
        self._changed = changed
        self._cut = cut
        self._steering = Steering(problem, placement, online.policy)
        self._pending: list[int] = []
        self._under_way: dict[int, tuple[BlockRange, float, float]] = {}
        """Servers that have begun: (old range, decided at, closed at)."""
        self._draining: set[int] = set()
        self.done: list[Move] = []
        self._plan_check()

    @property
    def is_moving(self) -> bool:
        return bool(self._pending or self._under_way)

    def released(self, server: int) -> None:
        """A session of ``server`` has ended."""
        if server in self._draining and self._servers.is_drained(server):
            self._draining.discard(server)
            self._begin_loading(server)

    def _plan_check(self) -> None:
        at_s = self._steering.next_check_at_s(self._queue.now_s)
        if at_s < math.inf:
            self._queue.at(at_s, self._check)

    def _check(self) -> None:
        moving = (*self._pending, *self._under_way)
        self._pending += self._steering.check(self._queue.now_s, self._load, moving)
        self._begin_pending()
        self._plan_check()

    def _begin_pending(self) -> None:
        while self._pending and (not self._policy.drains or self._may_drain(self._pending[0])):
            self._begin(self._pending.pop(0))

    def _may_drain(self, server: int) -> bool:
        return len(self._under_way) < self._policy.at_once and can_spare(
            self._servers.placement.ranges, server, self._stays(server)
        )

    def _stays(self, server: int) -> BlockRange:
        """What ``server`` goes on serving while it moves: it keeps nothing if it does not drain."""
        old, new = self._servers.range_of(server), self._steering.target.ranges[server]
        return kept(old, new) if self._policy.drains else BlockRange(0, 0)

    def _begin(self, server: int) -> None:
        now_s, servers = self._queue.now_s, self._servers
        self._under_way[server] = servers.range_of(server), self._steering.decided_at_s, now_s
        room_bytes = min(servers.placement.cache_bytes[server], self._steering.target.cache_bytes[server])
        servers.offer(server, self._stays(server), room_bytes)
        self._changed(servers.placement)
        if not self._policy.drains:
            self._cut(server, servers.cut(server, now_s))
        self._draining.add(server)
        self.released(server)

    def _begin_loading(self, server: int) -> None:
        now_s, stays = self._queue.now_s, self._servers.range_of(server)
        load_s = loading_s(self._problem, stays, self._steering.target.ranges[server], self._online.load_bps)
        self._queue.at(now_s + load_s, self._loaded, server, now_s)

    def _loaded(self, server: int, drained_at_s: float) -> None:
        new = self._steering.target.ranges[server]
        self._servers.offer(server, new, self._steering.target.cache_bytes[server])
        old, decided_at_s, closed_at_s = self._under_way.pop(server)
        now_s = self._queue.now_s
        self.done.append(Move(server, old, new, decided_at_s, closed_at_s, drained_at_s, now_s))
        self._changed(self._servers.placement)
        self._begin_pending()
