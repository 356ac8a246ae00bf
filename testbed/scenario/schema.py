"""The form of a scenario file: strict tables with defaults. Nothing here looks anything up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    PlainSerializer,
    Tag,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from testbed.scenario.problems import nearest, shown, unknown
from testbed.scenario.units import DURATION, RATE, SIZE, Dimension


def _rule(what: str, key: str | None = None) -> PydanticCustomError:
    """A broken rule; ``what`` goes to the user as it is, at ``key`` of the table being checked."""
    return PydanticCustomError("rule", "{what}", {"what": what, **({"key": key} if key else {})})


def _quantity(dimension: Dimension) -> Callable[[Any], float]:
    def parse(value: Any) -> float:
        if not isinstance(value, str):
            raise _rule(f'must be text with a unit such as "{dimension.example}", not {shown(value)}')
        try:
            return dimension.parse(value)
        except ValueError as error:
            raise _rule(str(error)) from None

    return parse


Seconds = Annotated[float, BeforeValidator(_quantity(DURATION)), PlainSerializer(DURATION.format)]
BitsPerSecond = Annotated[float, BeforeValidator(_quantity(RATE)), PlainSerializer(RATE.format), Field(gt=0)]
Bytes = Annotated[float, BeforeValidator(_quantity(SIZE)), PlainSerializer(SIZE.format), Field(gt=0)]
Positive = Annotated[float, Field(gt=0)]
Tokens = Annotated[int, Field(ge=1)]


def _int_or(*words: str) -> BeforeValidator:
    def check(value: Any) -> Any:
        whole = isinstance(value, int) and not isinstance(value, bool) and value >= 1
        if value not in words and not whole:
            choice = ", ".join(f'"{word}"' for word in words)
            raise _rule(f"must be {choice} or a whole number of at least 1, not {shown(value)}")
        return value

    return BeforeValidator(check)


def _name(value: str) -> str:
    if not (value.isascii() and value.replace("-", "").replace("_", "").replace(".", "").isalnum()):
        raise _rule(f'"{value}" must consist of letters, digits, ".", "_" and "-"')
    if not value[0].isalnum() or len(value) > 64:
        raise _rule(f'"{value}" must start with a letter or digit and have at most 64 characters')
    return value


Name = Annotated[
    str, BeforeValidator(lambda v: _name(v) if isinstance(v, str) and v else v), Field(min_length=1)
]


class Table(BaseModel):
    """A table of the file: no unknown keys, no conversions between types."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, data: Any) -> Any:
        if isinstance(data, dict):
            valid = [field.alias or name for name, field in cls.model_fields.items()]
            for key in data:
                if key not in valid:
                    what = f"unknown key{nearest(key, valid)}; valid here: {', '.join(valid)}"
                    raise PydanticCustomError("unknown_key", "{what}", {"what": what, "key": key})
        return data


class ModelTable(Table):
    """``[model]``: a profile's name, or numbers, or both (numbers replace the profile's)."""

    profile: str | None = None
    name: Name | None = None
    n_blocks: Annotated[int, Field(ge=1)] | None = None
    hidden_size: Annotated[int, Field(ge=1)] | None = None
    value_bytes: Annotated[int, Field(ge=1)] | None = None
    block_size: Bytes | None = None
    cache_per_token: Bytes | None = None
    petals_cache_tokens: Tokens | None = None


class HardwareTable(Table):
    """``[hardware.NAME]``: a hardware profile; what is left out comes from ``base``."""

    base: str | None = None
    memory: Bytes | None = None
    decode: Seconds | None = None
    prefill_base: Seconds | None = None
    prefill_per_token: Seconds | None = None
    petals_forward_rps: Positive | None = None
    petals_network_rps: Positive | None = None
    block_cap: Annotated[int | Literal["none"], _int_or("none")] | None = None


class ServersTable(Table):
    """``[[servers]]``: ``count`` equal servers at one site, or (in a topology) each at "any" node."""

    hardware: str
    site: Name
    count: Annotated[int, Field(ge=0)] = 1
    name: Name | None = None
    memory: Bytes | None = None


class ClientsTable(Table):
    """``[clients]`` or ``[[clients]]``: ``count`` clients at one site, or (in a topology) at "any" nodes."""

    site: Name
    count: Annotated[int, Field(ge=0)] = 1
    name: Name | None = None


