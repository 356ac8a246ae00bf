"""The mode ``real``: what the testbed's nodes and coordinator do, as an event simulation.

A request asks for a chain when it arrives, opens it on all hops at once and retries where a server
has no room; see ``docs/simulator-modes.md`` for what differs from the reference and the emulation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from policies.interfaces import Router
from policies.problem import Hop, Placement, PolicyError, Problem, RequestSpec, Route
from policies.workload import Backoff, RequestPlan
from testbed.simulation.events import EventQueue
from testbed.simulation.moving import Load, Move, Mover, Online
from testbed.simulation.servers import Key, OnCache, Servers
from testbed.simulation.serving import ClosedForm, Course, SerialServers, Serving
from testbed.simulation.view import RouterView

COMPLETED, REJECTED, FAILED = "completed", "rejected", "failed"
"""The states that end a request: all tokens came; no room in time; no chain can ever serve it."""

_MAX_ATTEMPTS = 1_000_000
"""As ``nodes.session``: a session that is refused so often is not tried again."""


class SimulatedRequest(NamedTuple):
    """What became of a request; the first five fields as ``policies.replay.ReplayedRequest``.

    ``route`` is the last chain that was asked for, ``None`` if there never was one. ``waiting_s`` is
    arrival to the start of the opening that led to the first token (to the end without one),
    ``setup_s`` from there until the prompt is sent, ``ttft_s`` arrival to first token (these two
    ``None`` without a first token), ``time_s`` arrival to the end, which is ``ended_at_s``.
    ``n_attempts`` are the chains asked for, ``n_replays`` how often a moving server cut the session.
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
    n_replays: int


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
    max_attempts: int = _MAX_ATTEMPTS,
    on_cache: OnCache | None = None,
) -> RealRun:
    """Serve ``requests`` as the testbed would. Deterministic: same arguments, same answer.

    ``router`` is bound to ``problem`` and ``placement``; ``online`` lets a policy change the placement.
    With ``serial_compute`` every step of every token is simulated (see ``SerialServers``);
    ``state_age_s`` is the time between reports to the coordinator, 0 for always current;
    ``on_cache`` is told every change of a server's account. Raises ``PolicyError`` if a policy fails
    or breaks a rule.
    """
    run = _Run(problem, placement, router, session_setup_s, backoff, state_age_s, max_attempts, on_cache)
    run.serving = SerialServers(problem, run.queue) if serial_compute else ClosedForm(problem, run.queue)
    if online is not None:
        run.go_online(placement, online)
    return run.serve(requests)


@dataclass(slots=True)
class _Session:
    """A request on its way. ``opening`` numbers its openings: what an earlier one planned is void."""

    number: int
    plan: RequestPlan
    request: RequestSpec
    """What is left to do: a session that was cut has its finished tokens in the prompt."""
    since_s: float
    backoff_s: float
    opening: int = 0
    n_attempts: int = 0
    n_replays: int = 0
    asked_at_s: float = 0.0
    was_idle: bool = False
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

    serving: Serving

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
        self._ended: dict[int, SimulatedRequest] = {}

    def go_online(self, placement: Placement, online: Online) -> None:
        """Let a policy change the placement while requests are served."""

        def changed(usable: Placement) -> None:
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
        session = _Session(number, plan, request, now_s, self._backoff.first_s)
        self._sessions[number] = session
        self._ask(session)

    def _ask(self, session: _Session) -> None:
        """Ask for a chain and send an opening to all of its servers."""
        now_s, plan = self.queue.now_s, session.plan
        session.opening += 1
        session.n_attempts += 1
        session.asked_at_s = now_s
        session.refusal = ""
        session.opened = ()
        state = self._view.state(session.number, now_s)
        session.was_idle = self._view.is_idle
        try:
            route = self._router.route(session.request, state, now_s)
        except PolicyError as error:
            raise PolicyError(f"request {plan.index}: {error}") from error
        if route is None:
            session.refusal = "no route covers the model"
            self._refused(session, session.opening)
            return
        session.route = route
        self._view.hold(
            session.number, route.hops, self._block_bytes(session), self._expected_end_s(session, route), now_s
        )
        rtt_s = self._problem.raw_rtt_s[plan.client]
        for hop in route.hops:
            self.queue.at(now_s + rtt_s[hop.server] / 2, self._open, session, session.opening, hop)
        slowest_s = max(rtt_s[hop.server] for hop in route.hops)
        self.queue.at(now_s + slowest_s, self._answered, session, session.opening)
