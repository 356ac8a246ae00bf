"""Servers that change their blocks while the real mode runs: checks, drains, cuts, loads."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from policies.checks import check_placement
from policies.interfaces import Router
from policies.online import OnlinePolicy, SystemView, kept, loading_s, moves, rolling_order
from policies.problem import BlockRange, Placement, PolicyError, Problem
from testbed.simulation.events import EventQueue
from testbed.simulation.servers import Key, Servers


class Online(NamedTuple):
    """An online policy, how servers load blocks (bits per second), and how routers for placements are made."""

    policy: OnlinePolicy
    load_bps: float
    bind: Callable[[Placement], Router]


class Move(NamedTuple):
    """One server's change.

    From ``closed_at_s`` it took new sessions only on blocks that it keeps (none if it does not drain),
    at ``drained_at_s`` it began to load, and from ``open_at_s`` it served its new range.
    """

    server: int
    old: BlockRange
    new: BlockRange
    decided_at_s: float
    closed_at_s: float
    drained_at_s: float
    open_at_s: float


class Load:
    """How many requests there are and were: what a ``SystemView`` needs."""

    def __init__(self) -> None:
        self.n_active = 0
        self._n_arrived = 0
        self._integral = 0.0
        self._changed_at_s = 0.0
        self._since_s = 0.0

    def arrive(self, now_s: float) -> None:
        self._n_arrived += 1
        self._change(1, now_s)

    def end(self, now_s: float) -> None:
        self._change(-1, now_s)

    def _change(self, change: int, now_s: float) -> None:
        self._integral += self.n_active * (now_s - self._changed_at_s)
        self._changed_at_s = now_s
        self.n_active += change

    def take(self, now_s: float) -> tuple[float, float]:
        """(mean number of requests in the system, arrivals per second) since the last call."""
        self._change(0, now_s)
        elapsed_s = now_s - self._since_s
        answer = (self._integral / elapsed_s, self._n_arrived / elapsed_s) if elapsed_s else (0.0, 0.0)
        self._integral, self._n_arrived, self._since_s = 0.0, 0, now_s
        return answer


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
        self._target = placement
        self._online = online
        self._policy = online.policy
        self._servers = servers
        self._queue = queue
        self._load = load
        self._changed = changed
        self._cut = cut
        self._controller = online.policy.bind(problem, placement)
        self._pending: list[int] = []
        self._under_way: dict[int, tuple[BlockRange, float, float]] = {}
        """Servers that have begun: (old range, decided at, closed at)."""
        self._draining: set[int] = set()
        self._decided_at_s = 0.0
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
        at_s, now_s = self._controller.next_check_at_s, self._queue.now_s
        if not at_s > now_s:
            raise PolicyError(
                f"online policy {self._policy.name} wants to be asked at {at_s} s when it is {now_s} s; "
                "next_check_at_s must move on with every check"
            )
        if at_s < math.inf:
            self._queue.at(at_s, self._check)

    def _check(self) -> None:
        now_s = self._queue.now_s
        mean_active, request_rate = self._load.take(now_s)
        moving = tuple(sorted((*self._pending, *self._under_way)))
        view = SystemView(self._load.n_active, mean_active, request_rate, self._target, moving)
        new = self._controller.check(now_s, view)
        if new is not None:
            self._adopt(new, moving)
        self._plan_check()

    def _adopt(self, new: Placement, moving: tuple[int, ...]) -> None:
        name = self._policy.name
        check_placement(self._problem, new, name)
        changing = moves(self._target, new)
        names = [self._problem.servers[j].name for j in changing if j in moving]
        if names:
            raise PolicyError(f"online policy {name} moves {names[0]} again before it has arrived")
        order = changing
        if self._policy.drains:
            order = rolling_order(self._target.ranges, new.ranges, changing, self._problem.model.n_blocks)
            if len(order) < len(changing):
                raise PolicyError(
                    f"online policy {name} asks for a placement that cannot be reached one server after "
                    "another without leaving a block on no server"
                )
        self._target = new
        self._decided_at_s = self._queue.now_s
        self._pending += order
        self._begin_pending()

    def _begin_pending(self) -> None:
        while self._pending and (not self._policy.drains or self._may_drain(self._pending[0])):
            self._begin(self._pending.pop(0))

    def _may_drain(self, server: int) -> bool:
        return len(self._under_way) < self._policy.at_once and self._servers.covers_with(
            server, self._stays(server), self._problem.model.n_blocks
        )

    def _stays(self, server: int) -> BlockRange:
        """What ``server`` goes on serving while it moves: it keeps nothing if it does not drain."""
        old, new = self._servers.range_of(server), self._target.ranges[server]
        return kept(old, new) if self._policy.drains else BlockRange(0, 0)

    def _begin(self, server: int) -> None:
        now_s, servers = self._queue.now_s, self._servers
        self._under_way[server] = servers.range_of(server), self._decided_at_s, now_s
        room_bytes = min(servers.placement.cache_bytes[server], self._target.cache_bytes[server])
        servers.offer(server, self._stays(server), room_bytes)
        self._changed(servers.placement)
        if not self._policy.drains:
            self._cut(server, servers.cut(server, now_s))
        self._draining.add(server)
        self.released(server)

    def _begin_loading(self, server: int) -> None:
        now_s, stays = self._queue.now_s, self._servers.range_of(server)
        load_s = loading_s(self._problem, stays, self._target.ranges[server], self._online.load_bps)
        self._queue.at(now_s + load_s, self._loaded, server, now_s)

    def _loaded(self, server: int, drained_at_s: float) -> None:
        new = self._target.ranges[server]
        self._servers.offer(server, new, self._target.cache_bytes[server])
        old, decided_at_s, closed_at_s = self._under_way.pop(server)
        now_s = self._queue.now_s
        self.done.append(Move(server, old, new, decided_at_s, closed_at_s, drained_at_s, now_s))
        self._changed(self._servers.placement)
        self._begin_pending()
