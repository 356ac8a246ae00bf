"""What messages did on a link that changes: how long it took for them, and how much longer than alone they took."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from policies.links import Link

Array = NDArray[np.float64]


class OnLink(NamedTuple):
    """What messages did on one link; columns with a row per message.

    ``row``: the message's row in the ``HopTable``. ``n_bits``: its bits on the wire. ``left_at_s``: when the last of
    them left the link. ``busy_s``: how long the link took for them. With nothing else on the link, which may change
    meanwhile, the message takes ``transmission_s``, the time that the link is cut, and ``delay_s`` to its arrival; it took
    ``wait_s`` longer.
    """

    row: NDArray[np.int64]
    n_bits: Array
    sent_at_s: Array
    left_at_s: Array
    busy_s: Array
    delay_s: Array
    transmission_s: Array
    wait_s: Array


class LinkOverTime:
    """The link of one pair of nodes with its changes (instant, link): how much it can carry until when.

    ``most_bps``: the rate of the narrowest shared link on the way. A cut link carries nothing.
    """

    def __init__(self, link: Link, changes: Sequence[tuple[float, Link]], most_bps: float) -> None:
        links = [(0.0, link), *changes]
        self._since_s = np.array([at_s for at_s, _ in links])
        self._delays_s = np.array([one.delay_s for _, one in links])
        self._rates_bps = np.array(
            [0.0 if one.loss_ratio >= 1 else min(one.rate_bps, most_bps) for _, one in links]
        )
        self._is_up = (self._rates_bps > 0).astype(np.float64)

    def _since_start(self, per_s: Array, at_s: Array) -> Array:
        """Returns how much has come together until ``at_s`` of what comes ``per_s`` of the links in force."""
        until = np.concatenate([[0.0], np.cumsum(np.diff(self._since_s) * per_s[:-1])])
        last = np.searchsorted(self._since_s, at_s, "right").clip(1) - 1
        found: Array = until[last] + (at_s - self._since_s[last]) * per_s[last]
        return found

    def _carried(self, at_s: Array) -> Array:
        """Returns how many bits it could have carried until ``at_s``."""
        return self._since_start(self._rates_bps, at_s)

    def _carried_at_s(self, n_bits: Array, side: Literal["left", "right"] = "left") -> Array:
        """Returns when it could first (``left``) or last have carried ``n_bits``; infinite if it never could."""
        until_bits = self._carried(self._since_s)
        last = np.searchsorted(until_bits, n_bits, side).clip(1) - 1
        rate_bps, never_s = self._rates_bps[last], np.full(len(n_bits), math.inf)
        more_s = np.divide(n_bits - until_bits[last], rate_bps, out=never_s, where=rate_bps > 0)
        at_s: Array = self._since_s[last] + more_s
        return at_s

    def passed(self, row: NDArray[np.int64], sent_at_s: Array, arrived_at_s: Array, n_bits: Array) -> OnLink:
        """Returns what messages of ``n_bits`` did on it."""
        delay_s = self._delays_s[np.searchsorted(self._since_s, sent_at_s, "right").clip(1) - 1]
        idle_left_at_s = self._carried_at_s(self._carried(sent_at_s) + n_bits)
        took_s = arrived_at_s - sent_at_s
        is_idle = np.isfinite(idle_left_at_s)  # else it was cut after the message had gone
        idle_left_at_s = np.where(is_idle, idle_left_at_s, arrived_at_s - delay_s)
        idle_s = np.where(is_idle, idle_left_at_s + delay_s - sent_at_s, took_s)
        up_s = self._since_start(self._is_up, idle_left_at_s) - self._since_start(self._is_up, sent_at_s)
        transmission_s = np.where(is_idle, up_s, took_s - delay_s)
        left_at_s = arrived_at_s - delay_s
        began_at_s = self._carried_at_s(self._carried(left_at_s) - n_bits, "right")
        busy_s = self._since_start(self._is_up, left_at_s) - self._since_start(self._is_up, began_at_s)
        busy_s = busy_s.clip(0.0, np.maximum(left_at_s - sent_at_s, 0.0))
        waits = delay_s, transmission_s, took_s - idle_s
        return OnLink(row, n_bits, sent_at_s, left_at_s, busy_s, *waits)
