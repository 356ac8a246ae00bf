"""The keys of a scenario file: one class per TOML table, with types, limits and defaults.

Only the form is checked here. ``testbed.experiments.resolve`` looks up names, reads files and draws random
choices. Quantities are text with a unit: durations become seconds, rates bits per second, sizes bytes
(``units``).
"""

from __future__ import annotations

import math
import re
import shlex
from itertools import pairwise
from statistics import NormalDist
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from policies.interfaces import Communication, Queue, SessionSetup
from policies.problem import Batching
from testbed.experiments.draws import Draw
from testbed.experiments.fault_tables import ChurnTable, FaultTable, MembershipTable, RecoveryTable
from testbed.experiments.fields import (
    BitsPerSecond,
    Bytes,
    Name,
    Positive,
    PositiveSeconds,
    Ratio,
    Seconds,
    Table,
    Tokens,
    Watts,
    Weight,
    rule,
)
from testbed.experiments.limits import (
    MAX_BLOCKS,
    MAX_DRAFTED,
    MAX_HIDDEN_SIZE,
    MAX_NODES,
    MAX_REQUESTS,
    MAX_TOKENS,
)
from testbed.experiments.network_tables import (
    ClustersTable,
    MatrixTable,
    SiteTable,
    TopologyNetworkTable,
)
from testbed.experiments.problems import shown


def _int_or(*words: str, most: int) -> BeforeValidator:
    def check(value: Any) -> Any:
        whole = isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= most
        if value not in words and not whole:
            choice = ", ".join(f'"{word}"' for word in words)
            raise rule(
                f"must be {choice} or a whole number of at least 1 and at most {most:,}, not {shown(value)}"
            )
        return value

    return BeforeValidator(check)


def _stored_as(value: Any) -> Any:
    return "int4" if value in ("awq", "gptq") else value


Dtype = Annotated[
    Literal["fp32", "fp16", "bf16", "int8", "nf4", "fp8", "mxfp4", "int4"], BeforeValidator(_stored_as)
]
"""How a block's weights are stored: int4 as AWQ and GPTQ do, which are other names of it.

Hidden states and caches are 16 bits wide with quantised weights.
"""


Count = Annotated[int, Field(ge=1, le=MAX_HIDDEN_SIZE)]
CountOrNone = Annotated[int, Field(ge=0, le=MAX_HIDDEN_SIZE)]
RateCurve = Annotated[list[Weight], Field(min_length=2, max_length=10_000)]


