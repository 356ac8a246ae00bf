"""The keys of ``[[fault]]``, ``[churn]``, ``[recovery]`` and ``[membership]``; ``faults`` resolves them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from policies.membership import MembershipRules
from policies.rules import RecoveryRules
from testbed.experiments.fields import Instant, Name, PositiveSeconds, Ratio, Seconds, Table, Tokens, rule
from testbed.experiments.limits import MAX_NUMBER, MAX_REQUESTS
from testbed.experiments.problems import shown
from testbed.faultkinds import IN_CHURN, IN_FILES, KINDS, FaultKind, any_of

_RECOVERY, _MEMBERSHIP = RecoveryRules(), MembershipRules()
"""The defaults of keys that a file leaves out."""
if TYPE_CHECKING:
    KindInFile = str
    KindInChurn = str
else:  # mypy knows no names that are made at run time
    KindInFile = Literal[IN_FILES]
    KindInChurn = Literal[IN_CHURN]


class AfterTable(Table):
    """``after = { request = 3, tokens = 20 }``: as soon as request 3 (from 0) has 20 output tokens."""

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
    """``[[fault]]``: what happens to servers, at the time ``at`` or ``after`` tokens of a request.

    ``kind`` is one of ``testbed.faultkinds``. ``for``: how long it lasts (default: to the end). ``factor``:
    how many times as long steps of a slow server take.
    """

    kind: KindInFile
    server: Names
    at: Instant | None = None
    after: AfterTable | None = None
    for_: Annotated[PositiveSeconds | None, Field(alias="for")] = None
    factor: Annotated[float, Field(ge=1, le=MAX_NUMBER)] | None = None

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if self.at is None and self.after is None:
            raise rule('is missing; give a time such as at = "30 s", or after', "at")
        if self.at is not None and self.after is not None:
            raise rule("has both at and after; keep one")
        kind = KINDS[self.kind]
        if self.for_ is not None and not (kind.can_end or kind.undone_by):
            raise rule(_only_for(lambda each: each.can_end or bool(each.undone_by), kind), "for")
        if self.for_ is not None and kind.undone_by and self.at is None:
            raise rule(f'of kind = "{kind.name}" needs at, a time that is known beforehand', "for")
        if self.factor is not None and not kind.has_factor:
            raise rule(_only_for(lambda each: each.has_factor, kind), "factor")
        if self.factor is None and kind.has_factor:
            raise rule(f'is missing; kind = "{kind.name}" needs it, for example factor = 4', "factor")
        twice = next((name for i, name in enumerate(self.server) if name in self.server[:i]), None)
        if twice is not None:
            raise rule(f'names "{twice}" twice; leave one out', "server")
        return self


def _only_for(has_key: Callable[[FaultKind], bool], kind: FaultKind) -> str:
    names = any_of(f'"{each.name}"' for each in KINDS.values() if has_key(each))
    return f'is only for kind = {names}; kind is "{kind.name}"'


class ChurnTable(Table):
    """``[churn]``: servers fail at random times and come back.

    ``mtbf`` is the mean time between two failures of all ``servers`` together (default: those present at the
    start). ``mttr`` is the mean time until a failed server is back. ``distribution`` is that of both times;
    "constant" makes them exactly these. ``kind`` is as in ``[[fault]]``. No failure happens after the time
    ``until`` (default: the last arrival). Failures have a random stream of their own, so that the workload
    does not change with them.
    """

    mtbf: PositiveSeconds
    mttr: PositiveSeconds
    distribution: Literal["exponential", "constant"] = "exponential"
    kind: KindInChurn = IN_CHURN[0]
    until: PositiveSeconds | None = None
    servers: Names | None = None


class RecoveryTable(Table):
    """``[recovery]``: what a client does when a hop of its chain fails (docs/faults.md).

    - ``mode``: "replay" replaces the hop and replays the session's history there. "head" behaves like PETALS'
      last commit, where a replacement works only during the prompt. "off": the request fails.
    - ``request_timeout``: a step without an answer for so long has failed; longer steps get more time.
      ``connect_timeout``: a server that has not opened a session in this time is treated as absent.
    - ``retry_first``, ``retry_max``: the first attempt to replace a hop is made at once, the second after
      ``retry_first``; further waits double up to ``retry_max``. With ``jitter`` j each wait is between (1 -
      j) and (1 + j) times as long. The request fails if no attempt succeeds within ``give_up`` of the
      failure's detection.
    - ``ban``: how long a server that failed is left out of routes; twice as long after each further failure
      in a row. ``ban_failed_servers = false``: it stays routable while routers believe that it is there.
    - ``replay``: how a replacement gets the history. "at_once": in one message. "step_by_step": the prompt,
      then each token by itself, as the lost hop did. "auto": "step_by_step" for real blocks of 16 bits, whose
      rounding depends on it, else "at_once".
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
            raise rule("must be at least recovery.retry_first", "retry_max")
        return self


class MembershipTable(Table):
    """``[membership]``: how routers learn which servers are there.

    "instant": they know at once. "announced", as in PETALS: a server announces itself when it begins and
    every ``announce_period`` (default 60 s), each time for ``expiry`` (default 120 s); routers read the
    announcements every ``refresh`` (default 60 s).
    """

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
                "must be at least announce_period; otherwise servers would vanish between announcements",
                "expiry",
            )
        return self
