"""The engine ``fast``: what nodes and coordinator do, event by event.

A request asks for a chain when it arrives, opens it on all hops at once and retries where a server has no room. Its
service takes the closed form of ``policies.problem.service_s``. It goes step by step (``testbed.fast.steps``) where
servers compute several sessions together, caches grow, or sessions can meet on links (``testbed.fast.meetings``), over
the scenario's links (``testbed.fast.links``). Servers come and go (``testbed.fast.machines``), and sessions that lose
one recover (``testbed.fast.recovery``). See ``docs/simulator-modes.md``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from operator import attrgetter

from nodes.admission import NO_ROUTE, Admission, Attempts, HostedBlocks, Need, name_of_attempt, ready_at_s
from nodes.batching import Batches
from nodes.clock import on_tick
from nodes.request import EARLIER_TURN_FAILED, SessionError
from policies.online import OnlinePolicy
from policies.outcomes import Times
from policies.problem import Hop, PolicyError, RequestSpec, Route
from policies.replay import ServiceTimes
from policies.rules import MAX_ATTEMPTS, RecoveryRules
from policies.workload import RequestPlan
from testbed.control.coordinator import Coordinator
from testbed.control.placing import PlacedExperiment
from testbed.experiments.experiment import Experiment
from testbed.experiments.step_limits import recovery_of
from testbed.fast.connections import Connections
from testbed.fast.conversations import Conversations
from testbed.fast.delays import ChainDelays, delays_of, overheads_of
from testbed.fast.events import EventQueue
from testbed.fast.idle import IdleTimes
from testbed.fast.links import Links, Way, never_wait
from testbed.fast.machines import Machines
from testbed.fast.meetings import Meetings, SessionsMeet, what_meets, why_links_have_no_closed_form
from testbed.fast.moving import Moving
from testbed.fast.opening import Chains, Opening
from testbed.fast.outcome import Disturbed, FastRun, SimulatedRequest
from testbed.fast.recovery import Recovering, SessionsCut, not_recovered
from testbed.fast.sending import Sending
from testbed.fast.session import Session
from testbed.fast.steps import ChainSession, Key, Part, Steps, replay_of
from testbed.records.requests import COMPLETED, FAILED

OnCache = Callable[[float, int, float], None]
"""Called with (instant, server, change in bytes) whenever cache is reserved or released."""
OnEnd = Callable[[int], None]
"""Called with how many requests have ended whenever one has. If the run begins anew, so does the number."""


def simulate_fast(
    experiment: Experiment,
    placed: PlacedExperiment,
    online: OnlinePolicy | None = None,
    *,
    max_attempts: int = MAX_ATTEMPTS,
    on_cache: OnCache | None = None,
    on_end: OnEnd | None = None,
    most_steps: int = 0,
) -> FastRun:
    """Serve the experiment's requests. Deterministic: equal arguments have equal results.

    ``online`` may change the placement; it must let sessions drain. ``on_cache`` is called at every change of
    a server's account until the last request has ended. Steps are kept unless they are more than ``most_steps``.
    Raises ``PolicyError`` if a policy fails or breaks a rule, ``Disturbed`` if a session is cut in a way not known here.
    """
    assert online is None or online.drains, "a policy that cuts sessions disturbs them"
    options = online, max_attempts, on_cache, on_end, most_steps
    try:
        return _simulate(experiment, placed, options)
    except StepsLate:
        return _simulate(experiment, _anew(placed), options, hears=True)


_Options = tuple[OnlinePolicy | None, int, OnCache | None, OnEnd | None, int]
"""``simulate_fast``'s after the placement, in its order."""


def _simulate(
    experiment: Experiment, placed: PlacedExperiment, options: _Options, *, hears: bool = False
) -> FastRun:
    """As ``simulate_fast``. Raises ``StepsLate`` unless it ``hears``: clients then note all that they hear of servers."""
    is_free = never_wait(experiment)
    why = what_meets(experiment) or ("" if is_free else why_links_have_no_closed_form(experiment))
    try:
        if not why:
            meetings = None if is_free else Meetings(experiment)
            try:
                return _Run(experiment, placed, *options, meetings).serve(
                    "in closed form, since nobody waits for links"
                )
            except SessionsMeet as meeting:
                why = str(meeting)
            placed = _anew(placed)
        return _Run(experiment, placed, *options, by_steps=True, hears=hears).serve(
            f"step by step, since {why}"
        )
    except SessionsCut as cut:
        if reason := not_recovered(experiment):
            raise Disturbed(f"{cut}, with {reason}") from cut
        run = _Run(experiment, _anew(placed), *options, by_steps=True, recovers=True, hears=hears)
        return run.serve(f"step by step, since {cut}")


