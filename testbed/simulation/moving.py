"""Servers that change their blocks while the real mode runs: checks, drains, cuts, loads."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

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


def _nobody(event: str, server: int, details: dict[str, Any]) -> None:
    """Hears of moves where nothing is written down."""


@dataclass(eq=False)
class _UnderWay:
    """A server that has begun to move."""

    old: BlockRange
    decided_at_s: float
    closed_at_s: float


class Mover:
    """Asks the controller at its times and brings the servers to what it decides.

    With ``drains`` servers go in rolling order: the next one begins as soon as fewer than ``at_once``
    are under way and every block is still offered when it offers only what it keeps. It loads when the
    sessions that are left need no more than these blocks and its new room: then blocks and caches
    fit its memory before, during and after. Otherwise all begin at once; ``cut`` is told the sessions
    that are lost. ``changed`` is told the server whose offer to new sessions is another one now.

    With ``alive``, which answers who is believed to be there at an instant, servers come and go: then moves
    that have not begun are dropped, as the controller decides anew. ``tell`` is told of every phase of a move.
    """

    def __init__(
        self,
        problem: Problem,
        placement: Placement,
        online: Online,
        servers: Servers,
        queue: EventQueue,
        load: Load,
        changed: Callable[[int], None],
        cut: Callable[[int, list[Key]], None],
        alive: Callable[[float], frozenset[int]] | None = None,
        tell: Callable[[str, int, dict[str, Any]], None] = _nobody,
    ) -> None:
        self._problem = problem
        self._online = online
        self._policy = online.policy
        self._servers = servers
        self._queue = queue
        self._load = load
        self._changed = changed
        self._cut = cut
        self._alive = alive
        self._there: frozenset[int] | None = None
        self._tell = tell
        self._steering = Steering(problem, placement, online.policy)
        self._pending: list[int] = []
        self._under_way: dict[int, _UnderWay] = {}
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
        at_s = self._steering.next_check_at_s()
        if at_s < math.inf:
            self._queue.at(at_s, self._check)

    def killed(self, server: int) -> None:
        """The process of ``server`` is gone: it begins again, if ever, with what it was on its way to."""
        if server in self._pending:
            self._pending.remove(server)
        way = self._under_way.pop(server, None)
        if way is not None:
            self._draining.discard(server)
            self._offer_target(server)
            self._tell("move-lost", server, {"old": list(way.old)})
            self._begin_pending()

    def _check(self) -> None:
        now_s = self._queue.now_s
        if self._alive is not None:
            there = self._alive(now_s)
            if there != self._there:
                self._there = there
                self._pending.clear()
            self._settle(there)
        moving = (*self._pending, *self._under_way)
        self._pending += self._steering.check(now_s, self._load, moving, self._there)
        self._begin_pending()
        self._plan_check()

    def _settle(self, there: frozenset[int]) -> None:
        """Servers that are on no way hold what they offer: they have joined, or their move was dropped."""
        offered = self._servers.placement
        for server in there.difference(self._under_way, self._pending):
            self._steering.settle(server, offered.ranges[server], offered.cache_bytes[server])

    def _offer_target(self, server: int) -> None:
        target = self._steering.target
        self._servers.offer(server, target.ranges[server], target.cache_bytes[server])
        self._changed(server)

    def _begin_pending(self) -> None:
        while self._pending and (not self._policy.drains or self._may_drain(self._pending[0])):
            self._begin(self._pending.pop(0))

    def _may_drain(self, server: int) -> bool:
        return len(self._under_way) < self._policy.at_once and can_spare(
            self._servers.placement.ranges, server, self._stays(server), self._there
        )

    def _stays(self, server: int) -> BlockRange:
        """What ``server`` goes on serving while it moves: it keeps nothing if it does not drain."""
        old, new = self._servers.range_of(server), self._steering.target.ranges[server]
        return kept(old, new) if self._policy.drains else BlockRange(0, 0)

    def _begin(self, server: int) -> None:
        now_s, servers, target = self._queue.now_s, self._servers, self._steering.target
        way = _UnderWay(servers.range_of(server), self._steering.decided_at_s, now_s)
        self._under_way[server] = way
        stays = self._stays(server)
        room_bytes = min(servers.placement.cache_bytes[server], target.cache_bytes[server])
        servers.offer(server, stays, room_bytes)
        self._changed(server)
        old, new = list(way.old), list(target.ranges[server])
        self._tell("moving", server, {"old": old, "new": new, "keeps": list(stays)})
        if not self._policy.drains:
            self._cut(server, servers.cut(server, now_s))
        self._draining.add(server)
        self.released(server)

    def _begin_loading(self, server: int) -> None:
        now_s, stays = self._queue.now_s, self._servers.range_of(server)
        load_s = loading_s(self._problem, stays, self._steering.target.ranges[server], self._online.load_bps)
        self._tell("drained", server, {})
        self._queue.at(now_s + load_s, self._loaded, server, self._under_way[server], now_s)

    def _loaded(self, server: int, way: _UnderWay, drained_at_s: float) -> None:
        if self._under_way.get(server) is not way:
            return  # its process has ended on the way
        del self._under_way[server]
        self._offer_target(server)
        new, now_s = self._steering.target.ranges[server], self._queue.now_s
        move = Move(server, way.old, new, way.decided_at_s, way.closed_at_s, drained_at_s, now_s)
        self.done.append(move)
        self._tell("moved", server, {k: v for k, v in move._asdict().items() if k != "server"})
        self._begin_pending()
