"""``[[network.event]]``: what happens to links while requests are served; ``events`` carries it out."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from testbed.scenario.fields import (
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
    """From ``at`` on, ``for`` so long (default: to the end), some links are different.

    Which: ``link`` (two sites or nodes; ``direction`` "forward" takes only first to second), ``site`` (every
    link with an end there) or ``partition`` (these sites are cut from the rest, not from each other).
    How: any of the effects that do not contradict each other; ``rtt_to`` moves the RTT there over ``for``.
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
            raise rule(f"needs one of link, site and partition{given}")
        if self.direction != "both" and self.link is None:
            raise rule("is only for link", "direction")
        if self.partition is not None and effects:
            raise rule("does not go with partition, which cuts links; take link or site", effects[0])
        if self.partition is None and not effects:
            raise rule(f"changes nothing; give one of {', '.join(_EFFECTS)}")
        for group in (("rtt", "rtt_factor", "rtt_to"), ("rate", "rate_factor")):
            both = [key for key in group if key in effects]
            if len(both) > 1:
                raise rule(f"contradicts {both[0]}; keep one of the two", both[1])
        if self.rtt_to is not None and self.for_ is None:
            raise rule("is missing; rtt_to needs the time that the RTT takes to get there", "for")
        return self
