"""The mode ``real`` when servers fail: sessions step by step, recovery, and what routers believe.

``docs/faults.md`` says what clients and servers do. An opening covers the whole model for a new session, or
the blocks of hops that were lost.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from nodes.links import GIVE_UP_S
from policies.bans import Bans
from policies.interfaces import Router
from policies.joining import join
from policies.membership import Membership, MembershipRules
from policies.problem import BlockRange, Hop, Placement, PolicyError, Problem, RequestSpec, Route
from policies.replay import ServiceTimes
from policies.subrange import SubrangeRouter
from policies.workload import Backoff, RequestPlan
from testbed.experiment import Fault, RecoveryRules
from testbed.simulation.events import EventQueue
from testbed.simulation.machines import Machines
from testbed.simulation.moving import Move
from testbed.simulation.network import ChangingNetwork, SteadyTimes, Ways, busy_s
from testbed.simulation.real import COMPLETED, FAILED, MAX_ATTEMPTS, SimulatedRequest
from testbed.simulation.record import Record, Recovery
from testbed.simulation.servers import Key, OnCache, Servers
from testbed.simulation.view import RouterView

_NO_HOPS = Route((), 0.0, 0.0)


class Failures(NamedTuple):
    """What can go wrong in an experiment, and what is done about it."""

    faults: tuple[Fault, ...] = ()
    recovery: RecoveryRules = RecoveryRules()
    membership: MembershipRules = MembershipRules()
    absent: frozenset[int] = frozenset()


class FailingRun(NamedTuple):
    """Requests in the order given, servers that joined as moves, and what happened."""

    requests: list[SimulatedRequest]
    moves: list[Move]
    record: Record


def simulate_failing(
    problem: Problem,
    placement: Placement,
    bind: Callable[[Problem, Placement], Router],
    requests: Sequence[RequestPlan],
    failures: Failures,
    *,
    session_setup_s: float = 0.0,
    backoff: Backoff = Backoff(),  # noqa: B008 - frozen
    serial_compute: bool = False,
    state_age_s: float = 0.0,
    network: ChangingNetwork | None = None,
    on_cache: OnCache | None = None,
) -> FailingRun:
    """Serve ``requests`` while servers fail. Deterministic: same arguments, same answer.

    Arguments as of ``testbed.simulation.real.simulate_real``; ``bind`` makes routers, also for parts of the
    model. ``problem`` has hub-spoke communication. Raises ``PolicyError`` if a policy breaks a rule.
    """
    assert not problem.forwarding, "only a hub has the inputs that a replay needs"
    run = _Run(problem, placement, bind, failures, session_setup_s, backoff, serial_compute)
    run.view = RouterView(placement.cache_bytes, state_age_s)
    run.servers = Servers(placement, on_cache)
    run.ways = network or SteadyTimes(problem)
    return run.serve(requests)


@dataclass(slots=True, eq=False)
class _Held:
    """A hop that a server has admitted. ``epoch`` is the server's then, ``n_cached`` the tokens in its cache."""

    hop: Hop
    key: Key
    epoch: int
    n_cached: int = 0


@dataclass(slots=True, eq=False)
class _Repair:
    """A failure that is being mended: the hops ``[first, last)`` of the chain are lost.

    ``failed_at_s`` to ``detected_at_s`` is the noticing; ``keys`` are those of the replacements.
    """

    failed_at_s: float
    detected_at_s: float
    first: int
    last: int
    attempt: int = 0
    keys: set[Key] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class _Session:
    """A request on its way. ``turn`` numbers what it waits for: answers to anything earlier are void."""

    number: int
    plan: RequestPlan
    backoff_s: float
    turn: int = 0
    n_keys: int = 0
    n_attempts: int = 0
    hops: list[_Held] = field(default_factory=list)
    n_done: int = 0
    """Output tokens that are there."""
    at: int = 0
    """The hop whose answer to the present step is next."""
    replaying: int | None = None
    """The hop that is given its history."""
    awaits: int | None = None
    """The hop from which an answer is awaited, since ``sent_at_s``."""
    sent_at_s: float = 0.0
    is_watched: bool = False
    has_ended: bool = False
    repair: _Repair | None = None
    n_replays: int = 0
    wait_s: float = 0.0
    waiting_s: float | None = None
    setup_s: float | None = None
    ttft_s: float | None = None

    @property
    def n_history(self) -> int:
        """Tokens in the caches of the hops that are through with everything before the present step."""
        return self.plan.n_input_tokens + self.n_done - 1 if self.n_done else 0

    @property
    def n_new(self) -> int:
        """Tokens of the present step."""
        return 1 if self.n_done else self.plan.n_input_tokens


