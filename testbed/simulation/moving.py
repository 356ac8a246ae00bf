"""Servers that change their blocks while the real mode runs: checks, drains, cuts, loads."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from policies.checks import check_placement
from policies.interfaces import Router
from policies.online import OnlinePolicy, SystemView, loading_s, moves, rolling_order
from policies.problem import BlockRange, Placement, PolicyError, Problem
from testbed.simulation.events import EventQueue
from testbed.simulation.servers import Key, Servers


class Online(NamedTuple):
    """An online policy, how servers load blocks (bits per second), and how routers for placements are made."""

    policy: OnlinePolicy
    load_bps: float
    bind: Callable[[Placement], Router]


class Move(NamedTuple):
    """One server's change. From ``closed_at_s`` it took no new sessions, at ``empty_at_s`` it began to load."""

    server: int
    old: BlockRange
    new: BlockRange
    decided_at_s: float
    closed_at_s: float
    empty_at_s: float
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
    are under way and the servers that take sessions hold every block without it. Otherwise all begin
    at once; ``cut`` is told the sessions that are lost. ``changed`` is told the placement that new
    sessions can use, whenever it changes.
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
        self._under_way: dict[int, tuple[float, float]] = {}
        """Servers that are closed: (decided at, closed at)."""
        self._draining: set[int] = set()
        self._decided_at_s = 0.0
        self.done: list[Move] = []
        self._plan_check()

    @property
    def is_moving(self) -> bool:
        return bool(self._pending or self._under_way)

    def emptied(self, server: int) -> None:
        """``server`` holds no session any more."""
        if server in self._draining:
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
        while self._pending:
            server = self._pending[0]
            if self._policy.drains and (
                len(self._under_way) >= self._policy.at_once
                or not self._servers.covers_without(server, self._problem.model.n_blocks)
            ):
                return
            self._begin(self._pending.pop(0))

    def _begin(self, server: int) -> None:
        now_s = self._queue.now_s
        self._under_way[server] = (self._decided_at_s, now_s)
        self._servers.close(server)
        self._changed(self._servers.placement)
        if not self._policy.drains:
            self._cut(server, self._servers.cut(server, now_s))
        if self._servers.is_empty(server):
            self._begin_loading(server)
        else:
            self._draining.add(server)

    def _begin_loading(self, server: int) -> None:
        now_s = self._queue.now_s
        old, new = self._servers.range_of(server), self._target.ranges[server]
        # A server that does not drain has ended: it comes back with none of its blocks.
        kept = old if self._policy.drains else BlockRange(0, 0)
        open_at_s = now_s + loading_s(self._problem, kept, new, self._online.load_bps)
        self._queue.at(open_at_s, self._loaded, server, old, now_s)

    def _loaded(self, server: int, old: BlockRange, empty_at_s: float) -> None:
        new = self._target.ranges[server]
        self._servers.install(server, new, self._target.cache_bytes[server])
        decided_at_s, closed_at_s = self._under_way.pop(server)
        self.done.append(Move(server, old, new, decided_at_s, closed_at_s, empty_at_s, self._queue.now_s))
        self._changed(self._servers.placement)
        self._begin_pending()