class PairRow(Table):
    """Both directions between two sites (``sites``, ``rtt``), or one (``from``, ``to``, ``delay``)."""

    sites: Annotated[list[Name], Field(min_length=2, max_length=2)] | None = None
    rtt: Seconds | None = None
    from_: Annotated[Name | None, Field(alias="from")] = None
    to: Name | None = None
    delay: Seconds | None = None
    rate: BitsPerSecond

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        both = [self.sites, self.rtt]
        one = [self.from_, self.to, self.delay]
        symmetric = None not in both and one == [None] * 3
        directed = None not in one and both == [None] * 2
        if not symmetric and not directed:
            raise _rule("needs either sites, rtt and rate, or from, to, delay (one way) and rate")
        return self


Backend = Literal["auto", "netem", "fabric", "loopback"]
Mtu = Annotated[int, Field(ge=576, le=65535)]


class ClustersTable(Table):
    """``[network]`` with a row per pair of sites."""

    backend: Backend = "auto"
    kind: Literal["clusters"]
    mtu: Mtu = 1500
    keep_cpus_awake: bool = True
    pairs: Annotated[list[PairRow], Field(min_length=1)]


def _rate_kind(value: Any) -> str:
    return "matrix" if isinstance(value, list) else "text"


class MatrixTable(Table):
    """``[network]`` with full matrices over ``sites``.

    The one-way delay from site i to site j is ``rtt[i][j] / 2``, so an asymmetric matrix gives
    different delays in the two directions. ``rate`` is one rate or a matrix in ``rate_unit``.
    """

    backend: Backend = "auto"
    kind: Literal["matrix"]
    mtu: Mtu = 1500
    keep_cpus_awake: bool = True
    sites: Annotated[list[Name], Field(min_length=1)]
    rtt: list[list[Annotated[float, Field(ge=0)]]]
    rtt_unit: str
    rate: Annotated[
        Annotated[str, Tag("text")] | Annotated[list[list[Positive]], Tag("matrix")],
        Discriminator(_rate_kind),
    ]
    rate_unit: str | None = None

    @field_validator("rate", mode="before")
    @classmethod
    def _rate(cls, value: Any) -> Any:
        if not isinstance(value, list | str):
            raise _rule(f'must be text such as "{RATE.example}" or a matrix of numbers with rate_unit')
        if isinstance(value, str) and _quantity(RATE)(value) == 0:
            raise _rule(f'must be more than 0, not "{value}"')
        return value

    @model_validator(mode="after")
    def _square(self) -> Self:
        n = len(self.sites)
        if len(set(self.sites)) != n:
            raise _rule("a site is listed twice", "sites")
        matrices: list[tuple[str, str, list[list[float]], Dimension, str | None]] = [
            ("rtt", "rtt_unit", self.rtt, DURATION, self.rtt_unit)
        ]
        if isinstance(self.rate, str):
            if self.rate_unit is not None:
                raise _rule("is only for a rate matrix; rate has its own unit", "rate_unit")
        else:
            matrices.append(("rate", "rate_unit", self.rate, RATE, self.rate_unit))
        for key, unit_key, matrix, dimension, unit in matrices:
            if len(matrix) != n or any(len(row) != n for row in matrix):
                raise _rule(f"must be a {n} x {n} matrix, a row and a column per site", key)
            if unit is None:
                raise _rule(f"is missing; give one of {', '.join(dimension.units)}", unit_key)
            if unit not in dimension.units:
                raise _rule(unknown("unit", unit, dimension.units), unit_key)
        return self


class TopologyNetworkTable(Table):
    """``[network]`` along the delay-shortest paths of a topology, whose node names are the sites.

    ``delays``: "given" takes the topology's, "fibre" great-circle distance x ``detour`` / 200 km/ms.
    """

    backend: Backend = "auto"
    kind: Literal["topology"]
    mtu: Mtu = 1500
    keep_cpus_awake: bool = True
    topology: Annotated[str, Field(min_length=1)]
    delays: Literal["given", "fibre"] = "given"
    detour: Annotated[float, Field(ge=1)] | None = None

    @model_validator(mode="after")
    def _detour_of_fibre(self) -> Self:
        if self.detour is not None and self.delays != "fibre":
            raise _rule('is only for delays = "fibre"', "detour")
        return self


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
            raise _rule(f"must not be less than low ({self.low}), but is {self.high}", "high")
        return self


class Lognormal(Table):
    """``mean`` is the mean before values are cut to ``1..max``; ``sigma`` that of the logarithm."""

    distribution: Literal["lognormal"]
    mean: Positive
    sigma: Annotated[float, Field(ge=0)]
    max: Tokens


