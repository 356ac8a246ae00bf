"""Compute backends: what turns a session's hidden states into the next hop's.

``stub`` takes exactly the time that the hardware profile says and returns verifiable values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from nodes.clock import Clock
from nodes.digest import apply_blocks, read_rows, write_rows


class ComputeError(Exception):
    """The backend cannot do it: blocks that do not load, no memory left. One sentence for the user."""


class Compute(Protocol):
    """What a server needs of a compute backend."""

    token_bytes: int

    def new_session(self, client: str, first: int, last: int, max_tokens: int) -> Any:
        """State of one session for blocks ``[first, last)``. Raises ``ComputeError`` without memory for it."""
        ...

    def close_session(self, session: Any) -> None:
        """Free what the session holds; it may still be computing."""
        ...

    async def step(
        self, session: Any, position: int, n_tokens: int, payload: bytes, arrived_at_s: float
    ) -> bytes:
        """Hidden states after the session's blocks; position 0 is the prefill. Raises ``ComputeError``."""
        ...

    async def host(self, first: int, last: int) -> None:
        """Hold blocks ``[first, last)`` and no others; sessions on blocks that go are closed before.

        Raises ``ComputeError`` if they cannot be loaded.
        """
        ...

    def memory(self) -> dict[str, float]:
        """Bytes really in use, by what for (``blocks_bytes``, ``cache_bytes``, ...); empty if none are."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class StubProfile:
    """Times of one server's blocks, scenario seconds.

    Decode of one token: ``decode_s`` per block. Prefill of l tokens: ``prefill_base_s +
    prefill_slope_s * l`` per block. On top of either, once per step, what the calibration adds for
    the client: ``token_overhead_s[client]``, ``input_overhead_s[client](l) = base + slope * l``.
    ``serial``: one step at a time, as PETALS' server runs; otherwise sessions do not slow each other.
    """

    token_bytes: int
    decode_s: float
    prefill_base_s: float
    prefill_slope_s: float
    token_overhead_s: Mapping[str, float] = field(default_factory=dict)
    input_overhead_s: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    serial: bool = False

    def compute_s(self, position: int, n_tokens: int, n_blocks: int) -> float:
        if position:
            return n_blocks * self.decode_s * n_tokens
        return n_blocks * (self.prefill_base_s + self.prefill_slope_s * n_tokens)

    def overhead_s(self, client: str, position: int, n_tokens: int) -> float:
        if position:
            return self.token_overhead_s.get(client, 0.0)
        base, slope = self.input_overhead_s.get(client, (0.0, 0.0))
        return max(0.0, base + slope * n_tokens)


class _StubSession:
    __slots__ = ("caches", "client", "first")

    def __init__(self, client: str, first: int, last: int) -> None:
        self.client = client
        self.first = first
        self.caches = [0] * (last - first)


class StubCompute:
    """The calibrated timing stub: no GPU, exact times, values that prove the chain was right.

    A step that arrived at t is done at the absolute instant t + time, so an error in one step never
    shifts the next.
    """

    def __init__(self, profile: StubProfile, clock: Clock) -> None:
        self.profile = profile
        self.token_bytes = profile.token_bytes
        self._clock = clock
        self._busy_until_s = 0.0

    def new_session(self, client: str, first: int, last: int, max_tokens: int) -> _StubSession:
        return _StubSession(client, first, last)

    def close_session(self, session: _StubSession) -> None:
        pass

    async def host(self, first: int, last: int) -> None:
        pass

    def memory(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        pass

    async def step(
        self, session: _StubSession, position: int, n_tokens: int, payload: bytes, arrived_at_s: float
    ) -> bytes:
        profile = self.profile
        start_s = arrived_at_s
        busy_s = profile.compute_s(position, n_tokens, len(session.caches))
        if profile.serial:
            start_s = max(start_s, self._busy_until_s)
            self._busy_until_s = start_s + busy_s
        done_at_s = start_s + busy_s + profile.overhead_s(session.client, position, n_tokens)
        values = [
            apply_blocks(value, session.first, session.caches)
            for value in read_rows(payload, self.token_bytes)
        ]
        answer = write_rows(values, self.token_bytes)
        await self._clock.sleep_until_s(done_at_s)
        return answer
