"""The mode ``real``: what the testbed's nodes and coordinator do, as an event simulation.

A request asks for a chain when it arrives, opens it on all hops at once and retries where a server
has no room; see ``docs/simulator-modes.md`` for what differs from the reference and the emulation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from nodes.links import GIVE_UP_S
from policies.interfaces import Router
from policies.problem import Hop, Placement, PolicyError, Problem, RequestSpec, Route
from policies.replay import ServiceTimes
from policies.workload import Backoff, RequestPlan
from testbed.moving.steering import Load, Move
from testbed.simulation.events import EventQueue
from testbed.simulation.moving import Mover, Online
from testbed.simulation.network import ChangingNetwork, ControlTimes, SteadyTimes
from testbed.simulation.servers import Key, OnCache, Servers
from testbed.simulation.serving import ClosedForm, Course, Serving, SteppedServers
from testbed.simulation.view import RouterView

COMPLETED, FAILED = "completed", "failed"
"""The states that end a request: all tokens came; no room in time, or no chain can ever serve it."""

MAX_ATTEMPTS = 1_000_000
"""As ``nodes.session``: a session that is refused so often is not tried again."""


class SimulatedRequest(NamedTuple):
    """What became of a request; the first five fields as ``policies.replay.ReplayedRequest``.

    ``route`` is the last chain that was asked for, ``None`` if there never was one. ``waiting_s`` is
    arrival to the start of the opening that led to the first token (to the end without one),
    ``setup_s`` from there until the prompt is sent, ``ttft_s`` arrival to first token (these two
    ``None`` without a first token), ``time_s`` arrival to the end, which is ``ended_at_s``.
    ``n_attempts`` are the chains asked for, ``n_cuts`` how often a moving server cut the session.
    """

    plan: RequestPlan
    route: Route | None
    waiting_s: float
    ttft_s: float | None
    time_s: float
    status: str
    reason: str
    setup_s: float | None
    ended_at_s: float
    n_attempts: int
    n_cuts: int
    n_replays: int = 0
    """How often lost hops were replaced and sent all that these had been (see ``failing``)."""
    n_done: int = 0
    """Tokens that came before it failed, where the record has their steps (see ``failing``)."""


class RealRun(NamedTuple):
    """Requests in the order given, and the servers' changes in the order of their ends."""

    requests: list[SimulatedRequest]
    moves: list[Move]


def simulate_real(
    problem: Problem,
    placement: Placement,
    router: Router,
    requests: Sequence[RequestPlan],
    *,
    session_setup_s: float = 0.0,
    backoff: Backoff = Backoff(),  # noqa: B008 - frozen
    serial_compute: bool = False,
    state_age_s: float = 0.0,
    online: Online | None = None,
    max_attempts: int = MAX_ATTEMPTS,
    on_cache: OnCache | None = None,
    network: ChangingNetwork | None = None,
) -> RealRun:
    """Serve ``requests`` as the testbed would. Deterministic: same arguments, same answer.

    ``router`` is bound to ``problem`` and ``placement``; ``online`` lets a policy change the placement.
    With ``serial_compute``, with contention, with links that change (``network``; policies go on to see
    ``problem``), and where a session whose tokens take longer and longer may be cut, every step of every
    token is simulated (see ``SteppedServers``);
    ``state_age_s`` is the time between reports to the coordinator, 0 for always current;
    ``on_cache`` is told every change of a server's account until the last request has ended. Raises ``PolicyError`` if a policy fails
    or breaks a rule.
    """
    run = _Run(problem, placement, router, session_setup_s, backoff, state_age_s, max_attempts, on_cache)
    if serial_compute or network is not None or _needs_steps(problem, online is not None):
        run.serving = SteppedServers(problem, run.queue, network, is_serial=serial_compute)
    if network is not None:
        run.control = network
    if online is not None:
        run.go_online(placement, online)
    return run.serve(requests)


def _needs_steps(problem: Problem, is_online: bool) -> bool:
    """Whether the closed form does not have it: sessions that slow each other, or tokens to be cut between."""
    return any(s.contention_ratio or (is_online and s.context_slope_s) for s in problem.servers)


@dataclass(slots=True)
class _Session:
    """A request on its way. ``opening`` numbers its openings: what an earlier one planned is void."""

    number: int
    plan: RequestPlan
    request: RequestSpec
    """What is left to do: a session that was cut has its finished tokens in the prompt."""
    since_s: float
    waits_s: Iterator[float]
    """Between one attempt to open it and the next."""
    opening: int = 0
    n_attempts: int = 0
    n_cuts: int = 0
    asked_at_s: float = 0.0
    was_idle: bool = False
    is_hopeless: bool = False
    route: Route | None = None
    opened: tuple[Hop, ...] = ()
    refusal: str = ""
    course: Course | None = None
    n_done: int = 0
    setup_s: float | None = None
    waiting_s: float | None = None
    ttft_s: float | None = None