class Choice(Table):
    distribution: Literal["choice"]
    values: Annotated[list[Tokens], Field(min_length=1)]
    weights: list[Annotated[float, Field(ge=0)]] | None = None

    @model_validator(mode="after")
    def _weighted(self) -> Self:
        if self.weights is not None and (len(self.weights) != len(self.values) or sum(self.weights) <= 0):
            raise _rule("needs one weight per value, not all of them 0", "weights")
        return self


Distribution = Annotated[Uniform | Lognormal | Choice, Field(discriminator="distribution")]


def _length_kind(value: Any) -> str:
    return "table" if isinstance(value, dict | Table) else "number"


Length = Annotated[
    Annotated[Tokens, Tag("number")] | Annotated[Distribution, Tag("table")], Discriminator(_length_kind)
]


class WorkloadTable(Table):
    """``[workload]``: when requests arrive and how long they are.

    ``trace`` and ``listed`` have their own arrivals and lengths; ``n_requests`` cuts them, ``rate``
    stretches time to that mean rate, and lengths replace their lengths.
    """

    arrivals: Literal["poisson", "gamma", "constant", "trace", "listed"] = "poisson"
    rate: Positive | None = None
    shape: Positive | None = None
    file: str | None = None
    requests: list[Any] | None = None
    n_requests: Annotated[int, Field(ge=1)] | None = None
    n_input_tokens: Length | None = None
    n_output_tokens: Length | None = None

    @model_validator(mode="after")
    def _keys_of_the_kind(self) -> Self:
        for key, kind in (("shape", "gamma"), ("file", "trace"), ("requests", "listed")):
            given = getattr(self, key) is not None
            if given and self.arrivals != kind:
                raise _rule(f'is only for arrivals = "{kind}"; arrivals is "{self.arrivals}"', key)
            if not given and self.arrivals == kind:
                raise _rule(f'is missing; arrivals = "{kind}" needs it', key)
        if self.arrivals not in ("trace", "listed"):
            for key in ("rate", "n_requests", "n_input_tokens", "n_output_tokens"):
                if getattr(self, key) is None:
                    raise _rule(f'is missing; arrivals = "{self.arrivals}" needs it', key)
        return self


class PolicyTable(Table):
    """``[policy]``: a pair by ``name``, or ``placement`` and ``routing``.

    ``design_concurrency`` is |R|: "auto" leaves it to the placement policy, "searched" tries candidates
    on synthetic arrivals. ``communication`` is who sends hidden states to the next server. ``online``
    names a policy that changes the placement while requests are served; servers then load blocks at
    ``load_rate``. ``state_age`` is the time between the reports that routers see. The last three are simulated.
    """

    name: str | None = None
    placement: str | None = None
    routing: str | None = None
    design_concurrency: Annotated[int | Literal["auto", "searched"], _int_or("auto", "searched")] = "auto"
    communication: Literal["hub-spoke", "server-to-server"] = "hub-spoke"
    online: str | None = None
    load_rate: BitsPerSecond = 1e9
    state_age: Annotated[Seconds, Field(ge=0)] = 0.0


class ComputeTable(Table):
    """``[compute]``: what a server's step really does."""

    backend: Literal["stub", "blocks"] = "stub"
    serial: bool = False


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
    """``[backoff]``: waits between attempts to open a session."""

    first: Annotated[Seconds, Field(gt=0)] = 1.0
    max: Annotated[Seconds, Field(gt=0)] = 60.0
    give_up: Seconds = 0.0

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.max < self.first:
            raise _rule("must not be shorter than first", "max")
        return self


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, dict) else value


class Scenario(Table):
    """A whole file. ``resolved`` marks what a run stores: every name has become numbers."""

    name: Name | None = None
    description: str = ""
    resolved: bool = False
    seed: Annotated[int, Field(ge=0)] = 0
    time_scale: Positive = 1.0
    model: ModelTable
    hardware: dict[Name, HardwareTable] = Field(default_factory=dict)
    servers: Annotated[list[ServersTable], Field(min_length=1)]
    clients: Annotated[list[ClientsTable], BeforeValidator(_as_list), Field(min_length=1)]
    network: Annotated[ClustersTable | MatrixTable | TopologyNetworkTable, Field(discriminator="kind")]
    tcp: TcpTable = TcpTable()
    workload: WorkloadTable
    policy: PolicyTable = PolicyTable(name="proposed")
    compute: ComputeTable = ComputeTable()
    calibration: CalibrationTable = CalibrationTable()
    backoff: BackoffTable = BackoffTable()
