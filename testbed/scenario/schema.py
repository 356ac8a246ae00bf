"""The form of a scenario file: strict tables with defaults. Nothing here looks anything up."""

from __future__ import annotations

import re
import shlex
from itertools import pairwise
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from testbed.scenario.draws import Draw
from testbed.scenario.fault_tables import ChurnTable, FaultTable, MembershipTable, RecoveryTable
from testbed.scenario.fields import (
    BitsPerSecond,
    Bytes,
    Name,
    Positive,
    PositiveSeconds,
    Ratio,
    Seconds,
    Table,
    Tokens,
    Weight,
    rule,
)
from testbed.scenario.limits import MAX_BLOCKS, MAX_HIDDEN_SIZE, MAX_NODES, MAX_REQUESTS, MAX_TOKENS
from testbed.scenario.network_tables import ClustersTable, MatrixTable, TopologyNetworkTable
from testbed.scenario.problems import shown


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


Dtype = Literal["fp32", "fp16", "bf16", "int8", "nf4"]
"""What a block's matrices are held in."""


class ModelTable(Table):
    """``[model]``: a profile's name, or numbers, or both (numbers replace the profile's).

    With ``family``, ``heads``, ``kv_heads``, ``head_size``, ``feed_forward`` and ``vocab`` every size follows from
    ``dtype``, the type of the weights, and a model of random weights (of ``seed``) can be made. Sizes that are
    given win over those that follow.
    """

    profile: str | None = None
    name: Name | None = None
    n_blocks: Annotated[int, Field(ge=1, le=MAX_BLOCKS)] | None = None
    hidden_size: Annotated[int, Field(ge=1, le=MAX_HIDDEN_SIZE)] | None = None
    value_bytes: Annotated[int, Field(ge=1, le=1024)] | None = None
    block_size: Bytes | None = None
    cache_per_token: Bytes | None = None
    petals_cache_tokens: Tokens | None = None
    family: Literal["bloom", "llama", "mistral", "qwen2", "qwen3"] | None = None
    dtype: Dtype | None = None
    heads: Annotated[int, Field(ge=1, le=MAX_HIDDEN_SIZE)] | None = None
    kv_heads: Annotated[int, Field(ge=1, le=MAX_HIDDEN_SIZE)] | None = None
    head_size: Annotated[int, Field(ge=1, le=MAX_HIDDEN_SIZE)] | None = None
    feed_forward: Annotated[int, Field(ge=1, le=MAX_HIDDEN_SIZE)] | None = None
    vocab: Annotated[int, Field(ge=2, le=MAX_HIDDEN_SIZE)] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None


class MeasuredTable(Table):
    """``measured`` of a hardware profile: the model whose block it is about."""

    model: str
    dtype: Dtype
    block_values: Annotated[int, Field(ge=1)]
    heads_width: Annotated[int, Field(ge=1)]


