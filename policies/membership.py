"""Which servers routers believe to be alive, and where they are wrong."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple


@dataclass(frozen=True)
class MembershipRules:
    """How routers learn which servers are alive.

    ``instant``: at once. ``announced``, as in PETALS: a server announces itself when it begins and every
    ``announce_period_s`` from then on, each time for ``expiry_s``. Routers read the announcements every
    ``refresh_s``, from time 0 on. A server that leaves announces it; one that dies or halts only stops
    announcing.
    """

    kind: Literal["instant", "announced"] = "instant"
    announce_period_s: float = 60.0
    expiry_s: float = 120.0
    refresh_s: float = 60.0


class _Spell(NamedTuple):
    """A time during which a server is alive. ``phase_at_s``: an instant at which it announces itself."""

    begin_at_s: float
    end_at_s: float
    is_said: bool
    """Whether the server announced its end."""
    phase_at_s: float


class Membership:
    """The history of which servers were alive, and what routers believe of it.

    Its methods must be called in the order of time. All servers but ``absent`` are alive from time 0 on.
    Pure: instants are arguments.
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
        """Record that ``server`` begins (again) and announces itself at once."""
        if not self._is_there(server):
            self._told(at_s)
            self._forget_old(server, at_s)
            self._spells[server].append(_Spell(at_s, math.inf, False, at_s))

    def goes_on(self, server: int, at_s: float) -> None:
        """Record that the halted ``server`` continues; its announcements keep their instants."""
        spells = self._spells[server]
        if spells and not self._is_there(server):
            self._told(at_s)
            self._forget_old(server, at_s)
            spells.append(_Spell(at_s, math.inf, False, spells[-1].phase_at_s))

    def ends(self, server: int, at_s: float, *, is_said: bool = False) -> None:
        """Record that ``server`` ended or halted; ``is_said``: it announced its end."""
        if self._is_there(server):
            self._told(at_s)
            self._spells[server][-1] = self._spells[server][-1]._replace(end_at_s=at_s, is_said=is_said)

    def alive(self) -> frozenset[int]:
        """Returns the servers that are really alive after the last recorded event."""
        if self._alive is None:
            self._alive = frozenset(j for j in range(len(self._spells)) if self._is_there(j))
        return self._alive

    def believed(self, now_s: float) -> frozenset[int]:
        """Returns the servers that routers believe to be alive at ``now_s``, not before the last event."""
        if self._rules.kind == "instant":
            return self.alive()
        seen_at_s = math.floor(now_s / self._rules.refresh_s) * self._rules.refresh_s
        if self._seen is None or self._seen[0] != seen_at_s:
            servers = range(len(self._spells))
            self._seen = seen_at_s, frozenset(j for j in servers if self._is_announced(j, seen_at_s))
        return self._seen[1]

    def wrong(self, now_s: float) -> frozenset[int]:
        """Returns the servers about which ``believed(now_s)`` is wrong; decisions about them are stale."""
        believed, alive = self.believed(now_s), self.alive()
        return frozenset() if believed is alive else believed ^ alive

    def _is_there(self, server: int) -> bool:
        spells = self._spells[server]
        return bool(spells) and spells[-1].end_at_s == math.inf

    def _told(self, at_s: float) -> None:
        assert at_s >= self._since_s, f"membership was notified of {at_s} s after {self._since_s} s"
        self._since_s = at_s
        self._seen = self._alive = None

    def _forget_old(self, server: int, at_s: float) -> None:
        """Drops spells before the last one whose announcements no router sees any more from ``at_s`` on."""
        seen_from_s = at_s - self._rules.refresh_s - self._rules.expiry_s
        spells = self._spells[server]
        spells[:-1] = [spell for spell in spells[:-1] if spell.end_at_s > seen_from_s]

    def _is_announced(self, server: int, at_s: float) -> bool:
        """Whether an announcement of ``server`` is valid at ``at_s``."""
        spells = self._spells[server]
        for spell in reversed(spells[: bisect_right(spells, at_s, key=lambda spell: spell.begin_at_s)]):
            if spell.is_said and spell.end_at_s <= at_s:
                return False
            # A server whose spell ends at an instant does not announce itself at that instant.
            until_s = min(at_s, math.nextafter(spell.end_at_s, -math.inf))
            period_s = self._rules.announce_period_s
            last_at_s = spell.phase_at_s + math.floor((until_s - spell.phase_at_s) / period_s) * period_s
            if last_at_s >= spell.begin_at_s:
                return at_s < last_at_s + self._rules.expiry_s
        return False
