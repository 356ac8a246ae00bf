"""Use of links over time: ``links.parquet``, and how every engine makes it from its messages.

Only messages with hidden states count. Openings, closings and acknowledgements are smaller by orders of magnitude.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from testbed.records.base import Record, column, columns_of
from testbed.records.summary import LinkRow, LinkWait

MOST_BINS = 256
"""A run's time has at most as many bins. Their width is a power of two of ``_LEAST_S``."""
_LEAST_S = 2.0**-10
_DIGITS = 9
"""Waits are in whole nanoseconds."""
BUSY_RATIO = 0.7
"""A link that is busy for more of the time is warned of."""
_AT_ONCE, _OPEN = 4096, 64
"""Messages that are put into the bins at once, and how many of the latest stay: others can still come before them."""

Array = NDArray[np.float64]


class LinkBin(Record, kw_only=True):
    """Use of one link during a part of the run: a row of ``links.parquet``. Parts without messages have no row."""

    from_: Annotated[
        str, column("the node that sends; of a link that pairs share, where it begins, or its whole name")
    ] = msgspec.field(name="from")
    to: Annotated[str, column("the node that receives; of a link that pairs share, where it ends, or empty")]
    start_s: Annotated[float, column("where the part begins", "s")]
    end_s: Annotated[float, column("where it ends; all parts of a run are equally long", "s")]
    use_ratio: Annotated[float, column("share of the part in which the link carried hidden states")]
    wait_s: Annotated[
        float | None,
        column(
            "how much later messages that left the link in the part arrived than with nothing else on the link, the "
            "mean; null: none left it",
            "s",
        ),
    ]


def link_columns() -> dict[str, tuple[Any, Meta]]:
    """Return the columns of ``links.parquet`` in order: (type, meaning) by name."""
    return {name.rstrip("_"): about for name, about in columns_of(LinkBin).items()}


class LinkUse:
    """Use of one link, from its messages in about the order in which they leave it. Ask for it after ``finish``.

    ``busy_s``: for how long it carried messages. ``waits_s``: how much longer each took than if it had been alone.
    """

    __slots__ = ("_bins", "_messages", "_spread", "busy_s", "waits_s", "width_s")

    def __init__(self) -> None:
        self.busy_s = 0.0
        self.waits_s = array("d")
        self.width_s = _LEAST_S
        self._messages, self._spread = array("d"), array("d")
        """Arguments of ``add`` and of ``spread`` that are not in the bins yet, one after the other."""
        self._bins = np.zeros((3, 0))
        """By bin: how long it was busy, how long the messages that left in it had waited, and how many they were."""

    def add(self, left_at_s: float, busy_s: float, wait_s: float) -> None:
        """Adds a message whose last byte left the link at ``left_at_s``, and which used it for ``busy_s``."""
        messages = self._messages
        messages.extend((left_at_s, busy_s, wait_s))
        if len(messages) > 3 * _AT_ONCE:
            self._settle(_OPEN)

    def add_all(self, left_at_s: Array, busy_s: Array, wait_s: Array) -> None:
        """Adds many messages."""
        self._messages.frombytes(np.stack([left_at_s, busy_s, wait_s], axis=1).tobytes())

    def spread(self, since_s: float, until_s: float, busy_s: float, n_messages: int) -> None:
        """Adds ``n_messages`` that waited for nothing, evenly over a time."""
        self._spread.extend((since_s, until_s, busy_s, n_messages))
        if len(self._spread) > 4 * _AT_ONCE:
            self._settle_spread()

    def finish(self) -> None:
        """Puts all messages into the bins."""
        self._settle(0)
        self._settle_spread()

    def _settle(self, n_open: int) -> None:
        """Puts messages into the bins, but for the last ``n_open``: those that come later may have been on the link before.

        Where messages went between each other's parts the link was busy for the sum of both, until the last one left.
        """
        rows = np.array(self._messages).reshape(-1, 3)
        rows = rows[np.argsort(rows[:, 0], kind="stable")]
        left_at_s, busy_s, wait_s = rows.T
        until_s = np.cumsum(busy_s)
        # Each was done before those that left after it began: the smallest of (left - all since), from the end on.
        ended_at_s = np.minimum.accumulate((left_at_s - until_s)[::-1])[::-1] + until_s
        n = max(0, len(rows) - n_open)
        if not n:
            return
        left_at_s, busy_s, ended_at_s = left_at_s[:n], busy_s[:n], ended_at_s[:n]
        wait_s = np.maximum(wait_s[:n], 0.0)  # jitter, and frames that are some bytes shorter than usual
        self._messages = array("d", rows[n:].ravel().tolist())
        self._reach(left_at_s[-1])
        edges_s = np.arange(self._bins.shape[1] + 1) * self.width_s
        instants_s = np.stack([ended_at_s - busy_s, ended_at_s], axis=1).ravel()
        carried_s = np.stack([until_s[:n] - busy_s, until_s[:n]], axis=1).ravel()
        number = (np.maximum(left_at_s, 0.0) / self.width_s).astype(np.int64)
        n_bins = self._bins.shape[1]
        self._bins[0] += np.diff(np.interp(edges_s, instants_s, carried_s))
        self._bins[1] += np.bincount(number, wait_s, n_bins)
        self._bins[2] += np.bincount(number, minlength=n_bins)
        self.busy_s += float(busy_s.sum())
        self.waits_s.extend(wait_s.tolist())

    def _settle_spread(self) -> None:
        if not self._spread:
            return
        since_s, until_s, busy_s, n_messages = np.array(self._spread).reshape(-1, 4).T
        self._spread = array("d")
        self._reach(until_s.max())
        edges_s = np.arange(self._bins.shape[1] + 1)[:, None] * self.width_s
        length_s = np.maximum(until_s - since_s, _LEAST_S)
        self._bins[0] += np.diff((((edges_s - since_s) / length_s).clip(0.0, 1.0) * busy_s).sum(axis=1))
        number = (np.maximum(until_s, 0.0) / self.width_s).astype(np.int64)
        self._bins[2] += np.bincount(number, n_messages, self._bins.shape[1])
        self.busy_s += float(busy_s.sum())

    def _reach(self, at_s: float) -> None:
        """Makes bins until an instant."""
        while at_s >= MOST_BINS * self.width_s:
            self.widen()
        n_more = int(max(at_s, 0.0) / self.width_s) + 1 - self._bins.shape[1]
        if n_more > 0:
            self._bins = np.pad(self._bins, ((0, 0), (0, n_more)))

    def widen(self) -> None:
        """Makes each bin twice as wide."""
        self.width_s *= 2
        bins = np.pad(self._bins, ((0, 0), (0, self._bins.shape[1] % 2)))
        self._bins = bins[:, ::2] + bins[:, 1::2]

    def series(self) -> LinkSeries:
        """Returns the use over time."""
        busy_s, waited_s, n_left = self._bins
        wait_s = np.divide(waited_s, n_left, out=np.full(len(n_left), math.nan), where=n_left > 0)
        return LinkSeries(np.minimum(busy_s / self.width_s, 1.0), wait_s.round(_DIGITS))

    def wait(self) -> LinkWait:
        """Returns the waits of all messages."""
        if not self.waits_s:
            return LinkWait(mean=0.0, p99=0.0)
        waits_s = np.array(self.waits_s)
        mean_s, p99_s = waits_s.mean(), np.percentile(waits_s, 99)
        return LinkWait(mean=round(float(mean_s), _DIGITS), p99=round(float(p99_s), _DIGITS))


