"""One session's chain of servers: opening, stepping through and closing it, each within a time limit."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from nodes import wire
from nodes.admission import name_of_attempt
from nodes.clock import Clock
from nodes.errors import ConnectionLost, ServerError
from nodes.prefixes import PAGE_ID_BYTES
from nodes.request import Request, SessionError
from nodes.watchdog import Limit, Overdue, Watchdog
from policies.problem import Hop
from policies.rules import RecoveryRules

if TYPE_CHECKING:
    from nodes.connection import Connection

FAILURES = (wire.SESSION_EXPIRED, wire.SESSION_MOVED, wire.COMPUTE_FAILED, wire.UNKNOWN_SESSION)
"""Errors of a step after which the session can go on elsewhere. Others but ``PREEMPTED`` fail the request."""


@dataclass(eq=False)
class OpenHop:
    """An open hop of the chain, with all inputs sent to it, from which its cache can be rebuilt elsewhere.

    ``inputs`` are payloads as ``HubModel.remember`` returns them. ``generation`` is the connection's,
    ``n_cached`` the number of tokens in the server's cache.

    ``n_found`` are the tokens of its prompt whose cache the server had kept, ``n_pages`` the ids with which it was opened.
    ``inputs`` begin at position ``begins_at``. ``n_away``: tokens that were sent to it, but not answered yet.
    ``is_given_up``: nobody waits for the answer to its last step any more.
    """

    server: int
    first: int
    last: int
    key: str
    generation: int
    is_replacement: bool = False
    n_cached: int = 0
    n_found: int = 0
    n_pages: int = 0
    begins_at: int = 0
    inputs: bytearray = field(default_factory=bytearray)
    n_away: int = 0
    is_given_up: bool = False

    @property
    def lacks_history(self) -> bool:
        """Whether it is a replacement to which nothing has been replayed yet."""
        return self.is_replacement and not self.n_cached


class NotOpened(NamedTuple):
    """Why a ``server`` did not open a session. ``is_broken``: for another reason than lack of room.

    ``is_final``: the session needs more cache than the server has in total.
    """

    server: int
    reason: str
    is_broken: bool
    is_final: bool

    @classmethod
    def of(cls, server: int, error: ServerError | ConnectionLost) -> NotOpened:
        code = error.code if isinstance(error, ServerError) else ""
        is_broken = code not in (wire.NO_CAPACITY, wire.NEVER_FITS)
        return cls(server, str(error), is_broken, code == wire.NEVER_FITS)


class Refusal(NamedTuple):
    """Why a chain could not be opened: one ``server`` and its ``reason``.

    ``refused`` are all servers that did not open the session, ``broken`` those of them with another reason
    than lack of room. ``is_final``: the session needs more cache than one of them has in total.
    """

    server: int
    reason: str
    refused: tuple[int, ...]
    broken: tuple[int, ...]
    is_final: bool

    @classmethod
    def of(cls, failed: Sequence[NotOpened]) -> Refusal:
        """Of those servers of a chain that did not open it, at least one, in the chain's order: its reason is the last one's."""
        return cls(
            failed[-1].server,
            failed[-1].reason,
            tuple(one.server for one in failed),
            tuple(one.server for one in failed if one.is_broken),
            any(one.is_final for one in failed),
        )


class HopFailed(Exception):
    """A hop is lost: its server lost the session, its connection is gone, or no answer came in time.

    ``sent_at_s`` is when the step that failed was begun; ``is_overdue``: no answer came in time.
    """

    def __init__(self, hop: OpenHop, reason: str, sent_at_s: float, is_overdue: bool = False) -> None:
        super().__init__(f"server {hop.server}: {reason}")
        self.hop = hop
        self.reason = reason
        self.sent_at_s = sent_at_s
        self.is_overdue = is_overdue


class Preempted(HopFailed):
    """A hop lost its cache, usually to a session whose request arrived earlier."""


class Chain:
    """Opens, uses and closes the hops of one session, within the time limits of ``rules``."""

    def __init__(
        self,
        request: Request,
        key: str,
        client: str,
        connections: Sequence[Connection],
        clock: Clock,
        rules: RecoveryRules,
    ) -> None:
        self.request = request
        self._key = key
        self._client = client
        self._connections = connections
        self._clock = clock
        self._watchdog = Watchdog(clock)
        self._rules = rules
        self._numbers = itertools.count()
        self.pages = b""
        """The ids of the pages with which the prompt begins: a new chain may find their caches."""

    async def open(
        self, plan: Sequence[Hop], first_tokens: int, *, is_replacement: bool = False
    ) -> list[OpenHop] | Refusal:
        """Opens all hops at once; if one is refused, closes the others.

        A replacement computes everything anew. The first step has ``first_tokens`` tokens. Returns the hops in the order of their blocks. Every
        attempt has its own key, because a server may still hold the session of an earlier attempt.
        """
        key = name_of_attempt(self._key, next(self._numbers))
        opened: list[OpenHop] = []

        async def open_one(server: int, first: int, last: int) -> None:
            pages = b"" if is_replacement else self.pages
            generation, n_found = await self._open(server, first, last, key, first_tokens, pages)
            hop = OpenHop(server, first, last, key, generation, is_replacement, n_found=n_found)
            hop.n_pages = len(pages) // PAGE_ID_BYTES
            opened.append(hop)

        try:
            results = await asyncio.gather(*(open_one(*hop) for hop in plan), return_exceptions=True)
        except asyncio.CancelledError:
            for hop in opened:
                self.forget(hop)
            raise
        failed: list[NotOpened] = []
        for (server, _, _), result in zip(plan, results, strict=True):
            if isinstance(result, ServerError | ConnectionLost):
                failed.append(NotOpened.of(server, result))
            elif isinstance(result, BaseException):
                for hop in opened:
                    self.forget(hop)
                raise result
        if failed:
            await self.close(opened)
            return Refusal.of(failed)
        return sorted(opened, key=lambda hop: hop.first)

    async def _open(
        self, server: int, first: int, last: int, key: str, first_tokens: int, pages: bytes
    ) -> tuple[int, int]:
        """Returns the connection's generation, and how many tokens the server has found in kept pages."""
        connection, limit_s = self._connections[server], self._rules.connect_timeout_s
        try:
            with self._watchdog.limit(limit_s):
                generation = await connection.ready()
        except Overdue:
            raise ConnectionLost(f"no connection within {limit_s:g} s") from None
        try:
            with self._watchdog.limit(limit_s) as limit:
                answer = await self._ask_to_open(
                    server, first, last, key, first_tokens, pages, generation, limit
                )
        except Overdue:
            raise ConnectionLost(f"nothing heard for {limit_s:g} s") from None
        return generation, answer.n_tokens if isinstance(answer, wire.Found) else 0

    async def _ask_to_open(
        self,
        server: int,
        first: int,
        last: int,
        key: str,
        first_tokens: int,
        pages: bytes,
        generation: int,
        limit: Limit,
    ) -> wire.Answer:
        connection, most = self._connections[server], self.request.n_reserved_tokens
        came_at_s = self.request.arrival_at_s
        fields = connection.next_id(), key, self._client, first, last, most, first_tokens, came_at_s
        request = wire.OpenPages(*fields, pages) if pages else wire.Open(*fields)
        return (await connection.ask(request, generation=generation, limit=limit)).frame

    async def step(
        self,
        hop: OpenHop,
        n_tokens: int,
        payload: bytes,
        kind: type[wire.Step] = wire.Step,
        on_left: Callable[[], object] | None = None,
    ) -> tuple[wire.Out, float, float]:
        """Sends ``n_tokens`` hidden states that ``hop`` has not seen; those of a ``wire.Fill`` have no result.

        ``on_left`` is called when they have left.

        Returns the result, and when (scenario seconds) the step was sent and the result received. Raises
        ``HopFailed`` if another server may succeed, ``SessionError`` if none can.
        """
        asked_at_s, limit_s = self._clock.now_s(), self._rules.step_limit_s(n_tokens)
        position = hop.n_cached + hop.n_away
        if hop.is_given_up:
            kind, hop.is_given_up = wire.Instead, False
        elif hop.n_away:
            kind = wire.Behind
        hop.n_away += n_tokens
        try:
            with self._watchdog.limit(limit_s) as limit:
                connection = self._connections[hop.server]
                step = kind(connection.next_id(), hop.key, position, n_tokens, payload)
                out, sent_at_s, received_at_s = await connection.ask(
                    step, generation=hop.generation, limit=limit, on_left=on_left
                )
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
        finally:
            hop.n_away -= n_tokens
        n_bytes = 0 if kind is wire.Fill else len(payload)
        if not isinstance(out, wire.Out) or len(out.payload) != n_bytes:
            raise SessionError(f"server {hop.server}: its answer is not {n_tokens} hidden states")
        return out, sent_at_s, received_at_s

    def is_there(self, hop: OpenHop) -> bool:
        """Returns whether the connection on which the hop was opened is still there."""
        return self._connections[hop.server].has(hop.generation)

    def end_of_loss(self, hops: Sequence[OpenHop], at: int) -> int:
        """Returns ``end``: ``hops[at:end]`` must be replaced together when ``hops[at]`` has failed.

        They are all where the inputs of some hop lack the beginning: only those of the first are whole.
        """
        if any(hop.begins_at for hop in hops):
            return len(hops)
        end = at + 1
        while end < len(hops) and not self.is_there(hops[end]):
            end += 1
        return end

    def forget(self, hop: OpenHop) -> None:
        """Closes a hop without waiting for its server."""
        self._close(hop)

    async def close(self, hops: Sequence[OpenHop], pages: bytes | None = None) -> None:
        """Closes the hops that can still be reached.

        Servers close the sessions of lost connections themselves. They may keep the caches of ``pages``, the ids of all
        pages of the session. All are told before this waits for the first time: also if it is cancelled then.
        """
        closings = [self._close(hop, pages) for hop in hops]
        await asyncio.gather(*(self._closed(closing) for closing in closings if closing is not None))

    def _close(self, hop: OpenHop, pages: bytes | None = None) -> asyncio.Task[None] | None:
        if pages is not None:
            pages = pages[hop.n_pages * PAGE_ID_BYTES :]
        return self._connections[hop.server].forget(hop.key, hop.generation, pages)

    async def _closed(self, closing: asyncio.Task[None]) -> None:
        # After the limit the message is still on its way: a paused server closes the session when it goes on.
        with contextlib.suppress(Overdue), self._watchdog.limit(self._rules.connect_timeout_s):
            await asyncio.shield(closing)

    def failed(self, server: int) -> None:
        """Marks ``server`` as doubted: it has failed this client."""
        self._connections[server].is_doubted = True

    def served(self, server: int) -> bool:
        """Clears the doubt about ``server``, which has answered. Returns whether there was any."""
        connection = self._connections[server]
        was_doubted, connection.is_doubted = connection.is_doubted, False
        return was_doubted

    def end(self) -> None:
        self._watchdog.close()
