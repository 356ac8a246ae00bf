"""The keys of a scenario file: one class per TOML table, with types, limits and defaults.

Only the form is checked here. ``testbed.experiments.resolve`` looks up names, reads files and draws random
choices. Quantities are text with a unit: durations become seconds, rates bits per second, sizes bytes
(``units``).
"""

from __future__ import annotations

import shlex
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from policies.interfaces import Communication, Queue, SessionSetup
from testbed.experiments.compute_tables import (
    CacheTable,
    CalibrationTable,
    ComputeTable,
    DecodingTable,
)
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
    Watts,
    Weight,
    int_or,
    rule,
)
from testbed.experiments.limits import (
    MAX_NODES,
    MAX_REQUESTS,
)
from testbed.experiments.model_tables import (
    Dtype,
    HardwareTable,
    ModelTable,
)
from testbed.experiments.network_tables import (
    ClustersTable,
    MatrixTable,
    SiteTable,
    TopologyNetworkTable,
)
from testbed.experiments.problems import shown
from testbed.experiments.workload_tables import (
    EndpointTable,
    Length,
    RateCurve,
    WorkloadTable,
)


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

    ``n_input_tokens``, ``n_output_tokens`` and ``slo`` are those of the client's requests, in the forms of ``[workload]``.
    What is left out is the workload's.
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
    n_input_tokens: Length | None = None
    n_output_tokens: Length | None = None
    slo: str | None = None

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


DEFAULT_PAIR = "proposed"
"""The policy pair of scenarios that name none."""


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
        int | Literal["auto", "searched"], int_or("auto", "searched", most=MAX_REQUESTS)
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


class BackoffTable(Table):
    """``[backoff]``: how long a client waits between its attempts to open a session.

    The waits begin with ``first`` and double up to ``max``. A request fails as soon as its next attempt would come later
    than ``give_up`` after its arrival; 0: it never gives up. With ``jitter`` j each wait is between (1 - j) and (1 + j) times
    as long.
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
    policy: PolicyTable = PolicyTable(name=DEFAULT_PAIR)
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
