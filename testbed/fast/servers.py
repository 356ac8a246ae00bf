"""The servers of the fast engine: what they offer now, and their attention-cache accounts."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from nodes.cache import CacheAccount, NoCapacityError
from policies.problem import BlockRange, Hop, Placement

Key = tuple[int, int]
"""(session, its opening)."""

OnCache = Callable[[float, int, float], None]
"""Told (instant, server, change in bytes) whenever cache is reserved or freed."""


class Refused(NamedTuple):
    """Why a server takes no session. ``is_final``: it has less room than the session needs, and does not move."""

    reason: str
    is_final: bool


class Servers:
    """What every server offers new sessions (a range of blocks, room for caches) and what sessions hold."""

    def __init__(self, placement: Placement, on_cache: OnCache | None = None) -> None:
        self._ranges = list(placement.ranges)
        self._accounts = [CacheAccount(room) for room in placement.cache_bytes]
        self._hops: list[dict[Key, Hop]] = [{} for _ in placement.ranges]
        self._has_moved: set[int] = set()
        self._on_cache = on_cache

    def reserve(self, key: Key, hop: Hop, n_bytes: float, now_s: float) -> Refused | None:
        """Set cache aside for ``key``; why not, if the server refuses."""
        server = hop.server
        if not _holds(self._ranges[server], hop):
            return Refused("its blocks are not here any more", False)
        account = self._accounts[server]
        try:
            account.reserve(key, n_bytes)
        except NoCapacityError as error:
            return Refused(str(error), server not in self._has_moved and not account.could_hold(n_bytes))
        self._hops[server][key] = hop
        if self._on_cache:
            self._on_cache(now_s, server, n_bytes)
        return None

    def release(self, key: Key, server: int, now_s: float) -> None:
        """Give back what ``key`` holds on ``server``."""
        del self._hops[server][key]
        n_bytes = self._accounts[server].held_bytes(key)
        self._accounts[server].release(key)
        if self._on_cache:
            self._on_cache(now_s, server, -n_bytes)

    def offer(self, server: int, held: BlockRange, cache_bytes: float) -> None:
        """Offer new sessions this range and this room from now on; those that are there stay."""
        self._has_moved.add(server)
        self._ranges[server] = held
        self._accounts[server].capacity_bytes = cache_bytes

    def is_drained(self, server: int) -> bool:
        """Whether the sessions that are there need no more than what is offered."""
        account, held = self._accounts[server], self._ranges[server]
        return account.could_hold(account.used_bytes) and all(
            _holds(held, hop) for hop in self._hops[server].values()
        )

    def room_bytes(self, server: int) -> float:
        """What all caches on ``server`` may take."""
        return self._accounts[server].capacity_bytes


def _holds(held: BlockRange, hop: Hop) -> bool:
    return held.first <= hop.first < hop.last <= held.last
