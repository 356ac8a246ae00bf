"""The state that routers see: the sessions that hold cache on servers and use links, and when they are expected to end."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Hashable, Sequence
from heapq import heapify, heappop, heappush
from operator import sub
from typing import NamedTuple

from policies.link_rates import Passage, Queue
from policies.outcomes import Outcomes, WhoAsks
from policies.prefixes import Asking
from policies.problem import Hop

_MIN_ENDS = 1024
"""Up to this many expected ends are kept before those of closed sessions are removed."""


class ActiveSession(NamedTuple):
    """A session's cache on one server: ``n_bytes`` for ``n_blocks`` blocks, until ``ends_at_s``."""

    ends_at_s: float
    sequence: int
    n_blocks: int
    n_bytes: float
    key: Hashable


class LinkUse(NamedTuple):
    """How often sessions' chains pass a link, and how many seconds it needs for the prompts that have arrived there."""

    n_sessions: int
    backlog_s: float


class SystemState:
    """The active sessions of each server, ordered by expected end.

    A session is active until ``close``, or until ``advance`` to an instant that is not before its
    ``ends_at_s``. ``open`` and ``close`` take a search among a server's sessions for each hop; ``advance``
    takes time proportional to what has ended.

    Of links it has what follows from the sessions: which use a link, and when their prompts are expected there. No
    router sees the messages that really wait.
    """

    def __init__(self, cache_bytes: Sequence[float]) -> None:
        self.cache_bytes = tuple(cache_bytes)
        self._sessions: list[list[ActiveSession]] = [[] for _ in cache_bytes]
        self._used = [0.0] * len(self.cache_bytes)
        self._n_active = [0] * len(self.cache_bytes)
        self._sequence = 0
        self._held: dict[Hashable, list[tuple[int, ActiveSession]]] = {}
        self._ends: list[tuple[float, int, Hashable]] = []
        """Heap of (expected end, sequence, key) of opened sessions; may also have some of closed ones."""
        self._max_ends = _MIN_ENDS
        self._passages: dict[Queue, _Passages] = {}
        """Those of active sessions, by link."""
        self._passing: dict[Hashable, list[Passage]] = {}
        """The same by session."""
        self.asking: Asking | None = None
        """What is known of the request that asks now; ``None`` where no cache outlives its request."""
        self.who: WhoAsks | None = None
        """Which request asks now; ``None`` for routings that do not want "requests", and in trials."""
        self.outcomes: Outcomes | None = None
        """What became of earlier requests; ``None`` for routers that do not observe, and in trials."""

    def open(
        self,
        key: Hashable,
        hops: Sequence[Hop],
        bytes_per_block: float,
        ends_at_s: float,
        passages: Sequence[Passage] = (),
    ) -> None:
        """Reserves ``bytes_per_block`` for every block of every hop until ``ends_at_s``.

        ``passages``: those of its prompt; the session uses these links until it ends.
        """
        entries = self._held.setdefault(key, [])
        for hop in hops:
            self._sequence += 1
            n_blocks = hop.last - hop.first
            held = ActiveSession(ends_at_s, self._sequence, n_blocks, n_blocks * bytes_per_block, key)
            insort(self._sessions[hop.server], held)
            self._used[hop.server] += held.n_bytes
            self._n_active[hop.server] += 1
            entries.append((hop.server, held))
        heappush(self._ends, (ends_at_s, self._sequence, key))
        if len(self._ends) > self._max_ends:
            self._forget_closed()
        if passages:
            self._passing.setdefault(key, []).extend(passages)
            for passage in passages:
                self._passages.setdefault(passage.queue, _Passages()).add(passage)

    def _forget_closed(self) -> None:
        """Removes the ends of closed sessions; without ``advance`` they would pile up."""
        held = {entry.sequence for entries in self._held.values() for _, entry in entries}
        self._ends = [end for end in self._ends if end[1] in held]
        heapify(self._ends)
        self._max_ends = max(_MIN_ENDS, 2 * len(self._ends))

    def close(self, key: Hashable) -> None:
        """Frees the cache of session ``key`` on every server; unknown keys are ignored."""
        for server, held in self._held.pop(key, ()):
            self._release(server, held)
        self._leave(key)

    def advance(self, now_s: float) -> None:
        """Closes every session whose expected end is not after ``now_s``."""
        ends = self._ends
        while ends and ends[0][0] <= now_s:
            key = heappop(ends)[2]
            later = []
            for server, held in self._held.pop(key, ()):
                if held.ends_at_s <= now_s:
                    self._release(server, held)
                else:
                    later.append((server, held))
            if later:
                self._held[key] = later
            else:
                self._leave(key)

    def _leave(self, key: Hashable) -> None:
        """Removes a session from the links that it has used."""
        for passage in self._passing.pop(key, ()):
            self._passages[passage.queue].remove(passage)

    def _release(self, server: int, held: ActiveSession) -> None:
        sessions = self._sessions[server]
        del sessions[bisect_left(sessions, held)]
        self._used[server] -= held.n_bytes
        self._n_active[server] -= 1
        if not sessions:
            self._used[server] = 0.0

    def sessions(self, server: int) -> Sequence[ActiveSession]:
        """Returns the sessions on ``server`` in the order of their expected ends."""
        return self._sessions[server]

    def n_active(self, server: int) -> int:
        return self._n_active[server]

    def all_active(self) -> Sequence[int]:
        """Returns the number of sessions on every server, in list order."""
        return self._n_active

    def free_bytes(self, server: int) -> float:
        return self.cache_bytes[server] - self._used[server]

    def all_free_bytes(self) -> Sequence[float]:
        """Returns ``free_bytes`` of every server, in list order."""
        return list(map(sub, self.cache_bytes, self._used))

    def used_queues(self) -> list[Queue]:
        """Returns the links that active sessions use."""
        return [queue for queue, passages in self._passages.items() if passages.all]

    def use(self, queue: Queue, now_s: float, at_s: float) -> LinkUse:
        """Returns what is expected of a link at ``at_s``, which is not before ``now_s``."""
        passages = self._passages.get(queue)
        return LinkUse(0, 0.0) if passages is None else passages.use(now_s, at_s)