class ModelTable(Table):
    """``[model]``: the model that the servers hold, by ``profile`` name, by its sizes, or both.

    Sizes given here replace those of the profile.

    - ``n_blocks``: transformer blocks. ``hidden_size``: values in one token's hidden state.
    - ``value_bytes`` (default 2): bytes of one such value.
    - ``block_size``: weights of one block.
    - ``cache_per_token`` (default ``2 x hidden_size x value_bytes``): attention cache of one token in one
      block.
    - ``petals_cache_tokens`` (default 4096): tokens that PETALS reserves cache for, per block.

    ``family``, ``heads`` and ``vocab`` together with ``n_blocks`` and ``hidden_size`` describe the model
    fully: sizes that are left out are computed from them and ``dtype``, and a model with random weights (from
    ``seed``, default 0) can be made. ``kv_heads`` (default ``heads``), ``head_size`` (default
    ``hidden_size / heads``) and ``feed_forward`` (default: as usual in the family) are needed only where they
    differ from these defaults.

    - Mixtures: every token is sent to ``experts_per_token`` of ``experts``, which have
      ``expert_feed_forward`` (default ``feed_forward``), and to ``shared_experts`` (default 0) more. The first
      ``dense_blocks`` (default 0) are no mixtures; of the others, every ``experts_every``-th is (default 1).
    - MLA: the cache holds ``kv_rank + rope_size`` values per token. Keys have ``head_size`` values beside
      ``rope_size``, values ``value_size``, queries are made from ``q_rank``.
    - Sliding windows: caches hold the last ``window`` tokens, but for every ``full_every``-th block, which may
      have ``full_kv_heads`` and ``full_head_size`` of its own, and values equal to its keys
      (``full_shares_keys``).
    - ``dense_feed_forward`` is for a mixture's dense blocks, where ``feed_forward`` is the experts' (Llama 4).
    - For the bytes of a checkpoint: ``tied`` (the head is the embedding), ``head_norms`` (norms of queries
      and keys in the family glm4_moe), ``next_token_blocks`` (not served, to predict further tokens).
    """

    profile: str | None = None
    name: Name | None = None
    n_blocks: Annotated[int, Field(ge=1, le=MAX_BLOCKS)] | None = None
    hidden_size: Annotated[int, Field(ge=1, le=MAX_HIDDEN_SIZE)] | None = None
    value_bytes: Annotated[int, Field(ge=1, le=1024)] | None = None
    block_size: Bytes | None = None
    cache_per_token: Bytes | None = None
    petals_cache_tokens: Tokens | None = None
    family: (
        Literal[
            "bloom",
            "llama",
            "mistral",
            "qwen2",
            "qwen3",
            "gemma3",
            "gemma4",
            "mixtral",
            "qwen3_moe",
            "gpt_oss",
            "deepseek_v3",
            "glm4_moe",
            "llama4",
        ]
        | None
    ) = None
    dtype: Dtype | None = None
    heads: Annotated[int, Field(ge=1, le=MAX_HIDDEN_SIZE)] | None = None
    kv_heads: Annotated[int, Field(ge=1, le=MAX_HIDDEN_SIZE)] | None = None
    head_size: Annotated[int, Field(ge=1, le=MAX_HIDDEN_SIZE)] | None = None
    feed_forward: Annotated[int, Field(ge=1, le=MAX_HIDDEN_SIZE)] | None = None
    vocab: Annotated[int, Field(ge=2, le=MAX_HIDDEN_SIZE)] | None = None
    experts: Annotated[int, Field(ge=2, le=MAX_HIDDEN_SIZE)] | None = None
    experts_per_token: Count | None = None
    expert_feed_forward: Count | None = None
    shared_experts: CountOrNone | None = None
    dense_blocks: CountOrNone | None = None
    experts_every: Count | None = None
    dense_feed_forward: Count | None = None
    kv_rank: Count | None = None
    q_rank: Count | None = None
    rope_size: Count | None = None
    value_size: Count | None = None
    window: Tokens | None = None
    full_every: Count | None = None
    full_kv_heads: Count | None = None
    full_head_size: Count | None = None
    full_shares_keys: bool | None = None
    tied: bool | None = None
    head_norms: bool | None = None
    next_token_blocks: CountOrNone | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None


class MeasuredTable(Table):
    """``measured`` of a hardware profile: the model whose block was measured.

    ``block_values`` is the number of values in the matrices of one block, ``heads_width`` the width of all
    its heads together. A scenario whose model differs in one of these or in ``dtype`` gets a warning.
    """

    model: str
    dtype: Dtype
    block_values: Annotated[int, Field(ge=1)]
    heads_width: Annotated[int, Field(ge=1)]


class OtherBlocksTable(Table):
    """A row of ``other_blocks`` of a hardware profile: times of a kind of block that the model also has.

    The keys are those of the profile, which has the times of the model's largest blocks.
    """

    decode: Seconds
    prefill_base: Seconds
    prefill_per_token: Seconds
    context_slope: Seconds | None = None
    prefill_curve: Seconds | None = None
    session_slope: Seconds | None = None
    prefill_least: Seconds | None = None
    experts_read: Seconds | None = None
    experts_share: Annotated[float, Field(ge=0, le=1)] | None = None
    window: Tokens | None = None