class HardwareTable(Table):
    """``[hardware.NAME]``: a hardware profile; what is left out comes from ``base``.

    ``decode`` is a block's time for a token. With ``context_slope``, which every token in the cache adds to
    it, it is that with nothing cached. A prompt of l tokens takes ``prefill_base + prefill_per_token l +
    prefill_curve l²`` per block, and at least ``prefill_least``. ``step_base`` comes once per step, and while n other sessions compute a step
    takes 1 + n x ``contention`` times as long. Where a step serves several sessions (``batching = "continuous"``),
    each further one adds ``session_slope`` per block. These six are 0 when left out. The ``petals_*`` numbers are
    only needed where PETALS places blocks. ``measured`` says of which model's block all this is, so that a scenario with
    another one is warned.
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
    measured: MeasuredTable | None = None


class ServersTable(Table):
    """``[[servers]]``: ``count`` equal servers at one site, or (in a topology) each at "any" node.

    With ``present = false`` they are not there at the start: a fault of the kind "join" begins them.
    """

    hardware: str
    site: Name
    count: Annotated[int, Field(ge=0, le=MAX_NODES)] = 1
    name: Name | None = None
    memory: Bytes | None = None
    present: bool = True


class ClientsTable(Table):
    """``[clients]`` or ``[[clients]]``: ``count`` clients at one site, or (in a topology) at "any" nodes."""

    site: Name
    count: Annotated[int, Field(ge=0, le=MAX_NODES)] = 1
    name: Name | None = None


def _words(value: Any) -> Any:
    """A command as a list: text is split as a shell would, and no shell reads it."""
    if isinstance(value, str):
        try:
            value = shlex.split(value)
        except ValueError as error:
            raise rule(f"cannot be split into words: {str(error).lower()}") from None
    if value == []:
        raise rule("names no program")
    if isinstance(value, list) and any("\0" in word for word in value if isinstance(word, str)):
        raise rule("has a NUL character in it")
    return value


def _variables(value: Any) -> Any:
    for name, text in value.items() if isinstance(value, dict) else ():
        if not name or "=" in name or "\0" in name or (isinstance(text, str) and "\0" in text):
            raise rule(f"{shown(name)} cannot be an environment variable")
    return value


class NodeTable(Table):
    """``[[node]]``: a node of its own for a program of the user's, linked to all others as its site is.

    ``command`` is text, split as a shell would, or a list; without it the node is empty, for ``testbed exec``.
    Words that begin with ``./`` are files beside the scenario's.
    """

    name: Name
    site: Name
    command: Annotated[list[str], BeforeValidator(_words)] | None = None
    environment: Annotated[dict[str, str], BeforeValidator(_variables)] = Field(default_factory=dict)
    restart: Literal["no", "on-failure"] = "no"


class TcpTable(Table):
    """``[tcp]`` inside the emulated network."""

    warm: bool = True
    slow_start_after_idle: bool = False
    congestion_control: Name = "reno"


class Uniform(Table):
    distribution: Literal["uniform"]
    low: Tokens
    high: Tokens

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.low > self.high:
            raise rule(f"must not be less than low ({self.low}), but is {self.high}", "high")
        return self


class Lognormal(Table):
    """``mean`` is the mean before values are cut to ``1..max``; ``sigma`` that of the logarithm."""

    distribution: Literal["lognormal"]
    mean: Positive
    sigma: Annotated[float, Field(ge=0, le=10)]
    max: Tokens


class Choice(Table):
    distribution: Literal["choice"]
    values: Annotated[list[Tokens], Field(min_length=1)]
    weights: list[Weight] | None = None

    @model_validator(mode="after")
    def _weighted(self) -> Self:
        if self.weights is not None and (len(self.weights) != len(self.values) or sum(self.weights) <= 0):
            raise rule("needs one weight per value, not all of them 0", "weights")
        return self


Distribution = Annotated[Uniform | Lognormal | Choice, Field(discriminator="distribution")]


def _length_kind(value: Any) -> str:
    return "table" if isinstance(value, dict | Table) else "number"


Length = Annotated[
    Annotated[Tokens, Tag("number")] | Annotated[Distribution, Tag("table")], Discriminator(_length_kind)
]


class RateChange(Table):
    """A row of ``workload.changes``: from ``at`` on requests arrive at ``rate``."""

    at: PositiveSeconds
    rate: Positive


_LENGTHS = ("n_input_tokens", "n_output_tokens")
_OF_A_TRACE = ("rate", "n_requests", *_LENGTHS)


class EndpointTable(Table):
    """``[endpoint]``: requests come from outside while ``testbed serve`` runs.

    Each has at most ``max_model_len`` tokens, prompt and output; ``workload`` says whether the scenario's own
    requests are served, too. Placement is made for these either way.
    """

    max_model_len: Annotated[int, Field(ge=2, le=MAX_TOKENS)]
    workload: Literal["also", "none"] = "none"


Lengths = Annotated[list[Tokens], Field(min_length=2, max_length=2)]
"""Input and output tokens of a request."""


class WorkloadTable(Table):
    """``[workload]``: when requests arrive and how long they are.

    ``trace`` and ``listed`` have their own arrivals and lengths; ``n_requests`` cuts them, ``rate``
    stretches time to that mean rate, and lengths replace their lengths. Each of these may say "trace": as the
    trace has it, whatever the file said that ``--set`` changes. ``draw`` says which of them a seed takes (see
    ``testbed.scenario.draws``; default: the first). The other kinds arrive at ``rate``,
    for which the placement is designed, until ``changes`` say otherwise; a length that they are not given, or
    that is "trace", is that of a request drawn from the trace ``file``, or of ``request_lengths``, one [input, output] per
    request in order. ``origin`` says where what is listed comes from, for people.

    ``lengths`` "known": a request's output length is known before it is served, as the paper assumes. "hidden":
    policies, admission and servers know ``max_new_tokens`` (by default the longest output that can occur), reserve
    for it and end no earlier than tokens do; a longer output is cut off there.

    ``known_lengths`` are (input, output) lengths of requests of the past: what an operator knows of lengths. Left out, they are drawn
    from the distributions, or of a trace those requests that are not served.

    ``max_input_tokens`` leaves recorded requests with longer prompts out, before anything is taken of the trace.

    ``slo`` is what requests should meet ("ttft=5s,tpot=1s"): goodput counts those that do, and a placement policy may aim at
    it.
    """

    arrivals: Literal["poisson", "gamma", "constant", "trace", "listed"] = "poisson"
    rate: Positive | None = None
    changes: list[RateChange] | None = None
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
                    raise rule('is "trace", but there is none; name it in workload.file', key)
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
                    'is for arrivals = "trace", or for a length that is "trace"; there is neither', key
                )
            if given and self.arrivals != kind:
                raise rule(f'is only for arrivals = "{kind}"; arrivals is "{self.arrivals}"', key)
            if not given and self.arrivals == kind:
                raise rule(f'is missing; arrivals = "{kind}" needs it', key)
        if self.max_input_tokens is not None and self.file is None:
            raise rule("leaves out what a trace recorded, and needs workload.file", "max_input_tokens")
        if self.max_new_tokens is not None and self.lengths == "known":
            raise rule('is only for lengths = "hidden"; lengths is "known"', "max_new_tokens")
        if self.request_lengths is not None and (self.file is not None or not takes_lengths):
            raise rule(
                "is only for generated arrivals without a file, and for a length that is not given",
                "request_lengths",
            )
        has_lengths = takes_lengths and (self.file is not None or self.request_lengths is not None)
        if self.origin is not None and self.arrivals != "listed" and not has_lengths:
            raise rule(f'is only for arrivals = "listed"; arrivals is "{self.arrivals}"', "origin")
        if is_generated:
            if self.draw is not None:
                raise rule('is only for arrivals = "trace" or "listed"', "draw")
            for key in _OF_A_TRACE:
                if getattr(self, key) is None and not (key in _LENGTHS and has_lengths):
                    raise rule(f'is missing; arrivals = "{self.arrivals}" needs it', key)
        elif self.changes:
            raise rule(f'are for generated arrivals; arrivals = "{self.arrivals}" has its own', "changes")
        for before, after in pairwise(self.changes or ()):
            if after.at <= before.at:
                raise rule("must be in the order of time, no two at once", "changes")
        return self


class PolicyTable(Table):
    """``[policy]``: a pair by ``name``, or ``placement`` and ``routing``.

    ``design_concurrency`` is |R|: "auto" leaves it to the placement policy, "searched" tries candidates
    on synthetic arrivals. ``communication`` is who sends hidden states to the next server:
    the client ("hub-spoke") or the server before ("server-to-server"). ``online``
    names a policy that changes the placement while requests are served, or says "none"; servers then load blocks at
    ``load_rate``, 1 Gbit/s if not given. ``online_period`` and ``online_patience`` replace that policy's own, if it has them.
    ``state_age`` is the time between the reports that routers see. ``queue`` is where requests without room wait:
    with their clients, who ask again ("none"), or at the coordinator, which wakes them: in order ("fifo"), or whoever
    has room first, until one has waited ``queue_age`` ("backfill"). Not given, it is what the routing policy wants.
    """

    name: str | None = None
    placement: str | None = None
    routing: str | None = None
    design_concurrency: Annotated[
        int | Literal["auto", "searched"], _int_or("auto", "searched", most=MAX_REQUESTS)
    ] = "auto"
    communication: Literal["hub-spoke", "server-to-server"] = "hub-spoke"
    online: str | None = None
    online_period: PositiveSeconds | None = None
    online_patience: Annotated[Seconds, Field(ge=0)] | None = None
    load_rate: BitsPerSecond | None = None
    state_age: Annotated[Seconds, Field(ge=0)] = 0.0
    queue: Literal["none", "fifo", "backfill"] | None = None
    queue_age: Annotated[Seconds, Field(ge=0)] = 300.0

    @model_validator(mode="after")
    def _online_keys(self) -> Self:
        for key in ("online_period", "online_patience", "load_rate"):
            if self.online is None and getattr(self, key) is not None:
                raise rule("is only for policy.online; name one", key)
        return self


def _device(value: Any) -> Any:
    if value == "auto":
        return value
    names = value if isinstance(value, list) and value else [value]
    for name in names:
        if not (isinstance(name, str) and re.fullmatch(r"cpu|cuda(:\d{1,3})?|(GPU|MIG)-[\w/-]{1,80}", name)):
            raise rule(
                'must be "cpu", "cuda", "cuda:0" or the like, a UUID such as "GPU-..." or "MIG-...", or a list of '
                f'these, or "auto", not {shown(value)}'
            )
    return value


class ComputeTable(Table):
    """``[compute]``: what a server's step really does. All keys but the first five are for real blocks.

    ``batching`` is how a server computes several sessions: "none", each as if it were alone; "serial", one step after
    another; "continuous", all that wait in one step, with one prompt at most (``chunk_tokens`` tokens of it).
    ``serial = true`` is another way to say "serial".
    ``hub_token`` is what the client computes per output token (embedding, head, choice): the stub's client takes
    it, and with real blocks the model counts it. Left out, it is that of ``hardware_files``, else 0.
    ``model`` is a checkpoint's folder or its name on the hub. A list of devices goes round the servers,
    "auto" is a list of what this machine has.
    """

    backend: Literal["stub", "blocks"] = "stub"
    batching: Literal["none", "serial", "continuous"] | None = None
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
                f'says that it is "{self.batching}", and serial = true that it is not; leave serial out',
                "batching",
            )
        if self.chunk_tokens is not None and self.batching != "continuous":
            raise rule('is only for batching = "continuous"', "chunk_tokens")
        return self


class CacheTable(Table):
    """``[cache]``: how servers give out attention cache.

    "reserved": all that a session may need when it opens. "paged": for the prompt, and then ``page_tokens`` at a time as tokens
    come; new sessions get in up to ``high_water`` of a server's room, and when it runs out the session whose request
    arrived last gives up its chain, waits, and replays. ``expected_output``: what the coordinator counts of an output
    before it is there; left out, half of a mean one (``known_lengths``), or the longest.
    """

    mode: Literal["reserved", "paged"] = "reserved"
    page_tokens: Tokens | None = None
    high_water: Annotated[float, Field(gt=0, le=1)] | None = None
    expected_output: Tokens | None = None

    @model_validator(mode="after")
    def _only_paged(self) -> Self:
        for key in ("page_tokens", "high_water", "expected_output"):
            if self.mode == "reserved" and getattr(self, key) is not None:
                raise rule('is only for mode = "paged"', key)
        return self


class CalibrationTable(Table):
    """``[calibration]``: a set by name; numbers replace the set's."""

    set: str = "none"
    session_setup: bool = False
    token_overhead: Seconds | None = None
    input_overhead_base: Seconds | None = None
    input_overhead_per_token: Seconds | None = None
    initial_delay: Seconds | None = None
    session_setup_petals: Seconds | None = None
    session_setup_proposed: Seconds | None = None