class _Passages:
    """The passages of one link, ``all`` in the order in which they were added. None ends before it arrives."""

    def __init__(self) -> None:
        self.all: list[Passage] = []
        self._arrivals_s: list[float] = []
        """When they arrive, ascending; ``_untils_s`` likewise."""
        self._untils_s: list[float] = []
        self._latest_s: list[float] = []
        """For each of ``all``, an instant at which its prompt and all before it have passed."""

    def add(self, passage: Passage) -> None:
        self.all.append(passage)
        self._latest_s.append(max(passage.ends_at_s, self._latest_s[-1] if self._latest_s else 0.0))
        insort(self._arrivals_s, passage.arrives_at_s)
        insort(self._untils_s, passage.until_s)

    def remove(self, passage: Passage) -> None:
        at = self.all.index(passage)
        del self.all[at], self._latest_s[at]
        del self._arrivals_s[bisect_left(self._arrivals_s, passage.arrives_at_s)]
        del self._untils_s[bisect_left(self._untils_s, passage.until_s)]

    def use(self, now_s: float, at_s: float) -> LinkUse:
        """As ``SystemState.use``, in the time of a search and of the prompts that have not passed at ``at_s``."""
        untils_s = self._untils_s
        n_ended = bisect_right(untils_s, at_s) - bisect_right(untils_s, now_s)  # one that is overdue counts
        backlog_s = 0.0
        for passage in self.all[bisect_right(self._latest_s, at_s) :]:
            _, arrives_at_s, begins_at_s, ends_at_s, busy_s, until_s = passage
            if arrives_at_s <= at_s < ends_at_s and not now_s < until_s <= at_s:
                backlog_s += busy_s * min((ends_at_s - at_s) / (ends_at_s - begins_at_s), 1.0)
        return LinkUse(bisect_right(self._arrivals_s, at_s) - n_ended, backlog_s)