class HardwareTable(Table):
    """``[hardware.NAME]``: memory and step times of one kind of server.

    Keys that are left out come from the profile ``base``; a NAME of a shipped profile changes that profile.
    ``memory`` holds blocks and attention caches. ``block_cap`` limits the blocks of one server, for policies
    that honour it; "none" removes the limit of ``base``.

    Step times (``policies.steps.StepLaw`` is the equation):

    - ``decode``: one token in one block, with an empty attention cache. ``context_slope`` more for each
      cached token.
    - Prefill of l tokens in one block: ``prefill_base + prefill_per_token * l + prefill_curve * l**2``, and
      at least ``prefill_least``.
    - ``step_base``: once per step, however many blocks the server holds.
    - ``contention``: while n other sessions compute, a step takes ``1 + n * contention`` times as long.
    - ``session_slope``: what each further session adds to one block of a step with
      ``batching = "continuous"``.
    - ``experts_read``: reading all experts of a block, of which a token chooses the share
      ``experts_share``; ``decode`` reads those of one token, ``prefill_least`` all.
    - ``window``: the block attends to the last so many tokens only.
    - ``other_blocks``: times of the model's other kinds of blocks, in the order of the model; without them
      all blocks take as long.

    ``context_slope``, ``prefill_curve``, ``prefill_least``, ``step_base``, ``contention``, ``session_slope``
    and ``experts_read`` are 0 by default. ``petals_forward_rps`` and ``petals_network_rps`` are the throughput
    that PETALS measures, in tokens per second; they are required only if PETALS places, routes or moves
    blocks. ``measured`` names the model that the times were measured with: a scenario with another model gets
    a warning.
    """

    base: str | None = None
    memory: Bytes | None = None
    decode: Seconds | None = None
    prefill_base: Seconds | None = None
    prefill_per_token: Seconds | None = None
    petals_forward_rps: Positive | None = None
    petals_network_rps: Positive | None = None
    block_cap: Annotated[int | Literal["none"], _int_or("none", most=MAX_BLOCKS)] | None = None
    step_base: Seconds | None = None
    context_slope: Seconds | None = None
    prefill_curve: Seconds | None = None
    contention: Weight | None = None
    session_slope: Seconds | None = None
    prefill_least: Seconds | None = None
    experts_read: Seconds | None = None
    experts_share: Annotated[float, Field(ge=0, le=1)] | None = None
    window: Tokens | None = None
    other_blocks: list[OtherBlocksTable] | None = None
    measured: MeasuredTable | None = None


class ServersTable(Table):
    """``[[servers]]``: ``count`` servers with the same ``hardware`` at one ``site``.

    In a topology, ``site = "any"`` draws a node of its own for each server. ``name`` (default: the hardware's
    name) begins the servers' names: NAME-0, NAME-1, ...; a single server with a ``name`` is called just that.
    ``memory`` replaces that of the hardware. With ``present = false`` the servers are absent at the start;
    a ``[[fault]]`` of the kind "join" begins them.

    ``memory_reserve`` is the share of the memory that blocks and caches do not get: 0.1 (as vLLM's
    ``gpu_memory_utilization`` of 0.9) for a GPU by its name, 0 with a ``memory`` or a profile of one's own.
    A server with several ``gpus``, which ``interconnect`` connects (default "nvlink"), computes each step on
    all of them: ``testbed.experiments.parallel``. Its ``memory`` is that of all together. ``dtype`` is how
    this server stores the blocks, in place of ``model.dtype``.

    With ``hours`` such as "22:00-18:00" the servers are there at these times of every day of their
    ``time_zone``, an offset from UTC (default "+00:00"): ``testbed.experiments.hours``.

    ``cost_per_hour`` is the price of each server, in any currency. ``power_idle`` and ``power_busy`` are the
    power of each, all its GPUs included; ``power_busy`` is by default what the GPU's data sheet states. From
    these follow the cost and the energy per token. All tables must have them, or none.
    """

    hardware: str
    site: Name
    count: Annotated[int, Field(ge=0, le=MAX_NODES)] = 1
    name: Name | None = None
    memory: Bytes | None = None
    memory_reserve: Annotated[float, Field(ge=0, lt=1)] | None = None
    gpus: Annotated[int, Field(ge=1, le=8)] = 1
    interconnect: Literal["nvlink", "pcie"] | None = None
    dtype: Dtype | None = None
    present: bool = True
    hours: str | None = None
    time_zone: str | None = None
    cost_per_hour: Weight | None = None
    power_idle: Watts | None = None
    power_busy: Watts | None = None

    @model_validator(mode="after")
    def _connected(self) -> Self:
        if self.interconnect is not None and self.gpus == 1:
            raise rule("connects several GPUs; give gpus, or leave this out", "interconnect")
        if self.power_busy is not None and self.power_idle is None:
            raise rule('is missing beside power_busy; give it, such as "60 W"', "power_idle")
        if self.power_busy is not None and self.power_idle is not None and self.power_busy < self.power_idle:
            raise rule("must be at least power_idle", "power_busy")
        return self

    @property
    def profile_key(self) -> str:
        """The name in ``[hardware]`` of a resolved scenario: each type of weights has times of its own."""
        return self.hardware if self.dtype is None else f"{self.hardware}-in-{self.dtype}"


