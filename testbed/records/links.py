"""Use of links over time: ``links.parquet``, and how every engine makes it from its messages.

Only messages with hidden states count. Openings, closings and acknowledgements are smaller by orders of magnitude.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator, Sequence
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
_AT_ONCE = 4 * 1024
"""Values of ``LinkUse.spread`` that are put into bins together."""
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
    """Use of one link, from its messages. They may be added in any order."""

    __slots__ = ("_evenly", "_messages")

    def __init__(self) -> None:
        self._messages: list[Array] = []
        """Rows of (when the message's last byte left the link, for how long it used it, its wait)."""
        self._evenly = array("d")
        """Arguments of ``spread``, one after the other."""

    def add(self, left_at_s: Array, busy_s: Array, wait_s: Array) -> None:
        """Adds messages: when the last byte of each left the link, for how long it used it, and its wait.

        A wait is how much later a message arrived than with nothing else on the link.
        """
        # With jitter, and where frames are some bytes shorter than usual, a message can come a little early.
        self._messages.append(np.stack([left_at_s, busy_s, np.maximum(wait_s, 0.0)], axis=1))

    def spread(self, since_s: float, until_s: float, busy_s: float, n_messages: int) -> None:
        """Adds ``n_messages`` that waited for nothing, evenly over a time."""
        self._evenly.extend((since_s, until_s, busy_s, n_messages))

    @property
    def busy_s(self) -> float:
        """For how long the link carried messages."""
        return sum(float(rows[:, 1].sum()) for rows in self._messages) + sum(self._evenly[2::4])

    def wait(self) -> LinkWait:
        """Returns the waits of all messages. They are 0, or none was added by ``spread``."""
        if not self._messages:
            return LinkWait(mean=0.0, p99=0.0)
        waits_s = np.concatenate([rows[:, 2] for rows in self._messages])
        mean_s, p99_s = waits_s.mean(), np.percentile(waits_s, 99)
        return LinkWait(mean=round(float(mean_s), _DIGITS), p99=round(float(p99_s), _DIGITS))

    def series(self, width_s: float, n_bins: int) -> LinkSeries:
        """Returns the use in ``n_bins`` of ``width_s``."""
        edges_s = np.arange(n_bins + 1) * width_s
        busy_s, waited_s, n_left = (np.zeros(n_bins) for _ in range(3))
        if self._messages:
            rows = np.concatenate(self._messages)
            left_at_s, used_s, wait_s = rows[np.argsort(rows[:, 0], kind="stable")].T
            instants_s, carried_s = _carried(left_at_s, used_s)
            busy_s += np.diff(np.interp(edges_s, instants_s, carried_s))
            number = _bin(left_at_s, width_s, n_bins)
            waited_s += np.bincount(number, wait_s, n_bins)
            n_left += np.bincount(number, minlength=n_bins)
        for at in range(0, len(self._evenly), _AT_ONCE):
            since_s, until_s, used_s, n_messages = np.array(self._evenly[at : at + _AT_ONCE]).reshape(-1, 4).T
            share = (edges_s[:, None] - since_s) / np.maximum(until_s - since_s, _LEAST_S)
            busy_s += np.diff((share.clip(0.0, 1.0) * used_s).sum(axis=1))
            n_left += np.bincount(_bin(until_s, width_s, n_bins), n_messages, n_bins)
        wait_s = np.divide(waited_s, n_left, out=np.full(n_bins, math.nan), where=n_left > 0)
        return LinkSeries(np.minimum(busy_s / width_s, 1.0), wait_s.round(_DIGITS))


def _carried(left_at_s: Array, used_s: Array) -> tuple[Array, Array]:
    """Returns instants, and for how long the link had been busy until each; straight lines lie between them.

    Messages are in the order in which they leave the link. Where they went between each other's parts the link was busy
    for the sum of both, until the last one left.
    """
    until_s = np.cumsum(used_s)
    # Each was done before those that left after it began: the smallest of (left - used by all so far), from the end on.
    ended_at_s = np.minimum.accumulate((left_at_s - until_s)[::-1])[::-1] + until_s
    instants_s = np.stack([ended_at_s - used_s, ended_at_s], axis=1)
    return instants_s.ravel(), np.stack([until_s - used_s, until_s], axis=1).ravel()


def _bin(at_s: Array, width_s: float, n_bins: int) -> NDArray[np.int64]:
    number: NDArray[np.int64] = (at_s / width_s).astype(np.int64).clip(0, n_bins - 1)
    return number


class LinkSeries(NamedTuple):
    """Use of one link over time: a value per bin, from 0 on. ``wait_s`` is NaN where no message left."""

    use_ratio: Array
    wait_s: Array


class LinksUsed:
    """Use of every link (from, to, use) that carried hidden states, from 0 to ``until_s``.

    ``rows``: over the whole run, the busiest first. ``width_s``: the width of the bins of ``series``.
    """

    def __init__(self, uses: Iterable[tuple[str, str, LinkUse]], until_s: float) -> None:
        self.width_s = _LEAST_S
        while until_s >= MOST_BINS * self.width_s:
            self.width_s *= 2
        self._n_bins = int(until_s / self.width_s) + 1
        found = []
        for source, target, use in uses:
            if busy_s := use.busy_s:
                use_ratio = busy_s / until_s if until_s > 0 else 0.0
                found.append((LinkRow(from_=source, to=target, use_ratio=use_ratio, wait_s=use.wait()), use))
        found.sort(key=lambda one: (-round(one[0].use_ratio, 9), one[0].from_, one[0].to))
        self.rows = [row for row, _ in found]
        self._uses = [use for _, use in found]

    def series(self) -> Iterator[tuple[LinkRow, LinkSeries]]:
        """Yields every link with its use over time."""
        for row, use in zip(self.rows, self._uses, strict=True):
            yield row, use.series(self.width_s, self._n_bins)


def ends_of(name: str) -> tuple[str, str]:
    """Returns where a link that pairs share begins and ends: of ``a>b`` a and b; others have a name alone."""
    source, _, target = name.partition(">")
    return source, target


def busy_text(links: Sequence[LinkRow]) -> list[str]:
    """Returns a line about the busiest of ``links`` if it was busy for most of the time, else nothing."""
    busy = [link for link in links if link.use_ratio > BUSY_RATIO]
    if not busy:
        return []
    most = max(busy, key=lambda link: round(link.use_ratio, 9))  # the first of those that differ by rounding
    others = f" (and {len(busy) - 1} more above {BUSY_RATIO:.0%})" if len(busy) > 1 else ""
    return [
        f"the link {link_name(most.from_, most.to)} was busy {min(most.use_ratio, 1.0):.0%} of the time{others}: messages "
        f"waited {most.wait_s.mean:.3g} s (mean); raise its rate, or have fewer or shorter requests go over it"
    ]


def link_name(source: str, target: str) -> str:
    """Returns a link's name for a sentence."""
    return f"{source} to {target}" if target else source
