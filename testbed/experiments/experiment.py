"""A resolved scenario: every name is looked up, every unit converted, every random choice made.

An ``Experiment`` is a function of its resolved tables: what is saved and shown is what runs. To change one, use
``testbed.experiments.changed``, which changes the tables and resolves them again.

Times are scenario seconds (before ``time_scale``), rates are bits per second. ``testbed.experiments``
makes an ``Experiment`` from a TOML file; the emulation and the simulator run it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from ipaddress import IPv4Network
from itertools import chain
from typing import Any, Literal, NamedTuple

from netem.spec import SUBNET, TcpSpec
from policies.links import Link
from policies.membership import MembershipRules
from policies.places import Places
from policies.problem import Problem, Wire
from policies.rules import PagingRules, PrefixRules, RecoveryRules
from policies.workload import Backoff, QueueRules, RequestPlan
from testbed.experiments.draws import Sample
from testbed.experiments.event_table import EventTable, TraceTable
from testbed.experiments.fields import Table
from testbed.experiments.network_tables import SiteTable
from testbed.experiments.slo import Objectives


@dataclass(frozen=True)
class NetworkChange:
    """New links of ordered pairs of nodes from ``at_s`` on; ``why`` describes the change in words."""

    at_s: float
    links: Mapping[tuple[str, str], Link]
    why: str


@dataclass(frozen=True)
class LinkPlans:
    """What the scenario plans for links: ``[[network.event]]`` and ``[[network.trace]]``, whose files were read.

    ``traces_end_at_s``: until when a trace is repeated that does not state it.
    """

    events: tuple[EventTable, ...] = ()
    traces: tuple[TraceTable, ...] = ()
    traces_end_at_s: float = 0.0


@dataclass(frozen=True)
class Calibration:
    """Published overheads that the stub adds to the emulated network's times (all 0 in the set "none").

    The overheads of tokens and inputs include PETALS' own transfer time, so the stub adds only what exceeds
    the transmission on the emulated link. ``session_setup_s`` is added to every request's first token; it is
    0 unless ``calibration.session_setup`` is true.
    """

    name: str = "none"
    token_overhead_s: float = 0.0
    input_overhead_base_s: float = 0.0
    input_overhead_slope_s: float = 0.0
    initial_delay_s: float = 0.0
    session_setup_s: float = 0.0

    def input_overhead_s(self, n_tokens: int) -> float:
        return self.input_overhead_base_s + self.input_overhead_slope_s * n_tokens

    @property
    def has_overheads(self) -> bool:
        """Whether a message takes the RTT plus these overheads, not the RTT plus the links' transmission."""
        return bool(self.token_overhead_s or self.input_overhead_base_s or self.input_overhead_slope_s)


class After(NamedTuple):
    """The moment at which ``request`` (an index) has ``tokens`` output tokens."""

    request: int
    tokens: int


@dataclass(frozen=True)
class Fault:
    """One fault of ``server`` (an index), at ``at_s`` or at the moment ``after``; see ``fault_tables``.

    ``kind`` is a name of ``testbed.faultkinds``.
    ``for_s`` later a killed server serves again (the time to load its blocks included), a stopped one
    continues, and a slow one is as fast as before; ``None``: never. ``factor`` multiplies the compute times
    of a slow server.
    """

    kind: str
    server: int
    at_s: float | None = None
    after: After | None = None
    for_s: float | None = None
    factor: float = 1.0


@dataclass(frozen=True)
class Program:
    """The user's program on a ``[[node]]``:

    ``command`` (empty: none), with variables added to the caller's.
    """

    node: str
    command: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    restarts_on_failure: bool = False


@dataclass(frozen=True)
class Machine:
    """A machine of a Ray cluster that runs some of the servers.

    These are the ``servers`` named (servers or sites), or else a share of the servers that no machine names.
    ``resources`` is what the run asks of Ray, by Ray's names.
    """

    name: str
    resources: Mapping[str, float]
    servers: tuple[str, ...] = ()


