"""Turns a checked scenario into an ``Experiment``: looks up names and makes every random choice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TypeVar

from netem.networks import NETWORKS
from netem.spec import TcpSpec
from policies.interfaces import PlacementPolicy
from policies.problem import Batching, Problem
from policies.rules import PagingRules, PrefixRules
from policies.workload import Backoff, QueueRules, RequestPlan, Turn, longest_tokens
from testbed.experiments.blocks import check_steps, resolve_blocks
from testbed.experiments.compute_tables import CacheTable, ComputeTable
from testbed.experiments.decoding import resolve_decoding, warn_of_costs
from testbed.experiments.demand import demand_of, objectives_in, own_objectives
from testbed.experiments.events import check_changes, network_changes
from testbed.experiments.experiment import (
    BlocksSettings,
    ComputePart,
    CostsPart,
    Experiment,
    FaultsPart,
    LinkPlans,
    NetworkPart,
    PolicyPart,
    Program,
    WorkloadPart,
)
from testbed.experiments.fault_tables import FaultTable
from testbed.experiments.faults import (
    churn_faults,
    membership_rules,
    recovery_rules,
    resolve_faults,
    resolve_recovery,
)
from testbed.experiments.hardware_files import one_hub_token, with_hardware_files
from testbed.experiments.hours import (
    Hours,
    check_alone,
    check_is_held,
    check_no_churn,
    faults_of_hours,
    hours_by_server,
)
from testbed.experiments.hub import hub_tokens_s, with_hub_tokens
from testbed.experiments.limits import check_counts
from testbed.experiments.link_traces import REPEATED_AFTER_S, listed
from testbed.experiments.machines import machines_of
from testbed.experiments.matrices import matrix_of_file
from testbed.experiments.model_tables import HardwareTable
from testbed.experiments.network import (
    Node,
    check_places,
    link_rates,
    node_links,
    policy_times,
    site_links,
    subnet_of,
)
from testbed.experiments.network_tables import (
    ClustersTable,
    MatrixTable,
    SiteTable,
    TopologyNetworkTable,
)
from testbed.experiments.policy import LoadPolicy, Policies, unread_policies, with_halves, with_whole_paths
from testbed.experiments.problems import Key, KeyedError, shown
from testbed.experiments.profiles import resolve_calibration, resolve_model
from testbed.experiments.schema import ClientsTable, NodeTable, PolicyTable, Scenario, ServersTable
from testbed.experiments.servers import server_specs, servers_hardware
from testbed.experiments.shared_links import between_nodes, check_sites, narrowed, shared_links
from testbed.experiments.topologies import ANY, as_matrix, choose_nodes, topology_of, unknown_node
from testbed.experiments.workload import join_order, make_requests, stream, workload_source
from testbed.experiments.workload_tables import EndpointTable, WorkloadTable

GroupT = TypeVar("GroupT", ServersTable, ClientsTable)
_OUR_PROCESSES = ("launcher", "still", *(each.name for each in NETWORKS.values() if each.has_forwarder))
"""Processes of a run that are no nodes. A node cannot have their names, since logs are named alike."""
FolderOf = Callable[..., Path]
"""Called with a key of the scenario; returns the folder where its relative path starts."""


def resolve(
    scenario: Scenario,
    stem: str,
    folder_of: FolderOf,
    code_in_file: tuple[str, ...] = (),
    load_policy: LoadPolicy | None = None,
) -> Experiment:
    """Look up every name and make every random choice.

    ``stem`` is the name of a scenario without one. A relative path starts at ``folder_of`` its key.
    ``code_in_file``: see ``PolicyPart``; ``load_policy``: see ``Policies.of``.
    Raises ``KeyedError`` with the key path of what cannot be resolved.
    """
    sized, compute, blocks = resolve_blocks(scenario, folder_of("compute", "model"))
    model_table, model = resolve_model(sized, scenario.network.wire)
    policy = with_whole_paths(with_halves(scenario.policy), folder_of)
    policies = Policies.of(policy, load_policy)
    policy = policies.decide(policy)
    assert policy.placement is not None and policy.routing is not None
    calibration_table, calibration = resolve_calibration(
        scenario.calibration, policy.session_setup or PlacementPolicy.session_setup
    )
    where = _places(scenario, folder_of)
    own, compute = _own_hardware(scenario, compute, folder_of)
    hardware, groups = servers_hardware(
        scenario, own, model_table, for_petals=policies.need_petals_throughput
    )
    clients = with_hub_tokens(scenario.clients, compute, model_table, is_resolved=scenario.resolved)
    demand = demand_of(scenario)
    workload, requests, lengths, sample, length_samples = make_requests(
        scenario.workload,
        scenario.seed,
        demand,
        folder_of("workload", "file"),
        keeps_prompts=scenario.cache.prefix == "shared",
    )
    if (
        scenario.cache.prefix == "shared"
        and scenario.workload.arrivals == "trace"
        and not (requests[0].block_tokens or requests[0].turn)
    ):
        raise KeyedError(
            ("cache", "prefix"),
            'is "shared", and nothing is known of which recorded prompts begin alike: the trace needs hash_ids, and '
            'its own lengths of prompts; else take "none"',
        )
    assert workload.rate is not None
    check_steps(blocks, longest_tokens(requests))
    specs = server_specs(groups, where.server_nodes, hardware, model_table, model, lengths)
    client_names = tuple(node.name for node in where.clients)
    server_names = [spec.name for spec in specs]
    network = where.network
    by_site = site_links(network)
    is_measured = not scenario.resolved and not isinstance(scenario.network, TopologyNetworkTable)
    check_places(network, by_site, warns=is_measured)
    known = {site for pair in by_site for site in pair}
    check_sites(where.own_links, known, set(where.sites.values()))
    shared = between_nodes(shared_links(network, where.own_links, known), where.sites)
    most_bps = shared.narrowest_bps()
    stated = node_links(by_site, where.clients, where.servers, where.others)
    links = narrowed(stated, most_bps)
    plans = LinkPlans(
        tuple(network.event or ()),
        tuple(network.trace or ()),
        max(request.arrival_at_s for request in requests) + REPEATED_AFTER_S,
    )
    check_changes(plans, links, where.sites)
    is_forwarding = policy.communication == "server-to-server"
    bases_s = [spec.step_base_s for spec in specs]
    times = policy_times(
        links, client_names, server_names, model, calibration, network.mtu, bases_s, is_forwarding
    )
    programs = [
        node.model_copy(update={"command": _beside(folder_of("node", str(index), "command"), node.command)})
        for index, node in enumerate(scenario.node or ())
    ]
    hours = hours_by_server(scenario)
    absent = _absent(scenario.servers, hours)
    check_no_churn(hours, server_names, scenario.churn)
    faults = _faults(scenario, server_names, absent, requests)
    check_alone(hours, server_names, faults)
    check_is_held(hours, specs, model, scenario.begins_at)
    by_hours = faults_of_hours(hours, server_names, max(request.arrival_at_s for request in requests))
    longest_output = max(request.n_output_tokens for request in requests)
    decoding_table, decoding = resolve_decoding(
        scenario, longest_output, folder_of("decoding", "draft_model")
    )
    recovery = resolve_recovery(scenario.recovery, blocks.dtype if blocks is not None else None)
    resolved = scenario.model_copy(
        update={
            "name": scenario.name or stem,
            "resolved": True,
            "model": model_table,
            "hardware": hardware,
            "hardware_files": None,
            "servers": _at_sites(groups, where.server_nodes, where.sites),
            "clients": _at_sites(clients, where.client_nodes, where.sites),
            "node": programs or None,
            "network": network,
            "sites": where.own_links or None,
            "workload": workload,
            "policy": policy,
            "compute": compute,
            "decoding": decoding_table,
            "calibration": calibration_table,
            "fault": faults or None,
            "churn": None,
            "recovery": recovery,
        }
    )
    paging = _paging(scenario.cache)
    # On average, a session in progress has half of its output: half of the mean, rounded up.
    n_known = 2 * len(length_samples)
    expected_output = -(-sum(n for _, n in length_samples) // n_known) if n_known else None
    tcp, backoff = scenario.tcp, scenario.backoff
    served, source = _served(
        scenario.endpoint, requests, workload_source(workload, demand), len(where.clients)
    )
    found = Experiment(
        name=scenario.name or stem,
        description=scenario.description,
        seed=scenario.seed,
        clock=scenario.clock,
        time_scale=scenario.time_scale,
        problem=Problem(
            model=model,
            servers=specs,
            clients=client_names,
            **vars(times),
            links=link_rates(
                links, shared, client_names, server_names, model.token_bytes, network.mtu, is_forwarding
            ),
            n_input_tokens=lengths[0],
            n_output_tokens=lengths[1],
            request_rate=policy.planned_rate or workload.rate,
            join_order=_join_order(policy, scenario.seed, len(specs)),
            initial_delay_s=calibration.initial_delay_s,
            forwarding=is_forwarding,
            hub_token_s=compute.hub_token or 0.0,
            hub_tokens_s=hub_tokens_s(clients, compute),
            length_samples=length_samples,
            reserved_output_tokens=_reserved_output(scenario, workload, length_samples),
            batching=_batching(compute, blocks),
            decoding=decoding,
            objectives_s=objectives_in(workload.slo, ("workload", "slo")),
            own_objectives_s=own_objectives(scenario.clients),
        ),
        sites=where.sites,
        calibration=calibration,
        network=NetworkPart(
            backend=network.backend,
            links=links,
            changes=network_changes(plans, stated, where.sites, most_bps),
            site_links=by_site,
            plans=plans,
            sites=tuple(where.own_links),
            shared_bps=shared.rates_bps,
            shared_paths=shared.paths,
            tcp=TcpSpec(tcp.warm, tcp.slow_start_after_idle, tcp.congestion_control),
            mtu=network.mtu,
            subnet=subnet_of(network.subnet, len(where.sites)),
            keep_cpus_awake=network.keep_cpus_awake,
        ),
        compute=ComputePart(
            backend=scenario.compute.backend,
            batching=_batching(compute, blocks),
            chunk_tokens=compute.chunk_tokens,
            paging=paging,
            prefix=_prefix(scenario, requests, sum(lengths), is_forwarding),
            expected_output=None if paging is None else scenario.cache.expected_output or expected_output,
            blocks=blocks,
            draft_model=None if decoding_table is None or blocks is None else decoding_table.draft_model,
            is_measured=blocks is None or all(table.measured is not None for table in hardware.values()),
        ),
        policy=PolicyPart(
            placement=policy.placement,
            routing=policy.routing,
            design_concurrency=None if policy.design_concurrency == "auto" else policy.design_concurrency,
            online=None if policy.online == "none" else policy.online,
            online_period_s=policy.online_period,
            online_patience_s=policy.online_patience,
            load_bps=policy.load_rate or 1e9,
            state_age_s=policy.state_age,
            queue=None
            if policy.queue is None or policy.queue == "none"
            else QueueRules(policy.queue, policy.queue_age, backoff.give_up, backoff.max),
            unread=unread_policies(policy),
            code_in_file=code_in_file,
        ),
        workload=WorkloadPart(
            requests=served,
            source=source,
            sample=sample,
            backoff=Backoff(backoff.first, backoff.max, backoff.give_up, backoff.jitter, scenario.seed),
            endpoint_tokens=scenario.endpoint.max_model_len if scenario.endpoint is not None else 0,
        ),
        faults=FaultsPart(
            planned=resolve_faults([*faults, *by_hours], server_names, absent, requests),
            recovery=recovery_rules(recovery, scenario.seed),
            membership=membership_rules(scenario.membership),
            absent=absent,
        ),
        costs=_costs(groups, where),
        tables=resolved,
        machines=machines_of(scenario),
        programs=tuple(
            Program(
                node.name,
                tuple(node.command or ()),
                node.environment,
                node.restart == "on-failure",
            )
            for node in programs
        ),
    )
    if blocks is None and not scenario.resolved:
        warn_of_costs(found.problem)
    return found


@dataclass(frozen=True)
class _Places:
    """Every node with its site, and the network between the sites.

    ``*_nodes`` are grouped as in the scenario.
    """

    server_nodes: list[list[Node]]
    client_nodes: list[list[Node]]
    servers: list[Node]
    clients: list[Node]
    others: list[Node]
    """The nodes of the user's programs."""
    network: ClustersTable | MatrixTable
    own_links: list[SiteTable]
    """The rows of ``[[sites]]`` whose sites have nodes."""

    @property
    def sites(self) -> dict[str, str]:
        return {node.name: node.site for node in (*self.clients, *self.servers, *self.others)}


