"""A resolved scenario: every name looked up, every unit converted, every random choice made.

Times are scenario seconds (before ``time_scale``), rates are bits per second. ``testbed.scenario``
makes an ``Experiment`` from a TOML file; the emulation and the simulator run it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from ipaddress import IPv4Network
from typing import Any, Literal, NamedTuple, get_args

import nodes.rules
from netem.spec import SUBNET, TcpSpec
from policies.membership import MembershipRules
from policies.problem import Problem, RequestSpec
from policies.workload import Backoff, QueueRules, RequestPlan
from testbed.scenario.draws import Sample
from testbed.scenario.event_table import EventTable


@dataclass(frozen=True)
class Link:
    """One direction between two nodes, in scenario units; see ``netem.spec.LinkProfile``."""

    delay_s: float
    rate_bps: float
    jitter_s: float = 0.0
    loss_ratio: float = 0.0


@dataclass(frozen=True)
class NetworkChange:
    """From ``at_s`` on, these ordered pairs of nodes have these links; ``why`` says it in a few words."""

    at_s: float
    links: Mapping[tuple[str, str], Link]
    why: str


@dataclass(frozen=True)
class Calibration:
    """Published overheads that the stub adds on top of the emulated network (all 0 for ``none``).

    The per-token and per-input overheads include PETALS' own transfer time, so the stub adds only
    what the emulated link's transmission does not already take. ``session_setup_s`` is the constant
    added to every request's first token; it is 0 unless switched on.
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
        """Whether times of messages are the RTT and these overheads, and not the RTT and the links' transmission."""
        return bool(self.token_overhead_s or self.input_overhead_base_s or self.input_overhead_slope_s)


FaultKind = Literal["kill", "stop", "slow", "restart", "join", "leave"]
KINDS_BY_HAND = (*get_args(FaultKind), "cont")
"""What a running testbed can be asked for; ``cont``: a stopped server goes on."""


class After(NamedTuple):
    """As soon as ``request`` (its index) has ``tokens`` output tokens."""

    request: int
    tokens: int


@dataclass(frozen=True)
class Fault:
    """What happens to ``server`` at ``at_s``, or else ``after``; see ``testbed.scenario.fault_tables``.

    ``for_s`` later a killed server serves again (what it loads included), a stopped one goes on, a slow one
    is as fast as before; ``None``: never. ``factor`` multiplies the compute times of a slow one.
    """

    kind: FaultKind
    server: int
    at_s: float | None = None
    after: After | None = None
    for_s: float | None = None
    factor: float = 1.0


@dataclass(frozen=True)
class Program:
    """What a node of the user's runs: nothing, or ``command`` with ``environment`` beside the caller's."""

    node: str
    command: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    restarts_on_failure: bool = False


@dataclass(frozen=True)
class Machine:
    """A machine of a Ray cluster that has servers of the run: those named (servers or sites), or its share of the others.

    ``resources`` is what Ray is asked for, by Ray's names.
    """

    name: str
    resources: Mapping[str, float]
    servers: tuple[str, ...] = ()


@dataclass(frozen=True)
class RecoveryRules(nodes.rules.RecoveryRules):
    """What a client does when a hop fails, with limits, and what routers do.

    A server that failed is left out for ``ban_s``, twice as long with every failure in a row; not
    ``ban_failed_servers``: it stays routable for as long as routers believe it there.
    """

    request_timeout_s: float = 180.0
    connect_timeout_s: float = 5.0
    ban_s: float = 15.0
    ban_failed_servers: bool = True

    def replayed(self, plan: RequestPlan, n_tokens: int) -> RequestSpec:
        """A request that takes as long to serve as the replay of ``n_tokens`` of ``plan``."""
        n_prompt = n_tokens if self.replay == "at_once" else plan.n_input_tokens
        return RequestSpec(plan.client, n_prompt, n_tokens - n_prompt + 1)

    @property
    def push_limit_s(self) -> float:
        """How long a server waits for the next one to take a push: half as long as the client for the result,
        so that the client knows who is overdue."""
        return self.request_timeout_s / 2


@dataclass(frozen=True)
class BlocksSettings:
    """``[compute]`` of a run with real blocks."""

    checkpoint: str | None
    """The folder, absolute, or its name on the hub; ``None``: weights are made."""
    config: Mapping[str, Any]
    """What ``config.json`` says: the checkpoint's, if it can be read, or that of the model to be made."""
    random_weights: bool
    """Made weights are made in the servers; otherwise a small checkpoint is written first."""
    seed: int
    """Of made weights."""
    devices: tuple[str, ...]
    """Given to servers in turn; the client's part is on the first. ``("auto",)``: those of the machine that runs."""
    dtype: str
    weights: str
    n_threads: int
    n_streams: int
    verify: bool
    """Compare the tokens with those of the whole model on one machine after the run."""
    is_batched: bool = False
    """Steps that wait are computed together; of a prompt at most ``chunk_tokens``."""
    chunk_tokens: int | None = None
    has_graphs: bool = False
    """Steps of one token are CUDA graphs."""

    def device_of(self, server: int) -> str:
        """That of server number ``server``."""
        return self.devices[server % len(self.devices)]


