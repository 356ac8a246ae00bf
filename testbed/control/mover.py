"""Servers that change their blocks as an online policy decides: who moves when, and what is offered meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from policies.online import OnlinePolicy, can_spare, kept, loading_s
from policies.problem import BlockRange
from testbed.control.coordinator import Coordinator
from testbed.control.steering import Load, Steering
from testbed.rundir import MOVED
from testbed.scenario.experiment import Experiment


@dataclass(eq=False)
class Way:
    """A server between two placements: what it held, holds on to meanwhile, and is to hold.

    It loads once sessions need no more than ``stays`` and ``new_bytes`` of cache, for ``load_s`` seconds. Those
    that need more may go on for ``drain_s``, and are cut then; ``None``: they are cut at once.
    """

    server: int
    old: BlockRange
    stays: BlockRange
    new: BlockRange
    new_bytes: float
    decided_at_s: float
    drain_s: float | None
    load_s: float


class Carrier(Protocol):
    """Who has the servers. It calls ``Mover.arrived`` when a way is at its end, and ``Mover.died`` when its server is."""

    def rehost(self, way: Way) -> None:
        """Begin ``way`` now."""
        ...


class Mover:
    """Asks the controller when it wants to be asked (``next_check_at_s``) and sends the servers on their ways.

    Servers that drain go in rolling order: the next one begins as soon as fewer than ``at_once`` are under way
    and every block that it gives up is offered by another server that is there; others begin at once. Routers
    see at every moment what servers offer. When servers come or go, moves that have not begun are dropped, since
    they were planned with all of them: the controller decides anew. ``write(event, at_s, details)`` is called at
    every phase of a move.
    """

    def __init__(
        self,
        experiment: Experiment,
        policy: OnlinePolicy,
        coordinator: Coordinator,
        carrier: Carrier,
        now_s: Callable[[], float],
        write: Callable[[str, float, dict[str, Any]], None],
    ) -> None:
        self._experiment = experiment
        self._problem = experiment.problem
        self._policy = policy
        self._coordinator = coordinator
        self._carrier = carrier
        self._now_s = now_s
        self._write = write
        self._steering = Steering(experiment.problem, coordinator.placement, policy)
        self.load = Load()
        self._pending: list[int] = []
        self._under_way: dict[int, Way] = {}
        self._alive = coordinator.membership.alive()

    def next_check_at_s(self) -> float:
        """When ``check`` is due next; infinite: never. Raises ``PolicyError`` if time would stand still."""
        return self._steering.next_check_at_s()

    def check(self) -> None:
        """Ask the controller now. Raises ``PolicyError`` if it fails, or asks for what cannot be done."""
        now_s = self._now_s()
        alive = self._coordinator.membership.believed(now_s)
        if alive != self._alive:
            self._alive = alive
            self._pending.clear()
            for server in [j for j in self._under_way if j not in alive]:
                self._give_up(server)  # one that only halts arrives by itself, if it ever goes on
        self._settle_idle()
        moving = (*self._pending, *self._under_way)
        order = self._steering.check(now_s, self.load, moving, alive)
        if order:
            names = [self._problem.servers[j].name for j in order]
            concurrency = self._steering.target.design_concurrency
            self._write("decided", now_s, {"servers": names, "design_concurrency": concurrency})
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
            self._begin(self._pending.pop(0))

    def _may_drain(self, server: int) -> bool:
        if len(self._under_way) >= self._policy.at_once:
            return False
        return can_spare(self._coordinator.placement.ranges, server, self._stays(server), self._alive)

    def _stays(self, server: int) -> BlockRange:
        """What ``server`` goes on serving while it moves: it keeps nothing if it does not drain."""
        if not self._policy.drains:
            return BlockRange(0, 0)
        return kept(self._coordinator.placement.ranges[server], self._steering.target.ranges[server])

    def _begin(self, server: int) -> None:
        offered, target = self._coordinator.placement, self._steering.target
        stays, new = self._stays(server), target.ranges[server]
        way = Way(
            server=server,
            old=offered.ranges[server],
            stays=stays,
            new=new,
            new_bytes=target.cache_bytes[server],
            decided_at_s=self._steering.decided_at_s,
            drain_s=self._experiment.recovery.give_up_s if self._policy.drains else None,
            load_s=loading_s(self._problem, stays, new, self._experiment.load_bps),
        )
        self._under_way[server] = way
        self._coordinator.offer(server, stays, min(way.new_bytes, offered.cache_bytes[server]))
        self._tell("moving", server, self._now_s(), old=list(way.old), new=list(new), keeps=list(stays))
        self._carrier.rehost(way)

    def drained(self, server: int, at_s: float) -> None:
        """``server`` begins to load."""
        if server in self._under_way:
            self._tell("drained", server, at_s)

    def is_on(self, way: Way) -> bool:
        """Whether nothing has come between ``way`` and its end."""
        return self._under_way.get(way.server) is way

    def arrived(
        self, way: Way, closed_at_s: float, drained_at_s: float, open_at_s: float, n_cut: int
    ) -> None:
        """``way`` is at its end: its server has loaded, ``n_cut`` sessions were cut."""
        if not self.is_on(way):
            return
        server = way.server
        del self._under_way[server]
        self._coordinator.offer(server, way.new, way.new_bytes)
        self._tell(
            MOVED,
            server,
            open_at_s,
            old=list(way.old),
            new=list(way.new),
            decided_at_s=way.decided_at_s,
            closed_at_s=closed_at_s,
            drained_at_s=drained_at_s,
            open_at_s=open_at_s,
            n_cut=n_cut,
        )
        self._begin_pending()

    def died(self, server: int) -> None:
        """``server`` is dead: what was planned with it is not begun any more."""
        self._pending.clear()
        self._give_up(server)

    def _give_up(self, server: int) -> None:
        """A move ends with its server; if that is ever there again, then with its new blocks."""
        way = self._under_way.pop(server, None)
        if way is None:
            return
        target = self._steering.target
        self._coordinator.offer(server, target.ranges[server], target.cache_bytes[server])
        self._tell("move-lost", server, self._now_s(), old=list(way.old))

    def _tell(self, event: str, server: int, at_s: float, **details: Any) -> None:
        self._write(event, at_s, {"server": self._problem.servers[server].name, **details})
