"""What a router knows of the servers: the sessions that hold cache, and when they will end."""

from __future__ import annotations

from bisect import insort
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from policies.problem import Hop


class ActiveSession(NamedTuple):
    """Cache held on one server: until ``ends_at_s``, for ``n_blocks`` blocks, ``n_bytes`` in all."""

    ends_at_s: float
    sequence: int
    n_blocks: int
    n_bytes: float
    key: Hashable


class SystemState:
    """Active sessions per server, ordered by expected completion.

    A session counts as active at time t while ``ends_at_s > t`` (strictly) or until ``close``.
    """

    def __init__(self, cache_bytes: Sequence[float]) -> None:
        self.cache_bytes = tuple(cache_bytes)
        self._sessions: list[list[ActiveSession]] = [[] for _ in cache_bytes]
        self._used = [0.0] * len(self.cache_bytes)
        self._sequence = 0

    def open(self, key: Hashable, hops: Sequence[Hop], bytes_per_block: float, ends_at_s: float) -> None:
        """Reserve ``bytes_per_block`` for every block of every hop until ``ends_at_s``."""
        for hop in hops:
            self._sequence += 1
            held = ActiveSession(ends_at_s, self._sequence, hop.n_blocks, hop.n_blocks * bytes_per_block, key)
            insort(self._sessions[hop.server], held)
            self._used[hop.server] += held.n_bytes

    def close(self, key: Hashable) -> None:
        """Free what ``key`` holds, on every server. Unknown keys hold nothing."""
        for server, sessions in enumerate(self._sessions):
            for held in [s for s in sessions if s.key == key]:
                sessions.remove(held)
                self._release(server, held)

    def advance(self, now_s: float) -> None:
        """Drop every session whose expected completion is not after ``now_s``."""
        for server, sessions in enumerate(self._sessions):
            while sessions and sessions[0].ends_at_s <= now_s:
                self._release(server, sessions.pop(0))

    def _release(self, server: int, held: ActiveSession) -> None:
        self._used[server] -= held.n_bytes
        if not self._sessions[server]:
            self._used[server] = 0.0

    def sessions(self, server: int) -> Sequence[ActiveSession]:
        """Sessions on ``server`` in the order of their expected completion."""
        return self._sessions[server]

    def n_active(self, server: int) -> int:
        return len(self._sessions[server])

    def free_bytes(self, server: int) -> float:
        return self.cache_bytes[server] - self._used[server]
