"""The engine ``fast``: what nodes and coordinator do for sessions that nothing disturbs, event by event.

A request asks for a chain when it arrives, opens it on all hops at once and retries where a server has no room;
its service takes the closed form of ``policies.problem.service_s``, or goes step by step (``testbed.fast.steps``) where
servers compute several sessions together. See ``docs/simulator-modes.md``.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from policies.online import OnlinePolicy
from policies.problem import BlockRange, PolicyError, Route
from policies.replay import ServiceTimes
from policies.workload import RequestPlan
from testbed.control.coordinator import Coordinator
from testbed.control.mover import Mover, Way
from testbed.control.placing import PlacedExperiment
from testbed.fast.events import EventQueue
from testbed.fast.servers import Key, OnCache, Refused, Servers
from testbed.fast.steps import Steps, legs_of
from testbed.rundir import MOVED
from testbed.scenario.experiment import Experiment

COMPLETED, FAILED = "completed", "failed"
"""The states that end a request: all tokens came; no room in time, or no chain can ever serve it."""

MAX_ATTEMPTS = 1_000_000
"""As ``nodes.session``: a session that is refused so often is not tried again."""


class Disturbed(Exception):
    """A session would be cut: that is for the system itself (the engine ``virtual``)."""


class Move(NamedTuple):
    """One server's change.

    From ``closed_at_s`` it took new sessions only on blocks that it keeps (none if it does not drain),
    at ``drained_at_s`` it began to load, and from ``open_at_s`` it served its new range.
    """

    server: int
    old: BlockRange
    new: BlockRange
    decided_at_s: float
    closed_at_s: float
    drained_at_s: float
    open_at_s: float


class SimulatedRequest(NamedTuple):
    """What became of a request. Times count from its arrival; ``None``: it did not get so far.

    ``waiting_s`` ends when the attempt that was admitted begins (or with the request), ``setup_s`` from there until
    the prompt is sent. ``route`` is the chain that it was admitted on, ``n_rejections`` how often it asked again.
    """

    plan: RequestPlan
    status: str
    route: Route | None
    n_rejections: int
    waiting_s: float
    setup_s: float | None
    ttft_s: float | None
    time_s: float | None
    reason: str = ""
    n_replays: int = 0
    n_done: int = 0
    """Tokens of one that did not complete."""


class FastRun(NamedTuple):
    """Requests in the order of the experiment, and the servers' changes in the order of their ends."""

    requests: list[SimulatedRequest]
    moves: list[Move]
    decisions_s: list[float]
    """Real seconds of every routing decision."""
    steps: array[float] | None = None
    """Rows of ``testbed.fast.steps.COLUMNS`` where servers compute several sessions together, if they were asked for."""


def simulate_fast(
    experiment: Experiment,
    placed: PlacedExperiment,
    online: OnlinePolicy | None = None,
    *,
    max_attempts: int = MAX_ATTEMPTS,
    on_cache: OnCache | None = None,
    most_steps: int = 0,
) -> FastRun:
    """Serve the experiment's requests. Deterministic: same arguments, same answer.

    ``online`` may change the placement; it must let sessions drain. ``on_cache`` is called at every change of a server's
    account until the last request has ended. Up to ``most_steps`` steps are kept. Raises ``PolicyError`` if a policy fails or breaks a rule,
    ``Disturbed`` when a session would have to be cut.
    """
    assert online is None or online.drains, "a policy that cuts sessions disturbs them"
    return _Run(experiment, placed, online, max_attempts, on_cache, most_steps).serve()