class StepsLate(Exception):
    """A step takes longer than its client waits if it hears nothing, and what that hears was not noted."""


def _anew(placed: PlacedExperiment) -> PlacedExperiment:
    """Returns the placement with a router that remembers nothing of what it has decided."""
    return replace(placed, router=placed.bind(placed.placement))


class _Run:
    """One simulation."""

    def __init__(
        self,
        experiment: Experiment,
        placed: PlacedExperiment,
        online: OnlinePolicy | None,
        max_attempts: int,
        on_cache: OnCache | None,
        on_end: OnEnd | None,
        most_steps: int,
        meetings: Meetings | None = None,
        by_steps: bool = False,
        recovers: bool = False,
        hears: bool = False,
    ) -> None:
        self._hears = hears
        self._queue = queue = EventQueue()
        self._experiment = experiment
        self._problem = experiment.problem
        self._setup_s = experiment.calibration.session_setup_s
        self._max_attempts = max_attempts
        self._talks = Conversations(experiment)
        paging = experiment.compute.paging
        self._on_cache = on_cache
        self._on_end = on_end
        self._coordinator = Coordinator(experiment, placed, lambda: queue.now_s, queue.at)
        self._servers = [self._admission(server) for server in range(experiment.problem.n_servers)]
        self._machines = Machines(
            experiment, queue, self._coordinator, self._servers, self._begin, self._check_loss, self._ends
        )
        self._steps: Steps | None = None
        """``None``: sessions do not meet on servers, and the closed form holds."""
        self._free_at = queue.free_at
        """Has something called that gives room back. In closed form it is planned long before it happens, and goes first;
        step by step everything is planned when the system sets a timer for it, and comes in that order."""
        self._meetings = meetings
        self._times: ServiceTimes | IdleTimes = ServiceTimes(experiment.problem)
        self._links = None if never_wait(experiment) else Links(queue, experiment, hears=hears)
        """``None``: messages take their links' delays alone."""
        self._send = Sending(queue, experiment.problem, self._links)
        if self._links is not None:
            self._times = IdleTimes(experiment, self._links)
            queue.at(0.0, self._links.follow, experiment.network.changes)
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
                notify=self._send.notify,
                forwarding=problem.forwarding,
                hub_s=[problem.hub_s(client) for client in range(len(problem.clients))],
                decoding=problem.decoding,
                most=most_steps,
                limit_s=experiment.faults.recovery.request_timeout_s,
                is_late=self._check_limit,
            )
        self._connections: Connections | None = None
        """``None``: no server ends or begins."""
        if recovers or experiment.faults.planned or experiment.faults.absent:
            absent = experiment.faults.absent
            ways = queue, self._problem, self._send, self._links
            self._connections = Connections(*ways, absent, placed.placement)
        self._chains = Chains(
            *(experiment.problem, queue, self._send, self._servers, self._free_at),
            *(self._released, experiment.faults.recovery.connect_timeout_s, self._connections),
        )
        # A preempted session may have steps elsewhere.
        if self._steps is not None and experiment.problem.forwarding:
            self._chains.closed = self._steps.drop
        self._recovering: Recovering | None = None
        if recovers and self._connections is not None and self._steps is not None:
            self._recovering = Recovering(
                *(experiment, queue, self._coordinator, self._machines, self._connections, self._chains),
                *(self._steps, self._send, self._servers, self._delays),
                *(self._talks.reserved_tokens, self._give_up),
            )
        self._sessions: dict[int, Session] = {}
        """Those that have arrived and have not ended, or whose chain is open for the next turn, by number."""
        self._held: dict[int, Session] = {}
        """Those whose chain is open, by the index of the next turn."""
        self._ended: dict[int, SimulatedRequest] = {}
        self._moving: Moving | None = None
        if online is not None:
            self._moving = Moving(experiment, online, queue, self._coordinator, self._servers)

    @cached_property
    def _recovery(self) -> RecoveryRules:
        return recovery_of(self._experiment)

    def _check_limit(self, chain: ChainSession) -> None:
        """Raises ``Disturbed`` if a step is answered so late that its client has given the server up; see ``nodes.chain.Chain.step``."""
        server, now_s = chain.hops[chain.at].server, self._queue.now_s
        n_hops, n_tokens = len(chain.hops), chain.parts[chain.part].n_tokens
        is_pushed, took_s = self._problem.forwarding, now_s - chain.asked_at_s
        limit_s = self._recovery.step_limit_s(n_tokens, n_hops if is_pushed else 1)
        if took_s < limit_s:
            return
        if not is_pushed and self._links is not None:  # else it hears of none but by the answer
            if not self._hears:
                raise StepsLate
            took_s = self._send.heard(chain.plan.client, server).silence_s(chain.asked_at_s, now_s)
        if took_s >= limit_s:
            raise Disturbed(
                f"nothing is heard of {self._problem.servers[server].name} for {took_s:.3g} s after a step was sent to it, and "
                f"recovery.request_timeout allows {limit_s:.3g} s"
            )

    def serve(self, why: str) -> FastRun:
        """Serves all requests. ``why``: how, and the reason."""
        requests = self._experiment.workload.requests
        coming: list[deque[RequestPlan]] = [deque() for _ in self._problem.clients]
        for plan in requests:
            if plan.turn is None or plan.turn.after is None:
                coming[plan.client].append(plan)
        for of_client in coming:
            if of_client:
                self._queue.at(of_client[0].arrival_at_s, self._arrive_from, of_client)
        if requests:
            self._queue.run()
        ended = [self._ended[plan.index] for plan in requests]
        decisions_s, links = self._coordinator.decisions_s, self._links
        moves = [] if self._moving is None else self._moving.rows
        if links is not None and self._steps is None:
            for request in ended:
                links.note(request)
        use = None if links is None else links.use(self._queue.now_s)
        faults = self._machines.events
        if (steps := self._steps) is None:
            return FastRun(ended, moves, decisions_s, why, links=use, faults=faults)
        is_cut = self._recovering is not None
        return FastRun(
            ended, moves, decisions_s, why, steps.rows, steps.n_rows, steps.gaps_s, use, faults, is_cut
        )

    # Sessions.

    def _arrive_from(self, coming: deque[RequestPlan]) -> None:
        """One client's requests: those that are due now, and the next when it is due."""
        due = []
        while coming and on_tick(coming[0].arrival_at_s) <= self._queue.now_s:
            due.append(coming.popleft())
        if coming:
            self._queue.at(coming[0].arrival_at_s, self._arrive_from, coming)
        for plan in due:
            self._arrive(plan)

    def _arrive(self, plan: RequestPlan) -> None:
        if self._moving is not None:
            self._moving.load.arrive(self._queue.now_s)
        attempts = self._attempts(plan.index, plan.arrival_at_s)
        if (before := self._held.pop(plan.index, None)) is not None:
            self._go_on(before, plan, attempts)
            return
        pages = self._talks.prompt_pages(plan)
        self._sessions[plan.index] = session = Session(plan.index, plan, attempts, pages=pages)
        self._ask(session)

    def _go_on(self, before: Session, plan: RequestPlan, attempts: Attempts) -> None:
        """Serves a turn on the chain that the one before has left open."""
        now_s, chain = self._queue.now_s, before.on_chain
        assert chain is not None and self._steps is not None, "its chain is open"
        self._sessions[before.number] = session = Session(
            before.number,
            plan,
            attempts,
            before.opening,
            n_chains=before.n_chains,
            asked_at_s=now_s,
            ready_at_s=now_s,
            route=Route(chain.hops, 0.0, 0.0),
            opened=before.opened,
            n_reused=before.plan.n_input_tokens + before.plan.n_output_tokens - 1,
        )
        self._serve_step_by_step(self._steps, session, chain.hops, now_s, chain)

    def _follow(self, plan: RequestPlan, *, has_failed: bool) -> None:
        """Plans the turn after request ``plan``, which has ended now; if that failed, the whole conversation fails."""
        following, now_s = self._talks.after(plan.index), self._queue.now_s
        if following is None:
            return
        assert following.turn is not None, "it follows another turn"
        think_s, index = following.turn.think_s, following.index
        at_s = now_s if has_failed else on_tick(now_s + think_s)
        following = replace(following, arrival_at_s=at_s)
        if has_failed:
            if self._moving is not None:
                self._moving.load.arrive(now_s)
            self._end(
                Session(index, following, self._attempts(index, now_s)), FAILED, reason=EARLIER_TURN_FAILED
            )
            return
        if index in self._held and (hold_s := self._talks.hold_s) is not None and think_s > hold_s:
            self._queue.at(now_s + hold_s, self._let_go, index)
        self._queue.at(at_s, self._come_back, following)

    def _come_back(self, plan: RequestPlan) -> None:
        self._coordinator.arrives(plan.index, plan.arrival_at_s)
        self._arrive(plan)

    def _let_go(self, index: int) -> None:
        """Closes the chain that was open for turn ``index``, which is not there yet."""
        session = self._held.pop(index)
        self._coordinator.release(index)
        self._chains.close(session.plan.client, session.opened)
        del self._sessions[session.number]

    def _attempts(self, request: int, since_s: float) -> Attempts:
        backoff, final_give_up_s = (
            self._experiment.workload.backoff,
            self._experiment.faults.recovery.give_up_s,
        )
        return Attempts(
            backoff.waits_s(request), since_s, backoff.give_up_s, final_give_up_s, self._max_attempts
        )

    def _ask(self, session: Session) -> None:
        """Ask for a chain."""
        session.opening += 1
        n_done = session.on_chain.token if session.on_chain is not None else 0
        self._coordinator.ask(session.plan.index, partial(self._answer, session), n_done)

    def _answer(self, session: Session, route: Route | PolicyError | None) -> None:
        """The coordinator has decided. Of several that it lets in at once one is told after the other."""
        if self._experiment.policy.queue is None:
            self._told(session, route)
        else:
            self._queue.at(self._queue.now_s, self._told, session, route)

    def _told(self, session: Session, route: Route | PolicyError | None) -> None:
        """Send an opening to all servers of the chain."""
        plan = session.plan
        session.asked_at_s = self._queue.now_s
        session.opened, session.preempted_by = [], None
        if isinstance(route, PolicyError):
            raise PolicyError(f"request {plan.index}: {route}") from route
        if route is None:
            self._refused(session, NO_ROUTE, is_final=True)
            return
        session.route = route
        session.wait_expected_s = max(session.wait_expected_s, route.wait_s)
        if session.cost_s is None:
            session.cost_s = route.cost_s
        # It orders requests that arrived at the same time.
        name = name_of_attempt(f"{session.number}", session.n_chains)
        session.n_chains += 1
        n_done = session.on_chain.token if session.on_chain is not None else 0
        n_sent = n_done
        if session.on_chain is not None and n_done:  # it replays the step in which it lost its chain
            n_sent += session.on_chain.round.sent - 1
        most_tokens = self._talks.reserved_tokens(plan)
        need = Need(plan.n_input_tokens + n_sent, most_tokens, (plan.arrival_at_s, name))
        if self._meetings is not None:
            self._meetings.begin(session.number, plan.client, route.hops, session.asked_at_s)
        then = partial(self._opened, session)
        opening = Opening(plan.client, route.hops, session.key, need, then, session.pages)
        opening.is_replacement = session.on_chain is not None
        session.opened = opening.opened
        self._chains.open(opening)

    def _opened(self, session: Session, opening: Opening) -> None:
        """All servers have answered an opening; goes on if none has refused it."""
        now_s, plan = self._queue.now_s, session.plan
        if self._recovering is not None:
            session.opened.sort(key=attrgetter("first"))
        if (refusal := opening.refusal) is not None:
            self._refused(session, refusal.reason, refusal.broken, is_final=refusal.is_final)
            return
        self._check_passing(session)
        if session.ready_at_s is not None:
            self._serve(session, now_s)
            return
        initial_delay_s = self._problem.initial_delay_s
        session.ready_at_s = ready_at_s(session.asked_at_s, now_s, initial_delay_s, self._setup_s)
        session.waiting_s = session.asked_at_s - on_tick(plan.arrival_at_s)
        session.opened_at_s = session.asked_at_s
        if self._talks.outlive:
            found = {hop.first: hop.n_found for hop in session.opened}
            session.n_reused, lacking = self._talks.fill(plan.client, found, session.pages)
            session.n_unfilled = len(lacking)
            for first, n_tokens in lacking.items():
                self._fill(session, first, n_tokens)
        if not session.n_unfilled:
            self._ready(session)

    def _fill(self, session: Session, first: int, n_tokens: int) -> None:
        """Sends a hop what it lacks of the prompt's pages, beside all others."""
        assert self._steps is not None and session.route is not None, "hubs fill hops step by step"
        (hop,) = (hop for hop in session.route.hops if hop.first == first)
        (n_found,) = (opened.n_found for opened in session.opened if opened.first == first)
        filling = ChainSession(
            session.plan,
            session.key,
            (hop,),
            *self._delays(session.plan, (hop,), n_tokens),
            ended=partial(self._filled, session),
            parts=(Part(n_found, n_tokens),),
            is_fill=True,
        )
        self._steps.begin(filling, self._queue.now_s)

    def _filled(self, session: Session, at_s: float) -> None:
        session.n_unfilled -= 1
        if not session.n_unfilled:
            self._ready(session)

    def _ready(self, session: Session) -> None:
        """Has the prompt sent as soon as the session is set up."""
        assert session.ready_at_s is not None, "its chain is open"
        session.ready_at_s = max(session.ready_at_s, self._queue.now_s)
        if self._talks.histories and session.ready_at_s > self._queue.now_s:  # they may change until then
            self._queue.at(session.ready_at_s, self._serve, session, session.ready_at_s)
        else:
            self._serve(session, session.ready_at_s)

    def _serve(self, session: Session, begins_at_s: float) -> None:
        """Serves a session whose chain is open, from its first token on or after a lost chain."""
        plan = session.plan
        assert session.route is not None, "its chain is open"
        hops = session.route.hops
        if self._steps is not None:
            if session.on_chain is None:
                session.begins = self._talks.begins(plan.client, hops, session.pages, session.n_reused or 0)
            self._serve_step_by_step(self._steps, session, hops, begins_at_s)
            return
        first_s, all_s = self._times.of(plan.served, hops)
        if self._links is not None:
            way = self._links.ways(plan.client, hops[:1])[0]
            prompt = way.size_there(plan.n_input_tokens * self._problem.model.token_bytes)
            begins_at_s += way.there.late_s(prompt, begins_at_s)
        self._free_at(begins_at_s + all_s, self._finish, session, on_tick(begins_at_s + first_s))

    def _delays(
        self, plan: RequestPlan, hops: tuple[Hop, ...], first_tokens: int
    ) -> tuple[ChainDelays, Sequence[Way]]:
        """Returns the delays of a chain whose first message has ``first_tokens``, and its connections, if they are simulated."""
        sent = RequestSpec(plan.client, first_tokens, plan.n_output_tokens)
        if self._links is None:
            return delays_of(self._experiment, sent, hops), ()
        return overheads_of(self._experiment, sent, hops), self._links.ways(plan.client, hops)

    def _serve_step_by_step(
        self,
        steps: Steps,
        session: Session,
        hops: tuple[Hop, ...],
        ready_at_s: float,
        held: ChainSession | None = None,
    ) -> None:
        """Serve a session step by step: from the first token on, also on a chain that was ``held``, or with a replay after
        a lost chain."""
        plan, before = session.plan, session.on_chain
        n_reused = session.n_reused or 0
        parts: Sequence[Part] = (Part(n_reused, plan.n_input_tokens - n_reused),)
        if before is not None:
            parts = replay_of(before, in_steps=self._experiment.faults.recovery.replay == "step_by_step")
        session.admitted = hops
        session.on_chain = on_chain = ChainSession(
            plan,
            session.key,
            hops,
            *self._delays(plan, hops, parts[0].n_tokens),
            ended=partial(self._finish, session),
            lost=partial(self._lost, session),
            parts=parts,
            ready_at_s=ready_at_s,
        )
        on_chain.round_s = self._coordinator.round_times_s(plan.index, hops) if held is None else held.round_s
        if held is not None:
            on_chain.earlier, on_chain.seen_tokens = held.step_sizes, held.seen_tokens
            session.preempted_by = held.preempted_by
        if before is not None:
            session.preempted_s += ready_at_s - session.attempts.since_s
            on_chain.resume(before, forwarding=self._problem.forwarding)
        on_chain.preempted_by = session.preempted_by
        if self._recovering is not None:
            self._recovering.equip(session, on_chain)
        steps.begin(on_chain, ready_at_s)

    def _admission(self, server: int) -> Admission[Key]:
        """Returns what a server that begins now offers, with no session."""
        placement = self._coordinator.placement
        held, room_bytes = placement.ranges[server], placement.cache_bytes[server]
        token_bytes, on_cache = self._problem.model.cache_bytes_per_token, self._on_cache
        how = self._experiment.compute.paging, self._talks.page_tokens
        return Admission(
            HostedBlocks(held.first, held.last, room_bytes, token_bytes, *how),
            partial(self._preempted, server),
            None if on_cache is None else partial(self._cache_changed, on_cache, server),
        )

    def _begin(self, server: int) -> None:
        self._servers[server] = self._admission(server)
        if self._connections is not None:
            self._connections.begin(server)

    def _check_loss(self, server: int) -> None:
        """A server is killed now."""
        for session in self._sessions.values():
            if self._recovering is None and any(hop.server == server for hop in session.opened):
                name = self._problem.servers[server].name
                raise SessionsCut(f"request {session.plan.index} loses {name}, which is killed")

    def _check_passing(self, session: Session) -> None:
        """With forwarding, a server that has been away is connected with again when a step is passed on to it."""
        if self._connections is None or self._recovering is not None or not self._problem.forwarding:
            return
        assert session.route is not None, "it has been opened on one"
        pair = self._connections.unconnected([hop.server for hop in session.route.hops])
        if pair is not None and not not_recovered(self._experiment):
            source, server = (self._problem.servers[number].name for number in pair)
            raise SessionsCut(
                f"{source} has no connection with {server} when request {session.plan.index} comes"
            )

    def _ends(self, server: int) -> None:
        """A server ends now, with all that it has."""
        if self._connections is not None:
            self._connections.end(server)
        if self._steps is not None:
            self._steps.end(server)

    def _unreachable(self, session: Session, servers: Sequence[int]) -> None:
        """Notes that no session could be opened on ``servers``, which were gone."""
        if self._recovering is None:
            # A ban ends when the server answers, which is noted only where sessions recover.
            if not not_recovered(self._experiment):
                name = self._problem.servers[servers[0]].name
                raise SessionsCut(f"request {session.plan.index} finds that {name} is gone")
            self._coordinator.failed(session.plan.index, servers)
        else:
            self._recovering.of(session).unreachable(tuple(servers))

    def _give_up(self, session: Session, reason: str) -> None:
        """Fails a session that has lost hops for which there are no replacements."""
        self._fail(session, reason)
        self._coordinator.release(session.plan.index)

    def _cache_changed(self, on_cache: OnCache, server: int, n_bytes: float) -> None:
        on_cache(self._queue.now_s, server, n_bytes)

    def _preempted(self, server: int, key: Key) -> None:
        """Handle that a server has taken a session's cache for others."""
        session = self._sessions.get(key[0])  # it may have ended, which the server does not know yet
        if self._problem.forwarding and session is not None:
            self._send.notify(session.plan.client, server, self._hear, key, server)

    def _hear(self, key: Key, server: int) -> None:
        """With forwarding: notify the client that ``server`` preempted its session or opening ``key``."""
        session = self._sessions.get(key[0])
        if session is None:
            return
        if self._steps is not None and session.on_chain is not None and session.on_chain.key == key:
            self._steps.notify_preempted(session.on_chain, server)
        elif key == session.key:
            session.preempted_by = session.preempted_by if session.preempted_by is not None else server

    def _lost(self, session: Session, server: int, cached_tokens: int) -> None:
        """Give up the chain, and ask for another as at first."""
        now_s, index = self._queue.now_s, session.plan.index
        session.n_preemptions += 1
        session.preempted_tokens += cached_tokens
        session.attempts = self._attempts(index, now_s)
        session.pages, session.begins = (), ()
        self._chains.close(session.plan.client, session.opened)
        self._coordinator.release(index)
        self._ask(session)

    def _refused(self, session: Session, reason: str, broken: Sequence[int] = (), *, is_final: bool) -> None:
        """Try again after the backoff, or give up. ``broken`` are the servers that were gone."""
        now_s, plan = self._queue.now_s, session.plan
        session.opened = []
        if self._meetings is not None:
            self._meetings.end(session.number, self._queue.now_s)
        if broken:
            self._unreachable(session, broken)
        try:
            wait_s = session.attempts.failed(now_s, reason, is_final=is_final or bool(broken))
        except SessionError as given_up:
            self._fail(session, str(given_up))
        else:
            session.n_rejections += 1
            self._queue.at(now_s + wait_s, self._ask, session)
        self._coordinator.release(plan.index)

    def _finish(self, session: Session, first_at_s: float) -> None:
        if self._links is not None and self._steps is None:
            assert session.route is not None
            if not self._problem.hub_s(session.plan.client):  # else that of its last result has left before
                self._links.up(session.plan.client, session.route.hops[-1].server).acknowledge()
        plan, route = session.plan, session.route
        assert route is not None, "it was served"
        following, pages = self._talks.after(plan.index), self._talks.all_pages(plan)
        self._coordinator.completed(plan.index)
        times = Times(session.opened_at_s, first_at_s, plan.n_output_tokens)
        self._coordinator.ended(plan.index, times, self._queue.now_s, has_failed=False)
        if following is not None and self._talks.hold_s is not None:
            assert session.on_chain is not None, "chains stay open step by step"
            session.on_chain.is_over = False
            self._held[following.index] = session
            self._coordinator.hands_over(plan.index, following.index)
        else:
            if pages is not None:
                self._talks.remember(plan.client, route.hops, session.begins, pages)
            self._chains.close(plan.client, session.opened, pages)
            if self._meetings is not None:
                self._meetings.end(session.number, self._queue.now_s)
            self._coordinator.release(plan.index)
        self._end(session, COMPLETED, route, first_at_s, self._queue.now_s)

    def _fail(self, session: Session, reason: str) -> None:
        on_chain = session.on_chain
        route = None
        if on_chain is not None and session.route is not None:
            route = session.route._replace(hops=session.admitted)
        n_tokens = 0 if on_chain is None else on_chain.token
        first_at_s = on_chain.first_at_s if on_chain is not None and n_tokens else None
        times = Times(session.opened_at_s, first_at_s, n_tokens)
        self._coordinator.ended(session.plan.index, times, self._queue.now_s, has_failed=True)
        self._end(session, FAILED, route, first_at_s, None, reason)

    def _end(
        self,
        session: Session,
        status: str,
        route: Route | None = None,
        first_at_s: float | None = None,
        ended_at_s: float | None = None,
        reason: str = "",
    ) -> None:
        now_s, plan = self._queue.now_s, session.plan
        if self._moving is not None:
            self._moving.load.end(now_s)
        following = self._talks.after(plan.index)
        if following is None or following.index not in self._held:
            self._sessions.pop(session.number, None)
        if len(self._ended) + 1 == len(self._experiment.workload.requests):
            self._queue.stop()
        if self._recovering is not None:
            self._recovering.ended(session)
        self._ended[plan.index] = session.outcome(status, now_s, route, first_at_s, ended_at_s, reason)
        if self._on_end is not None:
            self._on_end(len(self._ended))
        self._follow(plan, has_failed=status == FAILED)

    def _released(self, server: int) -> None:
        """Notes that a session has left ``server``."""
        if self._moving is not None:
            self._moving.released(server)
        self._machines.released(server)
