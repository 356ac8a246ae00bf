"""Moves a server to other blocks while it serves: it refuses new sessions, drains, loads, and opens again.

Blocks of both the old and the new range stay served, and sessions on them notice nothing. New sessions on
other blocks are refused as if there were no room, because clients may have got their chain before the move.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import msgspec

from nodes import wire
from nodes.admission import HostedBlocks
from nodes.control import Handlers
from nodes.messages import Drain, Moved, Rehost, WaitUntilEmpty
from nodes.sessions import Sessions
from nodes.watchdog import Overdue, Watchdog

log = logging.getLogger(__name__)

SERVING, DRAINING, LOADING = "serving", "draining", "loading"
"""The values of a server's ``phase``."""


class Moving:
    """Moves one server to other blocks, one move at a time.

    Calls ``notify(phase, at_s)`` when a phase begins.
    """

    def __init__(self, sessions: Sessions, notify: Callable[[str, float], None]) -> None:
        self._sessions = sessions
        self._notify = notify
        self._watchdog = Watchdog(sessions.clock)
        self._turn = asyncio.Lock()

    def handlers(self) -> Handlers:
        """Returns the handlers of the orchestrator's messages."""
        return {
            Rehost: lambda message: self.rehost(*msgspec.structs.astuple(message)),
            Drain: lambda _: self.leave(),
            WaitUntilEmpty: lambda _: self.wait_until_empty(),
        }

    async def leave(self) -> None:
        """Refuses new sessions from now on, also after later moves. Open sessions keep their cache."""
        self._sessions.admission.leave()

    async def wait_until_empty(self) -> None:
        """Waits until no session is left."""
        sessions = self._sessions
        while len(sessions.admission.account):
            sessions.released.clear()
            await sessions.released.wait()

    async def rehost(
        self, first: int, last: int, cache_bytes: float, drain_s: float | None, load_s: float
    ) -> Moved:
        """Holds blocks ``[first, last)`` with ``cache_bytes`` of room for caches instead of the present ones.

        During the move the server keeps the blocks of both ranges, with the smaller room. Sessions that need
        more may go on for ``drain_s`` scenario seconds and are ended then; their clients replay elsewhere.
        With ``drain_s`` ``None`` no blocks are kept, and all sessions are ended at once. Loading takes
        ``load_s`` scenario seconds, and the backend's own time. Raises ``ComputeError`` if the blocks cannot
        be loaded: then only the kept blocks are served.
        """
        async with self._turn:
            sessions, clock = self._sessions, self._sessions.clock
            admission, wanted = sessions.admission, (first, last, cache_bytes)
            self._enter(DRAINING)
            closed_at_s = clock.now_s()
            kept = _kept(admission.hosted, *wanted, spares=drain_s is not None)
            admission.offer(*kept)
            n_cut = await self._drain(drain_s or 0.0)
            drained_at_s = clock.now_s()
            self._enter(LOADING)
            await sessions.compute.host(*kept[:2])
            await clock.sleep_until_s(drained_at_s + load_s)
            await sessions.compute.host(first, last)
            admission.offer(*wanted)
            self._enter(SERVING)
            return Moved(closed_at_s, drained_at_s, clock.now_s(), n_cut)

    def _enter(self, phase: str) -> None:
        self._sessions.phase = phase
        self._notify(phase, self._sessions.clock.now_s())

    async def _drain(self, most_s: float) -> int:
        """Waits up to ``most_s`` for the sessions that cannot stay, then ends the rest.

        Returns how many it ended.
        """
        sessions, n_cut = self._sessions, 0
        try:
            with self._watchdog.limit(most_s):
                while most_s and sessions.admission.leaving():
                    sessions.released.clear()
                    await sessions.released.wait()
        except Overdue:
            pass  # the sessions that are left are ended below
        while leaving := sessions.admission.leaving():
            n_cut += 1
            sessions.end(leaving[0], wire.SESSION_MOVED, "is cut: its server moves to other blocks")
        if n_cut:
            log.warning("%d sessions must go on elsewhere: this server moves to other blocks", n_cut)
        return n_cut


def _kept(
    old: HostedBlocks, first: int, last: int, cache_bytes: float, *, spares: bool
) -> tuple[int, int, float]:
    """Returns the blocks of both ranges with the smaller room; no blocks unless ``spares``."""
    room_bytes = min(old.cache_bytes, cache_bytes)
    first, last = max(old.first, first), min(old.last, last)
    if not spares or first >= last:
        first = last = 0
    return first, last, room_bytes