def _batching(compute: ComputeTable, blocks: BlocksSettings | None) -> Batching:
    """Return how servers compute several sessions.

    Real blocks do so serially, unless they have batching or streams.
    """
    if compute.batching == "continuous":
        return "continuous"
    if compute.serial or (blocks is not None and blocks.n_streams == 1):
        return "serial"
    return compute.batching or "none"


def _beside(folder: Path, command: Sequence[str] | None) -> list[str] | None:
    """Return ``command`` with absolute paths for its words ``./FILE``, which are in ``folder``."""
    if command is None:
        return None
    return [str((folder / word).absolute()) if word.startswith("./") else word for word in command]


def _served(
    endpoint: EndpointTable | None, own: tuple[RequestPlan, ...], source: str, n_clients: int
) -> tuple[tuple[RequestPlan, ...], str]:
    """Return the requests that are served, and in words where they come from.

    These are the scenario's ``own``, and those from outside once the endpoint's requests are known.
    """
    if endpoint is None:
        return own, source
    plans = {} if endpoint.workload == "none" else {plan.index: plan for plan in own}
    if endpoint.requests is None:
        return tuple(plans.values()), source
    n_own = len(plans)
    for number, (index, at_s, n_input, n_output, client, *place) in enumerate(endpoint.requests):
        counts = [index, n_input, n_output, client, *place]
        are_counts = all(isinstance(n, int) and n >= 0 for n in counts) and len(place) != 1
        if not are_counts or at_s < 0 or client >= n_clients:
            raise KeyedError(
                ("endpoint", "requests", number),
                "must be [number, arrival in seconds, input tokens, output tokens, client's number from 0 to "
                f"{n_clients - 1}], or these and the numbers of conversation and turn, not {shown(endpoint.requests[number])}",
            )
        turn = Turn(*map(int, place)) if place else None
        lengths = int(n_input), int(n_output)
        plans[int(index)] = RequestPlan(int(index), int(client), at_s, *lengths, turn=turn)
    outside = f"from outside, {len(plans) - n_own:,} requests"
    return tuple(plans[index] for index in sorted(plans)), f"{outside}; and {source}" if n_own else outside