@dataclass(frozen=True)
class Experiment:
    """Everything a run needs. ``links`` maps (from, to) node names; nodes are clients and servers."""

    name: str
    description: str
    seed: int
    time_scale: float
    problem: Problem
    sites: Mapping[str, str]
    """Site of every node, by node name."""
    links: Mapping[tuple[str, str], Link]
    """Both directions of every client-server pair, every server-server pair, and every pair with a ``[[node]]``."""
    changes: tuple[NetworkChange, ...]
    """What happens to links while the workload is served, in the order of time."""
    network: str
    """Backend asked for: auto, netem, fabric, memory, loopback, hosts."""
    keep_cpus_awake: bool
    """Spin at idle priority while running, so that no CPU sleeps (see ``testbed.runtime.real.launcher``)."""
    tcp: TcpSpec
    mtu: int
    compute: str
    """Compute backend: stub or blocks."""
    batching: Literal["none", "serial", "continuous"]
    """How a server computes several sessions."""
    placement: str
    routing: str
    design_concurrency: int | Literal["searched"] | None
    """|R| as given; ``None``: the placement policy chooses."""
    online: str | None
    """Policy that changes the placement while requests are served; ``None``: it stays."""
    load_bps: float
    """How fast a server loads blocks."""
    state_age_s: float
    """Time between the reports of servers that routers see; 0: always current."""
    calibration: Calibration
    backoff: Backoff
    requests: tuple[RequestPlan, ...]
    document: Mapping[str, Any] = field(repr=False)
    """The resolved scenario as TOML data; parsing it again gives this experiment."""
    workload: str = ""
    """Where arrivals and lengths of ``requests`` come from, for people."""
    sample: Sample | None = field(default=None, compare=False)
    """How ``requests`` were taken from recorded ones; ``None``: they were generated."""
    site_links: Mapping[tuple[str, str], Link] = field(default_factory=dict)
    """The network between sites, from which ``links`` come; ``testbed.scenario.whole`` has what else follows."""
    events: tuple[EventTable, ...] = ()
    """From which ``changes`` come."""
    machines: tuple[Machine, ...] | Literal["ray"] = ()
    """Where servers are: on machines of a Ray cluster, on all of them ("ray"), or on this one (empty)."""
    programs: tuple[Program, ...] = ()
    """One for every ``[[node]]``; they are there in real time alone."""
    subnet: IPv4Network = SUBNET
    """Where the nodes' addresses come from."""
    shared_bps: Mapping[str, float] = field(default_factory=dict)
    """Rate of every link that pairs of nodes share, by its name."""
    shared_paths: Mapping[tuple[str, str], tuple[str, ...]] = field(default_factory=dict)
    """The shared links on the way of an ordered pair of nodes, in order; other pairs share nothing."""
    blocks: BlocksSettings | None = None
    """What real blocks need to know; ``None`` for the stub."""
    faults: tuple[Fault, ...] = ()
    """What happens to servers, in the order of the file; what churn drew comes last."""
    recovery: RecoveryRules = RecoveryRules()
    membership: MembershipRules = MembershipRules()  # noqa: RUF009 - frozen
    online_period_s: float | None = None
    """Time between the checks of the online policy; ``None``: its own."""
    online_patience_s: float | None = None
    """How long the load is other than designed for before the online policy acts; ``None``: its own."""
    clock: Literal["auto", "virtual", "real"] = "auto"
    """As asked for: see ``testbed.runtime.stage``."""
    queue: QueueRules | None = None
    """Where requests without room wait at the coordinator; ``None``: their clients ask again."""
    paging: nodes.rules.PagingRules | None = None
    """How servers' caches grow; ``None``: all that a session may need is reserved."""
    expected_output: int | None = None
    """With paging, what the coordinator counts of an output before it is there."""
    chunk_tokens: int | None = None
    """Of a prompt, in one step of "continuous"; ``None``: all of them."""
    endpoint_tokens: int = 0
    """Tokens of the longest request, prompt and output, that may come from outside; 0: none comes."""
    absent: frozenset[int] = frozenset()
    """Servers that are not there at the start: they hold nothing until they join."""
    code_in_file: tuple[str, ...] = field(default=(), compare=False)
    """Policies ``module:Class`` that the file names, not the command line: placing runs their code."""

    @cached_property
    def program_nodes(self) -> Mapping[str, Program]:
        """The nodes of the user's, by name."""
        return {program.node: program for program in self.programs}

    @property
    def objectives(self) -> dict[str, float]:
        """Limits in seconds by metric (``testbed.scenario.slo``); empty: the scenario states none."""
        return dict(self.problem.objectives_s)

    @property
    def nodes(self) -> tuple[str, ...]:
        """Clients and servers."""
        return (*self.problem.clients, *(s.name for s in self.problem.servers))
