"""Servers that a client avoids for a while because they failed."""

from __future__ import annotations


class Bans:
    """Bans of servers by clients, as in PETALS' client.

    A server that fails a client is banned for that client: for ``ban_s`` seconds, and twice as long with
    every further failure in a row. Failures during a ban do not count, because many sessions of a client can
    notice the same death. A success ends the row. With ``ban_s`` 0 no server is banned. Pure: instants are
    arguments.
    """

    def __init__(self, ban_s: float) -> None:
        self._ban_s = ban_s
        self._failures: dict[tuple[int, int], int] = {}
        self._until_s: dict[tuple[int, int], float] = {}

    def failed(self, client: int, server: int, now_s: float) -> float:
        """Record that ``server`` failed ``client``. Returns the instant until which it is banned."""
        key = client, server
        if now_s < self._until_s.get(key, now_s):
            return self._until_s[key]
        n_before = self._failures.get(key, 0)
        self._failures[key] = n_before + 1
        # After 60 failures a ban lasts practically for ever; a larger exponent could overflow.
        self._until_s[key] = now_s + self._ban_s * 2.0 ** min(n_before, 60)
        return self._until_s[key]

    def served(self, client: int, server: int) -> None:
        """Record that ``server`` served ``client``: its ban ends, and the next is as short as a first one."""
        self._failures.pop((client, server), None)
        self._until_s.pop((client, server), None)

    def banned(self, client: int, now_s: float) -> frozenset[int]:
        """Returns the servers that ``client`` avoids at ``now_s``."""
        return frozenset(
            server
            for (banner, server), until_s in self._until_s.items()
            if banner == client and now_s < until_s
        )