@dataclass(frozen=True)
class BlocksSettings:
    """``[compute]`` of a run with real blocks."""

    checkpoint: str | None
    """Absolute path of its folder, or its name on the hub; ``None``: random weights are made."""
    config: Mapping[str, Any]
    """Data of ``config.json``: the checkpoint's (empty if unreadable), or that of the model to be made."""
    random_weights: bool
    """Servers make random weights themselves.

    If false and without a checkpoint, a small one is written first.
    """
    seed: int
    """Seed of random weights."""
    devices: tuple[str, ...]
    """Dealt out to the servers in turn; clients use the first.

    ``("auto",)``: the GPUs of the machine that runs.
    """
    dtype: str
    weights: str
    n_threads: int
    n_streams: int
    verify: bool
    """After the run, compare the tokens with those of the whole model on one machine."""
    is_batched: bool = False
    """Waiting steps are computed together, with at most ``chunk_tokens`` tokens of a prompt."""
    chunk_tokens: int | None = None
    wire: Wire | None = None
    """How hidden states are sent; ``None``: as they are computed."""
    has_graphs: bool = False
    """Steps of one token are recorded and played as CUDA graphs."""

    def device_of(self, server: int) -> str:
        """Return the device of server number ``server``."""
        return self.devices[server % len(self.devices)]


@dataclass(frozen=True)
class NetworkPart:
    """The emulated network. ``links`` maps (from, to) node names; nodes are clients and servers."""

    backend: str
    """The network asked for: "auto", or a name of ``netem.networks.NETWORKS``."""
    links: Mapping[tuple[str, str], Link]
    """By (from, to): every client with every server, servers with servers, and each ``[[node]]`` with all."""
    changes: tuple[NetworkChange, ...] = ()
    """Changes of links while the workload is served, in the order of time."""
    site_links: Mapping[tuple[str, str], Link] = field(default_factory=dict)
    """Links between sites as stated. ``links`` (and those of ``testbed.experiments.whole``) are these, at most as fast
    as the shared links on their way."""
    plans: LinkPlans = LinkPlans()
    """The scenario's tables from which ``changes`` follow."""
    sites: tuple[SiteTable, ...] = ()
    """The rows of ``[[sites]]``; ``shared_bps`` has their links, too."""
    shared_bps: Mapping[str, float] = field(default_factory=dict)
    """Rate in bit/s of every link that pairs of nodes share, by its name."""
    shared_paths: Mapping[tuple[str, str], tuple[str, ...]] = field(default_factory=dict)
    """Names of the shared links on the path of an ordered pair of nodes; other pairs share nothing."""
    tcp: TcpSpec = TcpSpec()  # noqa: RUF009 - frozen
    mtu: int = 1500
    subnet: IPv4Network = SUBNET
    """The IPv4 network of the nodes' addresses."""
    keep_cpus_awake: bool = False
    """Spin at idle priority while running, so that no CPU sleeps (see ``testbed.runtime.real.launcher``)."""

    @property
    def loses(self) -> bool:
        """Whether some link loses packets at random, at first or after a change."""
        links = chain(self.links.values(), *(change.links.values() for change in self.changes))
        return any(0 < link.loss_ratio < 1 for link in links)


@dataclass(frozen=True)
class ComputePart:
    """How servers and clients compute, and how servers' caches grow."""

    backend: str = "stub"
    """stub or blocks."""
    batching: Literal["none", "serial", "continuous"] = "none"
    """How a server computes several sessions."""
    chunk_tokens: int | None = None
    """Tokens of a prompt in one step of batching "continuous", at most; ``None``: all of them."""
    paging: PagingRules | None = None
    """How servers' caches grow; ``None``: all that a session may need is reserved when it opens."""
    prefix: PrefixRules | None = None
    """How caches outlive their requests; ``None``: they do not."""
    expected_output: int | None = None
    """With paging: output tokens that the coordinator counts for a session before they exist."""
    blocks: BlocksSettings | None = None
    """Settings of real blocks; ``None`` for the stub."""
    draft_model: str | None = None
    """With real blocks: the checkpoint of the model with which clients draft, if they do."""
    is_measured: bool = True
    """With real blocks: whether all servers' times were measured with blocks of this model."""


@dataclass(frozen=True)
class PolicyPart:
    """How blocks are placed, and requests routed and admitted."""

    placement: str
    routing: str
    design_concurrency: int | Literal["searched"] | None = None
    """|R|, the sessions at a time to design for, as given; ``None``: the placement policy chooses."""
    online: str | None = None
    """Policy that changes the placement while requests are served; ``None``: none does."""
    online_period_s: float | None = None
    """Seconds between two checks of the online policy; ``None``: the policy's own."""
    online_patience_s: float | None = None
    """Seconds that the load must differ from the design before the online policy acts; ``None``: its own."""
    load_bps: float = 1e9
    """Rate at which a server loads blocks, in bit/s."""
    state_age_s: float = 0.0
    """Seconds between the reports of servers that routers see; 0: routers see the present state."""
    queue: QueueRules | None = None
    """How requests without room wait at the coordinator; ``None``: their clients ask again after a while."""
    unread: tuple[str, ...] = ()
    """Policies that are not shipped, and whose traits were not read, since that runs their code."""
    code_in_file: tuple[str, ...] = field(default=(), compare=False)
    """Policies ``module:Class`` named by the file, not by an option: placing blocks runs their code."""


