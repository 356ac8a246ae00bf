"""Use of links over time: ``links.parquet``, and how every engine makes it from its messages.

Only messages with hidden states count. Openings, closings and acknowledgements are smaller by orders of magnitude.
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Collection, Sequence
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
_OPEN = 64
"""Busy periods that a message which leaves later can still join."""


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
    """Use of one link, from its messages in about the order in which they leave it.

    ``busy_s``: for how long it carried messages. ``waits_s``: how much longer each took than if it had been alone.
    """

    __slots__ = ("_busy_s", "_n_left", "_periods", "_waited_s", "busy_s", "waits_s", "width_s")

    def __init__(self) -> None:
        self.busy_s = 0.0
        self.waits_s = array("d")
        self.width_s = _LEAST_S
        self._periods: deque[tuple[float, float]] = deque()
        """Busy periods that are not in the bins yet, one after the other."""
        self._busy_s, self._waited_s, self._n_left = array("d"), array("d"), array("q")
        """By bin: how long it was busy, how long the messages that left in it had waited, and how many they were."""

    def add(self, left_at_s: float, busy_s: float, wait_s: float) -> None:
        """Adds a message whose last byte left the link at ``left_at_s``, and which used it for ``busy_s``.

        Where messages went between each other's parts the link was busy for the sum of both, until the last one left.
        """
        self.busy_s += busy_s
        self.waits_s.append(wait_s)
        number = self._bin(left_at_s)
        self._waited_s[number] += wait_s
        self._n_left[number] += 1
        periods, until_s = self._periods, left_at_s
        while periods and periods[-1][1] > until_s - busy_s:
            since_s, ended_s = periods.pop()
            busy_s += ended_s - since_s
            until_s = max(until_s, ended_s)
        periods.append((until_s - busy_s, until_s))
        if len(periods) > _OPEN:
            self._put(*periods.popleft())

    def spread(self, since_s: float, until_s: float, busy_s: float, n_messages: int) -> None:
        """Adds ``n_messages`` that waited for nothing, evenly over a time."""
        self.busy_s += busy_s
        first, last = self._bin(since_s), self._bin(until_s)
        first = min(self._bin(since_s), last)  # the bins may have become wider
        for number in range(first, last + 1):
            self._busy_s[number] += busy_s / (last + 1 - first)
        self._n_left[last] += n_messages

    def _bin(self, at_s: float) -> int:
        """Returns the number of the bin of an instant; there is one."""
        number = max(0, int(at_s / self.width_s))
        while number >= MOST_BINS:
            self.widen()
            number //= 2
        if (n_more := number + 1 - len(self._busy_s)) > 0:
            self._busy_s.extend([0.0] * n_more)
            self._waited_s.extend([0.0] * n_more)
            self._n_left.extend([0] * n_more)
        return number

    def widen(self) -> None:
        """Makes each bin twice as wide."""
        self.width_s *= 2
        for bins in (self._busy_s, self._waited_s, self._n_left):
            if len(bins) % 2:
                bins.append(0)
            halves = np.array(bins)
            bins[:] = array(bins.typecode, (halves[::2] + halves[1::2]).tolist())

    def _put(self, since_s: float, until_s: float) -> None:
        """Adds a busy period to the bins."""
        since_s = max(0.0, since_s)
        last = self._bin(until_s)
        first = int(since_s / self.width_s)
        if first >= last:
            self._busy_s[last] += until_s - since_s
            return
        width_s = self.width_s
        self._busy_s[first] += (first + 1) * width_s - since_s
        for number in range(first + 1, last):
            self._busy_s[number] += width_s
        self._busy_s[last] += until_s - last * width_s

    def bins(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Returns of every bin the share of its time that the link was busy, and the mean wait, or NaN."""
        while self._periods:
            self._put(*self._periods.popleft())
        n_left = np.array(self._n_left, dtype=np.float64)
        waited_s = np.divide(
            np.array(self._waited_s), n_left, out=np.full(len(n_left), math.nan), where=n_left > 0
        )
        return np.minimum(np.array(self._busy_s) / self.width_s, 1.0), waited_s.round(_DIGITS) + 0.0

    def wait(self) -> LinkWait:
        """Returns the waits of all messages."""
        if not self.waits_s:
            return LinkWait(mean=0.0, p99=0.0)
        waits_s = np.array(self.waits_s)
        mean_s, p99_s = waits_s.mean(), np.percentile(waits_s, 99)
        return LinkWait(mean=round(float(mean_s), _DIGITS) + 0.0, p99=round(float(p99_s), _DIGITS) + 0.0)


class LinkSeries(NamedTuple):
    """Use of one link over time: a value per bin, from 0 on. ``wait_s`` is NaN where no message left."""

    use_ratio: NDArray[np.float64]
    wait_s: NDArray[np.float64]


class LinksUsed(NamedTuple):
    """Use of every link that carried hidden states, the busiest first: over the whole run, and in bins."""

    rows: list[LinkRow]
    series: list[LinkSeries]
    width_s: float
    """The width of all bins."""


def links_used(uses: Collection[tuple[str, str, LinkUse]], until_s: float) -> LinksUsed:
    """Returns the use of links (from, to, use) from 0 to ``until_s``."""
    width_s = max((use.width_s for _, _, use in uses), default=_LEAST_S)
    found = []
    for source, target, use in uses:
        while use.width_s < width_s:
            use.widen()
        use_ratio = use.busy_s / until_s if until_s > 0 else 0.0
        row = LinkRow(from_=source, to=target, use_ratio=use_ratio, wait_s=use.wait())
        found.append((row, LinkSeries(*use.bins())))
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
