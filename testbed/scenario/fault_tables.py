"""``[[fault]]``, ``[churn]``, ``[recovery]`` and ``[membership]``: the form; ``faults`` carries them out."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from policies.membership import MembershipRules
from testbed.scenario.experiment import FaultKind, RecoveryRules
from testbed.scenario.fields import Name, PositiveSeconds, Ratio, Seconds, Table, Tokens, rule
from testbed.scenario.limits import MAX_NUMBER, MAX_REQUESTS
from testbed.scenario.problems import shown

_RECOVERY, _MEMBERSHIP = RecoveryRules(), MembershipRules()
"""What holds where a file says nothing."""
_ENDING = ("kill", "stop", "slow")
"""Kinds that can end after a time."""


class AfterTable(Table):
    """``after = { request = 3, tokens = 20 }``: as soon as that request has so many output tokens."""

    request: Annotated[int, Field(ge=0, lt=MAX_REQUESTS)]
    tokens: Tokens


def _as_names(value: Any) -> Any:
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise rule(f"must be a name or a list of names, not {shown(value)}")
    return value


Names = Annotated[list[Name], BeforeValidator(_as_names), Field(min_length=1)]
"""One name, or a list of them."""


class FaultTable(Table):
    """At an instant, or after tokens of a request, something happens to one server or to several.

    ``kill`` ends the process at once (``for``: it serves again after this), ``stop`` halts it without a
    word (``for``: it goes on), ``slow`` multiplies its compute times by ``factor`` (``for``: until then),
    ``restart`` kills what runs and begins anew, ``join`` begins a server that was declared with
    ``present = false``, ``leave`` takes no new sessions, lets those that are there finish, and ends.
    """

    kind: FaultKind
    server: Names
    at: Seconds | None = None
    after: AfterTable | None = None
    for_: Annotated[PositiveSeconds | None, Field(alias="for")] = None
    factor: Annotated[float, Field(ge=1, le=MAX_NUMBER)] | None = None

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if self.at is None and self.after is None:
            raise rule('is missing; give an instant such as at = "30 s", or after', "at")
        if self.at is not None and self.after is not None:
            raise rule("contradicts at; keep one of the two", "after")
        if self.for_ is not None and self.kind not in _ENDING:
            raise rule(f'is only for kind = "kill", "stop" or "slow"; kind is "{self.kind}"', "for")
        if self.factor is not None and self.kind != "slow":
            raise rule(f'is only for kind = "slow"; kind is "{self.kind}"', "factor")
        if self.factor is None and self.kind == "slow":
            raise rule('is missing; kind = "slow" needs it, for example factor = 4', "factor")
        twice = next((name for i, name in enumerate(self.server) if name in self.server[:i]), None)
        if twice is not None:
            raise rule(f'names "{twice}" twice; leave one out', "server")
        return self


class ChurnTable(Table):
    """``[churn]``: servers fail at random, from a random stream of their own, and come back.

    ``mtbf`` is the mean time between two failures over all ``servers`` together (default: all that are
    present at the start), ``mttr`` the mean time until a failed one is back; ``until`` (default: the last
    arrival) is when the last failure may happen.
    """

    mtbf: PositiveSeconds
    mttr: PositiveSeconds
    distribution: Literal["exponential", "constant"] = "exponential"
    kind: Literal["kill", "stop"] = "kill"
    until: PositiveSeconds | None = None
    servers: Names | None = None


class RecoveryTable(Table):
    """``[recovery]``: what a client does when a hop of its chain fails.

    ``retry_first`` and ``retry_max``: the first attempt to replace a hop is made at once, the next after
    ``retry_first``, doubling up to ``retry_max``, until ``give_up`` after the failure was noticed; ``jitter`` is
    how far each of these waits may be off, as a share.
    ``replay``: the history goes to replacements in one message, or as the steps were; "auto" is
    "step_by_step" for real blocks of 16 bits, whose rounding depends on the steps, else "at_once".
    """

    mode: Literal["replay", "head", "off"] = "replay"
    request_timeout: PositiveSeconds = _RECOVERY.request_timeout_s
    connect_timeout: PositiveSeconds = _RECOVERY.connect_timeout_s
    retry_first: PositiveSeconds = _RECOVERY.retry_first_s
    retry_max: PositiveSeconds = _RECOVERY.retry_max_s
    jitter: Ratio = _RECOVERY.retry_jitter_ratio
    give_up: PositiveSeconds = _RECOVERY.give_up_s
    ban: Seconds = _RECOVERY.ban_s
    ban_failed_servers: bool = _RECOVERY.ban_failed_servers
    replay: Literal["auto", "at_once", "step_by_step"] = "auto"

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.retry_max < self.retry_first:
            raise rule("must not be shorter than retry_first", "retry_max")
        return self


class MembershipTable(Table):
    """``[membership]``: how routers learn which servers are there."""

    kind: Literal["instant", "announced"] = "instant"
    announce_period: PositiveSeconds | None = None
    expiry: PositiveSeconds | None = None
    refresh: PositiveSeconds | None = None

    @model_validator(mode="after")
    def _of_the_kind(self) -> Self:
        if self.kind == "instant":
            for key in ("announce_period", "expiry", "refresh"):
                if getattr(self, key) is not None:
                    raise rule('is only for kind = "announced"; kind is "instant"', key)
        elif (self.expiry or _MEMBERSHIP.expiry_s) < (self.announce_period or _MEMBERSHIP.announce_period_s):
            raise rule(
                "must not be shorter than announce_period: servers would vanish between announcements",
                "expiry",
            )
        return self