class ClientsTable(Table):
    """``[clients]`` or ``[[clients]]``: ``count`` clients at one ``site``.

    In a topology, ``site = "any"`` draws a node for each client. ``name`` (default "client") begins their
    names. ``hardware`` is what computes their part of the model, a GPU or a CPU by name: from it follows
    ``hub_token``, the time per output token. Default: ``compute.hub_token``.

    Each client sends ``rate`` requests per second, or a ``share`` of all in proportion to the others'. With
    rates, ``workload.rate`` is their sum; if it is given, too, they are shares of it. That rate is the mean of the client's
    ``curve`` (default: ``workload.curve``), which goes by local time if ``time_zone`` is given, an offset from UTC, and
    else begins with the run: ``testbed.experiments.demand``.
    """

    site: Name
    count: Annotated[int, Field(ge=0, le=MAX_NODES)] = 1
    name: Name | None = None
    hardware: str | None = None
    hub_token: Seconds | None = None
    rate: Positive | None = None
    share: Positive | None = None
    curve: RateCurve | None = None
    time_zone: str | None = None

    @property
    def weight(self) -> float | None:
        """How many requests each client sends, in proportion to others; ``None``: as many as any."""
        return self.share if self.rate is None else self.rate

    @model_validator(mode="after")
    def _rate_or_share(self) -> Self:
        if self.rate is not None and self.share is not None:
            raise rule("and share say the same of a client; keep one of them", "rate")
        return self


def _words(value: Any) -> Any:
    """Return a command as a list of words. Text is split by a shell's rules, but no shell runs it."""
    if isinstance(value, str):
        try:
            value = shlex.split(value)
        except ValueError as error:
            raise rule(f"cannot be split into words ({str(error).lower()}); close every quote") from None
    if value == []:
        raise rule("is empty; give the program to run, or leave the key out")
    if isinstance(value, list) and any("\0" in word for word in value if isinstance(word, str)):
        raise rule("contains a NUL character; remove it")
    return value


def _variables(value: Any) -> Any:
    for name, text in value.items() if isinstance(value, dict) else ():
        if not name or "=" in name or "\0" in name or (isinstance(text, str) and "\0" in text):
            raise rule(
                f"{shown(name)} cannot be an environment variable: a name must not be empty or contain '=', "
                "and neither name nor value may contain a NUL character"
            )
    return value


class NodeTable(Table):
    """``[[node]]``: a node for a program of the user's, with a link to every other node.

    Its links have the values of the network between its ``site`` and theirs. ``command`` is a list of words,
    or text that is split like a shell's command line; without it the node is empty and waits for
    ``testbed exec``. Words that begin with ``./`` are paths relative to the scenario file. ``environment``
    adds variables to those of the caller. ``restart = "on-failure"`` starts the program again, 1 s after it
    ended with a status other than 0.
    """

    name: Name
    site: Name
    command: Annotated[list[str], BeforeValidator(_words)] | None = None
    environment: Annotated[dict[str, str], BeforeValidator(_variables)] = Field(default_factory=dict)
    restart: Literal["no", "on-failure"] = "no"