class LinkSeries(NamedTuple):
    """Use of one link over time: a value per bin, from 0 on. ``wait_s`` is NaN where no message left."""

    use_ratio: Array
    wait_s: Array


class LinksUsed(NamedTuple):
    """Use of every link that carried hidden states, the busiest first: over the whole run, and in bins."""

    rows: list[LinkRow]
    series: list[LinkSeries]
    width_s: float
    """The width of all bins."""


def links_used(uses: Iterable[tuple[str, str, LinkUse]], until_s: float) -> LinksUsed:
    """Returns the use of links (from, to, use) from 0 to ``until_s``. Those that carried nothing are left out."""
    carried = []
    for source, target, use in uses:
        use.finish()
        if use.busy_s:
            carried.append((source, target, use))
    width_s = max((use.width_s for _, _, use in carried), default=_LEAST_S)
    found = []
    for source, target, use in carried:
        while use.width_s < width_s:
            use.widen()
        use_ratio = use.busy_s / until_s if until_s > 0 else 0.0
        row = LinkRow(from_=source, to=target, use_ratio=use_ratio, wait_s=use.wait())
        found.append((row, use.series()))
    found.sort(key=lambda one: (-one[0].use_ratio, one[0].from_, one[0].to))
    return LinksUsed([row for row, _ in found], [series for _, series in found], width_s)


def ends_of(name: str) -> tuple[str, str]:
    """Returns where a link that pairs share begins and ends: of ``a>b`` a and b; others have a name alone."""
    source, _, target = name.partition(">")
    return source, target


def busy_text(links: Sequence[LinkRow]) -> list[str]:
    """Returns a line about the busiest of ``links`` if it was busy for most of the time, else nothing."""
    busy = [link for link in links if link.use_ratio > BUSY_RATIO]
    if not busy:
        return []
    most = max(busy, key=lambda link: link.use_ratio)
    others = f" (and {len(busy) - 1} more above {BUSY_RATIO:.0%})" if len(busy) > 1 else ""
    return [
        f"the link {link_name(most.from_, most.to)} was busy {min(most.use_ratio, 1.0):.0%} of the time{others}: messages "
        f"waited {most.wait_s.mean:.3g} s (mean); raise its rate, or have fewer or shorter requests go over it"
    ]


def link_name(source: str, target: str) -> str:
    """Returns a link's name for a sentence."""
    return f"{source} to {target}" if target else source
