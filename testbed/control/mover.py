"""Moves servers to other blocks as an online policy decides: which one when, and what it offers meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from policies.online import OnlinePolicy, can_spare, kept, loading_s
from policies.problem import BlockRange
from testbed.control.coordinator import Coordinator
from testbed.control.steering import Load, Steering
from testbed.experiments.experiment import Experiment
from testbed.records.events import AnyEvent, MoveBegun, Moved, MoveDrained, MoveLost, PlacementDecided


@dataclass(eq=False)
class ServerMove:
    """A server's move from blocks ``old`` to ``new``. It keeps ``stays`` meanwhile.

    It loads for ``load_s`` once sessions need no more than the blocks ``stays`` and ``new_bytes`` of cache.
    Sessions that need more may go on for ``drain_s`` and are cut then; ``None``: they are cut at once. All
    times are scenario seconds.
    """

    server: int
    old: BlockRange
    stays: BlockRange
    new: BlockRange
    new_bytes: float
    decided_at_s: float
    drain_s: float | None
    load_s: float


class MoveExecutor(Protocol):
    """Carries out moves.

    It calls ``Mover.completed`` at the end of a move, ``Mover.server_died`` if its server dies.
    """

    def rehost(self, move: ServerMove) -> None:
        """Begin ``move`` now."""
        ...


class Mover:
    """Asks the controller at its times (``next_check_at_s``), and begins the moves that it decides.

    With a policy that drains, servers move in rolling order: the next one begins as soon as fewer than
    ``at_once`` move and another server that is there offers every block that it gives up. Otherwise all begin
    at once. Routers always see what servers offer now. When servers come or go, moves that have not begun are
    dropped, because they were planned with the servers before, and the controller decides anew.
    ``write`` is called with the event at every phase of a move.
    """

    def __init__(
        self,
        experiment: Experiment,
        policy: OnlinePolicy,
        coordinator: Coordinator,
        executor: MoveExecutor,
        now_s: Callable[[], float],
        write: Callable[[AnyEvent], None],
    ) -> None:
        self._experiment = experiment
        self._problem = experiment.problem
        self._policy = policy
        self._coordinator = coordinator
        self._executor = executor
        self._now_s = now_s
        self._write = write
        self._steering = Steering(experiment.problem, coordinator.placement, policy)
        self.load = Load()
        self._pending: list[int] = []
        self._under_way: dict[int, ServerMove] = {}
        self._alive = coordinator.membership.alive()

    def next_check_at_s(self) -> float:
        """Returns when ``check`` is due next, infinite if never.

        Raises ``PolicyError`` as ``Steering`` does.
        """
        return self._steering.next_check_at_s()

    def check(self) -> None:
        """Ask the controller now, and begin the moves that may begin.

        Raises ``PolicyError`` as ``Steering`` does.
        """
        now_s = self._now_s()
        alive = self._coordinator.membership.believed(now_s)
        if alive != self._alive:
            self._alive = alive
            self._pending.clear()
            for server in [j for j in self._under_way if j not in alive]:
                self._give_up(server)  # a server that is only stopped completes its move if it goes on
        self._settle_idle()
        moving = (*self._pending, *self._under_way)
        order = self._steering.check(now_s, self.load, moving, alive)
        if order:
            names = [self._problem.servers[j].name for j in order]
            concurrency = self._steering.target.design_concurrency
            self._write(PlacementDecided(at_s=now_s, servers=names, design_concurrency=concurrency))
        self._pending += order
        self._begin_pending()

    def _settle_idle(self) -> None:
        """Set the target of servers that do not move to what they offer.

        It differs if they have joined, or if their move was dropped.
        """
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
        """Returns the blocks that ``server`` serves while it moves: none if the policy does not drain."""
        if not self._policy.drains:
            return BlockRange(0, 0)
        return kept(self._coordinator.placement.ranges[server], self._steering.target.ranges[server])

    def _begin(self, server: int) -> None:
        offered, target = self._coordinator.placement, self._steering.target
        stays, new = self._stays(server), target.ranges[server]
        move = ServerMove(
            server=server,
            old=offered.ranges[server],
            stays=stays,
            new=new,
            new_bytes=target.cache_bytes[server],
            decided_at_s=self._steering.decided_at_s,
            drain_s=self._experiment.faults.recovery.give_up_s if self._policy.drains else None,
            load_s=loading_s(self._problem, server, stays, new, self._experiment.policy.load_bps),
        )
        self._under_way[server] = move
        self._coordinator.offer(server, stays, min(move.new_bytes, offered.cache_bytes[server]))
        name = self._problem.servers[server].name
        self._write(MoveBegun(at_s=self._now_s(), server=name, old=move.old, new=new, keeps=stays))
        self._executor.rehost(move)

    def drained(self, server: int, at_s: float) -> None:
        """Note that ``server`` begins to load."""
        if server in self._under_way:
            self._write(MoveDrained(at_s=at_s, server=self._problem.servers[server].name))

    def is_under_way(self, move: ServerMove) -> bool:
        """Returns whether ``move`` is still under way: it has neither ended nor been given up."""
        return self._under_way.get(move.server) is move

    def completed(
        self, move: ServerMove, closed_at_s: float, drained_at_s: float, open_at_s: float, n_cut: int
    ) -> None:
        """Note that ``move`` has ended: its server has loaded, and ``n_cut`` sessions were cut."""
        if not self.is_under_way(move):
            return
        server = move.server
        del self._under_way[server]
        self._coordinator.offer(server, move.new, move.new_bytes)
        self._write(
            Moved(
                at_s=open_at_s,
                server=self._problem.servers[server].name,
                old=move.old,
                new=move.new,
                decided_at_s=move.decided_at_s,
                closed_at_s=closed_at_s,
                drained_at_s=drained_at_s,
                open_at_s=open_at_s,
                n_cut=n_cut,
            )
        )
        self._begin_pending()

    def server_died(self, server: int) -> None:
        """Note that ``server`` has died. Moves that have not begun are dropped."""
        self._pending.clear()
        self._give_up(server)

    def _give_up(self, server: int) -> None:
        """Drop the move of a server that has died. If the server comes back, it has its new blocks."""
        move = self._under_way.pop(server, None)
        if move is None:
            return
        target = self._steering.target
        self._coordinator.offer(server, target.ranges[server], target.cache_bytes[server])
        self._write(MoveLost(at_s=self._now_s(), server=self._problem.servers[server].name, old=move.old))
