"""The tables of scenario files about requests: ``[workload]`` with distributions of lengths, and ``[endpoint]``."""

from __future__ import annotations

import math
from itertools import pairwise
from statistics import NormalDist
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from testbed.experiments.draws import Draw
from testbed.experiments.fields import (
    Positive,
    PositiveSeconds,
    Seconds,
    Table,
    Tokens,
    Weight,
    rule,
)
from testbed.experiments.limits import (
    MAX_REQUESTS,
    MAX_TOKENS,
)

RateCurve = Annotated[list[Weight], Field(min_length=2, max_length=10_000)]


class Uniform(Table):
    """A length in tokens, uniform from ``low`` to ``high``, both included."""

    distribution: Literal["uniform"]
    low: Tokens
    high: Tokens

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.low > self.high:
            raise rule(f"must be at least low ({self.low}), not {self.high}", "high")
        return self


class Lognormal(Table):
    """A lognormal length in tokens, rounded and then limited to ``1..max``.

    ``mean`` (tokens) is the mean before that limit; ``sigma`` is the standard deviation of the logarithm.
    """

    distribution: Literal["lognormal"]
    mean: Positive
    sigma: Annotated[float, Field(ge=0, le=10)]
    max: Tokens


class Choice(Table):
    """A length in tokens drawn from ``values`` with ``weights`` (default: all equally likely)."""

    distribution: Literal["choice"]
    values: Annotated[list[Tokens], Field(min_length=1)]
    weights: list[Weight] | None = None

    @model_validator(mode="after")
    def _weighted(self) -> Self:
        if self.weights is not None and (len(self.weights) != len(self.values) or sum(self.weights) <= 0):
            raise rule("must have one weight for each of values, and at least one weight above 0", "weights")
        return self


class Quantiles(Table):
    """A lognormal length in tokens by its median ``p50`` and its ``p95``, which one request in 20 exceeds.

    It is rounded and then limited to ``1..max`` (default: what one request in 1,000 would exceed).
    ``distribution`` may be left out.
    """

    distribution: Literal["quantiles"]
    p50: Tokens
    p95: Tokens
    max: Tokens | None = None

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.p95 < self.p50:
            raise rule(f"must be at least p50 ({self.p50}), not {self.p95}", "p95")
        if self.most > MAX_TOKENS:
            raise rule(f"is missing, and one request in 1,000 would exceed {MAX_TOKENS:,} tokens", "max")
        return self

    @property
    def sigma(self) -> float:
        """The standard deviation of the logarithm."""
        return math.log(self.p95 / self.p50) / NormalDist().inv_cdf(0.95)

    @property
    def most(self) -> int:
        usual = self.p50 * math.exp(self.sigma * NormalDist().inv_cdf(0.999))
        return self.max or math.ceil(usual)


def _named(value: Any) -> Any:
    """Return the table of a length with the name of its distribution, which quantiles need not have."""
    if isinstance(value, dict) and "distribution" not in value and "p50" in value:
        return {"distribution": "quantiles", **value}
    return value


Distribution = Annotated[
    Uniform | Lognormal | Choice | Quantiles, Field(discriminator="distribution"), BeforeValidator(_named)
]


def _length_kind(value: Any) -> str:
    return "table" if isinstance(value, dict | Table) else "number"


Length = Annotated[
    Annotated[Tokens, Tag("number")] | Annotated[Distribution, Tag("table")], Discriminator(_length_kind)
]


class RateChange(Table):
    """A row of ``workload.changes``: from time ``at`` on, requests arrive at ``rate`` per second."""

    at: PositiveSeconds
    rate: Positive


class ThinkTime(Table):
    """Seconds between an answer and the next message, exponentially distributed with this ``mean``."""

    distribution: Literal["exponential"] = "exponential"
    mean: PositiveSeconds


_LENGTHS = ("n_input_tokens", "n_output_tokens")
_OF_A_TRACE = ("rate", "n_requests", *_LENGTHS)


class EndpointTable(Table):
    """``[endpoint]``: ``testbed serve`` accepts requests from outside.

    ``max_model_len`` is the largest number of tokens of a request, prompt and output together.
    ``workload = "also"`` serves the scenario's own requests, too. The placement is designed for the
    scenario's requests either way. ``requests`` are those that came, once a run has ended: rows of [number,
    arrival in seconds, input tokens, output tokens, client's number], and the numbers of its conversation and its turn if it is of one.
    """

    max_model_len: Annotated[int, Field(ge=2, le=MAX_TOKENS)]
    workload: Literal["also", "none"] = "none"
    requests: list[Annotated[list[int | float], Field(min_length=5, max_length=7)]] | None = None


