"""Makes a run's routing decisions: one object per run, which knows the sessions that hold cache."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from nodes.clock import on_tick
from policies.bans import Bans
from policies.decoding import RoundTimes
from policies.joining import join
from policies.link_rates import Passage
from policies.link_waits import LinkWaits
from policies.membership import Membership
from policies.outcomes import Outcomes, Times, WhoAsks, outcome_of
from policies.prefixes import PrefixMap
from policies.problem import BlockRange, Hop, Placement, PolicyError, RequestSpec, Route, round_times_s
from policies.replay import ServiceTimes
from policies.subrange import SubrangeRouter
from policies.waiting import fits
from policies.workload import RequestPlan
from testbed.control.placing import PlacedExperiment
from testbed.control.view import RouterView
from testbed.control.waiting_room import Answer, CallAt, Wait, WaitingRoom
from testbed.experiments.experiment import Experiment
from testbed.records.summary import DecisionCounts


class Coordinator:
    """Routes clients' requests, and keeps the router's view of the servers.

    Requests are named by their index.

    A session counts from the moment that its chain is returned until it ends or is refused. Its expected end
    is the modelled one, with what is known of its length. ``membership`` must be notified of servers that
    begin and end.

    ``now_s`` returns scenario time. ``call_at`` calls a function at an instant; it is needed only if the
    experiment has a queue. ``decisions_s`` are the real seconds of every decision.
    """

    def __init__(
        self,
        experiment: Experiment,
        placed: PlacedExperiment,
        now_s: Callable[[], float],
        call_at: CallAt | None = None,
    ) -> None:
        self._problem = problem = experiment.problem
        prefix, paging = experiment.compute.prefix, experiment.compute.paging
        self._state_age_s = experiment.policy.state_age_s
        self._setup_s = problem.initial_delay_s + experiment.calibration.session_setup_s
        self._whole = placed.router
        self._parts = SubrangeRouter(placed.bind_to, problem, placed.placement)
        self._first_placement = placed.placement
        self.requests = {r.index: r for r in experiment.workload.requests}
        """By index. More requests may be added."""
        self._now_s = now_s
        self._view = RouterView(placed.placement.cache_bytes, experiment.policy.state_age_s)
        self._chains: dict[int, tuple[Hop, ...]] = {}
        self._prefixes: PrefixMap | None = None
        if prefix is not None and prefix.kind == "shared":
            self._prefixes = self._new_prefixes(placed.placement)
        self._n_done: dict[int, int] = {}
        self._outcomes = Outcomes() if placed.observes else None
        self._names_requests = placed.names_requests
        self._expected_output = experiment.compute.expected_output
        self._session_tokens = 0 if prefix is None or paging is not None else prefix.session_tokens
        self._times = ServiceTimes(problem)
        self._link_waits = LinkWaits.of(problem)
        rules = experiment.faults.recovery
        self._bans = Bans(rules.ban_s if rules.ban_failed_servers else 0.0)
        self.membership = Membership(
            experiment.faults.membership, problem.n_servers, experiment.faults.absent
        )
        self._present = self.membership.alive()
        self.decisions = DecisionCounts()
        self.decisions_s: list[float] = []
        self._room: WaitingRoom | None = None
        if experiment.policy.queue is not None and call_at is not None:
            self._call_at = call_at
            self._room = WaitingRoom(experiment.policy.queue, self._let_in, self.route, now_s, call_at)

    def arrives(self, index: int, at_s: float) -> None:
        """Notes when a request arrives: a further turn of a conversation does once the one before has ended."""
        self.requests[index] = replace(self.requests[index], arrival_at_s=at_s)

    @property
    def observes(self) -> bool:
        """Whether the routing policy learns from what became of requests."""
        return self._outcomes is not None

    def ended(self, index: int, times: Times, at_s: float, *, has_failed: bool) -> None:
        """Notes what a client has measured of a request that has ended, for policies that learn. ``release`` must follow."""
        if self._outcomes is not None:
            plan, hops = self.requests[index], self._chains.get(index, ())
            self._outcomes.add(
                outcome_of(
                    *(_who(plan), plan.client, hops, plan.n_input_tokens, times, at_s), has_failed=has_failed
                )
            )

    @property
    def placement(self) -> Placement:
        """The blocks and the cache room that servers offer new sessions now."""
        return self._parts.placement

    def route(self, index: int) -> Route | None:
        """Returns the chain for request ``index`` now; ``None`` if there is none.

        Raises ``policies.problem.PolicyError`` when a policy fails or returns a chain that breaks a rule.
        """
        self._forget(index)
        n_done = self._n_done.get(index, 0)
        return self._held(index, self._choose(index, 0, self._problem.model.n_blocks, n_done), n_done)

    def ask(self, index: int, answer: Answer, n_done: int = 0) -> None:
        """As ``route``, but calls ``answer`` with the result: at once, or with a queue once there is room.

        A request with ``n_done`` output tokens has lost its cache and starts over.
        """
        self._n_done[index] = n_done
        if self._room is not None:
            now_s, came_at_s = self._now_s(), self.requests[index].arrival_at_s
            self._room.add(index, came_at_s, now_s if n_done else came_at_s, answer)
            return
        try:
            found: Route | PolicyError | None = self.route(index)
        except PolicyError as error:
            found = error
        answer(found)

    def _let_in(self, index: int) -> Route | Wait | None:
        """As ``route``, but returns ``Wait.NO_ROOM`` unless all servers of the chain have room now."""
        self._forget(index)
        n_done = self._n_done[index]
        route = self._choose(index, 0, self._problem.model.n_blocks, n_done)
        if route is None:
            return None
        state = self._view.state(index, self._now_s())
        block_bytes = self._problem.model.cache_bytes(self._left(index, n_done).cache_tokens)
        has_room = (fits(state.free_bytes(hop.server), hop.n_blocks * block_bytes) for hop in route.hops)
        return self._held(index, route, n_done) if route.wait_s == 0 and all(has_room) else Wait.NO_ROOM

    def could_route(self, request: RequestSpec) -> bool:
        """Returns whether ``request`` has a chain if no session holds any cache and all servers are there."""
        placement, now_s = self.placement, self._now_s()
        state = RouterView(placement.cache_bytes, 0.0).state(-1, now_s)
        everybody = frozenset(range(self._problem.n_servers))
        n_blocks = self._problem.model.n_blocks
        return self._parts.route(request, state, now_s, everybody, 0, n_blocks) is not None

    def reroute(self, index: int, first: int, last: int, n_done: int) -> Route | None:
        """Returns other hops for blocks ``[first, last)`` of request ``index``, which has ``n_done`` tokens.

        Its present hops there are released; its other hops stay. Otherwise as ``route``.
        """
        kept = tuple(hop for hop in self._chains.get(index, ()) if hop.last <= first or hop.first >= last)
        self._hold(index, self._left(index, n_done), kept)
        return self._held(index, self._choose(index, first, last, n_done), n_done)

    def _left(self, index: int, n_done: int) -> RequestSpec:
        """Returns what is known to be left of a request; its ``n_done`` output tokens count as input."""
        known = self.requests[index].known
        n_left = known.n_output_tokens - n_done
        if self._expected_output is not None:  # caches grow: a router sees what will probably be needed
            n_left = min(n_left, max(1, self._expected_output - n_done))
        held_tokens = 0 if self.requests[index].turn is None else self._session_tokens
        return RequestSpec(known.client, known.n_input_tokens + n_done, n_left, held_tokens)

    def _choose(self, index: int, first: int, last: int, n_done: int) -> Route | None:
        request, now_s = self._left(index, n_done), self._now_s()
        believed, alive = self.membership.believed(now_s), self.membership.alive()
        banned = self._bans.banned(request.client, now_s)
        self.decisions.n_decisions += 1
        self.decisions.n_stale_decisions += bool(self.membership.wrong(now_s))
        started_at = time.perf_counter()
        route = self._routed(index, request, now_s, believed - banned if banned else believed, first, last)
        self.decisions_s.append(time.perf_counter() - started_at)
        if route is not None:
            self.decisions.n_misled_decisions += any(hop.server not in alive for hop in route.hops)
        return route

    def _held(self, index: int, route: Route | None, n_done: int) -> Route | None:
        """Add the hops of ``route`` to those that the session has kept, in the order of their blocks, and return ``route``."""
        if route is not None:
            hops = sorted((*self._chains.get(index, ()), *route.hops), key=lambda hop: hop.first)
            self._hold(index, self._left(index, n_done), tuple(hops))
        return route

    def _routed(
        self, index: int, request: RequestSpec, now_s: float, usable: frozenset[int], first: int, last: int
    ) -> Route | None:
        state = self._view.state(index, now_s)
        is_whole = (first, last) == (0, self._problem.model.n_blocks)
        state.asking = None
        if self._prefixes is not None and is_whole:
            state.asking = self._prefixes.asking(self.requests[index], now_s)
        state.who = _who(self.requests[index]) if self._names_requests else None
        if self._outcomes is not None:
            age_s = self._state_age_s
            self._outcomes.know(math.floor(now_s / age_s) * age_s if age_s else math.inf)
        state.outcomes = self._outcomes
        is_as_at_first = self.placement is self._first_placement and (
            usable is self._present or usable == self._present
        )
        if is_whole and is_as_at_first:
            return self._whole.route(request, state, now_s)
        return self._parts.route(request, state, now_s, usable, first, last)

    def _hold(self, index: int, request: RequestSpec, hops: tuple[Hop, ...]) -> None:
        if not hops:
            self._forget(index)
            return
        now_s = self._now_s()
        self._chains[index] = hops
        begins_at_s = now_s
        if request.n_input_tokens == self.requests[index].n_input_tokens:  # it has no token yet
            begins_at_s += self._setup_s
        ends_at_s = begins_at_s + self._times.of(request, hops)[1]
        passages: tuple[Passage, ...] = ()
        if self._link_waits is not None:
            state = self._view.state(index, now_s)
            _, wait_s, passages = self._link_waits.of_request(request, hops, state, begins_at_s)
            ends_at_s += wait_s
        bytes_per_block = self._problem.model.cache_bytes(request.cache_tokens)
        self._view.hold(index, hops, bytes_per_block, ends_at_s, now_s, passages)

    @property
    def n_sessions(self) -> int:
        """The number of sessions that the coordinator believes to be there."""
        return len(self._chains)

    def round_times_s(self, index: int, hops: Sequence[Hop]) -> RoundTimes:
        """Returns how long a request's rounds take on a chain; empty unless clients choose how much they draft."""
        decoding, known = self._problem.decoding, self.requests[index].known
        if decoding is None or not decoding.is_auto:
            return ()
        return round_times_s(self._problem, known, hops)

    def release(self, index: int) -> None:
        """Release a session that has ended or was refused."""
        hops = self._chains.get(index, ())
        if self._room is not None:
            self._room.drop(index)
        self._forget(index)
        if self._room is not None:
            client = self.requests[index].client
            closed_s = max((self._problem.up_s(client, hop.server) for hop in hops), default=0.0)
            if closed_s:
                self._call_at(self._now_s() + closed_s, self._room.look)
            else:
                self._room.look()

    def completed(self, index: int) -> None:
        """Notes that a request has all its tokens: its servers may keep its cache. ``release`` must follow."""
        hops = self._chains.get(index)
        if self._prefixes is not None and hops:
            self._prefixes.served(self.requests[index], hops, self._now_s())

    def _new_prefixes(self, placement: Placement) -> PrefixMap:
        model = self._problem.model
        return PrefixMap(placement.cache_bytes, model.cache_bytes_per_token, self._state_age_s)

    def hands_over(self, index: int, to: int) -> None:
        """Lets a request that has ended leave its chain open for the next turn of its conversation, number ``to``."""
        hops = self._chains.get(index, ())
        self.release(index)
        self._hold(to, self._left(to, 0), hops)

    def look(self) -> None:
        """Try the requests in the queue again, because there may be more room."""
        if self._room is not None:
            self._room.look()

    def _forget(self, index: int) -> None:
        if self._chains.pop(index, None) is not None:
            self._view.release(index, self._now_s())

    def failed(self, index: int, servers: Sequence[int]) -> None:
        """Ban ``servers``, which failed the client of request ``index``, for this client."""
        for server in servers:
            self._bans.failed(self.requests[index].client, server, self._now_s())

    def served(self, index: int, servers: Sequence[int]) -> None:
        """End the bans of ``servers``, which answer the client of request ``index`` again."""
        for server in servers:
            self._bans.served(self.requests[index].client, server)

    def offer(self, server: int, held: BlockRange, cache_bytes: float) -> None:
        """Let ``server`` offer new sessions this range and this room from now on. Present sessions stay."""
        placement = self.placement
        ranges, rooms = list(placement.ranges), list(placement.cache_bytes)
        ranges[server], rooms[server] = held, cache_bytes
        self._replace(replace(placement, ranges=tuple(ranges), cache_bytes=tuple(rooms)))

    def join(self, server: int) -> BlockRange:
        """Choose the blocks of a server that was absent so far, and return them."""
        there = self.membership.believed(self._now_s()) - {server}
        self._replace(join(self._problem, self.placement, server, there))
        return self.placement.ranges[server]

    def _replace(self, placement: Placement) -> None:
        self._parts.replace(placement)
        self._view.replace(placement.cache_bytes)
        if self._prefixes is not None:
            self._prefixes = self._new_prefixes(placement)
        self.look()


def _who(plan: RequestPlan) -> WhoAsks:
    turn = plan.turn
    conversation, number = (None, 0) if turn is None else (turn.conversation, turn.number)
    return WhoAsks(plan.index, conversation, number, on_tick(plan.arrival_at_s))