class BackoffTable(Table):
    """``[backoff]``: waits between attempts to open a session; ``jitter`` is how far each may be off, as a share."""

    first: PositiveSeconds = 1.0
    max: PositiveSeconds = 60.0
    give_up: Seconds = 0.0
    jitter: Ratio = 0.0

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.max < self.first:
            raise rule("must not be shorter than first", "max")
        return self


class HostTable(Table):
    """``[[hosts]]``: a machine of a Ray cluster that has what is asked for, or this ``address`` in it.

    ``servers`` are names of servers or of sites.
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
            raise rule('must be "ray" (all machines of the Ray cluster) or tables [[hosts]]')
        return []
    return value


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, dict) else value


class Scenario(Table):
    """A whole file. ``resolved`` marks what a run stores: every name has become numbers."""

    name: Name | None = None
    description: str = ""
    resolved: bool = False
    seed: Annotated[int, Field(ge=0)] = 0
    clock: Literal["auto", "virtual", "real"] = "auto"
    time_scale: Positive = 1.0
    model: ModelTable
    hardware: dict[Name, HardwareTable] = Field(default_factory=dict)
    hardware_files: list[str] | None = None
    servers: Annotated[list[ServersTable], Field(min_length=1)]
    clients: Annotated[list[ClientsTable], BeforeValidator(_as_list), Field(min_length=1)]
    node: list[NodeTable] | None = None
    network: Annotated[ClustersTable | MatrixTable | TopologyNetworkTable, Field(discriminator="kind")]
    hosts: Annotated[list[HostTable], BeforeValidator(_all_of_cluster)] | None = None
    """Empty: all machines of the Ray cluster."""
    tcp: TcpTable = TcpTable()
    workload: WorkloadTable
    policy: PolicyTable = PolicyTable(name="proposed")
    compute: ComputeTable = ComputeTable()
    cache: CacheTable = CacheTable()
    calibration: CalibrationTable = CalibrationTable()
    backoff: BackoffTable = BackoffTable()
    fault: list[FaultTable] | None = None
    churn: ChurnTable | None = None
    recovery: RecoveryTable = RecoveryTable()
    membership: MembershipTable = MembershipTable()
    endpoint: EndpointTable | None = None
