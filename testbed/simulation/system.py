"""What all sessions of a simulation under faults share: servers, ways of messages, and what routers know."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from nodes.links import GIVE_UP_S
from policies.bans import Bans
from policies.interfaces import Router
from policies.joining import join
from policies.membership import Membership
from policies.problem import BlockRange, Hop, Placement, Problem
from policies.replay import ServiceTimes
from policies.subrange import SubrangeRouter
from testbed.moving.steering import Load, Move
from testbed.simulation.events import EventQueue
from testbed.simulation.failures import Failures
from testbed.simulation.machines import Machines
from testbed.simulation.moving import Mover, Online
from testbed.simulation.network import Ways
from testbed.simulation.record import Record
from testbed.simulation.servers import Key, OnCache, Servers
from testbed.simulation.sessions import Held, Session
from testbed.simulation.view import RouterView


class System:
    """Servers with their processes and caches, and the coordinator's knowledge of them and of sessions.

    ``lost``, to be set, is told that a server's process is gone, with all caches. ``setup_s`` is what a session's opening
    takes beside messages.
    """

    def __init__(
        self,
        problem: Problem,
        placement: Placement,
        bind: Callable[[Problem, Placement], Router],
        failures: Failures,
        ways: Ways,
        setup_s: float,
        state_age_s: float,
        on_cache: OnCache | None,
    ) -> None:
        self.problem = problem
        self.names = [server.name for server in problem.servers]
        self.rules = failures.recovery
        self.queue = EventQueue()
        self.record = Record()
        self.ways = ways
        self.servers = Servers(placement, on_cache)
        self.view = RouterView(placement.cache_bytes, state_age_s)
        self.router = SubrangeRouter(bind, problem, placement)
        self.bans = Bans(failures.recovery.ban_s if failures.recovery.ban_failed_servers else 0.0)
        self.membership = Membership(failures.membership, problem.n_servers, failures.absent)
        self.machines = Machines(
            self.names,
            failures.faults,
            failures.absent,
            self.membership,
            self.queue,
            self.record,
            self,
            failures.recovery.give_up_s,
        )
        self.moves: list[Move] = []
        self.mover: Mover | None = None
        self.load = Load()
        self._cut_epoch: dict[int, int] = {}
        """The process number since which a server has not failed: it has only cut its sessions."""
        self._setup_s = setup_s
        self._times = ServiceTimes(problem)
        self.lost: Callable[[int], None] = lambda server: None
        self._closing: set[Key] = set()

    def go_online(self, placement: Placement, online: Online) -> None:
        """Let a policy change the placement while requests are served."""

        def changed(server: int) -> None:
            known, offered = self.router.placement, self.servers.placement
            ranges, rooms = list(known.ranges), list(known.cache_bytes)
            ranges[server], rooms[server] = offered.ranges[server], offered.cache_bytes[server]
            self.router.replace(replace(known, ranges=tuple(ranges), cache_bytes=tuple(rooms)))
            self.view.replace(rooms)

        def tell(event: str, server: int, details: dict[str, Any]) -> None:
            self.record.event(event, self.queue.now_s, server=self.names[server], **details)

        self.mover = Mover(
            self.problem,
            placement,
            online,
            self.servers,
            self.queue,
            self.load,
            changed,
            self._cut,
            self.membership.believed,
            tell,
        )
        self.moves = self.mover.done

    def _cut(self, server: int, keys: list[Key]) -> None:
        """A server that moves has dropped its sessions; they replay elsewhere, as after its death."""
        if keys:
            self.machines.cut(server)
            self._cut_epoch[server] = self.machines.epoch(server)
            self.lost(server)

    @property
    def is_moving(self) -> bool:
        """Whether servers are on their way to other blocks."""
        return self.mover is not None and self.mover.is_moving

    def killed(self, server: int) -> None:
        self.servers.cut(server, self.queue.now_s)
        self.lost(server)
        if self.mover is not None:
            self.mover.killed(server)

    def begun(self, server: int) -> None:
        placement = self.router.placement
        held = placement.ranges[server]
        self.servers.offer(server, held, placement.cache_bytes[server])
        self.record.event("begun", self.queue.now_s, server=self.names[server], blocks=list(held))

    def joined(self, server: int) -> None:
        now_s = self.queue.now_s
        placement = join(self.problem, self.router.placement, server, self.membership.believed(now_s))
        self.router.replace(placement)
        self.view.replace(placement.cache_bytes)
        held, nothing = placement.ranges[server], BlockRange(0, 0)
        self.begun(server)
        self.moves.append(Move(server, nothing, held, now_s, now_s, now_s, now_s))
        self.record.event("moved", now_s, server=self.names[server], old=list(nothing), new=list(held))

    def leaves(self, server: int) -> None:
        self.servers.offer(server, BlockRange(0, 0), self.router.placement.cache_bytes[server])

    def n_sessions(self, server: int) -> int:
        return len(self.servers.keys(server))

    def tell(self, event: str, session: Session, **details: Any) -> None:
        """Something that happened to a session."""
        plan = session.plan
        client = self.problem.clients[plan.client]
        self.record.event(event, self.queue.now_s, client=client, request=plan.index, **details)

    def failed(self, client: int, servers: Sequence[int]) -> None:
        """``client`` leaves these servers out for a while, if that is the rule."""
        if self.rules.ban_failed_servers:
            for server in servers:
                if self._cut_epoch.get(server) == self.machines.epoch(server):
                    continue  # it moves, and says so: it has failed nobody
                self.bans.failed(client, server, self.queue.now_s)

    def hold(self, session: Session, more: Sequence[Hop] = ()) -> None:
        """What routers see of the session from now on: the hops that are not lost, and ``more``."""
        hops, now_s = (*session.holds(), *more), self.queue.now_s
        if not hops:
            self.view.release(session.number, now_s)
            return
        request = session.left
        expected_s = self._times.of(request, hops)[1] + (0.0 if session.n_done else self._setup_s)
        block_bytes = self.problem.model.cache_bytes(request.n_tokens)
        self.view.hold(session.number, hops, block_bytes, now_s + expected_s, now_s)

    def close(self, session: Session, hops: Sequence[Held]) -> None:
        """Tell servers that they may forget these hops."""
        now_s, client = self.queue.now_s, session.plan.client
        for held in hops:
            self._closing.add(held.key)
            at_s = self.ways.arrives_at_s(client, held.hop.server, now_s)
            # A server that does not hear of it forgets the session as the connection is given up.
            self.queue.free_at(min(at_s, now_s + GIVE_UP_S), self._free, held.key, held.hop.server)

    def _free(self, key: Key, server: int) -> None:
        if self.machines.waits(server, self._free, key, server):
            return
        self._closing.discard(key)
        self.servers.release(key, server, self.queue.now_s)
        if self.mover is not None:
            self.mover.released(server)
        if self.servers.is_empty(server):
            self.machines.released(server)

    def check_leaks(self) -> None:
        """All sessions have ended: what servers still hold is about to be freed."""
        for server, name in enumerate(self.names):
            left = [key for key in self.servers.keys(server) if key not in self._closing]
            assert not left, f"{name} still holds cache of sessions that have ended: {left}"
