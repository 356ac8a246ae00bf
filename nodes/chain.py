"""The servers that hold a session: opening, stepping through and closing them, each with its limit."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from nodes import wire
from nodes.clock import Clock
from nodes.connection import Connection, ConnectionLost, ServerError
from nodes.records import HopPlan
from nodes.request import Request, SessionError
from nodes.rules import RecoveryRules
from nodes.watchdog import Overdue, Watchdog

FAILURES = (wire.SESSION_EXPIRED, wire.SESSION_MOVED, wire.COMPUTE_FAILED, wire.UNKNOWN_SESSION)
"""Errors after which the session can go on elsewhere; others mean that client or server is wrong."""


@dataclass(eq=False)
class OpenHop:
    """A hop of the chain, and what was sent to it: enough to rebuild its cache elsewhere.

    ``generation`` is that of the connection, ``n_cached`` the tokens that the server has in its cache.
    """

    server: int
    first: int
    last: int
    key: str
    generation: int
    is_replacement: bool = False
    n_cached: int = 0
    inputs: bytearray = field(default_factory=bytearray)

    @property
    def lacks_history(self) -> bool:
        """Whether it is a replacement to which nothing has been replayed yet."""
        return self.is_replacement and not self.n_cached


class Refusal(NamedTuple):
    """Why a chain could not be opened: one server's reason, all that refused, and of these all that could not be reached.

    ``is_final``: one of them has less room in all than the session needs.
    """

    server: int
    reason: str
    refused: tuple[int, ...]
    broken: tuple[int, ...]
    is_final: bool


class HopFailed(Exception):
    """A hop is lost: its server, its connection, or its answer. ``sent_at_s``: when it was last spoken to."""

    def __init__(self, hop: OpenHop, reason: str, sent_at_s: float, is_overdue: bool = False) -> None:
        super().__init__(f"server {hop.server}: {reason}")
        self.hop = hop
        self.reason = reason
        self.sent_at_s = sent_at_s
        self.is_overdue = is_overdue


class Preempted(HopFailed):
    """A hop's cache was needed for a session that came earlier."""


