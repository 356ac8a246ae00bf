"""Servers of an emulation that change their blocks: drains, cuts and loads as an online policy decides."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from nodes.control import ControlError
from policies.online import OnlinePolicy, can_spare, kept, loading_s
from policies.problem import BlockRange, PolicyError
from testbed.coordinator import Coordinator
from testbed.errors import RunError, TestbedError, UserError
from testbed.experiment import Experiment
from testbed.faults.machines import Nodes
from testbed.moving.steering import Load, Steering
from testbed.placing import PolicyInterrupted
from testbed.rundir import MOVED, EventWriter

_NEWS_S = 2.0
"""Seconds of the event loop's time, real or virtual, in which the launcher has told of a process that has ended."""


@dataclass(eq=False)
class _UnderWay:
    """A server between two placements."""

    old: BlockRange
    decided_at_s: float
    task: asyncio.Task[None] | None = None


class Mover:
    """Asks the controller at its times and brings the servers to what it decides.

    As in the simulation, servers that drain go in rolling order: the next one begins as soon as fewer than
    ``at_once`` are under way and every block that it gives up is offered by another server that is there;
    others begin at once. Sessions that a server cannot wait for (``recovery.give_up``) are cut, and replay
    elsewhere. Routers see at every moment what servers offer. When servers come or go, moves that have not
    begun are dropped: the controller decides anew. Every phase of a move is a line of ``events.jsonl``.
    """

    def __init__(
        self,
        experiment: Experiment,
        policy: OnlinePolicy,
        nodes: Nodes,
        coordinator: Coordinator,
        events: EventWriter,
        has_real_blocks: bool,
    ) -> None:
        self._experiment = experiment
        self._problem = experiment.problem
        self._policy = policy
        self._nodes = nodes
        self._coordinator = coordinator
        self._events = events
        self._has_real_blocks = has_real_blocks
        self._steering = Steering(experiment.problem, coordinator.placement, policy)
        self._load = Load()
        self._pending: list[int] = []
        self._under_way: dict[int, _UnderWay] = {}
        self._alive = coordinator.membership.alive()
        self._checking: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Time has begun."""
        self._checking = asyncio.create_task(self._guarded(self._check_at_times()))

    async def end(self) -> None:
        """No more moves. Safe in every phase."""
        moves = [way.task for way in self._under_way.values() if way.task is not None]
        tasks = [task for task in (self._checking, *moves) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def state(self, state: str) -> None:
        """What a client says of one of its requests."""
        if state == "arrived":
            self._load.arrive(self._nodes.now_s())
        elif state in ("completed", "failed", "interrupted"):
            self._load.end(self._nodes.now_s())

    def phase(self, server: int, phase: str, at_s: float) -> None:
        """A server says what it does to its blocks."""
        if phase == "loading" and server in self._under_way:
            self._event("drained", server, at_s)

    def begins(self, server: int) -> None:
        """``server`` is about to be spawned: it begins with what it was on its way to."""
        self._give_up(server)

    async def _guarded(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except PolicyInterrupted:  # by what ends the run
            return
        except PolicyError as error:
            self._nodes.broke(UserError(str(error)))
        except TestbedError as error:
            self._nodes.broke(error)

    async def _check_at_times(self) -> None:
        while (at_s := self._steering.next_check_at_s()) < math.inf:
            await self._nodes.clock.sleep_until_s(at_s)
            self._check(self._nodes.now_s())

    def _check(self, now_s: float) -> None:
        alive = self._coordinator.membership.believed(now_s)
        if alive != self._alive:
            self._alive = alive
            self._pending.clear()
            for server in [j for j in self._under_way if j not in alive]:
                self._give_up(server)  # one that only halts arrives by itself, if it ever goes on
        self._settle_idle()
        moving = (*self._pending, *self._under_way)
        order = self._steering.check(now_s, self._load, moving, alive)
        if order:
            names = [self._problem.servers[j].name for j in order]
            concurrency = self._steering.target.design_concurrency
            self._events.write("decided", now_s, servers=names, design_concurrency=concurrency)
        self._pending += order
        self._begin_pending()

    def _settle_idle(self) -> None:
        """Servers that are on no way hold what they offer: they have joined, or their move was dropped."""
        offered = self._coordinator.placement
        for server in range(self._problem.n_servers):
            if server not in self._under_way and server not in self._pending:
                self._steering.settle(server, offered.ranges[server], offered.cache_bytes[server])

    def _begin_pending(self) -> None:
        while self._pending and (not self._policy.drains or self._may_drain(self._pending[0])):
            server = self._pending.pop(0)
            old = self._coordinator.placement.ranges[server]
            way = _UnderWay(old, self._steering.decided_at_s)
            self._under_way[server] = way
            way.task = asyncio.create_task(self._guarded(self._move(server, way)))

    def _may_drain(self, server: int) -> bool:
        if len(self._under_way) >= self._policy.at_once:
            return False
        return can_spare(self._coordinator.placement.ranges, server, self._stays(server), self._alive)

    def _stays(self, server: int) -> BlockRange:
        """What ``server`` goes on serving while it moves: it keeps nothing if it does not drain."""
        if not self._policy.drains:
            return BlockRange(0, 0)
        return kept(self._coordinator.placement.ranges[server], self._steering.target.ranges[server])

    async def _move(self, server: int, way: _UnderWay) -> None:
        new = self._steering.target.ranges[server]
        room_bytes = self._steering.target.cache_bytes[server]
        stays = self._stays(server)
        load_s = loading_s(self._problem, stays, new, self._experiment.load_bps)
        less_bytes = min(room_bytes, self._coordinator.placement.cache_bytes[server])
        self._coordinator.offer(server, stays, less_bytes)
        now_s = self._nodes.now_s()
        self._event("moving", server, now_s, old=list(way.old), new=list(new), keeps=list(stays))
        drain_s = self._experiment.recovery.give_up_s if self._policy.drains else None
        try:
            done = await self._nodes.ask_server(
                server, "rehost", *new, room_bytes, drain_s, 0.0 if self._has_real_blocks else load_s
            )
        except ControlError as error:
            await self._lost(server, way, error)
            return
        if self._under_way.get(server) is way:
            del self._under_way[server]
            self._coordinator.offer(server, new, room_bytes)
            line = {"old": list(way.old), "new": list(new), "decided_at_s": way.decided_at_s, **done}
            self._event(MOVED, server, done["open_at_s"], **line)
            self._begin_pending()

    async def _lost(self, server: int, way: _UnderWay, error: ControlError) -> None:
        """The server does not answer any more: that it is dead is known in a moment."""
        await asyncio.sleep(_NEWS_S)
        if self._under_way.get(server) is not way:
            return
        if server in self._coordinator.membership.alive():
            raise RunError(f"{self._problem.servers[server].name} could not change its blocks: {error}")
        self._give_up(server)

    def _give_up(self, server: int) -> None:
        """A move ends with its server; if that is ever there again, then with its new blocks."""
        way = self._under_way.pop(server, None)
        if way is None:
            return
        target = self._steering.target
        self._coordinator.offer(server, target.ranges[server], target.cache_bytes[server])
        self._event("move-lost", server, self._nodes.now_s(), old=list(way.old))
        self._begin_pending()

    def _event(self, event: str, server: int, at_s: float, **details: Any) -> None:
        self._events.write(event, at_s, server=self._problem.servers[server].name, **details)
