"""What routers see of the sessions: their state at the last report."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from policies.link_rates import Passage
from policies.problem import Hop
from policies.state import SystemState

_MAX_STALE = 65536
"""Openings after which the state is rebuilt, because it also keeps the ends of closed sessions."""


class _Held(NamedTuple):
    hops: tuple[Hop, ...]
    bytes_per_block: float
    ends_at_s: float
    passages: tuple[Passage, ...]


class RouterView:
    """The sessions that hold cache: from the moment that their chain is chosen until they end or are refused.

    A session that lasts longer than expected is still held. With ``age_s`` 0 every change is seen at once.
    Otherwise reports come every ``age_s`` scenario seconds from time 0, and a change is seen from the next
    report on. A change costs O(log n).
    """

    def __init__(self, cache_bytes: Sequence[float], age_s: float = 0.0) -> None:
        self._age_s = age_s
        self._state = SystemState(cache_bytes)
        self._n_opened = 0
        self._seen: dict[int, _Held] = {}
        self._unseen: deque[tuple[float, int, _Held | None]] = deque()
        """Changes since the last report: (instant, session, what it holds or ``None`` if it was released)."""

    def hold(
        self,
        key: int,
        hops: tuple[Hop, ...],
        bytes_per_block: float,
        ends_at_s: float,
        now_s: float,
        passages: tuple[Passage, ...] = (),
    ) -> None:
        """Note that session ``key`` has this chain and is expected to end at ``ends_at_s``; see ``SystemState.open``."""
        self._change(key, _Held(hops, bytes_per_block, ends_at_s, passages), now_s)

    def release(self, key: int, now_s: float) -> None:
        """Note that session ``key`` has ended or was refused."""
        self._change(key, None, now_s)

    def state(self, key: int, now_s: float) -> SystemState:
        """Returns what a decision for session ``key`` sees at ``now_s``: all others, as last reported."""
        if self._age_s:
            reported_at_s = math.floor(now_s / self._age_s) * self._age_s
            while self._unseen and self._unseen[0][0] < reported_at_s:
                _, other, held = self._unseen.popleft()
                self._see(other, held)
            self._see(key, None)
        return self._state

    def replace(self, cache_bytes: Sequence[float]) -> None:
        """Change the servers' room for caches. The sessions stay."""
        self._state = SystemState(cache_bytes)
        self._n_opened = 0
        for key, held in self._seen.items():
            self._state.open(key, *held)

    def _change(self, key: int, held: _Held | None, now_s: float) -> None:
        if self._age_s:
            self._unseen.append((now_s, key, held))
        else:
            self._see(key, held)

    def _see(self, key: int, held: _Held | None) -> None:
        if self._seen.pop(key, None) is not None:
            self._state.close(key)
        if held is not None:
            self._seen[key] = held
            self._state.open(key, *held)
            self._n_opened += 1
            if self._n_opened > _MAX_STALE + len(self._seen):
                self.replace(self._state.cache_bytes)
