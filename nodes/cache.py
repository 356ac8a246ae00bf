"""A server's attention-cache account: what sessions have reserved, and what is left."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

ROUNDING = 1 + 1e-9
"""Relative slack, the same as in routing, so that rounding never refuses a session that routing admitted."""


def _sizes(needed_bytes: float, there_bytes: float) -> tuple[str, str]:
    """Returns both for people, in one unit and with as many digits as tell them apart."""
    unit, scale = "MB", 1e6
    if needed_bytes < 1e5:
        unit, scale = ("kB", 1e3) if needed_bytes >= 1e3 else ("B", 1.0)
    needed, there = needed_bytes / scale, there_bytes / scale
    fewest = 0 if scale == 1 else 1
    n_digits = next((n for n in range(fewest, 9) if f"{needed:.{n}f}" != f"{there:.{n}f}"), 9)
    return f"{needed:.{n_digits}f} {unit}", f"{there:.{n_digits}f} {unit}"


class NoCapacityError(Exception):
    """The server has no room for this session now."""


class CacheAccount:
    """Bytes reserved per session out of ``capacity_bytes``; never oversubscribed."""

    def __init__(self, capacity_bytes: float) -> None:
        self.capacity_bytes = capacity_bytes
        self._reserved: dict[Hashable, float] = {}
        self._used_bytes = 0.0
        self.shared_bytes = 0.0
        """Kept pages that sessions use, each counted once; ``reserve`` has what is a session's own."""

    @property
    def used_bytes(self) -> float:
        return self._used_bytes + self.shared_bytes

    @property
    def used_ratio(self) -> float:
        return self.used_bytes / self.capacity_bytes if self.capacity_bytes else 0.0

    def __len__(self) -> int:
        return len(self._reserved)

    def held_bytes(self, session: Hashable) -> float:
        """Returns the bytes that ``session`` has reserved; 0 if none."""
        return self._reserved.get(session, 0.0)

    def could_hold(self, n_bytes: float) -> bool:
        """Returns whether ``n_bytes`` fit into the capacity when nothing else is reserved."""
        return n_bytes <= self.capacity_bytes * ROUNDING

    def reserve(self, session: Hashable, n_bytes: float) -> None:
        """Reserves ``n_bytes`` for a session.

        Raises ``NoCapacityError``, or ``KeyError`` if it has some already.
        """
        if session in self._reserved:
            raise KeyError(session)
        self._take(session, n_bytes)

    def grow(self, session: Hashable, n_bytes: float) -> None:
        """Reserves ``n_bytes`` more for a session.

        Raises ``NoCapacityError``, or ``KeyError`` if it has none yet.
        """
        if session not in self._reserved:
            raise KeyError(session)
        self._take(session, n_bytes)

    def shrink(self, session: Hashable, n_bytes: float) -> None:
        """Releases ``n_bytes`` of what ``session`` has reserved."""
        self._reserved[session] -= n_bytes
        self._used_bytes -= n_bytes

    def leave_room(self, n_bytes: float, most_bytes: float, high_water: float) -> None:
        """Checks that a new session leaves room for the others to grow; reserves nothing.

        It needs ``n_bytes`` now and may need ``most_bytes`` in the end. Raises ``NoCapacityError`` if
        ``most_bytes`` exceed the capacity, or if other sessions are there and more than the share
        ``high_water`` (0..1) of the capacity would be in use.
        """
        if not self.could_hold(most_bytes):
            needed, there = _sizes(most_bytes, self.capacity_bytes)
            raise NoCapacityError(f"{needed} may be needed; the server has {there}")
        after_bytes = self.used_bytes + n_bytes
        allowed_bytes = high_water * self.capacity_bytes
        if self._reserved and after_bytes > allowed_bytes * ROUNDING:
            in_use, _ = _sizes(after_bytes, allowed_bytes)
            raise NoCapacityError(f"{in_use} would be in use, more than {high_water:.0%} of the room")

    def make_room(
        self,
        session: Hashable,
        n_bytes: float,
        came: Callable[[Any], tuple[float, str]],
        preempt: Callable[[Any], None],
    ) -> bool:
        """As ``grow``, but preempts sessions until there is room: those with the greatest ``came`` first.

        ``preempt`` must release what a session holds. Returns False if ``session`` itself was preempted.
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
        if not self.could_hold(self.used_bytes + n_bytes):
            free_bytes = max(0.0, self.capacity_bytes - self.used_bytes)
            asked, free = _sizes(n_bytes, free_bytes)
            raise NoCapacityError(f"{asked} asked for, {free} free")
        self._reserved[session] = self._reserved.get(session, 0.0) + n_bytes
        self._used_bytes += n_bytes

    def release(self, session: Hashable) -> None:
        """Releases what ``session`` has reserved, if anything."""
        self._used_bytes -= self._reserved.pop(session, 0.0)
        if not self._reserved:
            self._used_bytes = 0.0
