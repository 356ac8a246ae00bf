"""Recovery of a session: other servers replace a hop that failed, and its inputs are replayed to them.

This is what PETALS intends. Only the lost range of blocks is routed anew. The first replacement gets all
inputs of the lost hop from position 0 on, those of the present step included, in one message or step by step.
The next replacement gets all results of the first one, and so on. Healthy hops keep their caches and get only
what is new.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from operator import attrgetter

from nodes.chain import Chain, HopFailed, OpenHop, Refusal
from nodes.clock import Clock
from nodes.hub import HubModel
from nodes.records import AnyRecord, Detected, Plan, Reachable, Replayed, Rerouted, Unreachable
from nodes.request import Request, SessionError
from policies.problem import Hop
from policies.rules import RecoveryRules

Rerouter = Callable[[Request, int, int, int], Awaitable[Plan | None]]
"""Asks for servers for lost blocks: (request, first block, last block, output tokens so far)."""
Observer = Callable[[AnyRecord], None]
"""Called with everything that happens to a session."""


@dataclass
class _Standstill:
    """The time from a failure until the session goes on, with all further failures meanwhile."""

    failed_at_s: float
    detected_at_s: float
    attempts: int = 0
    began_at_s: float = 0.0
    """When the last replay began."""


class Recovery:
    """Replaces the lost hops of one session."""

    def __init__(
        self,
        request: Request,
        chain: Chain,
        reroute: Rerouter | None,
        rules: RecoveryRules,
        model: HubModel,
        clock: Clock,
        observer: Observer,
    ) -> None:
        self._request = request
        self._chain = chain
        self._reroute = reroute
        self._rules = rules
        self._model = model
        self._clock = clock
        self._observe = observer
        self._standstill: _Standstill | None = None
        self._replacements: list[OpenHop] = []

    async def replace(
        self, hops: list[OpenHop], at: int, failure: HopFailed, position: int, n_done: int
    ) -> bytes:
        """Replaces ``hops[at]``, and the hops after it that are lost as well, by others in ``hops``.

        ``position`` is that of the step that failed; ``n_done`` counts output tokens so far. Returns the
        hidden states to replay to the first replacement: all that the lost hop was ever sent. Raises
        ``SessionError`` when there is no replacement.
        """
        end = self._chain.end_of_loss(hops, at)
        lost = hops[at:end]
        first, last = lost[0].first, lost[-1].last
        now_s = self._clock.now_s()
        gone = [hop for hop in lost if hop is failure.hop or not self._chain.is_there(hop)]
        servers = [hop.server for hop in sorted(gone, key=lambda hop: hop is not failure.hop)]
        blocks, reason, sent_at_s = (first, last), failure.reason, failure.sent_at_s
        self._observe(Detected(*self._now, servers, blocks, position, reason, sent_at_s, failure.is_overdue))
        self._doubt(servers)
        if self._rules.mode == "off" or self._reroute is None:
            raise SessionError(str(failure)) from failure
        del hops[at:end]  # the session closes only what is in hops, so these must be closed here
        for hop in lost:
            self._chain.forget(hop)
        standstill = self._standstill = self._standstill or _Standstill(failure.sent_at_s, now_s)
        history = self._model.recall(bytes(lost[0].inputs))
        n_all = len(history) // self._model.token_bytes
        opened = await self._open(
            self._reroute, standstill, first, last, position, n_all, n_done, failure.reason
        )
        hops[at:at] = opened
        self._replacements = [hop for hop in self._replacements if hop not in lost] + opened
        standstill.began_at_s = self._clock.now_s()
        return history

    def starts_over(self, hops: list[OpenHop]) -> None:
        """Continues a standstill with a new chain: everything is replayed to its ``hops``."""
        if self._standstill is not None:
            self._replacements = list(hops)
            self._standstill.began_at_s = self._clock.now_s()

    async def _open(
        self,
        reroute: Rerouter,
        standstill: _Standstill,
        first: int,
        last: int,
        position: int,
        n_all: int,
        n_done: int,
        reason: str,
    ) -> list[OpenHop]:
        rules, attempt = self._rules, 0
        while True:
            again_at_s = self._clock.now_s() + rules.retry_delay_s(attempt, self._request.index)
            if again_at_s > standstill.detected_at_s + rules.give_up_s:
                raise SessionError(
                    f"blocks [{first}, {last}) could not be replaced within {rules.give_up_s:g} s ({reason})"
                )
            await self._clock.sleep_until_s(again_at_s)
            standstill.attempts += 1
            attempt += 1
            asked_at_s = self._clock.now_s()
            answer = await reroute(self._request, first, last, n_done)
            if answer is None:
                reason = f"no route covers blocks [{first}, {last})"
                continue
            plan, asked_s = answer.hops, self._clock.now_s() - asked_at_s
            self._observe(Rerouted(*self._now, (first, last), plan, attempt, asked_s, answer.decision_s))
            opened = await self._chain.open(plan, n_all, is_replacement=True)
            if isinstance(opened, Refusal):
                reason = f"server {opened.server}: {opened.reason}"
                self.unreachable(opened.broken)
            elif rules.mode == "head" and position:
                await self._chain.close(opened)
                reason = f"server {plan[0][0]}: a new session cannot start at position {position}"
                self.unreachable(plan[0][:1])
            else:
                return opened

    def passed(self, hop: OpenHop, following: OpenHop | None, n_tokens: int) -> None:
        """Notes that ``hop`` has computed ``n_tokens``. ``following`` is the next hop, if any.

        Records ``Replayed`` if this ends a standstill.
        """
        if self._chain.served(hop.server):
            self._observe(Reachable(*self._now, [hop.server]))
        standstill = self._standstill
        if standstill is None or not hop.is_replacement:
            return
        if following is not None and following.lacks_history:
            return
        request, now_s = self._now
        hops = sorted(
            (Hop(new.server, new.first, new.last) for new in self._replacements), key=attrgetter("first")
        )
        took_s = now_s - standstill.began_at_s
        failed_at_s, detected_at_s = standstill.failed_at_s, standstill.detected_at_s
        self._observe(
            Replayed(request, now_s, hops, n_tokens, took_s, failed_at_s, detected_at_s, standstill.attempts)
        )
        self._standstill, self._replacements = None, []

    def unreachable(self, servers: tuple[int, ...]) -> None:
        """Records servers on which no session could be opened, for another reason than lack of room."""
        if servers:
            self._observe(Unreachable(*self._now, list(servers)))
            self._doubt(servers)

    def _doubt(self, servers: list[int] | tuple[int, ...]) -> None:
        for server in servers:
            self._chain.failed(server)

    @property
    def _now(self) -> tuple[int, float]:
        """The first two fields of every record: the request's number and the present instant."""
        return self._request.index, self._clock.now_s()
