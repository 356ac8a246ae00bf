"""A server's attention-cache account: what sessions have reserved, and what is left."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

ROUNDING = 1 + 1e-9
"""The same relative slack as routing grants, so that rounding never refuses what it promised."""


class NoCapacityError(Exception):
    """The account has no room for this session now."""


class CacheAccount:
    """Bytes reserved per session out of ``capacity_bytes``; never oversubscribed."""

    def __init__(self, capacity_bytes: float) -> None:
        self.capacity_bytes = capacity_bytes
        self._reserved: dict[Hashable, float] = {}
        self._used_bytes = 0.0

    @property
    def used_bytes(self) -> float:
        return self._used_bytes

    @property
    def used_ratio(self) -> float:
        return self._used_bytes / self.capacity_bytes if self.capacity_bytes else 0.0

    def __len__(self) -> int:
        return len(self._reserved)

    def keys(self) -> list[Any]:
        """Who holds something, in the order in which they reserved it."""
        return list(self._reserved)

    def held_bytes(self, session: Hashable) -> float:
        """What ``session`` has reserved; 0 if nothing."""
        return self._reserved.get(session, 0.0)

    def could_hold(self, n_bytes: float) -> bool:
        """Whether ``n_bytes`` fit when nothing else is held."""
        return n_bytes <= self.capacity_bytes * ROUNDING

    def reserve(self, session: Hashable, n_bytes: float) -> None:
        """Set ``n_bytes`` aside. Raises ``NoCapacityError`` without room, ``KeyError`` if it holds some."""
        if session in self._reserved:
            raise KeyError(session)
        self._take(session, n_bytes)

    def grow(self, session: Hashable, n_bytes: float) -> None:
        """Set ``n_bytes`` more aside for a session. Raises ``NoCapacityError`` without room, ``KeyError`` if it holds nothing."""
        if session not in self._reserved:
            raise KeyError(session)
        self._take(session, n_bytes)

    def _take(self, session: Hashable, n_bytes: float) -> None:
        if not self.could_hold(self._used_bytes + n_bytes):
            free_bytes = max(0.0, self.capacity_bytes - self._used_bytes)
            raise NoCapacityError(f"{n_bytes / 1e6:.1f} MB asked for, {free_bytes / 1e6:.1f} MB free")
        self._reserved[session] = self._reserved.get(session, 0.0) + n_bytes
        self._used_bytes += n_bytes

    def release(self, session: Hashable) -> None:
        """Give back what ``session`` holds; nothing if it holds nothing."""
        self._used_bytes -= self._reserved.pop(session, 0.0)
        if not self._reserved:
            self._used_bytes = 0.0
