"""Where routing decisions are taken: one object per run that knows which sessions hold cache."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from policies.bans import Bans
from policies.joining import join
from policies.membership import Membership
from policies.problem import BlockRange, Hop, Placement, RequestSpec, Route, service_s
from policies.state import SystemState
from policies.subrange import SubrangeRouter
from testbed.experiment import Experiment
from testbed.placing import PlacedExperiment


@dataclass
class Decisions:
    """How many routing decisions were made, and how many of them on a wrong view of who is there.

    ``n_misled`` counts those for a chain with a server that was not there.
    """

    n_decisions: int = 0
    n_stale_decisions: int = 0
    n_misled_decisions: int = 0


class Coordinator:
    """Answers clients' questions for a chain, and keeps the router's view of the servers.

    A session counts from the moment that its chain is handed out until it ends or is refused; its
    expected completion is the modelled one. ``membership`` is told by whoever does things to servers.
    ``now_s`` gives scenario time. Where it is virtual deciding takes none of it, and answers say so: a run's
    record must not depend on the machine. ``decisions_s`` are the real seconds.
    """

    def __init__(
        self,
        experiment: Experiment,
        placed: PlacedExperiment,
        now_s: Callable[[], float],
        is_virtual: bool = False,
    ) -> None:
        self._experiment = experiment
        self._problem = problem = experiment.problem
        self._whole = placed.router
        self._present = frozenset(range(problem.n_servers)) - experiment.absent
        self._parts = SubrangeRouter(placed.bind_to, problem, placed.placement)
        self._first_placement = placed.placement
        self._requests = {r.index: r for r in experiment.requests}
        self._now_s = now_s
        self._state = SystemState(placed.placement.cache_bytes)
        self._chains: dict[int, tuple[Hop, ...]] = {}
        rules = experiment.recovery
        self._bans = Bans(rules.ban_s if rules.ban_failed_servers else 0.0)
        self.membership = Membership(experiment.membership, problem.n_servers, experiment.absent)
        self.decisions = Decisions()
        self.decisions_s: list[float] = []
        self._is_virtual = is_virtual

    @property
    def placement(self) -> Placement:
        return self._parts.placement

    def route(self, index: int) -> dict[str, Any] | None:
        """The chain for request ``index`` now: ``{hops, wait_s, decision_s}``, ``None`` if there is none.

        Raises ``policies.problem.PolicyError`` when a policy fails or answers a chain that breaks a rule.
        """
        self.release(index)
        return self._decide(index, 0, self._problem.model.n_blocks, 0)

    def reroute(self, index: int, first: int, last: int, n_done: int) -> dict[str, Any] | None:
        """Other hops for the blocks ``[first, last)`` of request ``index``, which has ``n_done`` tokens.

        What it held there is released; its other hops stay. Answers and raises as ``route``.
        """
        kept = tuple(hop for hop in self._chains.get(index, ()) if hop.last <= first or hop.first >= last)
        self._hold(index, self._left(index, n_done), kept)
        return self._decide(index, first, last, n_done)

    def _left(self, index: int, n_done: int) -> RequestSpec:
        """What is left of a request: output tokens that are there are part of its input."""
        plan = self._requests[index]
        return RequestSpec(plan.client, plan.n_input_tokens + n_done, plan.n_output_tokens - n_done)

    def _decide(self, index: int, first: int, last: int, n_done: int) -> dict[str, Any] | None:
        request, now_s = self._left(index, n_done), self._now_s()
        usable = self.membership.believed(now_s) - self._bans.banned(request.client, now_s)
        self.decisions.n_decisions += 1
        self.decisions.n_stale_decisions += bool(self.membership.wrong(now_s))
        started_at = time.perf_counter()
        route = self._routed(request, now_s, usable, first, last)
        self.decisions_s.append(time.perf_counter() - started_at)
        if route is None:
            return None
        alive = self.membership.alive()
        self.decisions.n_misled_decisions += any(hop.server not in alive for hop in route.hops)
        self._hold(index, request, (*self._chains.get(index, ()), *route.hops))
        decision_s = 0.0 if self._is_virtual else self.decisions_s[-1]
        return {"hops": [list(hop) for hop in route.hops], "wait_s": route.wait_s, "decision_s": decision_s}

    def _routed(
        self, request: RequestSpec, now_s: float, usable: frozenset[int], first: int, last: int
    ) -> Route | None:
        is_whole = (first, last) == (0, self._problem.model.n_blocks)
        if is_whole and usable == self._present and self.placement is self._first_placement:
            return self._whole.route(request, self._state, now_s)
        return self._parts.route(request, self._state, now_s, usable, first, last)

    def _hold(self, index: int, request: RequestSpec, hops: tuple[Hop, ...]) -> None:
        self.release(index)
        if not hops:
            return
        self._chains[index] = hops
        ends_at_s = self._now_s() + service_s(self._problem, request, hops)[1]
        if request.n_input_tokens == self._requests[index].n_input_tokens:  # it has no token yet
            ends_at_s += self._problem.initial_delay_s + self._experiment.calibration.session_setup_s
        self._state.open(index, hops, self._problem.model.cache_bytes(request.n_tokens), ends_at_s)

    def release(self, index: int) -> None:
        """The session has ended or was refused."""
        self._state.close(index)
        self._chains.pop(index, None)

    def failed(self, index: int, servers: Sequence[int]) -> None:
        """The client of request ``index`` could not use ``servers``."""
        for server in servers:
            self._bans.failed(self._requests[index].client, server, self._now_s())

    def served(self, index: int, servers: Sequence[int]) -> None:
        """``servers`` answer the client of request ``index`` again."""
        for server in servers:
            self._bans.served(self._requests[index].client, server)

    def offer(self, server: int, held: BlockRange, cache_bytes: float) -> None:
        """``server`` offers new sessions this range and this room from now on; those that are there stay."""
        placement = self.placement
        ranges, rooms = list(placement.ranges), list(placement.cache_bytes)
        ranges[server], rooms[server] = held, cache_bytes
        self._parts.replace(replace(placement, ranges=tuple(ranges), cache_bytes=tuple(rooms)))
        self._state.cache_bytes = tuple(rooms)

    def join(self, server: int) -> BlockRange:
        """Choose the blocks of a server that was absent so far."""
        placement = join(
            self._problem, self.placement, server, self.membership.believed(self._now_s()) - {server}
        )
        self._parts.replace(placement)
        self._state.cache_bytes = placement.cache_bytes
        return placement.ranges[server]