class TcpTable(Table):
    """``[tcp]``: TCP in the network namespaces of the nodes.

    ``warm``: connections behave like long-used ones from the first byte. ``slow_start_after_idle`` and
    ``congestion_control`` are the kernel's settings of these names.
    """

    warm: bool = True
    slow_start_after_idle: bool = False
    congestion_control: Name = "reno"


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
    arrival in seconds, input tokens, output tokens, client's number].
    """

    max_model_len: Annotated[int, Field(ge=2, le=MAX_TOKENS)]
    workload: Literal["also", "none"] = "none"
    requests: list[Annotated[list[int | float], Field(min_length=5, max_length=5)]] | None = None


Lengths = Annotated[list[Tokens], Field(min_length=2, max_length=2)]
"""[input, output] tokens of a request."""


class WorkloadTable(Table):
    """``[workload]``: when requests arrive and how many tokens they have (docs/workloads.md).

    Recorded arrivals: ``arrivals = "trace"`` reads the trace ``file``; "listed" has ``requests``, rows of
    [arrival in seconds, input tokens, output tokens], optionally with the client's number and
    ``max_new_tokens``. ``n_requests`` limits how many are used, ``rate`` stretches their arrivals to that
    mean rate per second, and ``n_input_tokens`` and ``n_output_tokens`` replace their lengths. The value
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
    ``hash_ids`` where ``cache.prefix`` is "shared".

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
        if self.prompt_block is not None and self.prompts is None:
            raise rule("is of workload.prompts; give them, or leave this out", "prompt_block")
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


class PolicyTable(Table):
    """``[policy]``: a pair of policies by ``name``, or ``placement`` and ``routing`` one by one.

    - ``design_concurrency``: |R|, the sessions at a time that the placement is designed for. "auto" leaves it
      to the placement policy, "searched" tries candidates on synthetic arrivals.
    - ``communication``: who sends hidden states to the next server, the client ("hub-spoke") or the server
      before it ("server-to-server"). Default: what the routing policy states.
    - ``session_setup``: which of the two constants ``[calibration]`` adds to first tokens, if it adds one.
      Default: what the placement policy states.
    - ``planned_rate``: requests per second that placements are made for. Default: the workload's own.
    - ``join_order``: order in which servers join under PETALS, by their numbers from 0. Default: drawn by the
      seed.
    - ``online``: a policy that changes the placement while requests are served, or "none". ``online_period``
      (time between two checks) and ``online_patience`` (how long the load must differ from the design before
      it acts) replace that policy's own values. Servers load blocks at ``load_rate`` (default 1 Gbit/s).
    - ``state_age``: time between the reports of servers that routers see; 0: routers see the present state.
    - ``queue``: where requests wait for room. "none": their clients ask again after ``[backoff]``. "fifo": at
      the coordinator, in order. "backfill": at the coordinator, and whichever fits goes first, until one has
      waited ``queue_age``. Default: what the routing policy states.
    """

    name: str | None = None
    placement: str | None = None
    routing: str | None = None
    design_concurrency: Annotated[
        int | Literal["auto", "searched"], _int_or("auto", "searched", most=MAX_REQUESTS)
    ] = "auto"
    communication: Communication | None = None
    session_setup: SessionSetup | None = None
    planned_rate: Positive | None = None
    join_order: list[int] | None = None
    online: str | None = None
    online_period: PositiveSeconds | None = None
    online_patience: Annotated[Seconds, Field(ge=0)] | None = None
    load_rate: BitsPerSecond | None = None
    state_age: Annotated[Seconds, Field(ge=0)] = 0.0
    queue: Queue | None = None
    queue_age: Annotated[Seconds, Field(ge=0)] = 300.0

    @model_validator(mode="after")
    def _online_keys(self) -> Self:
        for key in ("online_period", "online_patience", "load_rate"):
            if self.online is None and getattr(self, key) is not None:
                raise rule("needs policy.online; name an online policy there, or leave this out", key)
        return self


def _device(value: Any) -> Any:
    if value == "auto":
        return value
    names = value if isinstance(value, list) and value else [value]
    for name in names:
        if not (isinstance(name, str) and re.fullmatch(r"cpu|cuda(:\d{1,3})?|(GPU|MIG)-[\w/-]{1,80}", name)):
            raise rule(
                'must be "auto", or one or a list of "cpu", "cuda", "cuda:0" (or another number) and UUIDs '
                f'such as "GPU-..." or "MIG-...", not {shown(value)}'
            )
    return value


