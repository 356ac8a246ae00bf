"""The steps of sessions with hub-spoke communication when servers fail, and how they go on after a failure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from nodes.compute import Turns
from policies.problem import RequestSpec, Route, ServerSpec, service_s
from policies.workload import Backoff, RequestPlan
from testbed.moving.steering import Move
from testbed.simulation.network import busy_s
from testbed.simulation.openings import Openings
from testbed.simulation.real import COMPLETED, FAILED, SimulatedRequest
from testbed.simulation.record import Record, Recovery
from testbed.simulation.sessions import Held, Opening, Repair, Session
from testbed.simulation.system import System


class FailingRun(NamedTuple):
    """Requests in the order given, servers that joined as moves, and what happened."""

    requests: list[SimulatedRequest]
    moves: list[Move]
    record: Record


class HubRun:
    """One simulation: the steps of sessions, and how they go on after a failure.

    With hub-spoke communication; ``testbed.simulation.forwarded`` has what is different with forwarding.
    """

    def __init__(self, system: System, session_setup_s: float, backoff: Backoff, is_serial: bool) -> None:
        self._system = system
        self._queue = system.queue
        self._openings = Openings(system, backoff, self._opened, self._fail)
        self._problem = system.problem
        self._session_setup_s = session_setup_s
        self._is_serial = is_serial
        self._turns = [self._idle(server) for server in system.problem.servers]
        self._waiting: list[dict[int, Session]] = [{} for _ in system.problem.servers]
        """Sessions whose step is on its way to a server or in it."""
        self._ended: dict[int, SimulatedRequest] = {}
        system.lost = self._killed

    def serve(self, requests: Sequence[RequestPlan]) -> FailingRun:
        system = self._system
        for number, plan in enumerate(requests):
            self._queue.at(plan.arrival_at_s, self._arrive, number, plan)
        while len(self._ended) < len(requests):
            self._queue.step()
        system.check_leaks()
        return FailingRun(
            [self._ended[number] for number in range(len(requests))], system.moves, system.record
        )

    def _killed(self, server: int) -> None:
        """A server's process is gone: those that wait for it hear of that."""
        now_s = self._queue.now_s
        self._turns[server] = self._idle(self._problem.servers[server])
        waiting, self._waiting[server] = self._waiting[server], {}
        for session in waiting.values():
            self._plan_reset(session, server, now_s)

    def _stop_waiting(self, session: Session) -> None:
        """No server has a step of the session any more."""
        for held in session.hops:
            self._waiting[held.hop.server].pop(session.number, None)

    def _arrive(self, number: int, plan: RequestPlan) -> None:
        self._system.load.arrive(self._queue.now_s)
        self._openings.ask(Session(number, plan, self._openings.waits_s(plan.index)))

    def _opened(self, opening: Opening) -> None:
        """What a session lacked is open: begin, or go on."""
        session, now_s = opening.session, self._queue.now_s
        if session.repair is not None:
            self._replaced(session, session.repair, opening)
            return
        ready_at_s = max(now_s, opening.asked_at_s + self._problem.initial_delay_s)
        ready_at_s += self._session_setup_s
        session.hops = opening.held
        session.waiting_s = opening.asked_at_s - session.plan.arrival_at_s
        session.setup_s = ready_at_s - opening.asked_at_s
        self._queue.at(ready_at_s, self._step, session)

    # Steps.

    def _step(self, session: Session) -> None:
        """Send the hop whose turn it is what it lacks: of a replacement that is everything, or its next step."""
        now_s, held, client = self._queue.now_s, session.hops[session.at], session.plan.client
        server = held.hop.server
        session.turn += 1
        session.awaits, session.sent_at_s = True, now_s
        if self._is_gone(held):
            self._plan_reset(session, server, self._system.machines.died_at_s(server))
        else:
            self._waiting[server][session.number] = session
            is_prompt = not held.n_cached
            request = RequestSpec(client, self._n_tokens(session, held), session.plan.n_output_tokens)
            at_s = self._system.ways.step_arrives_at_s(request, None, server, now_s, is_prompt)
            if at_s < math.inf:
                self._queue.at(at_s, self._compute, session, session.turn, request, is_prompt)
        self._watch(session)

    def _watch(self, session: Session) -> None:
        """Look at the step's answer when it is overdue, unless an earlier step's look is still to come."""
        if not session.is_watched:
            session.is_watched = True
            due_at_s = session.sent_at_s + self._system.rules.request_timeout_s
            self._queue.at(due_at_s, self._check_answer, session)

    def _is_gone(self, held: Held) -> bool:
        """Whether the process that admitted the hop has died, or has cut it."""
        return self._system.machines.epoch(held.hop.server) != held.epoch

    def _n_tokens(self, session: Session, held: Held) -> int:
        """How many tokens the next step takes to a hop: a replay all at once, or as the steps were."""
        if self._system.rules.replay == "step_by_step":
            return 1 if held.n_cached else session.plan.n_input_tokens
        return session.n_inputs - held.n_cached

    def _compute(self, session: Session, turn: int, request: RequestSpec, is_prompt: bool) -> None:
        """A step reaches its server."""
        held = self._still_there(session, turn)
        if held is None:
            return
        server, now_s = held.hop.server, self._queue.now_s
        if self._system.machines.waits(server, self._compute, session, turn, request, is_prompt):
            return
        self._accepted(session)
        alone_s = busy_s(self._problem, held.hop, held.n_cached, request.n_input_tokens)
        alone_s *= self._system.machines.factor(server)
        start_at_s, takes_s = self._turns[server].take(now_s, alone_s)
        self._queue.at(start_at_s + takes_s, self._computed, session, turn, request, is_prompt, now_s)

    def _computed(
        self, session: Session, turn: int, request: RequestSpec, is_prompt: bool, arrived_at_s: float
    ) -> None:
        held = self._still_there(session, turn)
        if held is None:
            return
        server = held.hop.server
        # What a halted process was computing goes on without it; only its answer waits.
        if self._system.machines.waits(
            server, self._computed, session, turn, request, is_prompt, arrived_at_s
        ):
            return
        self._deliver(session, turn, request, is_prompt, arrived_at_s)

    def _accepted(self, session: Session) -> None:
        """A server has a step, and says so to nobody."""

    def _deliver(
        self, session: Session, turn: int, request: RequestSpec, is_prompt: bool, arrived_at_s: float
    ) -> None:
        """A server has computed a step."""
        del self._waiting[session.hops[session.at].hop.server][session.number]
        self._send_back(session, turn, request, is_prompt, arrived_at_s)

    def _send_back(
        self, session: Session, turn: int, request: RequestSpec, is_prompt: bool, arrived_at_s: float
    ) -> None:
        server, now_s = session.hops[session.at].hop.server, self._queue.now_s
        back_at_s = self._system.ways.step_returns_at_s(request, server, now_s, is_prompt, True)
        if back_at_s < math.inf:
            n_tokens = request.n_input_tokens
            self._queue.at(back_at_s, self._back, session, turn, n_tokens, arrived_at_s, now_s)

    def _idle(self, server: ServerSpec) -> Turns:
        return Turns(self._is_serial, server.contention_ratio)

    def _still_there(self, session: Session, turn: int) -> Held | None:
        """The hop that a step is for, unless its server has died or its client has given it up."""
        if session.turn != turn or not session.awaits:
            return None
        held = session.hops[session.at]
        return None if self._is_gone(held) else held

    def _back(
        self, session: Session, turn: int, n_tokens: int, arrived_at_s: float, departed_at_s: float
    ) -> None:
        """A hop's answer is at the client."""
        if session.turn != turn:
            return
        session.awaits = False
        held, repair = session.hops[session.at], session.repair
        is_replay = repair is not None and repair.is_waiting_for(held, session.n_inputs)
        n_replayed = n_tokens if is_replay else 0
        held.n_cached += n_tokens
        self._system.bans.served(session.plan.client, held.hop.server)
        n_bytes = self._problem.model.token_bytes * n_tokens
        times_s = session.sent_at_s, arrived_at_s, departed_at_s, self._queue.now_s
        self._system.record.step(
            session.plan.index, session.n_done, session.at, *held.hop, *times_s, n_bytes, n_bytes, n_replayed
        )
        if held.n_cached < session.n_inputs:  # a replay step by step
            self._step(session)
            return
        session.at += 1
        is_through = session.at == len(session.hops)
        if repair is not None and (
            is_through or not repair.is_waiting_for(session.hops[session.at], session.n_inputs)
        ):
            self._caught_up(session, repair)
        if not is_through:
            self._step(session)
        else:
            self._through(session)

    def _through(self, session: Session) -> None:
        """The last hop's answer is at the client, whose own part of the token comes now."""
        if self._problem.hub_token_s:
            self._queue.at(self._queue.now_s + self._problem.hub_token_s, self._token, session)
        else:
            self._token(session)

    def _token(self, session: Session) -> None:
        plan = session.plan
        session.at = 0
        session.n_done += 1
        if session.ttft_s is None:
            session.ttft_s = self._queue.now_s - plan.arrival_at_s
        self._system.machines.token(plan.index, session.n_done)
        if session.n_done < plan.n_output_tokens:
            self._step(session)
        else:
            self._end(session, COMPLETED, "")

    # Failure and recovery.

    def _plan_reset(self, session: Session, server: int, died_at_s: float) -> None:
        """The client learns that ``server`` died by the reset of its connection, or has learnt so."""
        now_s = self._queue.now_s
        reset_at_s = self._system.ways.returns_at_s(session.plan.client, server, died_at_s)
        reset_at_s = max(now_s, reset_at_s, self._listens_from_s(session, server))
        if reset_at_s < math.inf:
            self._queue.at(
                reset_at_s, self._lose, session, session.turn, (server,), "connection reset", now_s
            )

    def _listens_from_s(self, session: Session, server: int) -> float:
        """From when on the client hears what becomes of its connection to ``server``."""
        return session.sent_at_s

    def _check_answer(self, session: Session) -> None:
        """See whether the awaited answer is overdue."""
        session.is_watched = False
        if session.has_ended or not session.awaits:
            return
        if session.sent_at_s + self._system.rules.request_timeout_s > self._queue.now_s:
            self._watch(session)
        else:
            self._overdue(session)

    def _overdue(self, session: Session) -> None:
        """The awaited answer has not come in time."""
        reason = f"no answer for {self._system.rules.request_timeout_s:g} s"
        server = session.hops[session.at].hop.server
        self._lose(session, session.turn, (server,), reason, session.sent_at_s)

    def _lost(self, session: Session) -> tuple[int, int]:
        """The hops to be replaced, half-open: the one that has failed, and those after it that are known to be lost."""
        number = session.at
        last = number + 1
        while last < len(session.hops) and self._is_known_lost(session, session.hops[last]):
            last += 1
        return number, last

    def _lose(
        self, session: Session, turn: int, blamed: Sequence[int], reason: str, failed_at_s: float
    ) -> None:
        """The client notices that the servers ``blamed`` have failed it."""
        if session.turn != turn or not session.awaits:
            return
        now_s, client = self._queue.now_s, session.plan.client
        session.turn += 1
        session.awaits = False
        self._stop_waiting(session)
        number, last = self._lost(session)
        lost = session.hops[number:last]
        at_fault = [
            held.hop.server
            for held in lost
            if held.hop.server in blamed or self._is_known_lost(session, held)
        ]
        self._system.tell(
            "detected",
            session,
            servers=[self._system.names[server] for server in at_fault],
            blocks=[lost[0].hop.first, lost[-1].hop.last],
            position=session.n_history,
            reason=reason,
            sent_at_s=session.sent_at_s,
            failed_at_s=failed_at_s,
        )
        self._system.failed(client, at_fault)
        if self._system.rules.mode == "off":
            self._fail(session, f"{self._system.names[at_fault[0]]}: {reason}")
            return
        self._system.close(session, lost)
        if session.repair is None:
            session.repair = Repair(failed_at_s, now_s, number, last)
        else:  # a replacement, before it had caught up: it is still the same standstill
            repair = session.repair
            repair.first, repair.last, repair.attempt = number, last, 0
        self._system.hold(session)
        self._openings.replace(session, session.repair, reason)

    def _is_known_lost(self, session: Session, held: Held) -> bool:
        server = held.hop.server
        if not self._is_gone(held):
            return False
        died_at_s = self._system.machines.died_at_s(server)
        return self._system.ways.returns_at_s(session.plan.client, server, died_at_s) <= self._queue.now_s

    def _replaced(self, session: Session, repair: Repair, opening: Opening) -> None:
        """Replacements are open: they are sent what the lost hops were."""
        session.hops[repair.first : repair.last] = opening.held
        repair.keys.update(held.key for held in opening.held)
        repair.last = repair.first  # nothing is lost now
        self._system.hold(session)
        self._step(session)

    def _caught_up(self, session: Session, repair: Repair) -> None:
        """All replacements have done the present step: the standstill is over."""
        session.repair = None
        session.n_replays += 1
        client, n_tokens = session.plan.client, session.n_inputs
        new = tuple(held.hop for held in session.hops if held.key in repair.keys)
        connection_s = max(self._problem.raw_rtt_s[client][hop.server] for hop in new)
        # The standstill ends when the servers have answered: the client's own part comes after it.
        replayed = self._system.rules.replayed(session.plan, n_tokens)
        replay_s = service_s(self._problem, replayed, new)[1]
        replay_s -= replayed.n_output_tokens * self._problem.hub_token_s
        floor_s = (repair.detected_at_s - repair.failed_at_s) + connection_s + replay_s
        recovery_s = self._queue.now_s - repair.failed_at_s
        self._system.record.recoveries.append(Recovery(session.plan.index, n_tokens, recovery_s, floor_s))
        self._system.tell(
            "replayed",
            session,
            hops=[[self._system.names[hop.server], hop.first, hop.last] for hop in new],
            tokens=n_tokens,
            failed_at_s=repair.failed_at_s,
            detected_at_s=repair.detected_at_s,
            attempts=repair.n_attempts,
            recovery_s=recovery_s,
            floor_s=floor_s,
        )

    # The end.

    def _fail(self, session: Session, reason: str) -> None:
        self._end(session, FAILED, reason)

    def _end(self, session: Session, status: str, reason: str) -> None:
        now_s, plan = self._queue.now_s, session.plan
        assert not session.has_ended, f"request {plan.index} ends twice"
        session.has_ended = True
        session.turn += 1
        session.awaits = False
        self._system.view.release(session.number, now_s)
        self._system.close(session, session.hops)
        self._system.machines.ended(plan.index)
        self._system.load.end(now_s)
        time_s = now_s - plan.arrival_at_s
        hops = tuple(held.hop for held in session.hops)
        self._ended[session.number] = SimulatedRequest(
            plan=plan,
            route=Route(hops, session.wait_s, 0.0) if hops else None,
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
            n_done=session.n_done,
        )
