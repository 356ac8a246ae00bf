"""The mode ``real`` when servers fail and forward to each other: what is different from hub-spoke.

A step goes through the chain and comes back once. Whatever fails, a whole new chain takes over and gets the
history in one message (``nodes.forwarded``): the client hears of a dead server by the reset of its own
connection, of one that takes no push from the server before it, and of anything else by what is overdue.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from policies.problem import RequestSpec
from testbed.simulation.hub import HubRun
from testbed.simulation.sessions import Session


class ForwardedRun(HubRun):
    """As ``HubRun``, with server-to-server forwarding."""

    def _step(self, session: Session) -> None:
        now_s = self._queue.now_s
        session.turn += 1
        session.at, session.awaits, session.sent_at_s = 0, True, now_s
        session.is_asking = False
        session.passed.clear()
        for held in session.hops:
            server = held.hop.server
            self._waiting[server][session.number] = session
            if self._is_gone(held):
                self._plan_reset(session, server, self._system.machines.died_at_s(server))
        held = session.hops[0]
        request = RequestSpec(
            session.plan.client, self._n_tokens(session, held), session.plan.n_output_tokens
        )
        self._push(session, request, not held.n_cached)
        self._watch(session)

    def _push(self, session: Session, request: RequestSpec, is_prompt: bool) -> None:
        """Send the step on to the hop whose turn it is, from the client or from the hop before."""
        now_s, number, turn = self._queue.now_s, session.at, session.turn
        session.is_accepted = False
        previous = session.hops[number - 1].hop.server if number else None
        server = session.hops[number].hop.server
        at_s = self._system.ways.step_arrives_at_s(request, previous, server, now_s, is_prompt)
        if at_s < math.inf:
            self._queue.at(at_s, self._compute, session, turn, request, is_prompt)
        if number:
            limit_s = self._system.rules.push_limit_s
            self._queue.at(now_s + limit_s, self._check_push, session, turn, number)

    def _accepted(self, session: Session) -> None:
        session.is_accepted = True

    def _compute(self, session: Session, turn: int, request: RequestSpec, is_prompt: bool) -> None:
        if session.turn == turn and session.awaits and self._is_gone(session.hops[session.at]):
            if session.at:
                self._report(session, True, "could not be pushed to")
            return  # of the first one the client knows by itself
        super()._compute(session, turn, request, is_prompt)

    def _check_push(self, session: Session, turn: int, number: int) -> None:
        """Whether the next server has taken a push by now; if not, the client is told."""
        if session.turn == turn and session.at == number and not session.is_accepted:
            limit_s = self._system.rules.push_limit_s
            self._report(session, False, f"could not be pushed to for {limit_s:g} s")

    def _report(self, session: Session, is_answered: bool, reason: str) -> None:
        """The server before tells the client that the one whose turn it is has not taken a push.

        ``is_answered``: that server's machine has said so, which takes a way more.
        """
        ways, machines = self._system.ways, self._system.machines
        previous, server = (held.hop.server for held in session.hops[session.at - 1 : session.at + 1])
        told_at_s = self._queue.now_s
        if is_answered:
            told_at_s = ways.passes_at_s(server, previous, told_at_s)
        if told_at_s < math.inf and not machines.is_halted(previous):
            heard_at_s = ways.returns_at_s(session.plan.client, previous, told_at_s)
            if heard_at_s < math.inf:
                failed_at_s = max(session.sent_at_s, machines.failed_at_s(server))
                self._queue.at(heard_at_s, self._lose, session, session.turn, (server,), reason, failed_at_s)

    def _deliver(
        self, session: Session, turn: int, request: RequestSpec, is_prompt: bool, arrived_at_s: float
    ) -> None:
        now_s, hop = self._queue.now_s, session.hops[session.at].hop
        sent_at_s = session.passed[-1][3] if session.passed else session.sent_at_s
        session.passed.append((hop, sent_at_s, arrived_at_s, now_s))
        if session.at + 1 < len(session.hops):
            session.at += 1
            self._push(session, request, is_prompt)
            return
        self._send_back(session, turn, request, is_prompt, arrived_at_s)

    def _back(
        self, session: Session, turn: int, n_tokens: int, arrived_at_s: float, departed_at_s: float
    ) -> None:
        """The result is at the client."""
        if session.turn != turn:
            return
        session.awaits = False
        self._stop_waiting(session)
        repair, last = session.repair, len(session.hops) - 1
        n_bytes = self._problem.model.token_bytes * n_tokens
        for number, (hop, *times_s) in enumerate(session.passed):
            received_at_s, down_bytes = (times_s[-1], 0) if number < last else (self._queue.now_s, n_bytes)
            n_replayed = n_tokens if repair is not None else 0
            self._system.record.step(
                *(session.plan.index, session.n_done, number, *hop, *times_s, received_at_s),
                *(n_bytes, down_bytes, n_replayed),
            )
        for held in session.hops:
            held.n_cached += n_tokens
            self._system.bans.served(session.plan.client, held.hop.server)
        if session.hops[0].n_cached < session.n_inputs:  # a replay step by step
            self._step(session)
            return
        if repair is not None:
            self._caught_up(session, repair)
        self._through(session)

    # Failure.

    def _lost(self, session: Session) -> tuple[int, int]:
        return 0, len(session.hops)

    def _listens_from_s(self, session: Session, server: int) -> float:
        """The client listens to other servers than the first only once that has its push."""
        first = session.hops[0].hop.server
        if server == first:
            return session.sent_at_s
        return self._system.ways.answered_at_s(session.plan.client, first, session.sent_at_s)

    def _overdue(self, session: Session) -> None:
        """Ask all servers whether they are there: those that do not answer are to blame, or else all."""
        rules, client, now_s = self._system.rules, session.plan.client, self._queue.now_s
        session.turn += 1  # a result that comes now comes too late
        limit_s = min(rules.connect_timeout_s, rules.request_timeout_s)
        answers_s = [
            math.inf
            if self._is_gone(held) or self._system.machines.is_halted(held.hop.server)
            else self._system.ways.answered_at_s(client, held.hop.server, now_s)
            for held in session.hops
        ]
        silent = [
            held.hop.server
            for held, at_s in zip(session.hops, answers_s, strict=True)
            if at_s > now_s + limit_s
        ]
        known_at_s = now_s + limit_s if silent else max(answers_s)
        session.is_asking = True
        self._queue.at(known_at_s, self._asked, session, session.turn, silent)

    def _asked(self, session: Session, turn: int, silent: Sequence[int]) -> None:
        """All have answered, or the time for it is over. Who has died meanwhile has not answered either."""
        if session.turn != turn:
            return
        session.is_asking = False
        gone = [held.hop.server for held in session.hops if self._is_gone(held)]
        blamed = tuple(dict.fromkeys((*silent, *gone))) or tuple(held.hop.server for held in session.hops)
        reason = f"no result for {self._system.rules.request_timeout_s:g} s"
        self._lose(session, turn, blamed, reason, session.sent_at_s)

    def _plan_reset(self, session: Session, server: int, died_at_s: float) -> None:
        if not session.is_asking:
            super()._plan_reset(session, server, died_at_s)
