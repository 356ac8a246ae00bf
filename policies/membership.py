"""Which servers a router believes to be there, and where that is wrong."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple


@dataclass(frozen=True)
class MembershipRules:
    """How routers learn of servers.

    ``instant``: at once. ``announced``, as in PETALS: a server announces itself when it begins and every
    ``announce_period_s`` from then on, each time for ``expiry_s``; routers look at what is announced every
    ``refresh_s`` (from time 0). One that leaves says so; one that dies or halts just stops announcing.
    """

    kind: Literal["instant", "announced"] = "instant"
    announce_period_s: float = 60.0
    expiry_s: float = 120.0
    refresh_s: float = 60.0


class _Spell(NamedTuple):
    """A time during which a server is there. ``phase_at_s``: one instant at which it announces itself."""

    begin_at_s: float
    end_at_s: float
    is_said: bool
    """Whether it announced its end."""
    phase_at_s: float


class Membership:
    """What happened to servers so far, notified in the order of time, and what routers make of it.

    All servers but ``absent`` are there from time 0 on. Pure: instants are given, never looked up.
    """

    def __init__(self, rules: MembershipRules, n_servers: int, absent: Iterable[int] = ()) -> None:
        self._rules = rules
        self._since_s = -math.inf
        away = frozenset(absent)
        self._spells: list[list[_Spell]] = [
            [] if j in away else [_Spell(0.0, math.inf, False, 0.0)] for j in range(n_servers)
        ]
        self._seen: tuple[float, frozenset[int]] | None = None
        self._alive: frozenset[int] | None = None

    def begins(self, server: int, at_s: float) -> None:
        """``server`` is there (again) and announces itself at once."""
        if not self._is_there(server):
            self._told(at_s)
            self._forget_old(server, at_s)
            self._spells[server].append(_Spell(at_s, math.inf, False, at_s))

    def goes_on(self, server: int, at_s: float) -> None:
        """``server``, which halted, goes on: its next announcement comes when it would have come anyway."""
        spells = self._spells[server]
        if spells and not self._is_there(server):
            self._told(at_s)
            self._forget_old(server, at_s)
            spells.append(_Spell(at_s, math.inf, False, spells[-1].phase_at_s))

    def ends(self, server: int, at_s: float, *, is_said: bool = False) -> None:
        """``server`` is not there any more; ``is_said``: it announced that."""
        if self._is_there(server):
            self._told(at_s)
            self._spells[server][-1] = self._spells[server][-1]._replace(end_at_s=at_s, is_said=is_said)

    def alive(self) -> frozenset[int]:
        """The servers that are there after all that was notified."""
        if self._alive is None:
            self._alive = frozenset(j for j in range(len(self._spells)) if self._is_there(j))
        return self._alive

    def believed(self, now_s: float) -> frozenset[int]:
        """The servers that routers take to be there at ``now_s``, not before the last notification."""
        if self._rules.kind == "instant":
            return self.alive()
        seen_at_s = math.floor(now_s / self._rules.refresh_s) * self._rules.refresh_s
        if self._seen is None or self._seen[0] != seen_at_s:
            servers = range(len(self._spells))
            self._seen = seen_at_s, frozenset(j for j in servers if self._is_announced(j, seen_at_s))
        return self._seen[1]

    def wrong(self, now_s: float) -> frozenset[int]:
        """The servers about which ``believed(now_s)`` is wrong: a decision that uses one is made on a stale view."""
        believed, alive = self.believed(now_s), self.alive()
        return frozenset() if believed is alive else believed ^ alive

    def _is_there(self, server: int) -> bool:
        spells = self._spells[server]
        return bool(spells) and spells[-1].end_at_s == math.inf

    def _told(self, at_s: float) -> None:
        assert at_s >= self._since_s, f"membership was told of {at_s} s after {self._since_s} s"
        self._since_s = at_s
        self._seen = self._alive = None

    def _forget_old(self, server: int, at_s: float) -> None:
        """Drop all but the last spell whose announcements no router sees any more, from ``at_s`` on."""
        seen_from_s = at_s - self._rules.refresh_s - self._rules.expiry_s
        spells = self._spells[server]
        spells[:-1] = [spell for spell in spells[:-1] if spell.end_at_s > seen_from_s]

    def _is_announced(self, server: int, at_s: float) -> bool:
        """Whether an announcement of ``server`` holds at ``at_s``."""
        spells = self._spells[server]
        for spell in reversed(spells[: bisect_right(spells, at_s, key=lambda spell: spell.begin_at_s)]):
            if spell.is_said and spell.end_at_s <= at_s:
                return False
            # A process that is gone at an instant does not announce itself at it.
            until_s = min(at_s, math.nextafter(spell.end_at_s, -math.inf))
            period_s = self._rules.announce_period_s
            last_at_s = spell.phase_at_s + math.floor((until_s - spell.phase_at_s) / period_s) * period_s
            if last_at_s >= spell.begin_at_s:
                return at_s < last_at_s + self._rules.expiry_s
        return False
