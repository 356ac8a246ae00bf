"""The engine ``fast``: what nodes and coordinator do for sessions that nobody cuts, event by event.

A request asks for a chain when it arrives, opens it on all hops at once and retries where a server has no room. Its
service takes the closed form of ``policies.problem.service_s``. It goes step by step (``testbed.fast.steps``) where
servers compute several sessions together, caches grow, or sessions can meet on links (``testbed.fast.meetings``), over
the scenario's links (``testbed.fast.links``). Servers come and go (``testbed.fast.machines``). See ``docs/simulator-modes.md``.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from nodes import framesizes
from nodes.admission import NO_ROUTE, Admission, Attempts, HostedBlocks, Need, name_of_attempt, ready_at_s
from nodes.batching import Batches
from nodes.clock import NS, nanoseconds, on_tick
from nodes.framesizes import FrameSize
from nodes.request import SessionError
from policies.online import OnlinePolicy
from policies.outcomes import Times
from policies.problem import Hop, PolicyError, RequestSpec, Route
from policies.replay import ServiceTimes
from policies.rules import MAX_ATTEMPTS
from policies.workload import RequestPlan
from testbed.control.coordinator import Coordinator
from testbed.control.mover import Mover, ServerMove
from testbed.control.placing import PlacedExperiment
from testbed.experiments.experiment import Experiment
from testbed.fast.events import EventQueue
from testbed.fast.idle import IdleTimes
from testbed.fast.links import Links, Way, never_wait
from testbed.fast.machines import Machines
from testbed.fast.meetings import Meetings, SessionsMeet, why_links_have_no_closed_form
from testbed.fast.outcome import Disturbed, FastRun, SimulatedRequest
from testbed.fast.steps import ChainSession, Key, Part, Steps, delays_of, overheads_of, replay_of
from testbed.records.events import AnyEvent, Moved
from testbed.records.requests import COMPLETED, FAILED
from testbed.records.summary import MoveRow

Planner = Callable[..., float]
"""``EventQueue.at`` or ``EventQueue.free_at``."""
OnCache = Callable[[float, int, float], None]
"""Called with (instant, server, change in bytes) whenever cache is reserved or released."""


def simulate_fast(
    experiment: Experiment,
    placed: PlacedExperiment,
    online: OnlinePolicy | None = None,
    *,
    max_attempts: int = MAX_ATTEMPTS,
    on_cache: OnCache | None = None,
    most_steps: int = 0,
) -> FastRun:
    """Serve the experiment's requests. Deterministic: equal arguments have equal results.

    ``online`` may change the placement; it must let sessions drain. ``on_cache`` is called at every change of
    a server's account until the last request has ended. Steps are kept unless they are more than
    ``most_steps``. Raises ``PolicyError`` if a policy fails or breaks a rule, ``Disturbed`` if a session
    would have to be cut.
    """
    assert online is None or online.drains, "a policy that cuts sessions disturbs them"
    options = online, max_attempts, on_cache, most_steps
    is_free = never_wait(experiment)
    why = what_meets(experiment) or ("" if is_free else why_links_have_no_closed_form(experiment))
    if not why:
        meetings = None if is_free else Meetings(experiment)
        try:
            return _Run(experiment, placed, *options, meetings).serve(
                "in closed form, since nobody waits for links"
            )
        except SessionsMeet as meeting:
            why = str(meeting)
        placed = replace(placed, router=placed.bind(placed.placement))  # it may remember what it has decided
    return _Run(experiment, placed, *options, by_steps=True).serve(f"step by step, since {why}")


@dataclass(slots=True)
class _Session:
    """A request that has not ended. ``opening`` numbers its attempts to open a session."""

    number: int
    plan: RequestPlan
    attempts: Attempts
    """Those since the request has had no chain."""
    opening: int = 0
    n_chains: int = 0
    """How many chains it has tried to open."""
    asked_at_s: float = 0.0
    waiting_s: float = 0.0
    opened_at_s: float | None = None
    """When it began to open the first chain that admitted it."""
    ready_at_s: float | None = None
    """When its prompt could be sent."""
    route: Route | None = None
    opened: tuple[int, ...] = ()
    """The servers that have accepted the session."""
    n_unanswered: int = 0
    """The servers that have not answered an opening or a closing."""
    refusal: str = ""
    broken: tuple[int, ...] = ()
    """The servers that were gone when its opening came."""
    is_final: bool = False
    """Whether waiting for other sessions to end cannot help."""
    on_chain: ChainSession | None = None
    """The session on its present chain, or on the last one."""
    preempted_by: int | None = None
    """A server that took its cache before all of its present chain was open."""
    n_preemptions: int = 0
    preempted_tokens: int = 0
    preempted_s: float = 0.0
    cost_s: float | None = None
    """What routing minimised when the request first asked."""
    wait_expected_s: float = 0.0
    """The longest wait that routing expected."""


class _Run:
    """One simulation."""

    def __init__(
        self,
        experiment: Experiment,
        placed: PlacedExperiment,
        online: OnlinePolicy | None,
        max_attempts: int,
        on_cache: OnCache | None,
        most_steps: int,
        meetings: Meetings | None = None,
        by_steps: bool = False,
    ) -> None:
        self._queue = queue = EventQueue()
        self._experiment = experiment
        self._problem = experiment.problem
        self._setup_s = experiment.calibration.session_setup_s
        self._max_attempts = max_attempts
        paging = experiment.compute.paging
        self._on_cache = on_cache
        self._coordinator = Coordinator(experiment, placed, lambda: queue.now_s, queue.at)
        self._servers = [self._admission(server) for server in range(experiment.problem.n_servers)]
        self._machines = Machines(
            experiment, queue, self._coordinator, self._servers, self._begin, self._check_loss
        )
        self._steps: Steps | None = None
        """``None``: sessions do not meet on servers, and the closed form holds."""
        self._free_at = queue.free_at
        """Has something called that gives room back. In closed form it is planned long before it happens, and goes first;
        step by step everything is planned when the system sets a timer for it, and comes in that order."""
        self._meetings = meetings
        self._times: ServiceTimes | IdleTimes = ServiceTimes(experiment.problem)
        self._links = None if never_wait(experiment) else Links(queue, experiment)
        """``None``: messages take their links' delays alone."""
        if self._links is not None:
            self._times = IdleTimes(experiment, self._links)
            for change in experiment.network.changes:
                queue.at(change.at_s, self._links.change, change.links)
        if by_steps:
            self._free_at = queue.at
            problem, batches = experiment.problem, None
            if experiment.compute.batching == "continuous":
                batches = [Batches(law, experiment.compute.chunk_tokens) for law in problem.servers]
            self._steps = Steps(
                queue,
                problem.model.token_bytes,
                laws=problem.servers,
                batches=batches,
                caches=None if paging is None else self._servers,
                notify=self._notify,
                forwarding=problem.forwarding,
                hub_s=problem.hub_s,
                decoding=problem.decoding,
                most=most_steps,
            )
        self._sessions: dict[int, _Session] = {}
        """Requests that have arrived and have not ended, by number."""
        self._ended: dict[int, SimulatedRequest] = {}
        self._moves: list[MoveRow] = []
        self._draining: dict[int, tuple[ServerMove, float]] = {}
        self._mover: Mover | None = None
        if online is not None:
            self._mover = Mover(
                experiment, online, self._coordinator, self, lambda: queue.now_s, self._note_move
            )
            self._plan_check(self._mover)

    def serve(self, why: str) -> FastRun:
        """Serves all requests. ``why``: how, and the reason."""
        requests = self._experiment.workload.requests
        coming: list[deque[tuple[int, RequestPlan]]] = [deque() for _ in self._problem.clients]
        for number, plan in enumerate(requests):
            coming[plan.client].append((number, plan))
        for of_client in coming:
            if of_client:
                self._queue.at(of_client[0][1].arrival_at_s, self._arrive_from, of_client)
        if requests:
            self._queue.run()
        ended = [self._ended[number] for number in range(len(requests))]
        decisions_s, links = self._coordinator.decisions_s, self._links
        if links is not None and self._steps is None:
            for request in ended:
                links.note(request)
        use = None if links is None else links.use(self._queue.now_s)
        faults = self._machines.events
        if (steps := self._steps) is None:
            return FastRun(ended, self._moves, decisions_s, why, links=use, faults=faults)
        return FastRun(
            ended, self._moves, decisions_s, why, steps.rows, steps.n_rows, steps.gaps_s, use, faults
        )

    # Sessions.

    def _arrive_from(self, coming: deque[tuple[int, RequestPlan]]) -> None:
        """One client's requests: those that are due now, and the next when it is due."""
        due = []
        while coming and on_tick(coming[0][1].arrival_at_s) <= self._queue.now_s:
            due.append(coming.popleft())
        if coming:
            self._queue.at(coming[0][1].arrival_at_s, self._arrive_from, coming)
        for number, plan in due:
            self._arrive(number, plan)

    def _arrive(self, number: int, plan: RequestPlan) -> None:
        if self._mover is not None:
            self._mover.load.arrive(self._queue.now_s)
        attempts = self._attempts(plan.index, plan.arrival_at_s)
        self._sessions[number] = session = _Session(number, plan, attempts)
        self._ask(session)

    def _attempts(self, request: int, since_s: float) -> Attempts:
        backoff, final_give_up_s = (
            self._experiment.workload.backoff,
            self._experiment.faults.recovery.give_up_s,
        )
        return Attempts(
            backoff.waits_s(request), since_s, backoff.give_up_s, final_give_up_s, self._max_attempts
        )

    def _ask(self, session: _Session) -> None:
        """Ask for a chain."""
        session.opening += 1
        n_done = session.on_chain.token if session.on_chain is not None else 0
        self._coordinator.ask(session.plan.index, partial(self._answer, session), n_done)

    def _answer(self, session: _Session, route: Route | PolicyError | None) -> None:
        """The coordinator has decided. Of several that it lets in at once one is told after the other."""
        if self._experiment.policy.queue is None:
            self._told(session, route)
        else:
            self._queue.at(self._queue.now_s, self._told, session, route)

    def _told(self, session: _Session, route: Route | PolicyError | None) -> None:
        """Send an opening to all servers of the chain."""
        plan = session.plan
        session.asked_at_s = self._queue.now_s
        session.refusal, session.is_final, session.opened, session.preempted_by = "", False, (), None
        session.broken = ()
        if isinstance(route, PolicyError):
            raise PolicyError(f"request {plan.index}: {route}") from route
        if route is None:
            session.refusal, session.is_final = NO_ROUTE, True
            self._refused(session)
            return
        session.route = route
        session.wait_expected_s = max(session.wait_expected_s, route.wait_s)
        if session.cost_s is None:
            session.cost_s = route.cost_s
        # It orders requests that arrived at the same time.
        name = name_of_attempt(f"{plan.index}", session.n_chains)
        session.n_chains += 1
        n_done = session.on_chain.token if session.on_chain is not None else 0
        n_sent = n_done
        if session.on_chain is not None and n_done:  # it replays the step in which it lost its chain
            n_sent += session.on_chain.round.sent - 1
        need = Need(plan.n_input_tokens + n_sent, plan.known.n_tokens, (plan.arrival_at_s, name))
        session.n_unanswered = len(route.hops)
        size = framesizes.JOIN if self._problem.forwarding else framesizes.OPEN
        if self._meetings is not None:
            self._meetings.begin(session.number, plan.client, route.hops, session.asked_at_s)
        for hop in route.hops:
            self._up(self._queue.at, plan.client, hop.server, size, self._open, session, hop, need)

    def _up(
        self, plan: Planner, client: int, server: int, frame: FrameSize, call: Callable[..., None], *args: Any
    ) -> None:
        """Sends a small message from a client to a server.

        ``plan`` plans its arrival where messages take their link's delay alone.
        """
        if self._links is not None:
            self._links.up(client, server).send(frame, call, *args)
        else:
            plan(self._queue.now_s + self._problem.up_s(client, server), call, *args)

    def _down(
        self, plan: Planner, client: int, server: int, frame: FrameSize, call: Callable[..., None], *args: Any
    ) -> None:
        """As ``_up``, from a server to a client."""
        if self._links is not None:
            self._links.down(client, server).send(frame, call, *args)
        else:
            plan(self._queue.now_s + self._problem.down_s(client, server), call, *args)

    def _notify(self, client: int, server: int, call: Callable[..., None], *args: Any) -> None:
        """Sends a client that its session has failed on a server."""
        self._down(self._queue.at, client, server, framesizes.ERROR, call, *args)

    def _open(self, session: _Session, hop: Hop, need: Need) -> None:
        """An opening reaches a server. What the answer is, is known as soon as it is sent."""
        ended_at_s = self._machines.ended_at_s(hop.server)
        if ended_at_s is not None:  # the client learns it when the end of its connection arrives
            heard_at_s = ended_at_s + self._problem.down_s(session.plan.client, hop.server)
            session.refusal = f"{self._problem.servers[hop.server].name}: the connection was lost"
            session.broken += (hop.server,)
            self._queue.at(max(heard_at_s, self._queue.now_s), self._answered, session)
            return
        self._down(self._queue.at, session.plan.client, hop.server, framesizes.OK, self._answered, session)
        key, server = (session.number, session.opening), self._servers[hop.server]
        refused = server.admit(key, hop.first, hop.last, need)
        if refused is None:
            session.opened += (hop.server,)
        else:
            session.refusal = f"{self._problem.servers[hop.server].name}: {refused.reason}"
            session.is_final |= refused.is_final

    def _answered(self, session: _Session) -> None:
        """A server has answered; goes on once all have."""
        session.n_unanswered -= 1
        if session.n_unanswered:
            return
        now_s, plan = self._queue.now_s, session.plan
        if session.refusal:
            self._close(session, is_refused=True)
            return
        assert session.route is not None
        begins_at_s, hops = now_s, session.route.hops
        if session.ready_at_s is None:
            initial_delay_s = self._problem.initial_delay_s
            begins_at_s = ready_at_s(session.asked_at_s, now_s, initial_delay_s, self._setup_s)
            session.waiting_s = session.asked_at_s - on_tick(plan.arrival_at_s)
            session.opened_at_s = session.asked_at_s
            session.ready_at_s = begins_at_s
        if self._steps is not None:
            self._serve_step_by_step(self._steps, session, hops, begins_at_s)
            return
        first_s, all_s = self._times.of(plan.served, hops)
        if self._links is not None:
            way = self._links.ways(plan.client, hops[:1])[0]
            prompt = way.size_there(plan.n_input_tokens * self._problem.model.token_bytes)
            begins_at_s += way.there.late_s(prompt, begins_at_s)
        self._free_at(begins_at_s + all_s, self._finish, session, on_tick(begins_at_s + first_s))

    def _serve_step_by_step(
        self, steps: Steps, session: _Session, hops: tuple[Hop, ...], ready_at_s: float
    ) -> None:
        """Serve a session step by step, from the first token on, or with a replay after a lost chain."""
        plan, before, key = session.plan, session.on_chain, (session.number, session.opening)
        ended, lost = partial(self._finish, session), partial(self._lost, session)
        parts: Sequence[Part] = (Part(0, plan.n_input_tokens),)
        if before is not None:
            parts = replay_of(before, in_steps=self._experiment.faults.recovery.replay == "step_by_step")
        sent = RequestSpec(plan.client, parts[0].n_tokens, plan.n_output_tokens)
        ways: Sequence[Way] = ()
        if self._links is None:
            delays = delays_of(self._experiment, sent, hops)
        else:
            delays, ways = overheads_of(self._experiment, sent, hops), self._links.ways(plan.client, hops)
        session.on_chain = on_chain = ChainSession(plan, key, hops, delays, ended, lost, ways)
        on_chain.parts, on_chain.ready_at_s = parts, ready_at_s
        on_chain.costs = self._coordinator.round_costs(plan.index, hops)
        if before is not None:
            session.preempted_s += ready_at_s - session.attempts.since_s
            on_chain.rounds, on_chain.round = before.rounds, before.round
            on_chain.token, on_chain.first_at_s, on_chain.ready_at_s = (
                before.token,
                before.first_at_s,
                before.ready_at_s,
            )
            if not self._problem.forwarding:  # of hops that are done; else the client has none of them
                on_chain.records = before.records[: len(before.records) - before.part]
        on_chain.preempted_by = session.preempted_by
        steps.begin(on_chain, ready_at_s)

    def _admission(self, server: int) -> Admission[Key]:
        """Returns what a server that begins now offers, with no session."""
        placement = self._coordinator.placement
        held, room_bytes = placement.ranges[server], placement.cache_bytes[server]
        token_bytes, on_cache = self._problem.model.cache_bytes_per_token, self._on_cache
        return Admission(
            HostedBlocks(held.first, held.last, room_bytes, token_bytes, self._experiment.compute.paging),
            partial(self._preempted, server),
            None if on_cache is None else partial(self._cache_changed, on_cache, server),
        )

    def _begin(self, server: int) -> None:
        self._servers[server] = self._admission(server)

    def _check_loss(self, server: int) -> None:
        """A server is killed now."""
        for session in self._sessions.values():
            if server in session.opened:
                name = self._problem.servers[server].name
                raise Disturbed(f"request {session.plan.index} loses {name}, which is killed")

    def _cache_changed(self, on_cache: OnCache, server: int, n_bytes: float) -> None:
        on_cache(self._queue.now_s, server, n_bytes)

    def _preempted(self, server: int, key: Key) -> None:
        """Handle that a server has taken a session's cache for others."""
        session = self._sessions.get(key[0])  # it may have ended, which the server does not know yet
        if self._problem.forwarding and session is not None:
            self._notify(session.plan.client, server, self._hear, session, key, server)

    def _hear(self, session: _Session, key: Key, server: int) -> None:
        """With forwarding: notify the client that ``server`` preempted its session or opening ``key``."""
        if self._steps is not None and session.on_chain is not None and session.on_chain.key == key:
            self._steps.notify_preempted(session.on_chain, server)
        elif key == (session.number, session.opening):
            session.preempted_by = session.preempted_by if session.preempted_by is not None else server

    def _lost(self, session: _Session, server: int, cached_tokens: int) -> None:
        """Give up the chain, and ask for another as at first."""
        now_s, index = self._queue.now_s, session.plan.index
        session.n_preemptions += 1
        session.preempted_tokens += cached_tokens
        session.attempts = self._attempts(index, now_s)
        self._close(session)
        self._coordinator.release(index)
        self._ask(session)

    def _refused(self, session: _Session) -> None:
        """Try again after the backoff, or give up."""
        now_s, plan = self._queue.now_s, session.plan
        if self._meetings is not None:
            self._meetings.end(session.number, self._queue.now_s)
        if session.broken:
            self._coordinator.failed(plan.index, session.broken)
        try:
            is_final = session.is_final or bool(session.broken)
            wait_s = session.attempts.failed(now_s, session.refusal, is_final=is_final)
        except SessionError as given_up:
            self._fail(session, str(given_up))
        else:
            self._queue.at(now_s + wait_s, self._ask, session)
        self._coordinator.release(plan.index)

    def _finish(self, session: _Session, first_at_s: float) -> None:
        if self._links is not None and self._steps is None:
            assert session.route is not None
            if not self._problem.hub_s(session.plan.client):  # else that of its last result has left before
                self._links.up(session.plan.client, session.route.hops[-1].server).acknowledge()
        self._close(session)
        if self._meetings is not None:
            self._meetings.end(session.number, self._queue.now_s)
        times = Times(session.opened_at_s, first_at_s, session.plan.n_output_tokens)
        self._coordinator.ended(session.plan.index, times, self._queue.now_s, has_failed=False)
        self._coordinator.release(session.plan.index)
        self._end(session, COMPLETED, session.route, first_at_s, self._queue.now_s)

    def _fail(self, session: _Session, reason: str) -> None:
        on_chain = session.on_chain
        route = (
            None if on_chain is None or session.route is None else session.route._replace(hops=on_chain.hops)
        )
        n_tokens = 0 if on_chain is None else on_chain.token
        first_at_s = on_chain.first_at_s if on_chain is not None and n_tokens else None
        times = Times(session.opened_at_s, first_at_s, n_tokens)
        self._coordinator.ended(session.plan.index, times, self._queue.now_s, has_failed=True)
        self._end(session, FAILED, route, first_at_s, None, reason)

    def _end(
        self,
        session: _Session,
        status: str,
        route: Route | None,
        first_at_s: float | None,
        ended_at_s: float | None,
        reason: str = "",
    ) -> None:
        now_s, plan, setup_s = self._queue.now_s, session.plan, None
        arrived_at_s = on_tick(plan.arrival_at_s)
        waiting_s = now_s - arrived_at_s
        if session.ready_at_s is not None:
            waiting_s = session.waiting_s
        if session.ready_at_s is not None and first_at_s is not None:
            setup_s = session.ready_at_s - (arrived_at_s + waiting_s)
        if self._mover is not None:
            self._mover.load.end(now_s)
        del self._sessions[session.number]
        if len(self._ended) + 1 == len(self._experiment.workload.requests):
            self._queue.stop()
        self._ended[session.number] = SimulatedRequest(
            plan=plan,
            status=status,
            route=route,
            n_rejections=session.opening - 1 - session.n_preemptions,
            waiting_s=waiting_s,
            setup_s=setup_s,
            ttft_s=None if first_at_s is None else first_at_s - arrived_at_s,
            time_s=None if ended_at_s is None else ended_at_s - arrived_at_s,
            ended_s=now_s - arrived_at_s,
            reason=reason,
            rounds=None if session.on_chain is None else session.on_chain.rounds,
            n_done=session.on_chain.token if session.on_chain is not None and ended_at_s is None else 0,
            n_preemptions=session.n_preemptions,
            preempted_tokens=session.preempted_tokens,
            preempted_s=session.preempted_s,
            cost_s=session.cost_s,
            wait_expected_s=session.wait_expected_s,
        )

    def _close(self, session: _Session, *, is_refused: bool = False) -> None:
        """Notify servers that the session is over. One that ``is_refused`` goes on once all have confirmed it."""
        key, client = (session.number, session.opening), session.plan.client
        waits = session if is_refused else None
        session.n_unanswered = len(session.opened)
        for server in session.opened:
            self._up(self._free_at, client, server, framesizes.CLOSE, self._free, key, client, server, waits)
        if is_refused and not session.opened:
            self._refused(session)

    def _free(self, key: Key, client: int, server: int, waits: _Session | None) -> None:
        """A closing reaches a server."""
        self._servers[server].release(key)
        if waits is not None:
            self._down(self._free_at, client, server, framesizes.OK, self._confirmed, waits)
        if server in self._draining:
            self._load_if_drained(server)
        self._machines.released(server)

    def _confirmed(self, session: _Session) -> None:
        session.n_unanswered -= 1
        if not session.n_unanswered:
            self._refused(session)

    # Moves of servers.

    def _plan_check(self, mover: Mover) -> None:
        at_s = mover.next_check_at_s()
        if at_s < math.inf:
            never_early_at_s = nanoseconds(at_s) / NS  # or the policy would want the same check again
            self._queue.at(never_early_at_s, self._check, mover)

    def _check(self, mover: Mover) -> None:
        mover.check()
        self._plan_check(mover)

    def rehost(self, move: ServerMove) -> None:
        """As ``testbed.control.mover.MoveExecutor``."""
        now_s, server = self._queue.now_s, move.server
        room_bytes = self._servers[server].hosted.cache_bytes
        self._servers[server].offer(move.stays.first, move.stays.last, min(move.new_bytes, room_bytes))
        self._draining[server] = move, now_s
        assert move.drain_s is not None
        self._queue.at(now_s + move.drain_s, self._overdue, move)
        self._load_if_drained(server)

    def _load_if_drained(self, server: int) -> None:
        if not self._servers[server].leaving():
            assert self._mover is not None
            move, closed_at_s = self._draining.pop(server)
            now_s = self._queue.now_s
            self._mover.drained(server, now_s)
            self._queue.at(now_s + move.load_s, self._loaded, move, closed_at_s, now_s)

    def _overdue(self, move: ServerMove) -> None:
        if self._draining.get(move.server, (None, 0.0))[0] is move:
            name = self._problem.servers[move.server].name
            raise Disturbed(
                f"{name} cuts the sessions that have not ended {move.drain_s:g} s after it began to move"
            )

    def _loaded(self, move: ServerMove, closed_at_s: float, drained_at_s: float) -> None:
        assert self._mover is not None
        self._servers[move.server].offer(move.new.first, move.new.last, move.new_bytes)
        self._mover.completed(move, closed_at_s, drained_at_s, self._queue.now_s, 0)

    def _note_move(self, event: AnyEvent) -> None:
        if isinstance(event, Moved):
            self._moves.append(event.row([server.name for server in self._problem.servers]))


def what_meets(experiment: Experiment) -> str:
    """Returns why sessions affect each other on servers, so that their times have no closed form; "" if they do not."""
    if experiment.problem.decoding is not None:
        return "tokens are drafted"
    if experiment.compute.paging is not None:
        return "caches grow"
    return "sessions share steps" if experiment.compute.batching == "continuous" else ""