@dataclass(slots=True, eq=False)
class _Opening:
    """One attempt to open hops over the blocks that a session lacks."""

    session: _Session
    asked_at_s: float
    unanswered: dict[int, int]
    """Server by number of the key of what it was sent."""
    hops: tuple[Hop, ...]
    held: list[_Held] = field(default_factory=list)
    broken: set[int] = field(default_factory=set)
    """Servers without connection."""
    refusal: str = ""
    is_hopeless: bool = False
    was_idle: bool = False
    is_over: bool = False


class _Run:
    """One simulation."""

    view: RouterView
    servers: Servers
    ways: Ways

    def __init__(
        self,
        problem: Problem,
        placement: Placement,
        bind: Callable[[Problem, Placement], Router],
        failures: Failures,
        session_setup_s: float,
        backoff: Backoff,
        is_serial: bool,
    ) -> None:
        self.queue = EventQueue()
        self.record = Record()
        self._problem = problem
        self._names = [server.name for server in problem.servers]
        self._rules = failures.recovery
        self._session_setup_s = session_setup_s
        self._backoff = backoff
        self._is_serial = is_serial
        self._times = ServiceTimes(problem)
        self._router = SubrangeRouter(bind, problem, placement)
        self._bans = Bans(failures.recovery.ban_s if failures.recovery.ban_failed_servers else 0.0)
        self._membership = Membership(failures.membership, problem.n_servers, failures.absent)
        self._machines = Machines(
            self._names, failures.faults, failures.absent, self._membership, self.queue, self.record, self
        )
        self._free_at_s = [0.0] * problem.n_servers
        self._waiting: list[dict[int, _Session]] = [{} for _ in problem.servers]
        """Sessions whose step is on its way to a server or in it."""
        self._closing: set[Key] = set()
        self._moves: list[Move] = []
        self._ended: dict[int, SimulatedRequest] = {}

    def serve(self, requests: Sequence[RequestPlan]) -> FailingRun:
        for number, plan in enumerate(requests):
            self.queue.at(plan.arrival_at_s, self._arrive, number, plan)
        while len(self._ended) < len(requests):
            self.queue.step()
        for server in range(self._problem.n_servers):
            left = [key for key in self.servers.keys(server) if key not in self._closing]
            assert not left, f"{self._names[server]} still holds cache of sessions that have ended: {left}"
        return FailingRun([self._ended[number] for number in range(len(requests))], self._moves, self.record)

    # What machines tell.

    def killed(self, server: int) -> None:
        now_s = self.queue.now_s
        self.servers.cut(server, now_s)
        self._free_at_s[server] = now_s
        waiting, self._waiting[server] = self._waiting[server], {}
        for session in waiting.values():
            self._plan_reset(session, server, now_s)

    def begun(self, server: int) -> None:
        placement = self._router.placement
        self.servers.offer(server, placement.ranges[server], placement.cache_bytes[server])

    def joined(self, server: int) -> None:
        now_s = self.queue.now_s
        placement = join(self._problem, self._router.placement, server, self._membership.believed(now_s))
        self._router.replace(placement)
        self.view.replace(placement.cache_bytes)
        held = placement.ranges[server]
        self.servers.offer(server, held, placement.cache_bytes[server])
        nothing = BlockRange(0, 0)
        self._moves.append(Move(server, nothing, held, now_s, now_s, now_s, now_s))
        self.record.event("moved", now_s, server=self._names[server], old=list(nothing), new=list(held))

    def leaves(self, server: int) -> bool:
        self.servers.offer(server, BlockRange(0, 0), self._router.placement.cache_bytes[server])
        return self.servers.is_empty(server)

    # Opening.

    def _arrive(self, number: int, plan: RequestPlan) -> None:
        self._ask(_Session(number, plan, self._backoff.first_s))

    def _lost(self, session: _Session) -> tuple[int, int]:
        """The blocks that the session lacks."""
        repair = session.repair
        if repair is None:
            return 0, self._problem.model.n_blocks
        return session.hops[repair.first].hop.first, session.hops[repair.last - 1].hop.last

    def _ask(self, session: _Session) -> None:
        """Ask for a chain over what is lacking and send an opening to all of its servers."""
        now_s, plan = self.queue.now_s, session.plan
        first, last = self._lost(session)
        usable = self._membership.believed(now_s) - self._bans.banned(plan.client, now_s)
        wrong = self._membership.wrong(now_s)
        if session.repair is None:
            session.n_attempts += 1
        state = self.view.state(session.number, now_s)
        opening = _Opening(session, now_s, {}, (), was_idle=self.view.is_idle)
        try:
            route = self._router.route(self._left(session), state, now_s, usable, first, last)
        except PolicyError as error:
            raise PolicyError(f"request {plan.index}: {error}") from error
        self.record.n_decisions += 1
        self.record.n_stale_decisions += bool(wrong)
        if route is None:
            opening.refusal = f"no route covers blocks [{first}, {last})"
            if (first, last) == (0, self._problem.model.n_blocks):
                opening.refusal = "no route covers the model"
            nothing_changes = not wrong and not self._machines.may_change
            is_banned = bool(self._bans.banned(plan.client, now_s))
            opening.is_hopeless = opening.was_idle and nothing_changes and not is_banned
            self._refused(opening)
            return
        self.record.n_misled_decisions += any(not self._machines.is_up(hop.server) for hop in route.hops)
        opening.hops, session.wait_s = route.hops, route.wait_s
        self._hold(session, route.hops)
        for hop in route.hops:
            session.n_keys += 1
            key = session.number, session.n_keys
            opening.unanswered[session.n_keys] = hop.server
            at_s = self.ways.arrives_at_s(plan.client, hop.server, now_s)
            if at_s < math.inf:
                self.queue.at(at_s, self._open, opening, hop, key)
        self.queue.at(now_s + self._rules.connect_timeout_s, self._unanswered, opening)

    def _left(self, session: _Session) -> RequestSpec:
        """What routing is asked for: tokens that are there are part of the prompt."""
        plan, n_done = session.plan, session.n_done
        return RequestSpec(plan.client, plan.n_input_tokens + n_done, plan.n_output_tokens - n_done)

    def _hold(self, session: _Session, more: Sequence[Hop] = ()) -> None:
        """What routers see of the session: the hops that are not lost, and ``more``."""
        repair, now_s = session.repair, self.queue.now_s
        lost = range(repair.first, repair.last) if repair else range(0)
        hops = tuple(held.hop for i, held in enumerate(session.hops) if i not in lost) + tuple(more)
        if not hops:
            self.view.release(session.number, now_s)
            return
        request = self._left(session)
        expected_s = self._times.of(request, hops)[1]
        if not session.n_done:
            expected_s += self._problem.initial_delay_s + self._session_setup_s
        block_bytes = self._problem.model.cache_bytes(request.n_tokens)
        self.view.hold(session.number, hops, block_bytes, now_s + expected_s, now_s)

    def _open(self, opening: _Opening, hop: Hop, key: Key) -> None:
        """An opening reaches a server's machine."""
        server, now_s = hop.server, self.queue.now_s
        if opening.is_over or self._machines.waits(server, self._open, opening, hop, key):
            return
        held: _Held | None = None
        if not self._machines.is_up(server):
            reason, is_broken = "connection refused", True
        else:
            is_broken = False
            n_bytes = hop.n_blocks * self._problem.model.cache_bytes(self._left(opening.session).n_tokens)
            refused = self.servers.reserve(key, hop, n_bytes, now_s)
            if refused is None:
                held = _Held(hop, key, self._machines.epoch(server))
            elif self.servers.offers(hop) and self.servers.is_empty(server):
                opening.is_hopeless |= opening.was_idle and not self._machines.may_change
            reason = refused or ""
        back_at_s = self.ways.returns_at_s(opening.session.plan.client, server, now_s)
        if back_at_s < math.inf:
            self.queue.at(back_at_s, self._answered, opening, hop, key, held, reason, is_broken)

    def _answered(
        self, opening: _Opening, hop: Hop, key: Key, held: _Held | None, reason: str, is_broken: bool
    ) -> None:
        if opening.is_over:
            if held is not None:
                self._close(opening.session, [held])
            return
        del opening.unanswered[key[1]]
        if held is not None:
            opening.held.append(held)
        else:
            opening.refusal = f"{self._names[hop.server]}: {reason}"
        if is_broken:
            opening.broken.add(hop.server)
        if not opening.unanswered:
            self._opened(opening)

    def _unanswered(self, opening: _Opening) -> None:
        if opening.is_over:
            return
        silent = list(opening.unanswered.values())
        opening.broken.update(silent)
        opening.refusal = (
            f"{self._names[silent[0]]}: no connection within {self._rules.connect_timeout_s:g} s"
        )
        self._opened(opening)

    def _opened(self, opening: _Opening) -> None:
        """All servers have answered, or it has taken too long."""
        opening.is_over = True
        session, now_s, client = opening.session, self.queue.now_s, opening.session.plan.client
        opening.held.sort(key=lambda held: held.hop.first)
        if self._rules.ban_failed_servers:
            for server in sorted(opening.broken):
                self._bans.failed(client, server, now_s)
        if self._rules.mode == "head" and session.n_history and not opening.refusal:
            self._bans.failed(client, opening.held[0].hop.server, now_s)
            name = self._names[opening.held[0].hop.server]
            opening.refusal = f"{name}: a new session cannot start at position {session.n_history}"
        if opening.refusal:
            answers_s = [self.ways.answered_at_s(client, held.hop.server, now_s) for held in opening.held]
            self._close(session, opening.held)
            closed_at_s = min(max(answers_s, default=now_s), now_s + GIVE_UP_S)
            self.queue.free_at(closed_at_s, self._refused, opening)
            return
        if session.repair is None:
            ready_at_s = max(now_s, opening.asked_at_s + self._problem.initial_delay_s)
            ready_at_s += self._session_setup_s
            session.hops = opening.held
            session.waiting_s = opening.asked_at_s - session.plan.arrival_at_s
            session.setup_s = ready_at_s - opening.asked_at_s
            self.queue.at(ready_at_s, self._step, session)
        else:
            self._replaced(session, session.repair, opening)

    def _refused(self, opening: _Opening) -> None:
        """Try again after a while, or give up."""
        session, now_s, repair = opening.session, self.queue.now_s, opening.session.repair
        self._hold(session)
        if repair is not None:
            repair.attempt += 1
            again_at_s = now_s + self._rules.retry_delay_s(repair.attempt)
            if again_at_s > repair.detected_at_s + self._rules.give_up_s:
                first, last = self._lost(session)
                what = f"blocks [{first}, {last}) could not be replaced within {self._rules.give_up_s:g} s"
                self._fail(session, f"{what} ({opening.refusal})")
            else:
                self.queue.at(again_at_s, self._ask, session)
            return
        give_up_s = self._backoff.give_up_s
        if not give_up_s and (opening.broken or not opening.hops):
            give_up_s = self._rules.give_up_s  # servers that are gone may stay away for ever
        if opening.is_hopeless:
            self._fail(session, opening.refusal)
        elif give_up_s and now_s + session.backoff_s > session.plan.arrival_at_s + give_up_s:
            self._fail(session, f"no room within {give_up_s:g} s ({opening.refusal})")
        elif session.n_attempts >= MAX_ATTEMPTS:
            self._fail(session, f"{session.n_attempts} attempts to open a session failed ({opening.refusal})")
        else:
            self.queue.at(now_s + session.backoff_s, self._ask, session)
            session.backoff_s = min(2 * session.backoff_s, self._backoff.max_s)

    # Steps.

    def _step(self, session: _Session) -> None:
        """Send the present step to the hop whose turn it is."""
        self._send(session, session.at, session.n_new, is_prompt=not session.n_done)

    def _send(self, session: _Session, number: int, n_tokens: int, *, is_prompt: bool) -> None:
        now_s, held, client = self.queue.now_s, session.hops[number], session.plan.client
        server = held.hop.server
        session.turn += 1
        session.awaits, session.sent_at_s = number, now_s
        if self._machines.epoch(server) != held.epoch:
            self._plan_reset(session, server, self._machines.died_at_s(server))
        else:
            self._waiting[server][session.number] = session
            request = RequestSpec(client, n_tokens, session.plan.n_output_tokens)
            at_s = self.ways.step_arrives_at_s(request, None, server, now_s, is_prompt)
            if at_s < math.inf:
                self.queue.at(at_s, self._compute, session, session.turn, request, is_prompt)
        if not session.is_watched:
            session.is_watched = True
            self.queue.at(now_s + self._rules.request_timeout_s, self._check_answer, session)

    def _compute(self, session: _Session, turn: int, request: RequestSpec, is_prompt: bool) -> None:
        """A step reaches its server."""
        held = self._still_there(session, turn)
        if held is None:
            return
        server, now_s = held.hop.server, self.queue.now_s
        if self._machines.waits(server, self._compute, session, turn, request, is_prompt):
            return
        start_at_s = max(now_s, self._free_at_s[server]) if self._is_serial else now_s
        takes_s = busy_s(self._problem, request, held.hop, is_prompt) * self._machines.factor(server)
        self._free_at_s[server] = start_at_s + takes_s
        self.queue.at(start_at_s + takes_s, self._computed, session, turn, request, is_prompt, now_s)

    def _computed(
        self, session: _Session, turn: int, request: RequestSpec, is_prompt: bool, arrived_at_s: float
    ) -> None:
        held = self._still_there(session, turn)
        if held is None:
            return
        server, now_s = held.hop.server, self.queue.now_s
        # What a halted process was computing goes on without it; only its answer waits.
        if self._machines.waits(server, self._computed, session, turn, request, is_prompt, arrived_at_s):
            return
        del self._waiting[server][session.number]
        back_at_s = self.ways.step_returns_at_s(request, server, now_s, is_prompt, True)
        if back_at_s < math.inf:
            n_tokens = request.n_input_tokens
            self.queue.at(back_at_s, self._back, session, turn, n_tokens, arrived_at_s, now_s)

    def _still_there(self, session: _Session, turn: int) -> _Held | None:
        """The hop that a step is for, unless its server has died or its client has given it up."""
        if session.turn != turn or session.awaits is None:
            return None
        held = session.hops[session.awaits]
        return held if self._machines.epoch(held.hop.server) == held.epoch else None

    def _back(
        self, session: _Session, turn: int, n_tokens: int, arrived_at_s: float, departed_at_s: float
    ) -> None:
        """A hop's answer is at the client."""
        if session.turn != turn:
            return
        assert session.awaits is not None
        number, session.awaits = session.awaits, None
        held = session.hops[number]
        held.n_cached += n_tokens
        self._bans.served(session.plan.client, held.hop.server)
        if session.replaying is not None:
            self._replay(session)
            return
        n_bytes = self._problem.model.token_bytes * n_tokens
        times_s = session.sent_at_s, arrived_at_s, departed_at_s, self.queue.now_s
        self.record.step(session.plan.index, session.n_done, number, *held.hop, *times_s, n_bytes, n_bytes)
        session.at += 1
        if session.at == len(session.hops):
            self._token(session)
        else:
            self._step(session)

    def _token(self, session: _Session) -> None:
        plan = session.plan
        session.at = 0
        session.n_done += 1
        if session.ttft_s is None:
            session.ttft_s = self.queue.now_s - plan.arrival_at_s
        self._machines.token(plan.index, session.n_done)
        if session.n_done < plan.n_output_tokens:
            self._step(session)
        else:
            self._end(session, COMPLETED, "")

    # Failure and recovery.

    def _plan_reset(self, session: _Session, server: int, died_at_s: float) -> None:
        """The client learns that ``server`` died by the reset of its connection, or has learnt so."""
        now_s = self.queue.now_s
        reset_at_s = max(now_s, self.ways.returns_at_s(session.plan.client, server, died_at_s))
        if reset_at_s < math.inf:
            self.queue.at(reset_at_s, self._lose, session, session.turn, "connection reset", now_s)

    def _check_answer(self, session: _Session) -> None:
        """See whether the awaited answer is overdue."""
        session.is_watched = False
        if session.has_ended or session.awaits is None:
            return
        due_at_s = session.sent_at_s + self._rules.request_timeout_s
        if due_at_s > self.queue.now_s:
            session.is_watched = True
            self.queue.at(due_at_s, self._check_answer, session)
            return
        reason = f"no answer for {self._rules.request_timeout_s:g} s"
        self._lose(session, session.turn, reason, session.sent_at_s)

    def _lose(self, session: _Session, turn: int, reason: str, failed_at_s: float) -> None:
        """The client notices that a hop has failed it."""
        if session.turn != turn or session.awaits is None:
            return
        now_s, client, number = self.queue.now_s, session.plan.client, session.awaits
        server = session.hops[number].hop.server
        session.turn += 1
        session.awaits = None
        self._waiting[server].pop(session.number, None)
        last = number + 1
        while last < len(session.hops) and self._is_known_lost(session, session.hops[last]):
            last += 1
        lost = session.hops[number:last]
        self.record.event(
            "detected",
            now_s,
            request=session.plan.index,
            servers=[self._names[held.hop.server] for held in lost],
            blocks=[lost[0].hop.first, lost[-1].hop.last],
            position=session.n_history,
            reason=reason,
            failed_at_s=failed_at_s,
        )
        if self._rules.ban_failed_servers:
            for held in lost:
                self._bans.failed(client, held.hop.server, now_s)
        if self._rules.mode == "off":
            self._fail(session, f"{self._names[server]}: {reason}")
            return
        self._close(session, lost)
        if session.repair is None:
            session.repair = _Repair(failed_at_s, now_s, number, last)
        else:  # during a replay: it is still the same standstill
            repair = session.repair
            repair.first, repair.last, repair.attempt = number, last, 0
        self._hold(session)
        self._ask(session)

    def _is_known_lost(self, session: _Session, held: _Held) -> bool:
        server = held.hop.server
        if self._machines.epoch(server) == held.epoch:
            return False
        died_at_s = self._machines.died_at_s(server)
        return self.ways.returns_at_s(session.plan.client, server, died_at_s) <= self.queue.now_s

    def _replaced(self, session: _Session, repair: _Repair, opening: _Opening) -> None:
        """Replacements are open: give them what the lost hops had."""
        self.record.event(
            "re-routed",
            self.queue.now_s,
            request=session.plan.index,
            blocks=list(self._lost(session)),
            hops=[[self._names[hop.server], hop.first, hop.last] for hop in opening.hops],
            attempt=repair.attempt,
        )
        session.hops[repair.first : repair.last] = opening.held
        repair.keys.update(held.key for held in opening.held)
        session.replaying = repair.first
        # Until they are given up the replacements count as held, and nothing as lost.
        repair.last = repair.first
        self._hold(session)
        self._replay(session)

    def _replay(self, session: _Session) -> None:
        """Send the next replacement its history; go on with the present step when all have theirs."""
        assert session.replaying is not None and session.repair is not None
        n_history = session.n_history
        hops = session.hops
        while session.replaying < len(hops) and hops[session.replaying].n_cached >= n_history:
            session.replaying += 1
        if session.replaying < len(hops):
            self._send(session, session.replaying, n_history, is_prompt=True)
            return
        repair, session.repair, session.replaying = session.repair, None, None
        now_s, client = self.queue.now_s, session.plan.client
        new = [held.hop for held in hops if held.key in repair.keys]
        connection_s = max(self._problem.raw_rtt_s[client][hop.server] for hop in new)
        replay_s = 0.0
        if n_history:
            session.n_replays += 1
            request = RequestSpec(client, n_history, session.plan.n_output_tokens)
            for hop in new:
                replay_s += self._problem.input_rtt_s(client, hop.server, n_history)
                replay_s += busy_s(self._problem, request, hop, True)
        floor_s = (repair.detected_at_s - repair.failed_at_s) + connection_s + replay_s
        recovery = Recovery(session.plan.index, n_history, now_s - repair.failed_at_s, floor_s)
        self.record.recoveries.append(recovery)
        self.record.event(
            "replayed",
            now_s,
            request=session.plan.index,
            hops=[[self._names[hop.server], hop.first, hop.last] for hop in new],
            position=n_history,
            recovery_s=recovery.recovery_s,
            floor_s=floor_s,
        )
        self._step(session)

    # The end.

    def _fail(self, session: _Session, reason: str) -> None:
        self._end(session, FAILED, reason)

    def _end(self, session: _Session, status: str, reason: str) -> None:
        now_s, plan = self.queue.now_s, session.plan
        assert not session.has_ended, f"request {plan.index} ends twice"
        session.has_ended = True
        session.turn += 1
        session.awaits = None
        self.view.release(session.number, now_s)
        self._close(session, session.hops)
        self._machines.ended(plan.index)
        time_s = now_s - plan.arrival_at_s
        hops = tuple(held.hop for held in session.hops)
        self._ended[session.number] = SimulatedRequest(
            plan=plan,
            route=Route(hops, session.wait_s, 0.0) if hops else _NO_HOPS,
            waiting_s=time_s if session.waiting_s is None else session.waiting_s,
            ttft_s=session.ttft_s,
            time_s=time_s,
            status=status,
            reason=reason,
            setup_s=session.setup_s,
            ended_at_s=now_s,
            n_attempts=max(session.n_attempts, 1),
            n_cuts=0,
            n_replays=session.n_replays,
        )

    def _close(self, session: _Session, hops: Sequence[_Held]) -> None:
        """Tell servers that they may forget these hops."""
        now_s, client = self.queue.now_s, session.plan.client
        for held in hops:
            self._closing.add(held.key)
            at_s = self.ways.arrives_at_s(client, held.hop.server, now_s)
            # A server that does not hear of it forgets the session as the connection is given up.
            self.queue.free_at(min(at_s, now_s + GIVE_UP_S), self._free, held.key, held.hop.server)

    def _free(self, key: Key, server: int) -> None:
        if self._machines.waits(server, self._free, key, server):
            return
        self._closing.discard(key)
        self.servers.release(key, server, self.queue.now_s)
        if self.servers.is_empty(server):
            self._machines.released(server)
