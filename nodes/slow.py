"""Servers that compute more slowly than they should: wraps any compute backend and prolongs every step."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import Any

from nodes.clock import Clock
from nodes.compute import Compute, Computed, StubCompute


class SlowCompute:
    """A backend that takes ``factor`` times as long as ``inner`` for every step."""

    def __init__(self, inner: Compute, factor: float, clock: Clock) -> None:
        self.inner = inner
        self.token_bytes = inner.token_bytes
        self._factor = factor
        self._clock = clock

    def new_session(self, client: str, first: int, last: int, max_tokens: int) -> Any:
        return self.inner.new_session(client, first, last, max_tokens)

    def opening(self, session: Any) -> Awaitable[None] | None:
        return self.inner.opening(session)

    def close_session(self, session: Any) -> None:
        self.inner.close_session(session)

    async def step(
        self, session: Any, position: int, n_tokens: int, payload: bytes, arrived_at_s: float
    ) -> Computed:
        began_at_s = self._clock.now_s()
        answer = await self.inner.step(session, position, n_tokens, payload, arrived_at_s)
        now_s = self._clock.now_s()
        await self._clock.sleep_until_s(now_s + (self._factor - 1.0) * (now_s - began_at_s))
        return answer

    def kept(self, session: Any, tokens: range) -> Any:
        return self.inner.kept(session, tokens)

    def evicted(self, page: Any) -> None:
        self.inner.evicted(page)

    def reuse(self, session: Any, pages: Sequence[Any]) -> None:
        self.inner.reuse(session, pages)

    def grow(self, session: Any, max_tokens: int) -> None:
        self.inner.grow(session, max_tokens)

    async def host(self, first: int, last: int) -> None:
        await self.inner.host(first, last)

    def memory(self) -> dict[str, float]:
        return self.inner.memory()

    def close(self) -> None:
        self.inner.close()


def slowed(compute: Compute, factor: float, clock: Clock) -> Compute:
    """Returns a backend that takes ``factor`` times as long as ``compute``, the one the server started with.

    The stub itself takes longer for what it begins from now on, so that steps still wait for each other. Other backends
    wait after each step.
    """
    if isinstance(compute, StubCompute):
        compute.factor = factor
        return compute
    return compute if factor == 1.0 else SlowCompute(compute, factor, clock)
