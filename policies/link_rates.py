"""What is known of links before a run: their rates, and which of them messages between two nodes pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

T = TypeVar("T")

Rates = tuple[tuple[float, ...], ...]
"""Bits per second from a row's node to a column's."""
Shared = tuple[tuple[tuple[int, ...], ...], ...]
"""The numbers of the shared links from a row's node to a column's, in order; empty where nothing is shared."""


class Queue(NamedTuple):
    """A link in one direction: what enters it leaves in order, at ``rate_bps``.

    A pair's own link has ``kind`` up, down or across, and the numbers of its two ends as in ``LinkRates``; a shared one
    has its number in ``LinkRates.shared_bps``, twice.
    """

    kind: str
    row: int
    column: int
    rate_bps: float


class Passage(NamedTuple):
    """A session's use of a queue, as it is expected.

    Its prompt arrives at ``arrives_at_s``, and passes from ``begins_at_s`` to ``ends_at_s``; it keeps the queue busy for
    ``busy_s``, less than it takes if another link on its way is slower. Tokens follow until ``until_s``.
    """

    queue: Queue
    arrives_at_s: float
    begins_at_s: float
    ends_at_s: float
    busy_s: float
    until_s: float


@dataclass(frozen=True)
class LinkRates:
    """The rates of links, in bits per second, as the scenario's operator knows them.

    ``up_bps``: client to server, ``down_bps``: server to client (both [client][server]); ``across_bps``: server to
    server, [from][to], empty unless servers forward. They are the smallest on the way. ``shared_bps`` are the links that
    several pairs share, such as a site's uplink; ``*_shared`` have those on each way by their numbers, and are empty if
    there are none.

    ``token_bytes`` is a token's hidden state on the wire, headers included. ``window_bytes`` of a large message are on
    their way at most; the rest of it lets small messages pass.
    """

    up_bps: Rates
    down_bps: Rates
    across_bps: Rates
    token_bytes: float
    window_bytes: float
    shared_bps: tuple[float, ...] = ()
    up_shared: Shared = ()
    down_shared: Shared = ()
    across_shared: Shared = ()

    def up(self, client: int, server: int) -> tuple[Queue, ...]:
        """Returns the queues that a message from a client to a server passes."""
        return self._way("up", client, server, self.up_bps, self.up_shared)

    def down(self, client: int, server: int) -> tuple[Queue, ...]:
        """Returns the queues that a message from a server to a client passes."""
        return self._way("down", client, server, self.down_bps, self.down_shared)

    def across(self, server: int, other: int) -> tuple[Queue, ...]:
        """Returns the queues that a message from a server to another one passes."""
        return self._way("across", server, other, self.across_bps, self.across_shared)

    def _way(self, kind: str, row: int, column: int, rates_bps: Rates, shared: Shared) -> tuple[Queue, ...]:
        own = Queue(kind, row, column, rates_bps[row][column])
        if not shared:
            return (own,)
        return own, *(Queue("shared", k, k, self.shared_bps[k]) for k in shared[row][column])

    def among(self, servers: Sequence[int]) -> LinkRates:
        """Returns the links of only ``servers``, renumbered 0, 1, ...; shared links keep their numbers."""

        def columns(rows: tuple[tuple[T, ...], ...]) -> tuple[tuple[T, ...], ...]:
            return tuple(tuple(row[j] for j in servers) for row in rows)

        def square(rows: tuple[tuple[T, ...], ...]) -> tuple[tuple[T, ...], ...]:
            return columns(tuple(rows[j] for j in servers)) if rows else ()

        return replace(
            self,
            up_bps=columns(self.up_bps),
            down_bps=columns(self.down_bps),
            across_bps=square(self.across_bps),
            up_shared=columns(self.up_shared),
            down_shared=columns(self.down_shared),
            across_shared=square(self.across_shared),
        )
