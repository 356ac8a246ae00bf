"""The servers of the real mode: what they hold now, and their attention-cache accounts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from nodes.cache import CacheAccount, NoCapacityError
from policies.problem import BlockRange, Hop, Placement

Key = tuple[int, int]
"""(session, its opening): a session that is cut opens again under another key."""

OnCache = Callable[[float, int, float], None]
"""Told (instant, server, change in bytes) whenever cache is reserved or freed."""


class _Reserved(NamedTuple):
    hop: Hop
    n_bytes: float


class Servers:
    """What every server offers new sessions (a range of blocks, room for caches) and what sessions hold."""

    def __init__(self, placement: Placement, on_cache: OnCache | None = None) -> None:
        self._placement = placement
        self._ranges = list(placement.ranges)
        self._accounts = [CacheAccount(room) for room in placement.cache_bytes]
        self._reserved: list[dict[Key, _Reserved]] = [{} for _ in placement.ranges]
        self._on_cache = on_cache

    @property
    def placement(self) -> Placement:
        """What new sessions can use."""
        rooms = tuple(account.capacity_bytes for account in self._accounts)
        return replace(self._placement, ranges=tuple(self._ranges), cache_bytes=rooms)

    def range_of(self, server: int) -> BlockRange:
        return self._ranges[server]

    def is_empty(self, server: int) -> bool:
        return not self._reserved[server]

    def keys(self, server: int) -> list[Key]:
        """Whose cache is on ``server``, in the order in which they opened."""
        return list(self._reserved[server])

    def offers(self, hop: Hop) -> bool:
        """Whether new sessions can use these blocks on this server."""
        return _holds(self._ranges[hop.server], hop)

    def reserve(self, key: Key, hop: Hop, n_bytes: float, now_s: float) -> str | None:
        """Set cache aside for ``key``; the reason if the server refuses."""
        if not self.offers(hop):
            return "its blocks are not here any more"
        try:
            self._accounts[hop.server].reserve(key, n_bytes)
        except NoCapacityError as error:
            return str(error)
        self._reserved[hop.server][key] = _Reserved(hop, n_bytes)
        if self._on_cache:
            self._on_cache(now_s, hop.server, n_bytes)
        return None

    def release(self, key: Key, server: int, now_s: float) -> None:
        """Give back what ``key`` holds on ``server``; nothing if a cut has done so."""
        reserved = self._reserved[server].pop(key, None)
        if reserved is not None:
            self._accounts[server].release(key)
            if self._on_cache:
                self._on_cache(now_s, server, -reserved.n_bytes)

    def offer(self, server: int, held: BlockRange, cache_bytes: float) -> None:
        """Offer new sessions this range and this room from now on; those that are there stay."""
        self._ranges[server] = held
        self._accounts[server].capacity_bytes = cache_bytes

    def is_drained(self, server: int) -> bool:
        """Whether the sessions that are there need no more than what is offered."""
        account, held = self._accounts[server], self._ranges[server]
        return account.used_bytes <= account.capacity_bytes * (1 + 1e-9) and all(
            _holds(held, reserved.hop) for reserved in self._reserved[server].values()
        )

    def cut(self, server: int, now_s: float) -> list[Key]:
        """Drop all sessions of ``server`` and answer them in the order in which they opened."""
        keys = list(self._reserved[server])
        for key in keys:
            self.release(key, server, now_s)
        return keys


def _holds(held: BlockRange, hop: Hop) -> bool:
    return held.first <= hop.first < hop.last <= held.last
