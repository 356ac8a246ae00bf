"""One direction of an emulated link: its delay, rate, jitter and loss, and how long a message takes on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

HEADER_BYTES = 52
"""Headers of one TCP segment: IPv4 (20), TCP (20) and TCP's timestamp option (12)."""
MIN_RETRANSMISSION_S = 0.2
_SHOWING = 3
"""So many segments that arrive after another one show that it is lost."""
UNSENT_BYTES = 512 * 1024
"""What the kernel takes of a connection before it has sent the rest: small messages wait for that much at most, beside
what is on its way. A node that is late by 4 ms leaves a link of 1 Gbit/s unused."""
UNLIMITED_BPS = 1e15
"""The rate of links on which nothing takes time but the delay, as in instance files."""


Pair = tuple[str, str]
"""The names of the nodes that a link leads from and to."""


@dataclass(frozen=True)
class Link:
    """One direction of the link between two nodes, in seconds and bits per second.

    Every packet's delay is ``delay_s`` plus a value drawn uniformly from +- ``jitter_s`` (at most
    ``delay_s``), but no packet overtakes another. ``loss_ratio`` is the share of packets that are lost at
    random, from 0 to 1; 1 cuts the link. A scenario has its links in scenario seconds; a network backend gets
    them in the seconds that it emulates (``scaled``).
    """

    delay_s: float
    rate_bps: float
    jitter_s: float = 0.0
    loss_ratio: float = 0.0

    def transmission_s(self, n_bytes: int, mtu: int = 1500) -> float:
        """Returns the seconds to put a message of ``n_bytes`` on the link, headers of every segment included."""
        segments = -(-n_bytes // (mtu - HEADER_BYTES))
        return (n_bytes + segments * HEADER_BYTES) * 8 / self.rate_bps

    def scaled(self, time_scale: float) -> Link:
        """Returns the link for a clock that runs ``time_scale`` times as fast."""
        return Link(
            self.delay_s / time_scale, self.rate_bps * time_scale, self.jitter_s / time_scale, self.loss_ratio
        )


def repair_s(
    round_trip_s: float,
    n_segments: int,
    lost_of: Callable[[int], Sequence[int]],
    more_follows: bool = False,
) -> tuple[float, int]:
    """Returns how much later than without losses the last of ``n_segments`` arrives, in seconds, and how many are lost.

    TCP sees a loss a round trip later, by three segments that have arrived after it; if they are fewer, it waits for a quarter of
    a round trip more (RFC 8985). That of the last segment, unless ``more_follows``, or of one that is sent again, only its timer
    shows, ``MIN_RETRANSMISSION_S`` after that. ``lost_of(n)`` draws which of n segments are lost, from 0, ascending.
    """
    lost = lost_of(n_segments)
    if not lost:
        return 0.0, 0
    n_lost = len(lost)
    late_s = round_trip_s
    if not more_follows and lost[-1] == n_segments - 1:
        late_s += MIN_RETRANSMISSION_S
    elif not more_follows and n_segments - lost[0] - n_lost < _SHOWING:
        late_s += round_trip_s / 4
    while lost := lost_of(len(lost)):
        late_s += round_trip_s + MIN_RETRANSMISSION_S
    return late_s, n_lost
