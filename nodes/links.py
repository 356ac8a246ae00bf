"""Links that a node itself plays by delaying messages, on networks where nothing else does (``loopback``)."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Awaitable, Callable, Sized
from dataclasses import dataclass
from typing import Generic, TypeVar

from nodes.clock import Clock
from policies.links import HEADER_BYTES, repair_s

GIVE_UP_S = 900.0
"""Scenario seconds after which a cut link breaks a connection; about those of Linux (``tcp_retries2`` 15)."""


@dataclass(frozen=True)
class DelayProfile:
    """One direction of a link: propagation delay, and transmission time per byte, in scenario seconds.

    Every message's delay differs by up to +- ``jitter_s``. The share ``loss_ratio`` of the packets is lost; 1
    cuts the link. A packet holds up to ``segment_bytes`` of a message; lost ones are sent again (``policies.links.repair_s``).
    """

    delay_s: float
    s_per_byte: float
    jitter_s: float = 0.0
    loss_ratio: float = 0.0
    segment_bytes: int = 1500 - HEADER_BYTES


class DelayLine:
    """A FIFO link: a message arrives after its transmission and the delay, and not before earlier messages.

    Lost packets arrive late, as with TCP. Messages sent while the link is cut go out when it is up again.
    Messages that are on their way when the profile changes keep their arrival.
    """

    def __init__(self, profile: DelayProfile, clock: Clock, chance: random.Random | None = None) -> None:
        self._clock = clock
        self._chance = chance or random.Random(0)
        self._turn = asyncio.Lock()
        self._up = asyncio.Event()
        self._free_at_s = 0.0
        self._last_arrival_s = 0.0
        self.change(profile)

    def change(self, profile: DelayProfile) -> None:
        """Uses another profile for messages that are sent from now on."""
        self._profile = profile
        if profile.loss_ratio < 1:
            self._up.set()
        else:
            self._up.clear()

    async def enter(self, n_bytes: int) -> float:
        """Sends a message of ``n_bytes``; returns when it arrives. Waits while the link is cut.

        Raises ``ConnectionError`` when the link stays cut for ``GIVE_UP_S``.
        """
        async with self._turn:
            if not self._up.is_set():
                await self._until_up()
            profile = self._profile
            self._free_at_s = max(self._clock.now_s(), self._free_at_s) + n_bytes * profile.s_per_byte
            delay_s = profile.delay_s
            if profile.jitter_s:
                delay_s += self._chance.uniform(-1.0, 1.0) * profile.jitter_s
            if profile.loss_ratio:
                n_packets = -(-n_bytes // profile.segment_bytes)
                delay_s += repair_s(2 * profile.delay_s, n_packets, self._lost_of)[0]
            self._last_arrival_s = at_s = max(self._last_arrival_s, self._free_at_s + delay_s)
        return at_s

    async def until_free(self) -> None:
        """Waits until all messages so far have been transmitted."""
        if self._free_at_s > self._clock.now_s():
            await self._clock.sleep_until_s(self._free_at_s)

    def _lost_of(self, n_packets: int) -> list[int]:
        """Draws which of so many packets are lost."""
        return [i for i in range(n_packets) if self._chance.random() < self._profile.loss_ratio]

    async def _until_up(self) -> None:
        up = asyncio.ensure_future(self._up.wait())
        limit = asyncio.ensure_future(self._clock.sleep_until_s(self._clock.now_s() + GIVE_UP_S))
        try:
            await asyncio.wait((up, limit), return_when=asyncio.FIRST_COMPLETED)
        finally:
            up.cancel()
            limit.cancel()
        if not self._up.is_set():
            raise ConnectionResetError(f"nothing came through for {GIVE_UP_S:g} s")


M = TypeVar("M", bound=Sized)


class DelayedMessages(Generic[M]):
    """Passes messages to ``deliver``, in order, when they have crossed a ``DelayLine``.

    ``lost`` is called if ``deliver`` fails with a ``ConnectionError``.
    """

    def __init__(
        self,
        line: DelayLine,
        clock: Clock,
        deliver: Callable[[M], Awaitable[None]],
        lost: Callable[[], object],
    ) -> None:
        self._line = line
        self._clock = clock
        self._deliver = deliver
        self._lost = lost
        self._crossing: deque[tuple[float, M]] = deque()
        self._carrier: asyncio.Task[None] | None = None

    async def send(self, message: M) -> None:
        """Sends a message when the line is free. Raises ``ConnectionError`` if that gives up."""
        await self._line.until_free()
        self._crossing.append((await self._line.enter(len(message)), message))
        if self._carrier is None:
            self._carrier = asyncio.ensure_future(self._carry())

    async def _carry(self) -> None:
        try:
            while self._crossing:
                await self._clock.sleep_until_s(self._crossing[0][0])
                await self._deliver(self._crossing.popleft()[1])
        except ConnectionError:
            self._lost()
        finally:
            self._carrier = None

    def close(self) -> None:
        """Delivers nothing more."""
        self._crossing.clear()
        if self._carrier is not None:
            self._carrier.cancel()