class Chain:
    """Speaks to the servers for one session, within the limits of ``rules``."""

    def __init__(
        self,
        request: Request,
        key: str,
        client: str,
        connections: Sequence[Connection],
        clock: Clock,
        rules: RecoveryRules,
    ) -> None:
        self._request = request
        self._key = key
        self._client = client
        self._connections = connections
        self._clock = clock
        self._watchdog = Watchdog(clock)
        self._rules = rules
        self._numbers = itertools.count()

    async def open(
        self, plan: Sequence[HopPlan], first_tokens: int, *, is_replacement: bool = False
    ) -> list[OpenHop] | Refusal:
        """Open all hops at once; on a refusal close the others. The first step brings ``first_tokens``.

        Every attempt has its own key: a server may still hold an earlier one.
        """
        number = next(self._numbers)
        key = f"{self._key}.{number}" if number else self._key
        opened: list[OpenHop] = []

        async def open_one(server: int, first: int, last: int) -> None:
            generation = await self._open(server, first, last, key, first_tokens)
            opened.append(OpenHop(server, first, last, key, generation, is_replacement))

        try:
            results = await asyncio.gather(*(open_one(*hop) for hop in plan), return_exceptions=True)
        except asyncio.CancelledError:
            for hop in opened:
                self.forget(hop)
            raise
        reason: tuple[int, str] | None = None
        refused, broken, is_final = [], [], False
        for (server, _, _), result in zip(plan, results, strict=True):
            if isinstance(result, ServerError | ConnectionLost):
                reason = server, str(result)
                refused.append(server)
                code = result.code if isinstance(result, ServerError) else ""
                is_final |= code == wire.NEVER_FITS
                if code not in (wire.NO_CAPACITY, wire.NEVER_FITS):
                    broken.append(server)
            elif isinstance(result, BaseException):
                raise result
        if reason is not None:
            await self.close(opened)
            return Refusal(*reason, tuple(refused), tuple(broken), is_final)
        return sorted(opened, key=lambda hop: hop.first)

    async def _open(self, server: int, first: int, last: int, key: str, first_tokens: int) -> int:
        connection = self._connections[server]
        try:
            with self._watchdog.limit(self._rules.connect_timeout_s):
                generation = await connection.ready()
                await self._ask_to_open(server, first, last, key, first_tokens, generation)
        except Overdue:
            raise ConnectionLost(f"no connection within {self._rules.connect_timeout_s:g} s") from None
        return generation

    async def _ask_to_open(
        self, server: int, first: int, last: int, key: str, first_tokens: int, generation: int
    ) -> None:
        connection, most = self._connections[server], self._request.n_reserved_tokens
        came_at_s = self._request.arrival_at_s
        request = wire.Open(
            connection.next_id(), key, self._client, first, last, most, first_tokens, came_at_s
        )
        await connection.ask(request, generation=generation)

    async def step(self, hop: OpenHop, n_tokens: int, payload: bytes) -> tuple[wire.Out, float, float]:
        """Send ``n_tokens`` hidden states that ``hop`` has not seen.

        Returns the answer, and when (scenario seconds) it was sent and received. Raises ``HopFailed`` when another server could do better, ``SessionError`` when it could not.
        """
        asked_at_s, limit_s = self._clock.now_s(), self._rules.step_limit_s(n_tokens)
        try:
            with self._watchdog.limit(limit_s):
                connection = self._connections[hop.server]
                step = wire.Step(connection.next_id(), hop.key, hop.n_cached, n_tokens, payload)
                out, sent_at_s, received_at_s = await connection.ask(step, generation=hop.generation)
        except Overdue:
            reason = f"no answer for {limit_s:g} s"
            raise HopFailed(hop, reason, asked_at_s, is_overdue=True) from None
        except ConnectionLost as error:
            raise HopFailed(hop, str(error), asked_at_s) from error
        except ServerError as error:
            if error.code == wire.PREEMPTED:
                raise Preempted(hop, str(error), asked_at_s) from error
            if error.code in FAILURES:
                raise HopFailed(hop, str(error), asked_at_s) from error
            raise SessionError(f"server {hop.server}: {error}") from error
        if not isinstance(out, wire.Out) or len(out.payload) != len(payload):
            raise SessionError(f"server {hop.server}: its answer is not {n_tokens} hidden states")
        return out, sent_at_s, received_at_s

    def is_there(self, hop: OpenHop) -> bool:
        """Whether the connection that the hop was opened on is still there."""
        return self._connections[hop.server].has(hop.generation)

    def end_of_loss(self, hops: Sequence[OpenHop], at: int) -> int:
        """Which of ``hops`` is the first after the failed ``hops[at]`` that need not be replaced with it."""
        end = at + 1
        while end < len(hops) and not self.is_there(hops[end]):
            end += 1
        return end

    def forget(self, hop: OpenHop) -> None:
        """Close a hop without waiting for its server."""
        self._connections[hop.server].forget(hop.key, hop.generation)

    async def close(self, hops: Sequence[OpenHop]) -> None:
        """Close what can still be reached; a lost connection has closed its sessions itself."""
        await asyncio.gather(*(self._close(hop) for hop in hops))

    async def _close(self, hop: OpenHop) -> None:
        connection = self._connections[hop.server]
        # A server that halts closes it when it goes on: the message is on its way.
        with (
            contextlib.suppress(ServerError, ConnectionLost, Overdue),
            self._watchdog.limit(self._rules.connect_timeout_s),
        ):
            await connection.ask(wire.Close(connection.next_id(), hop.key), generation=hop.generation)

    def failed(self, server: int) -> None:
        """``server`` has failed this client."""
        self._connections[server].is_doubted = True

    def served(self, server: int) -> bool:
        """``server`` has answered; whether it had been in doubt."""
        connection = self._connections[server]
        was_doubted, connection.is_doubted = connection.is_doubted, False
        return was_doubted

    def end(self) -> None:
        self._watchdog.close()
