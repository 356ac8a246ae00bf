"""One inference session as the hub runs it: open a chain, prefill, decode token by token, close."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from nodes.clock import Clock
from nodes.connection import Connection, ConnectionLost, ServerError
from nodes.hub import HubModel
from nodes.request import Request, SessionError

HopPlan = tuple[int, int, int]
"""(server index, first block, last block), half-open."""


@dataclass(frozen=True)
class SessionRules:
    """How sessions behave; scenario seconds.

    ``initial_delay_s`` is the least time that opening takes, ``setup_s`` a constant added after it
    (both from the calibration). Without room the client waits ``backoff_first_s``, doubling up to
    ``backoff_max_s``, and gives up ``give_up_s`` after arrival (0: never).
    """

    initial_delay_s: float = 0.0
    setup_s: float = 0.0
    backoff_first_s: float = 1.0
    backoff_max_s: float = 60.0
    give_up_s: float = 0.0


class Observer(Protocol):
    """Where a session reports to: the event log and the progress counters."""

    def state(self, request: Request, state: str, at_s: float, details: Mapping[str, Any]) -> None: ...

    def opening(self, request: Request, at_s: float, opened_at_s: float) -> None: ...

    def token(
        self,
        request: Request,
        index: int,
        ready_at_s: float,
        finished_at_s: float,
        hops: Sequence[Any],
        token_id: int,
    ) -> None: ...


Router = Callable[[Request, int], Awaitable[dict[str, Any] | None]]
"""Asks the routing policy: (request, attempt) to ``{hops, wait_s, decision_s}`` or ``None``."""


@dataclass
class _OpenHop:
    """A hop of the chain, and what was sent to it: enough to rebuild its cache elsewhere."""

    server: int
    first: int
    last: int
    inputs: bytearray = field(default_factory=bytearray)


class HubSession:
    """Runs one request to its end. ``run`` returns normally only when every token came out right."""

    def __init__(
        self,
        request: Request,
        key: str,
        client: str,
        connections: Sequence[Connection],
        route: Router,
        model: HubModel,
        rules: SessionRules,
        clock: Clock,
        observer: Observer,
    ) -> None:
        self.request = request
        self.key = key
        self._client = client
        self._connections = connections
        self._route = route
        self._model = model
        self._rules = rules
        self._clock = clock
        self._observer = observer
        self.hops: list[_OpenHop] = []

    async def run(self) -> None:
        """Raises ``SessionError`` with the reason when the request cannot be completed."""
        hops, attempt_at_s = await self._open_chain()
        try:
            opened_at_s = self._clock.now_s()
            self._observer.opening(self.request, attempt_at_s, opened_at_s)
            ready_at_s = max(opened_at_s, attempt_at_s + self._rules.initial_delay_s) + self._rules.setup_s
            await self._clock.sleep_until_s(ready_at_s)
            finished_at_s = await self._generate(hops, ready_at_s)
            self._observer.state(self.request, "completed", finished_at_s, {})
        finally:
            await self._close(hops)

    async def _open_chain(self) -> tuple[list[HopPlan], float]:
        """Ask for routes until one admits the session; answer it and the start of that attempt."""
        rules = self._rules
        backoff_s = rules.backoff_first_s
        for attempt in range(1_000_000):
            asked_at_s = self._clock.now_s()
            answer = await self._route(self.request, attempt)
            attempt_at_s = self._clock.now_s()
            if answer is None:
                reason, server = "no route covers the model", -1
            else:
                hops: list[HopPlan] = [tuple(hop) for hop in answer["hops"]]
                details = {**answer, "asked_s": attempt_at_s - asked_at_s}
                self._observer.state(self.request, "routed", attempt_at_s, details)
                refused = await self._open(hops)
                if refused is None:
                    self._observer.state(self.request, "admitted", self._clock.now_s(), {"hops": hops})
                    return hops, attempt_at_s
                server, reason = refused
            now_s = self._clock.now_s()
            if rules.give_up_s and now_s + backoff_s > self.request.arrival_at_s + rules.give_up_s:
                raise SessionError(f"no room within {rules.give_up_s:g} s ({reason})")
            self._observer.state(
                self.request,
                "rejected",
                now_s,
                {"server": server, "reason": reason, "backoff_s": backoff_s},
            )
            await self._clock.sleep_until_s(now_s + backoff_s)
            backoff_s = min(2 * backoff_s, rules.backoff_max_s)
        raise SessionError("a million attempts to open a session failed")

    async def _open(self, hops: Sequence[HopPlan]) -> tuple[int, str] | None:
        """Open all hops at once; on a refusal close the others and answer (server, reason)."""
        max_tokens = self.request.n_input_tokens + self.request.n_output_tokens
        results = await asyncio.gather(
            *(
                self._connections[server].ask("open", self.key, self._client, first, last, max_tokens)
                for server, first, last in hops
            ),
            return_exceptions=True,
        )
        refused: tuple[int, str] | None = None
        opened: list[HopPlan] = []
        for hop, result in zip(hops, results, strict=True):
            if not isinstance(result, BaseException):
                opened.append(hop)
            elif isinstance(result, ServerError | ConnectionLost):
                refused = (hop[0], str(result))
            else:
                raise result
        if refused is not None:
            await self._close(opened)
        return refused

    async def _close(self, hops: Sequence[HopPlan]) -> None:
        """Close what can still be reached; a lost connection has closed its sessions itself."""
        results = await asyncio.gather(
            *(self._connections[server].ask("close", self.key) for server, _, _ in hops),
            return_exceptions=True,
        )
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, ServerError | ConnectionLost):
                raise result

    async def _generate(self, plan: Sequence[HopPlan], ready_at_s: float) -> float:
        """Prefill and decode; answer the instant of the last token."""
        self.hops = [_OpenHop(*hop) for hop in plan]
        sequence = self._model.sequence(self.request)
        position = 0
        for index in range(self.request.n_output_tokens):
            payload = await sequence.embed()
            n_tokens = len(payload) // self._model.token_bytes
            timings: list[tuple[int | float, ...]] = []
            for hop in self.hops:
                payload, timing = await self._pass(hop, position, n_tokens, payload)
                timings.append(timing)
            token_id = await sequence.take(payload)
            finished_at_s = self._clock.now_s()
            self._observer.token(self.request, index, ready_at_s, finished_at_s, timings, token_id)
            position += n_tokens
            ready_at_s = finished_at_s
            if sequence.ended:
                break
        return ready_at_s

    async def _pass(
        self, hop: _OpenHop, position: int, n_tokens: int, payload: bytes
    ) -> tuple[bytes, tuple[int | float, ...]]:
        """Send hidden states through ``hop``; answers what comes out, and the hop's row of the log."""
        hop.inputs += self._model.remember(payload)
        n_up = len(payload)
        try:
            frame, sent_at_s, received_at_s = await self._connections[hop.server].ask(
                "step", self.key, position, n_tokens, payload
            )
        except (ServerError, ConnectionLost) as error:
            raise SessionError(f"server {hop.server}: {error}") from error
        if frame[0] != "out" or len(frame[4]) != n_up:
            raise SessionError(f"server {hop.server}: its answer is not {n_tokens} hidden states")
        _, _, arrived_at_s, departed_at_s, answer = frame
        blocks = (hop.server, hop.first, hop.last)
        times = (sent_at_s, arrived_at_s, departed_at_s, received_at_s)
        return answer, (*blocks, *times, n_up, len(answer))