@dataclass(slots=True)
class _Session:
    """A request on its way. ``opening`` numbers its attempts."""

    number: int
    plan: RequestPlan
    waits_s: Iterator[float]
    """Between one attempt to open it and the next."""
    opening: int = 0
    asked_at_s: float = 0.0
    route: Route | None = None
    opened: tuple[int, ...] = ()
    """The servers that have said yes."""
    refusal: str = ""
    is_final: bool = False
    """Waiting for others to end does not help."""


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
    ) -> None:
        self._queue = queue = EventQueue()
        self._experiment = experiment
        self._problem = experiment.problem
        self._setup_s = experiment.calibration.session_setup_s
        self._max_attempts = max_attempts
        self._servers = Servers(placed.placement, on_cache)
        self._coordinator = Coordinator(experiment, placed, lambda: queue.now_s, queue.at)
        self._times = ServiceTimes(experiment.problem)
        self._steps: Steps | None = None
        """``None``: sessions do not meet on servers, and the closed form holds."""
        if experiment.batching == "continuous":
            problem = experiment.problem
            self._steps = Steps(
                queue,
                problem.servers,
                problem.model.token_bytes,
                hub_token_s=problem.hub_token_s,
                chunk_tokens=experiment.chunk_tokens,
                most=most_steps,
            )
        self._ended: dict[int, SimulatedRequest] = {}
        self._moves: list[Move] = []
        self._draining: dict[int, tuple[Way, float]] = {}
        self._mover: Mover | None = None
        if online is not None:
            self._mover = Mover(
                experiment, online, self._coordinator, self, lambda: queue.now_s, self._note_move
            )
            self._plan_check(self._mover)

    def serve(self) -> FastRun:
        requests = self._experiment.requests
        for number, plan in enumerate(requests):
            self._queue.at(plan.arrival_at_s, self._arrive, number, plan)
        while len(self._ended) < len(requests):
            self._queue.step()
        ended = [self._ended[number] for number in range(len(requests))]
        steps = self._steps.rows if self._steps is not None else None
        return FastRun(ended, self._moves, self._coordinator.decisions_s, steps)

    # Sessions.

    def _arrive(self, number: int, plan: RequestPlan) -> None:
        if self._mover is not None:
            self._mover.load.arrive(self._queue.now_s)
        self._ask(_Session(number, plan, self._experiment.backoff.waits_s(plan.index)))

    def _ask(self, session: _Session) -> None:
        """Ask for a chain."""
        session.opening += 1
        self._coordinator.ask(session.plan.index, partial(self._told, session))

    def _told(self, session: _Session, route: Route | PolicyError | None) -> None:
        """Send an opening to all servers of the chain."""
        now_s, plan = self._queue.now_s, session.plan
        session.asked_at_s = now_s
        session.refusal, session.is_final, session.opened = "", False, ()
        if isinstance(route, PolicyError):
            raise PolicyError(f"request {plan.index}: {route}") from route
        if route is None:
            session.refusal, session.is_final = "no route covers the model", True
            self._refused(session)
            return
        session.route = route
        rtt_s = self._problem.raw_rtt_s[plan.client]
        block_bytes = self._problem.model.cache_bytes(plan.known.n_tokens)
        slowest_s = 0.0
        for hop in route.hops:
            n_bytes = (hop.last - hop.first) * block_bytes
            self._queue.at(now_s + rtt_s[hop.server] / 2, self._open, session, hop, n_bytes)
            slowest_s = max(slowest_s, rtt_s[hop.server])
        self._queue.at(now_s + slowest_s, self._answered, session)

    def _open(self, session: _Session, hop: Any, n_bytes: float) -> None:
        """An opening reaches a server."""
        refused = self._servers.reserve((session.number, session.opening), hop, n_bytes, self._queue.now_s)
        if refused is None:
            session.opened += (hop.server,)
        else:
            self._note_refusal(session, hop.server, refused)

    def _note_refusal(self, session: _Session, server: int, refused: Refused) -> None:
        session.refusal = f"{self._problem.servers[server].name}: {refused.reason}"
        session.is_final |= refused.is_final

    def _answered(self, session: _Session) -> None:
        """All servers have answered."""
        now_s, plan = self._queue.now_s, session.plan
        if session.refusal:
            rtt_s = self._problem.raw_rtt_s[plan.client]
            closed_at_s = now_s + max((rtt_s[server] for server in session.opened), default=0.0)
            self._close(session)
            self._queue.free_at(closed_at_s, self._refused, session)
            return
        assert session.route is not None
        ready_at_s = max(now_s, session.asked_at_s + self._problem.initial_delay_s) + self._setup_s
        hops = session.route.hops
        if self._steps is not None:
            legs = legs_of(self._experiment, plan.served, hops)
            self._steps.walk(plan, hops, legs, ready_at_s, partial(self._finish, session, ready_at_s))
            return
        first_s, all_s = self._times.of(plan.served, hops)
        self._queue.free_at(ready_at_s + all_s, self._finish, session, ready_at_s, ready_at_s + first_s)

    def _refused(self, session: _Session) -> None:
        """Try again after the backoff, or give up."""
        now_s, plan, give_up_s = self._queue.now_s, session.plan, self._experiment.backoff.give_up_s
        self._coordinator.release(plan.index)
        if session.is_final:
            give_up_s = give_up_s or self._experiment.recovery.give_up_s
        backoff_s = next(session.waits_s)
        if give_up_s and now_s + backoff_s > plan.arrival_at_s + give_up_s:
            self._fail(session, f"no room within {give_up_s:g} s ({session.refusal})")
        elif session.opening >= self._max_attempts:
            self._fail(session, f"{session.opening} attempts to open a session failed ({session.refusal})")
        else:
            self._queue.at(now_s + backoff_s, self._ask, session)

    def _finish(self, session: _Session, ready_at_s: float, first_at_s: float) -> None:
        plan = session.plan
        self._coordinator.release(plan.index)
        self._close(session)
        self._end(
            session,
            SimulatedRequest(
                plan=plan,
                status=COMPLETED,
                route=session.route,
                n_rejections=session.opening - 1,
                waiting_s=session.asked_at_s - plan.arrival_at_s,
                setup_s=ready_at_s - session.asked_at_s,
                ttft_s=first_at_s - plan.arrival_at_s,
                time_s=self._queue.now_s - plan.arrival_at_s,
            ),
        )

    def _fail(self, session: _Session, reason: str) -> None:
        plan = session.plan
        waited_s, n_rejections = self._queue.now_s - plan.arrival_at_s, session.opening - 1
        self._end(
            session,
            SimulatedRequest(plan, FAILED, None, n_rejections, waited_s, None, None, None, reason),
        )

    def _end(self, session: _Session, ended: SimulatedRequest) -> None:
        if self._mover is not None:
            self._mover.load.end(self._queue.now_s)
        self._ended[session.number] = ended

    def _close(self, session: _Session) -> None:
        """Tell servers that the session is over."""
        now_s, key = self._queue.now_s, (session.number, session.opening)
        rtt_s = self._problem.raw_rtt_s[session.plan.client]
        for server in session.opened:
            self._queue.free_at(now_s + rtt_s[server] / 2, self._free, key, server)

    def _free(self, key: Key, server: int) -> None:
        self._servers.release(key, server, self._queue.now_s)
        if server in self._draining:
            self._load_if_drained(server)

    # Moves of servers.

    def _plan_check(self, mover: Mover) -> None:
        at_s = mover.next_check_at_s()
        if at_s < math.inf:
            self._queue.at(at_s, self._check, mover)

    def _check(self, mover: Mover) -> None:
        mover.check()
        self._plan_check(mover)

    def rehost(self, way: Way) -> None:
        """As ``testbed.control.mover.Carrier``."""
        now_s, server = self._queue.now_s, way.server
        self._servers.offer(server, way.stays, min(way.new_bytes, self._servers.room_bytes(server)))
        self._draining[server] = way, now_s
        assert way.drain_s is not None
        self._queue.at(now_s + way.drain_s, self._overdue, way)
        self._load_if_drained(server)

    def _load_if_drained(self, server: int) -> None:
        if self._servers.is_drained(server):
            assert self._mover is not None
            way, closed_at_s = self._draining.pop(server)
            now_s = self._queue.now_s
            self._mover.drained(server, now_s)
            self._queue.at(now_s + way.load_s, self._loaded, way, closed_at_s, now_s)

    def _overdue(self, way: Way) -> None:
        if self._draining.get(way.server, (None, 0.0))[0] is way:
            name = self._problem.servers[way.server].name
            raise Disturbed(
                f"{name} cuts the sessions that have not ended {way.drain_s:g} s after it began to move"
            )

    def _loaded(self, way: Way, closed_at_s: float, drained_at_s: float) -> None:
        assert self._mover is not None
        self._servers.offer(way.server, way.new, way.new_bytes)
        self._mover.arrived(way, closed_at_s, drained_at_s, self._queue.now_s, 0)

    def _note_move(self, event: str, at_s: float, details: dict[str, Any]) -> None:
        if event == MOVED:
            names = [server.name for server in self._problem.servers]
            self._moves.append(move_of(details, names))


def move_of(line: dict[str, Any], names: list[str]) -> Move:
    """A line of ``events.jsonl`` that says that a server has moved."""
    times = (line[name] for name in ("decided_at_s", "closed_at_s", "drained_at_s", "open_at_s"))
    server = names.index(line["server"])
    return Move(server, BlockRange(*line["old"]), BlockRange(*line["new"]), *times)
