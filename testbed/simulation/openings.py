"""Opening hops while servers fail: the whole chain of a new session, or replacements of lost hops."""

from __future__ import annotations

import math
from collections.abc import Callable

from nodes.links import GIVE_UP_S
from policies.problem import Hop, PolicyError
from policies.workload import Backoff
from testbed.simulation.real import MAX_ATTEMPTS
from testbed.simulation.servers import Key
from testbed.simulation.sessions import Held, Opening, Repair, Session
from testbed.simulation.system import System


class Openings:
    """Asks for a chain over what a session lacks, opens all of it at once, and asks again after a refusal.

    ``opened`` is told of success, ``failed`` of a session that gives up, with the reason.
    """

    def __init__(
        self,
        system: System,
        backoff: Backoff,
        opened: Callable[[Opening], None],
        failed: Callable[[Session, str], None],
    ) -> None:
        self._system = system
        self._queue = system.queue
        self._rules = system.rules
        self._backoff = backoff
        self.waits_s = backoff.waits_s
        self._tell_opened = opened
        self._tell_failed = failed

    def ask(self, session: Session) -> None:
        """Ask for a chain and send an opening to all of its servers."""
        system, now_s, plan = self._system, self._queue.now_s, session.plan
        n_blocks = system.problem.model.n_blocks
        first, last = session.lacks(n_blocks)
        banned = system.bans.banned(plan.client, now_s)
        wrong = system.membership.wrong(now_s)
        repair = session.repair
        if repair is None:
            session.n_attempts += 1
        else:
            repair.attempt += 1
            repair.n_attempts += 1
        state = system.view.state(session.number, now_s)
        opening = Opening(session, now_s, was_idle=system.view.is_idle)
        usable = system.membership.believed(now_s) - banned
        try:
            route = system.router.route(session.left, state, now_s, usable, first, last)
        except PolicyError as error:
            raise PolicyError(f"request {plan.index}: {error}") from error
        system.record.n_decisions += 1
        system.record.n_stale_decisions += bool(wrong)
        if route is None:
            what = "the model" if repair is None else f"blocks [{first}, {last})"
            opening.refusal = f"no route covers {what}"
            # Then the next answer would be the same: waiting does not help.
            may_change = wrong or banned or system.machines.may_change or system.mover is not None
            opening.is_hopeless = opening.was_idle and not may_change
            self._refused(opening)
            return
        system.record.n_misled_decisions += any(hop.server in wrong for hop in route.hops)
        opening.hops, session.wait_s = route.hops, route.wait_s
        system.hold(session, route.hops)
        if repair is not None:
            hops = [[system.names[hop.server], hop.first, hop.last] for hop in route.hops]
            system.tell("re-routed", session, blocks=[first, last], hops=hops, attempt=repair.attempt)
        for hop in route.hops:
            session.n_keys += 1
            key = session.number, session.n_keys
            opening.unanswered[session.n_keys] = hop.server
            at_s = system.ways.arrives_at_s(plan.client, hop.server, now_s)
            if at_s < math.inf:
                self._queue.at(at_s, self._arrive, opening, hop, key)
        self._queue.at(now_s + self._rules.connect_timeout_s, self._overdue, opening)

    def _arrive(self, opening: Opening, hop: Hop, key: Key) -> None:
        """An opening reaches a server's machine."""
        system, server, now_s = self._system, hop.server, self._queue.now_s
        machines, servers = system.machines, system.servers
        if opening.is_over or machines.waits(server, self._arrive, opening, hop, key):
            return
        held: Held | None = None
        is_broken = not machines.is_up(server)
        reason = "connection refused"
        if not is_broken:
            block_bytes = system.problem.model.cache_bytes(opening.session.left.n_tokens)
            refused = servers.reserve(key, hop, hop.n_blocks * block_bytes, now_s)
            reason = refused or ""
            if refused is None:
                held = Held(hop, key, machines.epoch(server))
            elif servers.offers(hop) and servers.is_empty(server):
                opening.is_hopeless |= opening.was_idle and not (machines.may_change or system.is_moving)
        back_at_s = system.ways.returns_at_s(opening.session.plan.client, server, now_s)
        if back_at_s < math.inf:
            self._queue.at(back_at_s, self._answered, opening, hop, key, held, reason, is_broken)

    def _answered(
        self, opening: Opening, hop: Hop, key: Key, held: Held | None, reason: str, is_broken: bool
    ) -> None:
        if opening.is_over:
            if held is not None:
                self._system.close(opening.session, [held])
            return
        del opening.unanswered[key[1]]
        if held is not None:
            opening.held.append(held)
        else:
            opening.refusal = f"{self._system.names[hop.server]}: {reason}"
        if is_broken:
            opening.broken.append(hop.server)
        if not opening.unanswered:
            self._settle(opening)

    def _overdue(self, opening: Opening) -> None:
        if opening.is_over:
            return
        silent = list(opening.unanswered.values())
        opening.broken += silent
        name = self._system.names[silent[0]]
        opening.refusal = f"{name}: no connection within {self._rules.connect_timeout_s:g} s"
        self._settle(opening)

    def _settle(self, opening: Opening) -> None:
        """All servers have answered, or it has taken too long."""
        opening.is_over = True
        system, session, now_s = self._system, opening.session, self._queue.now_s
        client = session.plan.client
        opening.held.sort(key=lambda held: held.hop.first)
        if opening.broken:
            system.tell("unreachable", session, servers=[system.names[j] for j in opening.broken])
            system.failed(client, opening.broken)
        if self._rules.mode == "head" and session.n_history and not opening.refusal:
            # PETALS' last commit: its assertion trips, whatever the rule for other failures.
            server = opening.held[0].hop.server
            system.bans.failed(client, server, now_s)
            opening.refusal = (
                f"{system.names[server]}: a replacement cannot start at position {session.n_history}"
            )
        if not opening.refusal:
            self._tell_opened(opening)
            return
        answers_s = [system.ways.answered_at_s(client, held.hop.server, now_s) for held in opening.held]
        system.close(session, opening.held)
        closed_at_s = min(max(answers_s, default=now_s), now_s + GIVE_UP_S)
        self._queue.free_at(closed_at_s, self._refused, opening)

    def replace(self, session: Session, repair: Repair, reason: str) -> None:
        """Ask for replacements of what is lost, when it is time for the next attempt; else give up for ``reason``."""
        again_at_s = self._queue.now_s + self._rules.retry_delay_s(repair.attempt, session.plan.index)
        if again_at_s <= repair.detected_at_s + self._rules.give_up_s:
            self._queue.at(again_at_s, self.ask, session)
            return
        first, last = session.lacks(self._system.problem.model.n_blocks)
        what = f"blocks [{first}, {last}) could not be replaced within {self._rules.give_up_s:g} s"
        self._tell_failed(session, f"{what} ({reason})")

    def _refused(self, opening: Opening) -> None:
        """Try again after a while, or give up."""
        session, now_s, repair = opening.session, self._queue.now_s, opening.session.repair
        self._system.hold(session)
        if repair is not None:
            self.replace(session, repair, opening.refusal)
            return
        give_up_s = self._backoff.give_up_s
        if not give_up_s and (opening.broken or not opening.hops):
            give_up_s = self._rules.give_up_s  # servers that are gone may stay away for ever
        backoff_s = next(session.waits_s)
        if opening.is_hopeless:
            self._tell_failed(session, opening.refusal)
        elif give_up_s and now_s + backoff_s > session.plan.arrival_at_s + give_up_s:
            self._tell_failed(session, f"no room within {give_up_s:g} s ({opening.refusal})")
        elif session.n_attempts >= MAX_ATTEMPTS:
            reason = f"{session.n_attempts} attempts to open a session failed ({opening.refusal})"
            self._tell_failed(session, reason)
        else:
            self._queue.at(now_s + backoff_s, self.ask, session)