def _places(scenario: Scenario, folder_of: FolderOf) -> _Places:
    """Name the nodes, draw sites that are "any", and reduce a topology or a matrix file to a matrix."""
    check_counts(sum(s.count for s in scenario.servers), sum(c.count for c in scenario.clients))
    taken: dict[str, Key] = {}
    server_nodes = _nodes("servers", scenario.servers, taken)
    client_nodes = _nodes("clients", scenario.clients, taken)
    others = _program_nodes(scenario.node or (), taken)
    servers = list(chain.from_iterable(server_nodes))
    clients = list(chain.from_iterable(client_nodes))
    network, own_links = scenario.network, list(scenario.sites or ())
    if isinstance(network, TopologyNetworkTable):
        topology = topology_of(network, folder_of("network", "topology"))
        servers, clients = choose_nodes(topology, scenario.seed, servers, clients)
        named = [(node.key, node.site) for node in others]
        named += [(("network", "places"), site) for site in network.places or ()]
        named += [(("sites", index, "name"), row.name) for index, row in enumerate(own_links)]
        for key, site in named:
            if site not in topology.node_names:
                raise KeyedError(key, unknown_node(site, topology.name, topology.node_names))
        used = {node.site for node in (*servers, *clients, *others)}
        if ANY in {*(s.site for s in scenario.servers), *(c.site for c in scenario.clients)}:
            own_links = [row for row in own_links if row.name in used]  # another seed draws other places
        network = as_matrix(network, topology, used)
    elif isinstance(network, MatrixTable) and network.file is not None:
        keys_of_sites = {node.site: node.key for node in (*others, *clients, *servers)}
        network = matrix_of_file(network, folder_of("network", "file"), keys_of_sites)
    if network.trace:
        keys = [("network", "trace", index) for index in range(len(network.trace))]
        traces = [
            listed(trace, folder_of(*map(str, key), "file"), key)
            for trace, key in zip(network.trace, keys, strict=True)
        ]
        network = network.model_copy(update={"trace": traces})
    return _Places(server_nodes, client_nodes, servers, clients, others, network, own_links)