class ComputeTable(Table):
    """``[compute]``: how servers and clients compute.

    - ``backend``: "stub" only waits for as long as a step would take; "blocks" computes with torch.
    - ``batching``: how a server computes several sessions. "none": each as if it were alone. "serial": one
      step after another (``serial = true`` means the same). "continuous": all that wait, in one step, with
      one prompt or at most ``chunk_tokens`` tokens of it.
    - ``hub_token``: the client's own time per output token (embedding, head, choice of the token). The stub's
      client waits for it; with real blocks only the model columns count it. Default: that of
      ``hardware_files``, else 0.

    The other keys are for real blocks (docs/blocks.md). ``model`` is the folder of a checkpoint or its name
    on the Hugging Face hub; it also gives the stub its sizes. A list in ``device`` is dealt out to the
    servers in turn; "auto" is the list of this machine's GPUs, or the CPU without any. ``weights`` is how
    matrices are stored ("plain": in ``dtype``), ``dtype`` the type of everything else. ``threads`` are per
    server process, ``streams`` the steps that a server computes at a time. With ``verify`` the tokens are
    compared with those of the whole model after the run.
    """

    backend: Literal["stub", "blocks"] = "stub"
    batching: Batching | None = None
    serial: bool = False
    chunk_tokens: Tokens | None = None
    hub_token: Seconds | None = None
    model: Annotated[str, Field(min_length=1)] | None = None
    random_weights: bool | None = None
    device: Annotated[str | list[str], BeforeValidator(_device)] | None = None
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    weights: Literal["plain", "int8", "nf4"] | None = None
    threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    streams: Annotated[int, Field(ge=1, le=1024)] | None = None
    cuda_graphs: bool | None = None
    verify: bool | None = None

    @model_validator(mode="after")
    def _one_batching(self) -> Self:
        if self.serial and self.batching not in (None, "serial"):
            raise rule(
                f'is "{self.batching}", which contradicts serial = true; leave serial out',
                "batching",
            )
        if self.chunk_tokens is not None and self.batching != "continuous":
            raise rule('is only for batching = "continuous"', "chunk_tokens")
        return self


class CacheTable(Table):
    """``[cache]``: how servers allocate attention cache to sessions.

    ``mode = "reserved"``: all that a session may need, when it opens. "paged": room for the prompt, and then
    for ``page_tokens`` (default 16) tokens at a time as they are generated. New sessions are admitted up to
    the share ``high_water`` (default 0.9) of a server's room. When the room runs out, the session whose
    request arrived last loses its chain, waits for another one, and replays. ``expected_output`` is the
    number of output tokens that the coordinator counts for a session before they exist; default: half of the
    mean output in ``known_lengths``, or, if nothing is known, the longest output.

    ``prefix = "shared"``: servers keep the caches of ended sessions by pages of ``page_tokens``, until sessions need the
    room, and a prompt that begins with the same tokens is computed from there on. Each client keeps ``hub_history`` (default
    0) of the hops' inputs, and fills hops that have lost pages. "session": a conversation's chain stays
    open for ``hold`` (default 300 s) after each answer, as PETALS' sessions do, with cache for ``session_tokens`` (default:
    the longest request that the placement is designed for). "none" (the default): no cache outlives its request.
    """

    mode: Literal["reserved", "paged"] = "reserved"
    page_tokens: Tokens | None = None
    high_water: Annotated[float, Field(gt=0, le=1)] | None = None
    expected_output: Tokens | None = None
    prefix: Literal["none", "session", "shared"] | None = None
    hold: PositiveSeconds | None = None
    session_tokens: Tokens | None = None
    hub_history: Bytes | None = None

    @model_validator(mode="after")
    def _only_paged(self) -> Self:
        if self.mode == "reserved" and self.prefix != "shared" and self.page_tokens is not None:
            raise rule('is only for mode = "paged", or prefix = "shared"', "page_tokens")
        for key in ("high_water", "expected_output"):
            if self.mode == "reserved" and getattr(self, key) is not None:
                raise rule('is only for mode = "paged"', key)
        if self.prefix != "shared" and self.hub_history is not None:
            raise rule('is only for prefix = "shared"', "hub_history")
        for key in ("hold", "session_tokens"):
            if self.prefix != "session" and getattr(self, key) is not None:
                raise rule('is only for prefix = "session"', key)
        return self


