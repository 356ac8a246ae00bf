"""A server that changes its blocks while it serves: it closes, drains, loads, and opens again.

What it keeps goes on being served all the while: sessions on kept blocks notice nothing. New sessions on
other blocks are refused as if there were no room, because a chain may have been handed out before.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace

import msgspec

from nodes import wire
from nodes.cache import ROUNDING
from nodes.control import Handlers
from nodes.messages import Drain, Emptied, Moved, Rehost
from nodes.sessions import HostedBlocks, Sessions
from nodes.watchdog import Overdue, Watchdog

log = logging.getLogger(__name__)

SERVING, DRAINING, LOADING = "serving", "draining", "loading"
"""What a server's ``phase`` can be."""


class Moving:
    """Moves one server to other blocks, one move after another. ``tell(phase, at_s)`` is called at every phase."""

    def __init__(self, sessions: Sessions, tell: Callable[[str, float], None]) -> None:
        self._sessions = sessions
        self._tell = tell
        self._watchdog = Watchdog(sessions.clock)
        self._turn = asyncio.Lock()
        self._leaves = False

    def handlers(self) -> Handlers:
        """What the orchestrator may ask."""
        return {
            Rehost: lambda message: self.rehost(*msgspec.structs.astuple(message)),
            Drain: lambda _: self.leave(),
            Emptied: lambda _: self.emptied(),
        }

    async def leave(self) -> None:
        """No room for new sessions from now on, whatever moves; those that are there keep theirs."""
        self._leaves = True
        self._sessions.account.capacity_bytes = 0.0

    async def emptied(self) -> None:
        """Returns when no session is left."""
        sessions = self._sessions
        while len(sessions.account):
            sessions.released.clear()
            await sessions.released.wait()

    async def rehost(
        self, first: int, last: int, cache_bytes: float, drain_s: float | None, load_s: float
    ) -> Moved:
        """Hold blocks ``[first, last)``, with room for ``cache_bytes`` of caches, instead of what is held now.

        Sessions that need more than stays (blocks of both ranges, the smaller room) may go on for ``drain_s``
        scenario seconds, and are ended then: their clients replay elsewhere. ``None`` keeps and spares
        nothing. Loading takes ``load_s`` beside what the backend needs. Raises ``ComputeError`` if the blocks
        cannot be loaded: then only what is kept is served.
        """
        async with self._turn:
            sessions, clock = self._sessions, self._sessions.clock
            old, sessions.may_move = sessions.hosted, True
            wanted = replace(old, first=first, last=last, cache_bytes=cache_bytes)
            self._enter(DRAINING)
            closed_at_s = clock.now_s()
            self._offer(_kept(old, wanted, spares=drain_s is not None))
            n_cut = await self._drain(drain_s or 0.0)
            drained_at_s = clock.now_s()
            self._enter(LOADING)
            await sessions.compute.host(sessions.hosted.first, sessions.hosted.last)
            await clock.sleep_until_s(drained_at_s + load_s)
            await sessions.compute.host(first, last)
            self._offer(wanted)
            self._enter(SERVING)
            return Moved(closed_at_s, drained_at_s, clock.now_s(), n_cut)

    def _enter(self, phase: str) -> None:
        self._sessions.phase = phase
        self._tell(phase, self._sessions.clock.now_s())

    def _offer(self, hosted: HostedBlocks) -> None:
        self._sessions.hosted = hosted
        self._sessions.account.capacity_bytes = 0.0 if self._leaves else hosted.cache_bytes

    async def _drain(self, most_s: float) -> int:
        """Wait for the sessions that cannot stay, then end them; returns how many those were."""
        sessions, n_cut = self._sessions, 0
        try:
            with self._watchdog.limit(most_s):
                while most_s and self._leaving():
                    sessions.released.clear()
                    await sessions.released.wait()
        except Overdue:
            pass  # the rest goes on elsewhere
        while leaving := self._leaving():
            n_cut += 1
            await sessions.end(leaving[0], wire.SESSION_MOVED, "is cut: its server moves to other blocks")
        if n_cut:
            log.warning("%d sessions have to go on elsewhere: their blocks move", n_cut)
        return n_cut

    def _leaving(self) -> list[tuple[int, str]]:
        """The sessions that need more than is offered: blocks that go, or room that goes, the last ones first."""
        sessions, account = self._sessions, self._sessions.account
        hosted = sessions.hosted
        leaving, used_bytes = [], 0.0
        for key in account.keys():  # noqa: SIM118 - an account is no mapping
            first, last = sessions.blocks_of(key)
            used_bytes += account.held_bytes(key)
            is_here = hosted.first <= first < last <= hosted.last
            if not is_here or used_bytes > hosted.cache_bytes * ROUNDING:
                leaving.append(key)
                used_bytes -= account.held_bytes(key)
        return leaving


def _kept(old: HostedBlocks, new: HostedBlocks, *, spares: bool) -> HostedBlocks:
    """The blocks of both and the smaller room; no blocks if nothing is spared."""
    room_bytes = min(old.cache_bytes, new.cache_bytes)
    first, last = max(old.first, new.first), min(old.last, new.last)
    if not spares or first >= last:
        first = last = 0
    return replace(new, first=first, last=last, cache_bytes=room_bytes)
