"""A server's attention-cache account: what sessions have reserved, and what is left."""

from __future__ import annotations

from collections.abc import Callable, Hashable
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

    def leave_room(self, n_bytes: float, most_bytes: float, high_water: float) -> None:
        """Raises ``NoCapacityError`` where ``n_bytes`` for a session would fill the room that others are to grow in.

        A session may need ``most_bytes`` in the end.
        """
        if not self.could_hold(most_bytes):
            raise NoCapacityError(
                f"{most_bytes / 1e6:.1f} MB may be needed, there are {self.capacity_bytes / 1e6:.1f} MB"
            )
        after_bytes = self._used_bytes + n_bytes
        if self._reserved and after_bytes > high_water * self.capacity_bytes * ROUNDING:
            raise NoCapacityError(
                f"{after_bytes / 1e6:.1f} MB would be in use, more than {high_water:.0%} of the room"
            )

    def make_room(
        self,
        session: Hashable,
        n_bytes: float,
        came: Callable[[Any], tuple[float, str]],
        preempt: Callable[[Any], None],
    ) -> bool:
        """``grow``, for which those who ``came`` last go without; whether ``session`` is not one of them.

        ``preempt`` has what somebody holds released.
        """
        while True:
            try:
                self.grow(session, n_bytes)
            except NoCapacityError:
                youngest = max(self._reserved, key=came)
                preempt(youngest)
                if youngest == session:
                    return False
            else:
                return True

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