def _acceptance(value: Any) -> Any:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    is_counts = isinstance(value, list) and all(type(n) is int and 0 <= n <= MAX_DRAFTED for n in value)
    if (is_number and 0 <= value <= 1) or (is_counts and value) or (isinstance(value, str) and value):
        return value
    raise rule(
        "must be a number from 0 to 1, a list of how many drafted tokens agreed in each of some measured rounds, or a "
        f"file with one such number per line, not {shown(value)}"
    )


class DecodingTable(Table):
    """``[decoding]``: speculative decoding, where clients draft tokens that the servers verify in one step.

    - ``drafter``: "none"; "ngram" continues what followed the last tokens earlier in prompt and output; "model" is a
      small model at the client; "petals" is one with PETALS' rule: no token of the large model after drafted ones that
      agree.
    - ``tokens``: how many to draft per round (default 5). "auto": each session drafts as many as it expects to be best
      on its chain, by the acceptance that it has seen.
    - ``acceptance``: the probability that a drafted token agrees, for the stub, which drafts no text; or how many agreed
      in each of some measured rounds, as a list or a file with a number per line. With real blocks it is what policies
      expect (default 0.5).
    - ``draft_token``: the client's time per drafted token (default 0). Real blocks take the time that they need.
    - ``draft_model``: the folder of the small model's checkpoint, for real blocks with "model" or "petals".
    """

    drafter: Literal["none", "ngram", "model", "petals"] = "none"
    tokens: Annotated[int | Literal["auto"], _int_or("auto", most=MAX_DRAFTED)] | None = None
    acceptance: Annotated[float | list[int] | str, BeforeValidator(_acceptance)] | None = None
    draft_token: Seconds | None = None
    draft_model: Annotated[str, Field(min_length=1)] | None = None


class CalibrationTable(Table):
    """``[calibration]``: published overheads that are added to the emulated network's times.

    ``set`` names a shipped set; values given here replace those of the set. ``token_overhead`` is added to
    every decode step of a hop, ``input_overhead_base`` plus ``input_overhead_per_token`` per prompt token to
    every prefill of a hop, ``initial_delay`` to every session. ``session_setup = true`` also adds
    ``session_setup_petals`` (PETALS and its variants) or ``session_setup_proposed`` (other placements) to
    every request's first token; ``policy.session_setup`` chooses another one.
    """

    set: str = "none"
    session_setup: bool = False
    token_overhead: Seconds | None = None
    input_overhead_base: Seconds | None = None
    input_overhead_per_token: Seconds | None = None
    initial_delay: Seconds | None = None
    session_setup_petals: Seconds | None = None
    session_setup_proposed: Seconds | None = None


class BackoffTable(Table):
    """``[backoff]``: how long a client waits between its attempts to open a session.

    The waits begin with ``first`` and double up to ``max``. A request fails if it has found no room
    ``give_up`` after its arrival; 0: it never gives up. With ``jitter`` j each wait is between (1 - j) and (1
    + j) times as long.
    """

    first: PositiveSeconds = 1.0
    max: PositiveSeconds = 60.0
    give_up: Seconds = 0.0
    jitter: Ratio = 0.0

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.max < self.first:
            raise rule("must be at least backoff.first", "max")
        return self


class HostTable(Table):
    """``[[hosts]]``: one machine of a Ray cluster (docs/machines.md).

    Ray chooses a machine with these ``cpus``, ``gpus``, ``accelerator_type`` and ``resources``, by Ray's
    names; ``address`` asks for one machine in particular. ``servers`` are the names of servers or sites that
    it runs; default: a share of those that no machine names. ``name`` defaults to host-0, host-1, ...
    """

    name: Name | None = None
    address: str | None = None
    servers: Annotated[list[Name], Field(min_length=1)] | None = None
    cpus: Positive = 1
    gpus: Weight = 0
    accelerator_type: str | None = None
    resources: dict[str, Positive] = Field(default_factory=dict)


