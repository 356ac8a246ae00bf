"""The servers of the real mode: what they hold now, and their attention-cache accounts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from nodes.cache import CacheAccount, NoCapacityError
from policies.problem import BlockRange, Hop, Placement

Key = tuple[int, int]
"""(session, its opening): a session that is cut opens again under another key."""

OnCache = Callable[[float, int, float], None]
"""Told (instant, server, change in bytes) whenever cache is reserved or freed."""


class Servers:
    """Ranges and accounts of all servers; a server that is ``closed`` takes no new session."""

    def __init__(self, placement: Placement, on_cache: OnCache | None = None) -> None:
        self._placement = placement
        self._ranges = list(placement.ranges)
        self._accounts = [CacheAccount(room) for room in placement.cache_bytes]
        self._reserved: list[dict[Key, float]] = [{} for _ in placement.ranges]
        self._closed: set[int] = set()
        self._on_cache = on_cache

    @property
    def placement(self) -> Placement:
        """What new sessions can use: closed servers hold nothing."""
        if not self._closed and all(
            a is b for a, b in zip(self._ranges, self._placement.ranges, strict=True)
        ):
            return self._placement
        is_open = [j not in self._closed for j in range(len(self._ranges))]
        return replace(
            self._placement,
            ranges=tuple(
                held if ok else BlockRange(0, 0) for held, ok in zip(self._ranges, is_open, strict=True)
            ),
            cache_bytes=tuple(
                account.capacity_bytes if ok else 0.0
                for account, ok in zip(self._accounts, is_open, strict=True)
            ),
        )

    def range_of(self, server: int) -> BlockRange:
        return self._ranges[server]

    def is_empty(self, server: int) -> bool:
        return not self._reserved[server]

    def offers(self, hop: Hop) -> bool:
        """Whether the server is open and holds the blocks of ``hop``."""
        held = self._ranges[hop.server]
        return hop.server not in self._closed and held.first <= hop.first < hop.last <= held.last

    def reserve(self, key: Key, hop: Hop, n_bytes: float, now_s: float) -> str | None:
        """Set cache aside for ``key``; the reason if the server refuses."""
        server = hop.server
        if not self.offers(hop):
            return "its blocks are not here any more"
        try:
            self._accounts[server].reserve(key, n_bytes)
        except NoCapacityError as error:
            return str(error)
        self._reserved[server][key] = n_bytes
        if self._on_cache:
            self._on_cache(now_s, server, n_bytes)
        return None

    def release(self, key: Key, server: int, now_s: float) -> None:
        """Give back what ``key`` holds on ``server``; nothing if a cut has done so."""
        n_bytes = self._reserved[server].pop(key, None)
        if n_bytes is not None:
            self._accounts[server].release(key)
            if self._on_cache:
                self._on_cache(now_s, server, -n_bytes)

    def close(self, server: int) -> None:
        """Take no new sessions; those that are there stay."""
        self._closed.add(server)

    def cut(self, server: int, now_s: float) -> list[Key]:
        """Drop all sessions of ``server`` and answer them in the order in which they opened."""
        keys = list(self._reserved[server])
        for key in keys:
            self.release(key, server, now_s)
        return keys

    def install(self, server: int, held: BlockRange, cache_bytes: float) -> None:
        """Hold other blocks and open again. The server must be empty."""
        assert self.is_empty(server), f"server {server} changes its blocks under its sessions"
        self._ranges[server] = held
        self._accounts[server] = CacheAccount(cache_bytes)
        self._closed.discard(server)

    def covers_without(self, server: int, n_blocks: int) -> bool:
        """Whether open servers other than ``server`` hold every block."""
        held = [r for j, r in enumerate(self._ranges) if j != server and j not in self._closed]
        return len({b for r in held for b in range(r.first, r.last)}) == n_blocks
