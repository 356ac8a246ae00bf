"""What the coordinator knows of the sessions, as old as its last report."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from policies.problem import Hop
from policies.state import SystemState

_MAX_STALE = 65536
"""Openings after which the state is made anew: it remembers the ends of sessions that were closed."""


class _Held(NamedTuple):
    hops: tuple[Hop, ...]
    bytes_per_block: float
    ends_at_s: float


class RouterView:
    """Sessions held from the moment their chain is handed out until they end or are refused.

    A session that lasts longer than expected is still held, and with no reports (``age_s`` 0) every
    change is seen at once. Otherwise changes are seen from the next report after them on; reports come every ``age_s`` seconds from time 0. A change costs O(log n).
    """

    def __init__(self, cache_bytes: Sequence[float], age_s: float = 0.0) -> None:
        self._age_s = age_s
        self._state = SystemState(cache_bytes)
        self._n_opened = 0
        self._seen: dict[int, _Held] = {}
        self._unseen: deque[tuple[float, int, _Held | None]] = deque()
        """(instant, session, what it holds or ``None``: no longer) of changes since the last report."""

    def hold(
        self, key: int, hops: tuple[Hop, ...], bytes_per_block: float, ends_at_s: float, now_s: float
    ) -> None:
        """``key`` was given this chain and is expected to be done at ``ends_at_s``."""
        self._change(key, _Held(hops, bytes_per_block, ends_at_s), now_s)

    def release(self, key: int, now_s: float) -> None:
        """``key`` has ended or was refused."""
        self._change(key, None, now_s)

    def state(self, key: int, now_s: float) -> SystemState:
        """What a decision for session ``key`` sees at ``now_s``; what ``key`` itself held is gone."""
        if self._age_s:
            reported_at_s = math.floor(now_s / self._age_s) * self._age_s
            while self._unseen and self._unseen[0][0] < reported_at_s:
                _, other, held = self._unseen.popleft()
                self._see(other, held)
            self._see(key, None)
        return self._state

    def replace(self, cache_bytes: Sequence[float]) -> None:
        """The servers have other room for caches now; the sessions stay."""
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