def _own_hardware(
    scenario: Scenario, compute: ComputeTable, folder_of: FolderOf
) -> tuple[dict[str, HardwareTable], ComputeTable]:
    """Return the scenario's own hardware, and ``compute`` with the ``hub_token`` of its files if unset."""
    files = [
        (file, folder_of("hardware_files", str(index)))
        for index, file in enumerate(scenario.hardware_files or ())
    ]
    own, hub_tokens = with_hardware_files(scenario.hardware, files)
    if compute.hub_token is None:
        compute = compute.model_copy(update={"hub_token": one_hub_token(hub_tokens)})
    return own, compute


def _reserved_output(
    scenario: Scenario, workload: WorkloadTable, length_samples: Sequence[tuple[int, int]]
) -> int | None:
    """Return ``Problem.reserved_output_tokens``."""
    if scenario.cache.mode == "paged" and length_samples:
        return -(-sum(n_output for _, n_output in length_samples) // len(length_samples))
    return workload.max_new_tokens


def _paging(table: CacheTable) -> PagingRules | None:
    if table.mode == "reserved":
        return None
    usual = PagingRules()
    return PagingRules(table.page_tokens or usual.page_tokens, table.high_water or usual.high_water)


def _prefix(
    scenario: Scenario, requests: Sequence[RequestPlan], longest: int, is_forwarding: bool
) -> PrefixRules | None:
    """Return how caches outlive their requests. ``longest``: the tokens that the placement is designed for."""
    table = scenario.cache
    if table.prefix is None or table.prefix == "none":
        return None
    if table.prefix == "shared":
        if table.hub_history and is_forwarding:
            raise KeyedError(
                ("cache", "hub_history"),
                "is given, and servers send to each other: clients have the first hop's inputs only; leave it out, or set "
                'policy.communication = "hub-spoke"',
            )
        size = table.page_tokens or PrefixRules.page_tokens
        return PrefixRules("shared", size, history_bytes=table.hub_history or 0.0)
    if scenario.endpoint is not None:
        raise KeyedError(
            ("cache", "prefix"), 'is "session", and requests from outside keep no chain open; take "shared"'
        )
    if not any(request.turn is not None and request.turn.after is not None for request in requests):
        raise KeyedError(
            ("cache", "prefix"),
            'is "session", and no request comes after another one; give workload.turns, or take "shared"',
        )
    needed = longest_tokens(request for request in requests if request.turn is not None)
    session_tokens = table.session_tokens or longest
    if session_tokens < needed:
        raise KeyedError(
            ("cache", "session_tokens"),
            f"is {session_tokens:,}, and a conversation of the workload has {needed:,}; raise it to that",
        )
    return PrefixRules("session", hold_s=table.hold or PrefixRules.hold_s, session_tokens=session_tokens)


def _join_order(policy: PolicyTable, seed: int, n_servers: int) -> tuple[int, ...]:
    if policy.join_order is None:
        return join_order(seed, n_servers)
    if sorted(policy.join_order) != list(range(n_servers)):
        raise KeyedError(
            ("policy", "join_order"), f"must name each of the servers 0 to {n_servers - 1} exactly once"
        )
    return tuple(policy.join_order)


def _absent(groups: Sequence[ServersTable], hours: Mapping[int, Hours]) -> frozenset[int]:
    """Return the servers (indices) that are absent at the start. Raises ``KeyedError`` if all of them are.

    ``hours``: those of servers that have any.
    """
    present = [group.present for group in groups for _ in range(group.count)]
    if not any(present):
        raise KeyedError(("servers",), "all have present = false; at least one must be present at the start")
    away = {j for j, each in hours.items() if not each.is_open(0.0)}
    return frozenset(j for j, is_present in enumerate(present) if not is_present or j in away)


def _costs(groups: Sequence[ServersTable], where: _Places) -> CostsPart:
    """Return what servers cost, by server."""
    each = [group for group in groups for _ in range(group.count)]
    prices = [group.cost_per_hour for group in each]
    powers = [(group.power_idle, group.power_busy) for group in each]
    of_sites = {row.name: row.carbon_g_per_kwh for row in where.own_links}
    carbon = [of_sites.get(node.site) for node in where.servers]
    known = [grams for grams in carbon if grams is not None]
    return CostsPart(
        tuple(price for price in prices if price is not None),
        tuple((idle, busy) for idle, busy in powers if idle is not None and busy is not None),
        tuple(known) if len(known) == len(carbon) else (),
    )


def _faults(
    scenario: Scenario, servers: Sequence[str], absent: frozenset[int], requests: Sequence[RequestPlan]
) -> list[FaultTable]:
    """Return the scenario's faults and those drawn by ``[churn]``."""
    faults = list(scenario.fault or ())
    if scenario.churn is not None:
        last_at_s = max(request.arrival_at_s for request in requests)
        rng = stream(scenario.seed, "faults")
        faults += churn_faults(scenario.churn, servers, absent, last_at_s, rng)
    return faults


def _nodes(
    kind: str, groups: Sequence[ServersTable | ClientsTable], taken: dict[str, Key]
) -> list[list[Node]]:
    """Return the nodes of each group.

    Default names are numbered across groups, given names within a group.
    """
    counter: Counter[str] = Counter()
    nodes: list[list[Node]] = []
    for index, group in enumerate(groups):
        members = []
        for position in range(group.count):
            name = _node_name(group, position, counter)
            _take(name, (kind, index), taken)
            members.append(Node(name, group.site, (kind, index, "site")))
        nodes.append(members)
    if not any(nodes):
        raise KeyedError((kind,), f"there are no {kind}; give at least one entry a count of 1 or more")
    return nodes


def _program_nodes(tables: Sequence[NodeTable], taken: dict[str, Key]) -> list[Node]:
    """Return the nodes of the user's programs."""
    nodes = []
    for index, table in enumerate(tables):
        if table.name in _OUR_PROCESSES:
            raise KeyedError(
                ("node", index, "name"), f'"{table.name}" is the name of a testbed process; use another'
            )
        _take(table.name, ("node", index), taken)
        nodes.append(Node(table.name, table.site, ("node", index, "site")))
    return nodes


def _take(name: str, key: Key, taken: dict[str, Key]) -> None:
    if name in taken:
        first = ".".join(str(part) for part in taken[name])
        raise KeyedError(key, f'makes a second node "{name}" beside {first}; change its name')
    taken[name] = key


def _at_sites(
    groups: Sequence[GroupT], nodes: Sequence[Sequence[Node]], sites: Mapping[str, str]
) -> list[GroupT]:
    """Split groups at ``site = "any"`` into single nodes, each with the site that was drawn for it."""
    tables: list[GroupT] = []
    for group, members in zip(groups, nodes, strict=True):
        if group.site != ANY or not members:
            tables.append(group)
            continue
        for node in members:
            name = node.name if group.name is not None else None
            tables.append(group.model_copy(update={"site": sites[node.name], "count": 1, "name": name}))
    return tables


def _node_name(group: ServersTable | ClientsTable, position: int, counter: Counter[str]) -> str:
    if group.name is not None:
        return group.name if group.count == 1 else f"{group.name}-{position}"
    prefix = group.hardware if isinstance(group, ServersTable) else "client"
    counter[prefix] += 1
    return f"{prefix}-{counter[prefix] - 1}"