class _Run:
    """One simulation."""

    def __init__(
        self,
        problem: Problem,
        placement: Placement,
        router: Router,
        session_setup_s: float,
        backoff: Backoff,
        state_age_s: float,
        max_attempts: int,
        on_cache: OnCache | None,
    ) -> None:
        self.queue = EventQueue()
        self._problem = problem
        self._router = router
        self._session_setup_s = session_setup_s
        self._backoff = backoff
        self._max_attempts = max_attempts
        self._servers = Servers(placement, on_cache)
        self._view = RouterView(placement.cache_bytes, state_age_s)
        self._load = Load()
        self._mover: Mover | None = None
        self._sessions: dict[int, _Session] = {}
        self._times = ServiceTimes(problem)
        self.serving: Serving = ClosedForm(self._times, self.queue)
        self.control: ControlTimes = SteadyTimes(problem)
        self._ended: dict[int, SimulatedRequest] = {}

    def go_online(self, placement: Placement, online: Online) -> None:
        """Let a policy change the placement while requests are served."""

        def changed(server: int) -> None:
            usable = self._servers.placement
            self._router = online.bind(usable)
            self._view.replace(usable.cache_bytes)

        self._mover = Mover(
            self._problem, placement, online, self._servers, self.queue, self._load, changed, self._cut
        )

    def serve(self, requests: Sequence[RequestPlan]) -> RealRun:
        for number, plan in enumerate(requests):
            self.queue.at(plan.arrival_at_s, self._arrive, number, plan)
        while len(self._ended) < len(requests):
            self.queue.step()
        moved = self._mover.done if self._mover else []
        return RealRun([self._ended[number] for number in range(len(requests))], moved)

    def _arrive(self, number: int, plan: RequestPlan) -> None:
        now_s = self.queue.now_s
        self._load.arrive(now_s)
        request = RequestSpec(plan.client, plan.n_input_tokens, plan.n_output_tokens)
        session = _Session(number, plan, request, now_s, self._backoff.waits_s(plan.index))
        self._sessions[number] = session
        self._ask(session)

    def _ask(self, session: _Session) -> None:
        """Ask for a chain and send an opening to all of its servers."""
        now_s, plan = self.queue.now_s, session.plan
        session.opening += 1
        session.n_attempts += 1
        session.asked_at_s = now_s
        session.refusal, session.is_hopeless = "", False
        session.opened, session.course = (), None
        state = self._view.state(session.number, now_s)
        session.was_idle = self._view.is_idle
        try:
            route = self._router.route(session.request, state, now_s)
        except PolicyError as error:
            raise PolicyError(f"request {plan.index}: {error}") from error
        if route is None:
            session.refusal = "no route covers the model"
            session.is_hopeless = session.was_idle and not self._is_moving()
            self._refused(session)
            return
        session.route = route
        hops = route.hops
        block_bytes = self._problem.model.cache_bytes(session.request.n_tokens)
        expected_s = (
            self._problem.initial_delay_s + self._setup_s(session) + self._times.of(session.request, hops)[1]
        )
        self._view.hold(session.number, hops, block_bytes, now_s + expected_s, now_s)
        for hop in hops:
            at_s = self.control.arrives_at_s(plan.client, hop.server, now_s)
            if at_s < math.inf:
                n_bytes = hop.n_blocks * block_bytes
                self.queue.at(at_s, self._open, session, session.opening, hop, n_bytes)
        answered_at_s = max(self.control.answered_at_s(plan.client, hop.server, now_s) for hop in hops)
        if answered_at_s < math.inf:
            self.queue.at(answered_at_s, self._answered, session, session.opening)
        else:
            self.queue.at(now_s + GIVE_UP_S, self._unanswered, session, session.opening)

    def _setup_s(self, session: _Session) -> float:
        """The constant that a request pays once, before its first token."""
        return 0.0 if session.n_done else self._session_setup_s

    def _open(self, session: _Session, opening: int, hop: Hop, n_bytes: float) -> None:
        """An opening reaches a server."""
        if session.opening != opening:
            return
        reason = self._servers.reserve((session.number, opening), hop, n_bytes, self.queue.now_s)
        if reason is None:
            session.opened += (hop,)
            return
        session.refusal = f"{self._problem.servers[hop.server].name}: {reason}"
        is_too_small = self._servers.offers(hop) and self._servers.is_empty(hop.server)
        # Nobody else was there, so the next answer would be the same: waiting does not help.
        session.is_hopeless |= is_too_small and session.was_idle and not self._is_moving()

    def _is_moving(self) -> bool:
        return self._mover is not None and self._mover.is_moving

    def _answered(self, session: _Session, opening: int) -> None:
        """All servers have answered."""
        if session.opening != opening:
            return
        now_s = self.queue.now_s
        if session.refusal:
            client = session.plan.client
            answers_at_s = (self.control.answered_at_s(client, hop.server, now_s) for hop in session.opened)
            closed_at_s = min(max(answers_at_s, default=now_s), now_s + GIVE_UP_S)
            self._close(session, session.opened)
            self.queue.free_at(closed_at_s, self._refused, session)
            return
        assert session.route is not None
        ready_at_s = max(now_s, session.asked_at_s + self._problem.initial_delay_s) + self._setup_s(session)
        if not session.n_done:
            session.waiting_s = session.asked_at_s - session.plan.arrival_at_s
            session.setup_s = ready_at_s - session.asked_at_s
        session.course = self.serving.start(
            session.request,
            session.route.hops,
            ready_at_s,
            partial(self._finish, session),
            partial(self._lose, session),
        )

    def _refused(self, session: _Session) -> None:
        """Try again after the backoff, or give up."""
        now_s, give_up_s = self.queue.now_s, self._backoff.give_up_s
        self._view.release(session.number, now_s)
        backoff_s = next(session.waits_s)
        if session.is_hopeless:
            self._end(session, FAILED, session.refusal)
        elif give_up_s and now_s + backoff_s > session.since_s + give_up_s:
            self._end(session, FAILED, f"no room within {give_up_s:g} s ({session.refusal})")
        elif session.n_attempts >= self._max_attempts:
            reason = f"{session.n_attempts} attempts to open a session failed ({session.refusal})"
            self._end(session, FAILED, reason)
        else:
            self.queue.at(now_s + backoff_s, self._ask, session)

    def _finish(self, session: _Session) -> None:
        self._note_first_token(session)
        self._view.release(session.number, self.queue.now_s)
        self._close(session, session.opened)
        self._end(session, COMPLETED, "")

    def _unanswered(self, session: _Session, opening: int) -> None:
        """A server can never be reached: its connection has been given up."""
        if session.opening == opening:
            self._lose(session, "a server of the chain cannot be reached")

    def _lose(self, session: _Session, reason: str) -> None:
        """The chain is out of reach for too long: the request has failed."""
        if session.course is not None and session.course.first_at_s is not None:
            self._note_first_token(session)
        self._view.release(session.number, self.queue.now_s)
        self._close(session, session.opened)
        self._end(session, FAILED, reason)

    def _note_first_token(self, session: _Session) -> None:
        if session.ttft_s is None:
            assert session.course is not None and session.course.first_at_s is not None
            session.ttft_s = session.course.first_at_s - session.plan.arrival_at_s

    def _close(self, session: _Session, hops: tuple[Hop, ...]) -> None:
        """Tell servers that the session is over."""
        now_s, key = self.queue.now_s, (session.number, session.opening)
        for hop in hops:
            at_s = self.control.arrives_at_s(session.plan.client, hop.server, now_s)
            # A server that does not hear of it forgets the session as the connection is given up.
            self.queue.free_at(min(at_s, now_s + GIVE_UP_S), self._free, key, hop.server)

    def _free(self, key: Key, server: int) -> None:
        self._servers.release(key, server, self.queue.now_s)
        if self._mover is not None:
            self._mover.released(server)

    def _cut(self, server: int, keys: list[Key]) -> None:
        """``server`` has dropped these sessions: those that go on ask for a chain now."""
        self.serving.restart(server)
        for number, opening in keys:
            session = self._sessions.get(number)
            # Others have ended or were refused, and their closing is on its way.
            if session is not None and session.opening == opening and not session.refusal:
                self._cut_session(session, server)

    def _cut_session(self, session: _Session, server: int) -> None:
        """Start over with what is done so far as part of the prompt."""
        now_s, plan = self.queue.now_s, session.plan
        self._close(session, tuple(hop for hop in session.opened if hop.server != server))
        self._view.release(session.number, now_s)
        n_new = session.course.cut(now_s) if session.course else 0
        if n_new:
            self._note_first_token(session)
            session.n_done += n_new
            n_prompt, n_left = plan.n_input_tokens + session.n_done, plan.n_output_tokens - session.n_done
            session.request = RequestSpec(plan.client, n_prompt, n_left)
        if not session.n_done:
            session.waiting_s = session.setup_s = None
        session.n_cuts += 1
        session.opening += 1
        session.since_s, session.waits_s = now_s, self._backoff.waits_s(session.plan.index)
        self.queue.at(now_s, self._ask, session)

    def _end(self, session: _Session, status: str, reason: str) -> None:
        now_s, plan = self.queue.now_s, session.plan
        assert session.number not in self._ended, f"request {plan.index} ends twice"
        del self._sessions[session.number]
        self._load.end(now_s)
        time_s = now_s - plan.arrival_at_s
        self._ended[session.number] = SimulatedRequest(
            plan=plan,
            route=session.route,
            waiting_s=time_s if session.waiting_s is None else session.waiting_s,
            ttft_s=session.ttft_s,
            time_s=time_s,
            status=status,
            reason=reason,
            setup_s=session.setup_s,
            ended_at_s=now_s,
            n_attempts=session.n_attempts,
            n_cuts=session.n_cuts,
        )
