"""``[[network.event]]``: changes of links while requests are served.

``events`` computes the links that follow.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from testbed.experiments.fields import (
    BitsPerSecond,
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

    at: Seconds
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
