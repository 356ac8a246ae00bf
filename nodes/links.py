"""Link delays inside the client's transport, for networks whose kernel delays nothing (``loopback``)."""

from __future__ import annotations

from dataclasses import dataclass

from nodes.clock import Clock


@dataclass(frozen=True)
class DelayProfile:
    """One direction: propagation (scenario seconds), and seconds per byte on the link."""

    delay_s: float
    s_per_byte: float


class DelayLine:
    """A FIFO link: a message arrives after the ones before it, its transmission and the delay."""

    def __init__(self, profile: DelayProfile, clock: Clock) -> None:
        self._profile = profile
        self._clock = clock
        self._free_at_s = 0.0

    async def carry(self, n_bytes: int) -> None:
        """Return when a message of ``n_bytes`` that is sent now arrives."""
        self._free_at_s = max(self._clock.now_s(), self._free_at_s) + n_bytes * self._profile.s_per_byte
        await self._clock.sleep_until_s(self._free_at_s + self._profile.delay_s)
