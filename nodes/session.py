"""One inference session as the hub runs it: open a chain, prefill, decode token by token, close."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from nodes.clock import Clock
from nodes.connection import Connection, ConnectionLost, ServerError
from nodes.digest import apply_blocks, embed, read_rows, token_of, write_rows

HopPlan = tuple[int, int, int]
"""(server index, first block, last block), half-open."""


@dataclass(frozen=True)
class Request:
    """What the load generator asks for. ``arrival_at_s`` is the intended instant."""

    index: int
    arrival_at_s: float
    n_input_tokens: int
    n_output_tokens: int


@dataclass(frozen=True)
class SessionRules:
    """How sessions behave; scenario seconds.

    ``initial_delay_s`` is the least time that opening takes, ``setup_s`` a constant added after it
    (both from the calibration). Without room the client waits ``backoff_first_s``, doubling up to
    ``backoff_max_s``, and gives up ``give_up_s`` after arrival (0: never).
    """

    token_bytes: int
    n_blocks: int
    initial_delay_s: float = 0.0
    setup_s: float = 0.0
    backoff_first_s: float = 1.0
    backoff_max_s: float = 60.0
    give_up_s: float = 0.0
    verify: bool = True
    """Compare every token with the same computation on one machine (stub only)."""


class SessionError(Exception):
    """The request has failed; the message is the reason."""


class Observer(Protocol):
    """Where a session reports to: the event log and the progress counters."""

    def state(self, request: Request, state: str, at_s: float, details: Mapping[str, Any]) -> None: ...

    def opening(self, request: Request, at_s: float, opened_at_s: float) -> None: ...

    def token(
        self, request: Request, token: int, ready_at_s: float, finished_at_s: float, hops: Sequence[Any]
    ) -> None: ...


Router = Callable[[Request, int], Awaitable[dict[str, Any] | None]]
"""Asks the routing policy: (request, attempt) to ``{hops, wait_s, decision_s}`` or ``None``."""


class WrongTokenError(SessionError):
    """The chain's output differs from the whole model's."""


class HubSession:
    """Runs one request to its end. ``run`` returns normally only when every token came out right."""

    def __init__(
        self,
        request: Request,
        key: str,
        client: str,
        connections: Sequence[Connection],
        route: Router,
        rules: SessionRules,
        clock: Clock,
        observer: Observer,
    ) -> None:
        self.request = request
        self.key = key
        self._client = client
        self._connections = connections
        self._route = route
        self._rules = rules
        self._clock = clock
        self._observer = observer
        self.hop_inputs: list[list[int]] = []
        """What was sent to each hop, token by token: enough to rebuild its cache elsewhere. The stub's
        hidden states are determined by their values, so these are kept and not the bytes."""

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

    async def _generate(self, hops: Sequence[HopPlan], ready_at_s: float) -> float:
        """Prefill and decode; answer the instant of the last token."""
        rules, request = self._rules, self.request
        self.hop_inputs = [[] for _ in hops]
        caches = [0] * rules.n_blocks
        tokens = [request.index + i for i in range(request.n_input_tokens)]
        position = 0
        for index in range(request.n_output_tokens):
            values = [embed(token, position + i) for i, token in enumerate(tokens)]
            payload = write_rows(values, rules.token_bytes)
            timings: list[tuple[int | float, ...]] = []
            for i, (server, first, last) in enumerate(hops):
                self.hop_inputs[i] += read_rows(payload, rules.token_bytes)
                n_up = len(payload)
                try:
                    frame, sent_at_s, received_at_s = await self._connections[server].ask(
                        "step", self.key, position, len(tokens), payload
                    )
                except (ServerError, ConnectionLost) as error:
                    raise SessionError(f"server {server}: {error}") from error
                if frame[0] != "out" or len(frame[4]) != n_up:
                    raise SessionError(f"server {server}: its answer is not {len(tokens)} hidden states")
                _, _, arrived_at_s, departed_at_s, payload = frame
                timings.append(
                    (
                        server,
                        first,
                        last,
                        sent_at_s,
                        arrived_at_s,
                        departed_at_s,
                        received_at_s,
                        n_up,
                        len(payload),
                    )
                )
            finished_at_s = self._clock.now_s()
            self._observer.token(request, index, ready_at_s, finished_at_s, timings)
            value = read_rows(payload, rules.token_bytes)[-1]
            if rules.verify:
                expected = [apply_blocks(v, 0, caches) for v in values][-1]
                if value != expected:
                    raise WrongTokenError(f"token {index} differs from the whole model's")
            position += len(tokens)
            tokens = [token_of(value)]
            ready_at_s = finished_at_s
        return ready_at_s
