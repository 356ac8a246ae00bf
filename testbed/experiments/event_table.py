"""``[[network.event]]`` and ``[[network.trace]]``: changes of links while requests are served.

``link_traces`` reads the files of traces; ``events`` computes the links that follow.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from nodes.clock import on_tick
from testbed.experiments.fields import (
    BitsPerSecond,
    Instant,
    Name,
    Positive,
    PositiveSeconds,
    Ratio,
    Seconds,
    Table,
    rule,
)

_WHERE = ("link", "site", "partition")
_EFFECTS = ("down", "loss", "jitter", "rtt", "rtt_factor", "rtt_to", "rate", "rate_factor")


class EventTable(Table):
    """One event: from ``at`` on, for the duration ``for`` (default: to the end), some links are different.

    Exactly one key selects the links. ``link``: those between two sites or nodes, with
    ``direction = "forward"`` only from the first to the second. ``site``: every link with an end at this site
    or node. ``partition``: every link between these sites or nodes and all others; it is cut.

    The other keys are the effects. ``down``: cut (true) or not (false). ``loss``: share of packets lost.
    ``jitter``. ``rtt``, or ``rtt_factor`` times the network's own; half of it is the delay of each direction.
    ``rtt_to``: the RTT moves there in even steps during ``for``, and stays. ``rate``, or ``rate_factor``
    times the network's own.
    """

    at: Instant
    for_: Annotated[PositiveSeconds | None, Field(alias="for")] = None
    link: Annotated[list[Name], Field(min_length=2, max_length=2)] | None = None
    direction: Literal["both", "forward"] = "both"
    site: Name | None = None
    partition: Annotated[list[Name], Field(min_length=1)] | None = None
    down: bool | None = None
    loss: Ratio | None = None
    jitter: Seconds | None = None
    rtt: Seconds | None = None
    rtt_factor: Positive | None = None
    rtt_to: Seconds | None = None
    rate: BitsPerSecond | None = None
    rate_factor: Positive | None = None

    @model_validator(mode="after")
    def _whole(self) -> Self:
        where = [key for key in _WHERE if getattr(self, key) is not None]
        effects = [key for key in _EFFECTS if getattr(self, key) is not None]
        if len(where) != 1:
            given = f", not {' and '.join(where)}" if where else ""
            raise rule(f"needs exactly one of link, site and partition{given}")
        if self.direction != "both" and self.link is None:
            raise rule("is only for events with link; leave it out", "direction")
        if self.partition is not None and effects:
            raise rule("cannot be combined with partition, which cuts links; use link or site", effects[0])
        if self.partition is None and not effects:
            raise rule(f"changes nothing; give at least one of {', '.join(_EFFECTS)}")
        for group in (("rtt", "rtt_factor", "rtt_to"), ("rate", "rate_factor")):
            both = [key for key in group if key in effects]
            if len(both) > 1:
                raise rule(f"has both {both[0]} and {both[1]}; keep one")
        if self.rtt_to is not None and self.for_ is None:
            raise rule("is missing; rtt_to needs the duration of the change", "for")
        return self

    @property
    def ends_at(self) -> float | None:
        """When it ends, in seconds; ``None``: it stays."""
        return None if self.for_ is None else on_tick(self.at + self.for_)


Numbers = Annotated[list[Annotated[float, Field(ge=0)]], Field(min_length=1)]
_COLUMNS = ("rates", "rtts", "losses")
_OF_A_KIND = {
    "mahimahi": ("file", "interval"),
    "csv": ("file", "time_unit", "rate_unit", "rtt_unit"),
    "listed": ("times", *_COLUMNS, "length"),
}


class TraceTable(Table):
    """A link that follows a recording, from ``at`` (default 0) on.

    ``link`` and ``direction`` are those of an event. The kinds of ``file``:

    - "mahimahi": a line per opportunity to send 1500 bytes, in ms. It becomes the mean rate of every ``interval``
      (default 100 ms); the link is cut in an interval without an opportunity.
    - "csv": columns ``time`` and any of ``rate``, ``rtt`` and ``loss``. Times count from the first row, and a row
      holds until the next. A cell is text with a unit, or a number in ``time_unit``, ``rate_unit`` or
      ``rtt_unit``. A rate of 0 cuts the link. An empty cell repeats the one above it.

    "listed" has the steps here, as a resolved scenario stores them: ``times`` and ``rtts`` in seconds, ``rates``
    in bit/s, ``losses`` as shares; it lasts for ``length``.

    With ``repeat`` (default: true for "mahimahi") the trace begins anew at its end, until ``until``; default: an
    hour after the last request's arrival. After that the network's own values hold. The last row of a CSV file
    lasts as long as the one before it, or to the end without ``repeat`` and ``until``.
    """

    link: Annotated[list[Name], Field(min_length=2, max_length=2)]
    direction: Literal["both", "forward"] = "both"
    kind: Literal["mahimahi", "csv", "listed"]
    file: Annotated[str, Field(min_length=1)] | None = None
    at: Instant = 0.0
    repeat: bool | None = None
    until: PositiveSeconds | None = None
    interval: PositiveSeconds | None = None
    time_unit: Literal["h", "min", "s", "ms", "us"] | None = None
    rate_unit: Literal["bit/s", "kbit/s", "Mbit/s", "Gbit/s"] | None = None
    rtt_unit: Literal["s", "ms", "us"] | None = None
    times: Numbers | None = None
    rates: Numbers | None = None
    rtts: Numbers | None = None
    losses: Annotated[list[Annotated[float, Field(ge=0, le=1)]], Field(min_length=1)] | None = None
    length: PositiveSeconds | None = None

    @model_validator(mode="after")
    def _keys_of_the_kind(self) -> Self:
        for kind, keys in _OF_A_KIND.items():
            for key in keys:
                if key not in _OF_A_KIND[self.kind] and getattr(self, key) is not None:
                    raise rule(f'is only for kind = "{kind}"; kind is "{self.kind}"', key)
        if self.until is not None and self.until <= self.at:
            raise rule("must be later than at", "until")
        if self.kind != "listed":
            if self.file is None:
                raise rule(f'is missing; kind = "{self.kind}" needs it', "file")
            return self
        if self.times is None:
            raise rule('is missing; kind = "listed" needs it', "times")
        self._check_steps(self.times)
        return self

    def _check_steps(self, times: list[float]) -> None:
        columns = [key for key in _COLUMNS if getattr(self, key) is not None]
        if not columns:
            raise rule(f"changes nothing; give at least one of {', '.join(_COLUMNS)}")
        for key in columns:
            if len(getattr(self, key)) != len(times):
                raise rule(f"must have as many values as times, {len(times):,}", key)
        if any(after <= before for before, after in pairwise(times)):
            raise rule("must be in the order of time, each later than the one before", "times")
        if self.length is not None and self.length <= times[-1]:
            raise rule(f"must be more than the last of times, {times[-1]:g} s", "length")
        if self.repeat and self.length is None:
            raise rule('is missing; a "listed" trace that is repeated needs it', "length")
        if all(loss == 1 for loss in self.losses or [0.0]) or not any(self.rates or [1.0]):
            raise rule("never lets anything through; give at least one step with a rate above 0")