Lengths = Annotated[list[Tokens], Field(min_length=2, max_length=2)]
"""[input, output] tokens of a request."""


class WorkloadTable(Table):
    """``[workload]``: when requests arrive and how many tokens they have (docs/workloads.md).

    Recorded arrivals: ``arrivals = "trace"`` reads the trace ``file``; "listed" has ``requests``, rows of
    [arrival in seconds, input tokens, output tokens], optionally with the client's number and
    ``max_new_tokens``. ``n_requests`` limits how many are used, ``rate`` stretches the arrivals of both to that
    mean rate per second (default: as they are), and ``n_input_tokens`` and ``n_output_tokens`` replace their lengths. The value
    "trace" for one of these four keys means "as recorded"; with ``--set`` it undoes the file's value.
    ``draw`` chooses which recorded requests a seed uses (``testbed.experiments.draws``; default: the first
    ones). ``max_input_tokens`` first drops recorded requests with longer prompts.

    Generated arrivals: "poisson", "gamma" (with ``shape``) and "constant" arrive at ``rate`` per
    second until the first of ``changes``. A ``curve`` has the rates over a day (or ``curve_period``) in
    proportion to each other, evenly spaced and repeated; ``rate`` is their mean. The placement is designed for
    ``rate``. ``n_input_tokens`` and
    ``n_output_tokens`` are numbers or distributions. A length that is missing or "trace" comes from a request
    drawn from the trace ``file``, or from ``request_lengths``, one [input, output] per request in order.

    ``lengths = "known"``: policies know each request's output length beforehand, as the paper assumes.
    "hidden": policies, admission and servers know only ``max_new_tokens`` (default: the longest output that
    can occur) and reserve cache for it; a longer output is cut off there.

    ``known_lengths`` are [input, output] tokens of past requests, as an operator knows them; policies see
    them as ``Problem.length_samples``. By default they are drawn from the distributions, or are lengths of
    the trace's requests that the run does not replay.

    ``turns`` makes conversations of so many requests (a number or a distribution, as lengths). Each further message comes
    ``think_time`` (a time, or ``{ mean = "30 s" }`` for exponential ones; default 0) after the last token of the answer
    before it, and its prompt is all that was said, then ``n_further_tokens`` new ones (default: ``n_input_tokens``, which
    are those of first messages). ``n_requests`` counts all requests, and ``rate`` would be theirs if answers took no time.

    ``conversations`` are those of listed requests or request_lengths, a row of [conversation's number, seconds after the answer
    before] for each; they come from recorded conversations, whose seconds ``think_time`` replaces.

    ``prompts`` are those of listed requests that may begin alike, rows of [chat, turn, ids of its blocks of ``prompt_block``
    tokens ...] (default 512; chat and turn -1: of none). Blocks with equal ids have equal tokens. They come from a trace's
    ``hash_ids`` where ``cache.prefix`` is "shared". ``answers`` has for each the ids of the blocks after the prompt's whole ones:
    what servers have computed for it, up to the last token but one. They come from the log of an endpoint's run.

    ``slo`` sets objectives that each request should meet, such as "ttft=5s,tpot=1s": goodput counts the
    requests that meet them, and a placement policy may aim at them. ``origin`` describes in words where
    listed values come from.
    """

    arrivals: Literal["poisson", "gamma", "constant", "trace", "listed"] = "poisson"
    rate: Positive | None = None
    changes: list[RateChange] | None = None
    curve: RateCurve | None = None
    curve_period: PositiveSeconds | None = None
    shape: Positive | None = None
    file: str | None = None
    requests: list[Any] | None = None
    request_lengths: list[Any] | None = None
    n_requests: Annotated[int, Field(ge=1, le=MAX_REQUESTS)] | None = None
    n_input_tokens: Length | None = None
    n_output_tokens: Length | None = None
    lengths: Literal["known", "hidden"] = "known"
    max_new_tokens: Tokens | None = None
    known_lengths: Annotated[list[Lengths], Field(max_length=10_000)] | None = None
    slo: str | None = None
    origin: Annotated[str, Field(max_length=1000)] | None = None
    draw: Draw | None = None
    max_input_tokens: Tokens | None = None
    turns: Length | None = None
    think_time: (
        Annotated[
            Annotated[Annotated[Seconds, Field(ge=0)], Tag("number")] | Annotated[ThinkTime, Tag("table")],
            Discriminator(_length_kind),
        ]
        | None
    ) = None
    n_further_tokens: Length | None = None
    conversations: list[Any] | None = None
    prompts: list[Any] | None = None
    prompt_block: Tokens | None = None
    answers: list[Any] | None = None

    @model_validator(mode="after")
    def _of_conversations(self) -> Self:
        if self.conversations is not None and self.requests is None and self.request_lengths is None:
            raise rule(
                "is of listed requests or request_lengths, and the workload has none; leave it out",
                "conversations",
            )
        if self.conversations is not None and self.prompts is not None:
            raise rule("has rows beside those of workload.prompts; leave out one of the two", "conversations")
        if self.turns is None:
            for key in ("think_time", "n_further_tokens"):
                if getattr(self, key) is not None and not (key == "think_time" and self.file is not None):
                    raise rule("is of conversations; give workload.turns, or leave this out", key)
        elif self.arrivals in ("trace", "listed") or None in (self.n_input_tokens, self.n_output_tokens):
            raise rule(
                "needs generated arrivals, and n_input_tokens and n_output_tokens as numbers or distributions",
                "turns",
            )
        return self

    @model_validator(mode="before")
    @classmethod
    def _as_the_trace(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        said = [key for key in _OF_A_TRACE if data.get(key) == "trace"]
        if data.get("arrivals") not in ("trace", "listed"):
            has_lengths = any(data.get(key) is not None for key in ("file", "request_lengths"))
            for key in said:
                if key not in _LENGTHS:
                    raise rule('may only be "trace" with arrivals = "trace" or "listed"', key)
                if not has_lengths:
                    raise rule('is "trace", but there is no trace; name its file in workload.file', key)
        return {key: value for key, value in data.items() if key not in said}

    @model_validator(mode="after")
    def _keys_of_the_kind(self) -> Self:
        is_generated = self.arrivals not in ("trace", "listed")
        takes_lengths = is_generated and None in (self.n_input_tokens, self.n_output_tokens)
        for key, kind in (("shape", "gamma"), ("file", "trace"), ("requests", "listed")):
            if key == "file" and takes_lengths:
                continue
            given = getattr(self, key) is not None
            if given and key == "file" and is_generated:
                raise rule(
                    'is only for arrivals = "trace", or for a length that is "trace"; leave it out', key
                )
            if given and self.arrivals != kind:
                raise rule(f'is only for arrivals = "{kind}"; arrivals is "{self.arrivals}"', key)
            if not given and self.arrivals == kind:
                raise rule(f'is missing; arrivals = "{kind}" needs it', key)
        if self.max_input_tokens is not None and self.file is None:
            remedy = "leave it out" if self.arrivals == "listed" else "name one in workload.file"
            raise rule(f"is only for requests of a trace; {remedy}", "max_input_tokens")
        if self.max_new_tokens is not None and self.lengths == "known":
            raise rule('is only for lengths = "hidden"; lengths is "known"', "max_new_tokens")
        if self.request_lengths is not None and (self.file is not None or not takes_lengths):
            raise rule(
                "is only for generated arrivals that leave out a length and have no workload.file; "
                "leave it out",
                "request_lengths",
            )
        if self.prompts is not None and self.arrivals != "listed":
            raise rule('is only for arrivals = "listed"; a trace has its own', "prompts")
        for key in ("prompt_block", "answers"):
            if getattr(self, key) is not None and self.prompts is None:
                raise rule("is of workload.prompts; give them, or leave this out", key)
        has_lengths = takes_lengths and (self.file is not None or self.request_lengths is not None)
        if self.origin is not None and self.arrivals != "listed" and self.request_lengths is None:
            raise rule(
                "describes listed requests or lengths, but the workload has none; leave it out", "origin"
            )
        if is_generated:
            if self.draw is not None:
                raise rule('is only for arrivals = "trace" or "listed"', "draw")
            for key in _OF_A_TRACE:
                if getattr(self, key) is None and not (key in _LENGTHS and has_lengths):
                    raise rule(f'is missing; arrivals = "{self.arrivals}" needs it', key)
        elif self.changes:
            raise rule(
                f'is only for generated arrivals; arrivals is "{self.arrivals}", so leave it out', "changes"
            )
        if self.curve is not None:
            if not is_generated or self.changes:
                what = "changes" if is_generated else f'arrivals = "{self.arrivals}"'
                raise rule(f"sets the rates, and so does {what}; keep one of them", "curve")
            if not any(self.curve):
                raise rule("is 0 at all times; at least one value must be above 0", "curve")
        for before, after in pairwise(self.changes or ()):
            if after.at <= before.at:
                raise rule("must be in the order of time, each later than the one before", "changes")
        return self