def _all_of_cluster(value: Any) -> Any:
    if isinstance(value, str):
        if value != "ray":
            raise rule(f'must be "ray" (all machines of the cluster) or [[hosts]] tables, not {shown(value)}')
        return []
    return value


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, dict) else value


class Scenario(Table):
    """A whole scenario file.

    ``seed`` fixes every random choice. ``clock`` is "virtual" (time jumps over waiting), "real", or "auto"
    (virtual unless something needs real time). ``time_scale`` makes real time run that many times faster.
    ``begins_at`` is the time of day, in UTC, at which the run begins, for the ``hours`` of servers.
    ``hardware_files`` are files of hardware profiles, as ``testbed calibrate`` writes them. ``resolved``
    marks a scenario that a run has stored: names are replaced by numbers, and random choices are made.
    """

    name: Name | None = None
    description: str = ""
    resolved: bool = False
    seed: Annotated[int, Field(ge=0)] = 0
    clock: Literal["auto", "virtual", "real"] = "auto"
    time_scale: Positive = 1.0
    begins_at: str = "00:00"
    model: ModelTable
    hardware: dict[Name, HardwareTable] = Field(default_factory=dict)
    hardware_files: list[str] | None = None
    servers: Annotated[list[ServersTable], Field(min_length=1)]
    clients: Annotated[list[ClientsTable], BeforeValidator(_as_list), Field(min_length=1)]
    node: list[NodeTable] | None = None
    network: Annotated[ClustersTable | MatrixTable | TopologyNetworkTable, Field(discriminator="kind")]
    sites: list[SiteTable] | None = None
    hosts: Annotated[list[HostTable], BeforeValidator(_all_of_cluster)] | None = None
    """An empty list, which "ray" becomes, stands for all machines of the Ray cluster."""
    tcp: TcpTable = TcpTable()
    workload: WorkloadTable
    policy: PolicyTable = PolicyTable(name="proposed")
    compute: ComputeTable = ComputeTable()
    cache: CacheTable = CacheTable()
    decoding: DecodingTable | None = None
    calibration: CalibrationTable = CalibrationTable()
    backoff: BackoffTable = BackoffTable()
    fault: list[FaultTable] | None = None
    churn: ChurnTable | None = None
    recovery: RecoveryTable = RecoveryTable()
    membership: MembershipTable = MembershipTable()
    endpoint: EndpointTable | None = None

    @model_validator(mode="before")
    @classmethod
    def _sum_of_rates(cls, data: Any) -> Any:
        """Fill in ``workload.rate`` with the sum of all clients' rates."""
        if not isinstance(data, dict):
            return data
        clients, workload = data.get("clients"), data.get("workload")
        groups = clients if isinstance(clients, list) else [clients]
        if not isinstance(workload, dict) or workload.get("rate") is not None:
            return data
        rates = [
            group["rate"] * group.get("count", 1)
            for group in groups
            if isinstance(group, dict)
            and isinstance(group.get("rate"), int | float)
            and isinstance(group.get("count", 1), int)
        ]
        if not rates or workload.get("arrivals") in ("trace", "listed"):
            return data
        return {**data, "workload": {**workload, "rate": sum(rates)}}

    @model_validator(mode="after")
    def _costs_of_all(self) -> Self:
        for key in ("cost_per_hour", "power_idle"):
            if len({getattr(group, key) is None for group in self.servers}) > 1:
                raise rule(f"have {key} in some tables and not in others; give it in all", "servers")
        return self

    @model_validator(mode="after")
    def _shares_of_all(self) -> Self:
        kinds = {(group.rate is not None, group.share is not None) for group in self.clients}
        if len(kinds) > 1:
            raise rule(
                "have a rate or share in some tables and not in others; give all the same key", "clients"
            )
        return self