@dataclass(frozen=True)
class WorkloadPart:
    """The requests, and how their clients ask for room."""

    requests: tuple[RequestPlan, ...]
    source: str = ""
    """Where arrivals and lengths of ``requests`` come from, in words."""
    sample: Sample | None = field(default=None, compare=False)
    """How ``requests`` were chosen from recorded ones; ``None``: they were generated."""
    backoff: Backoff = Backoff()  # noqa: RUF009 - frozen
    endpoint_tokens: int = 0
    """Most tokens, prompt and output, of a request from outside; 0: no requests come from outside."""


@dataclass(frozen=True)
class FaultsPart:
    """What happens to servers, and what clients and the coordinator do about it."""

    planned: tuple[Fault, ...] = ()
    """Faults of servers in the order of the file, then those that ``[churn]`` drew."""
    recovery: RecoveryRules = RecoveryRules()  # noqa: RUF009 - frozen
    membership: MembershipRules = MembershipRules()  # noqa: RUF009 - frozen
    absent: frozenset[int] = frozenset()
    """Servers (indices) that are absent at the start: they hold nothing until they join."""


@dataclass(frozen=True)
class CostsPart:
    """What each server costs, and its power: a value per server, or none at all where the scenario gives none."""

    per_hour: tuple[float, ...] = ()
    power_w: tuple[tuple[float, float], ...] = ()
    """(idle, busy) in watts."""
    carbon_g_per_kwh: tuple[float, ...] = ()
    """Of the electricity at each server's site; empty if any site with a server has none."""


@dataclass(frozen=True)
class Experiment:
    """Everything a run needs."""

    name: str
    description: str
    seed: int
    time_scale: float
    problem: Problem
    sites: Mapping[str, str]
    """Site of every node, by node name."""
    calibration: Calibration
    network: NetworkPart
    compute: ComputePart
    policy: PolicyPart
    workload: WorkloadPart
    tables: Table | None = field(repr=False)
    """The resolved ``testbed.experiments.schema.Scenario``, of which all else is a function.

    ``None``: an explicit instance.
    """
    faults: FaultsPart = FaultsPart()
    costs: CostsPart = CostsPart()
    clock: Literal["auto", "virtual", "real"] = "auto"
    """The clock as asked for; ``testbed.runtime.stage`` decides what "auto" means."""
    machines: tuple[Machine, ...] | Literal["ray"] = ()
    """The machines that run servers: some of a Ray cluster, all of it ("ray"), or only this one (empty)."""
    programs: tuple[Program, ...] = ()
    """One for every ``[[node]]``; they exist in real time only."""

    @cached_property
    def document(self) -> Mapping[str, Any]:
        """``tables`` as TOML data; loading it gives this experiment. Empty for an explicit instance."""
        return {} if self.tables is None else self.tables.model_dump(by_alias=True, exclude_none=True)

    @cached_property
    def places(self) -> Places:
        """Where servers and clients are, and what servers cost, for policies that want it."""
        regions = {row.name: row.region or row.name for row in self.network.sites}
        servers = tuple(self.sites[server.name] for server in self.problem.servers)
        clients = tuple(self.sites[client] for client in self.problem.clients)
        return Places(
            servers,
            clients,
            tuple(regions.get(site, site) for site in servers),
            tuple(regions.get(site, site) for site in clients),
            self.costs.per_hour,
        )

    @cached_property
    def program_nodes(self) -> Mapping[str, Program]:
        """The user's programs by node name."""
        return {program.node: program for program in self.programs}

    def uses(self, pair: tuple[str, str]) -> bool:
        """Whether clients and servers use the link of ``pair``; links between servers only with forwarding."""
        if self.program_nodes.keys() & pair:
            return False
        n_clients = sum(node in self.problem.clients for node in pair)
        return n_clients == 1 or (n_clients == 0 and self.problem.forwarding)

    @property
    def objectives(self) -> Objectives:
        """What the requests of each client should meet."""
        own = zip(self.problem.clients, self.problem.own_objectives_s, strict=False)
        return Objectives(
            dict(self.problem.objectives_s),
            {client: dict(limits_s) for client, limits_s in own if limits_s is not None},
        )

    @property
    def nodes(self) -> tuple[str, ...]:
        """Names of all clients, then of all servers."""
        return (*self.problem.clients, *(s.name for s in self.problem.servers))
