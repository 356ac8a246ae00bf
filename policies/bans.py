"""Servers that a client leaves out for a while because they failed it."""

from __future__ import annotations


class Bans:
    """A server that fails is banned, for this client, for ``ban_s``, twice as long with every time in a row.

    Failures while it is banned do not count: the sessions of a client that notice one death are many. A server
    that serves is forgiven. ``ban_s`` 0 bans nobody. As PETALS' client does; pure: instants are given.
    """

    def __init__(self, ban_s: float) -> None:
        self._ban_s = ban_s
        self._failures: dict[tuple[int, int], int] = {}
        self._until_s: dict[tuple[int, int], float] = {}

    def failed(self, client: int, server: int, now_s: float) -> float:
        """``server`` failed ``client``; return until when it is banned."""
        key = client, server
        if now_s < self._until_s.get(key, now_s):
            return self._until_s[key]
        n_before = self._failures.get(key, 0)
        self._failures[key] = n_before + 1
        # Past 2^60 the ban is for ever; the exponent must stay finite for floats.
        self._until_s[key] = now_s + self._ban_s * 2.0 ** min(n_before, 60)
        return self._until_s[key]

    def served(self, client: int, server: int) -> None:
        """``server`` has answered ``client``: its next ban is as short as the first."""
        self._failures.pop((client, server), None)
        self._until_s.pop((client, server), None)

    def banned(self, client: int, now_s: float) -> frozenset[int]:
        """Whom ``client`` leaves out at ``now_s``."""
        return frozenset(
            server
            for (banner, server), until_s in self._until_s.items()
            if banner == client and now_s < until_s
        )
