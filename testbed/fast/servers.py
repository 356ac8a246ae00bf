"""The servers of the fast engine: what they offer now, and their attention-cache accounts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from policies.rules import PagingRules

from nodes.cache import CacheAccount, NoCapacityError
from policies.problem import BlockRange, Hop, Placement

Key = tuple[int, int]
"""(session, its opening)."""

OnCache = Callable[[float, int, float], None]
"""Called with (instant, server, change in bytes) whenever cache is reserved or freed."""

OnPreempted = Callable[[Key, int], None]
"""Called with (session, server) as soon as the server has taken the session's cache for others."""


class Refused(NamedTuple):
    """Why a server refused a session.

    ``is_final``: the session can never fit, and the server has never moved.
    """

    reason: str
    is_final: bool


class Need(NamedTuple):
    """What a session needs in each block: cache for ``first_tokens`` at once, for ``most_tokens`` in the end.

    ``came`` is (arrival of its request, name). Of requests that arrived at the same time, the one with the
    greater name counts as the later one.
    """

    first_tokens: int
    most_tokens: int
    came: tuple[float, str] = (0.0, "")


@dataclass(slots=True)
class _Held:
    """What a session has on a server. It has cache for ``cached_tokens`` now."""

    hop: Hop
    need: Need
    cached_tokens: int


class Servers:
    """What every server offers new sessions (a range of blocks, room for caches) and what sessions hold.

    A token takes ``block_bytes`` in a block. With ``paging`` caches grow, and ``on_preempted`` is called for
    every session that was preempted.
    """

    def __init__(
        self,
        placement: Placement,
        block_bytes: float,
        on_cache: OnCache | None = None,
        paging: PagingRules | None = None,
        on_preempted: OnPreempted = lambda key, server: None,
    ) -> None:
        self._ranges = list(placement.ranges)
        self._accounts = [CacheAccount(room) for room in placement.cache_bytes]
        self._held: list[dict[Key, _Held]] = [{} for _ in placement.ranges]
        self._has_moved: set[int] = set()
        self._block_bytes = block_bytes
        self._on_cache = on_cache
        self._paging = paging
        self._on_preempted = on_preempted

    def reserve(self, key: Key, hop: Hop, need: Need, now_s: float) -> Refused | None:
        """Reserve cache for ``key``. Returns the reason if the server refuses, else ``None``."""
        server, paging, n_tokens = hop.server, self._paging, need.most_tokens
        if not _holds(self._ranges[server], hop):
            return Refused("its blocks are not here any more", False)
        account, each_bytes = self._accounts[server], self._block_bytes * hop.n_blocks
        most_bytes = each_bytes * n_tokens
        try:
            if paging is not None:
                n_tokens = paging.paged(need.first_tokens, n_tokens)
                account.leave_room(each_bytes * n_tokens, most_bytes, paging.high_water)
            account.reserve(key, each_bytes * n_tokens)
        except NoCapacityError as error:
            return Refused(str(error), server not in self._has_moved and not account.could_hold(most_bytes))
        self._held[server][key] = _Held(hop, need, n_tokens)
        if self._on_cache:
            self._on_cache(now_s, server, each_bytes * n_tokens)
        return None

    def grow(self, key: Key, server: int, n_tokens: int, now_s: float) -> bool:
        """Reserve cache for ``n_tokens`` of ``key``, for which sessions that arrived last are preempted.

        Returns False if ``key`` has no cache there any more.
        """
        held, paging = self._held[server].get(key), self._paging
        if held is None or paging is None or n_tokens <= held.cached_tokens:
            return held is not None
        wanted = paging.paged(n_tokens, held.need.most_tokens)
        more_bytes = self._block_bytes * held.hop.n_blocks * (wanted - held.cached_tokens)

        def preempt(key: Key) -> None:
            self.release(key, server, now_s)
            self._on_preempted(key, server)

        if not self._accounts[server].make_room(key, more_bytes, self._came(server), preempt):
            return False
        held.cached_tokens = wanted
        if self._on_cache:
            self._on_cache(now_s, server, more_bytes)
        return True

    def _came(self, server: int) -> Callable[[Key], tuple[float, str]]:
        return lambda key: self._held[server][key].need.came

    def holds(self, key: Key, server: int) -> bool:
        """Whether ``key`` has cache on ``server``."""
        return key in self._held[server]

    def release(self, key: Key, server: int, now_s: float) -> None:
        """Release what ``key`` holds on ``server``; nothing if it was preempted there."""
        if self._held[server].pop(key, None) is None:
            return
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
        """Returns whether the present sessions need no more than what is offered."""
        account, held = self._accounts[server], self._ranges[server]
        return account.could_hold(account.used_bytes) and all(
            _holds(held, one.hop) for one in self._held[server].values()
        )

    def room_bytes(self, server: int) -> float:
        """What all caches on ``server`` may take."""
        return self._accounts[server].capacity_bytes


def _holds(held: BlockRange, hop: Hop) -> bool:
    return held.first <= hop.first < hop.last <= held.last
