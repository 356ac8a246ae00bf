"""Makes the configuration of the network and of the nodes from a resolved scenario."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from math import inf
from pathlib import Path

from netem.spec import NetworkSpec
from nodes.admission import HostedBlocks
from nodes.digest import DIGEST_BYTES
from nodes.links import DelayProfile
from nodes.messages import ChangedLink, ServerEnd
from nodes.node import DATA_PORT, ClientConfig, ServerConfig, StubHubSpec
from nodes.server import ServerLimits
from nodes.session import SessionRules
from nodes.wire import MAX_PAYLOAD_BYTES
from policies.links import HEADER_BYTES, Link
from policies.problem import Placement
from policies.workload import longest_prompt
from testbed.errors import UserError
from testbed.experiments.courses import courses
from testbed.experiments.experiment import Experiment
from testbed.experiments.step_limits import idle_s, longest_request, recovery_of
from testbed.experiments.stub import kept_tokens, stub_profile
from testbed.experiments.units import RATE
from testbed.experiments.whole import whole_network
from testbed.runtime.blocks import BlocksModel


def scaled_links(
    experiment: Experiment, links: Mapping[tuple[str, str], Link], is_virtual: bool
) -> dict[tuple[str, str], Link]:
    """Return those of ``links`` that the machine must emulate, in real seconds.

    In real time these are all links, since programs of the user's may run on any node.
    """
    scale = experiment.time_scale
    return {
        pair: link.scaled(scale) for pair, link in links.items() if not is_virtual or experiment.uses(pair)
    }


def network_spec(experiment: Experiment, run: str, is_virtual: bool = False) -> NetworkSpec:
    """Return all nodes, the links between them in both directions, and the links that their paths share.

    ``is_virtual``: the run is in virtual time; then only links that the testbed's own nodes use are included.
    """
    whole = whole_network(experiment, is_virtual)
    links = scaled_links(experiment, whole.links, is_virtual)
    paths = {pair: path for pair, path in experiment.network.shared_paths.items() if pair in links}
    used = {link for path in paths.values() for link in path}
    return NetworkSpec(
        run,
        experiment.nodes if is_virtual else (*experiment.nodes, *experiment.program_nodes),
        links,
        experiment.network.tcp,
        experiment.network.mtu,
        is_virtual,
        {
            link: rate * experiment.time_scale
            for link, rate in experiment.network.shared_bps.items()
            if link in used
        },
        paths,
        experiment.network.subnet,
        courses=courses(whole.changes, {pair: whole.links[pair] for pair in links}, experiment.time_scale),
        seed=experiment.seed,
    )


def check_frames(experiment: Experiment) -> None:
    """Raise ``UserError`` for a prompt, or a replayed history, that is too long for one step, and for hidden states that cannot
    hold the stub's value.
    """
    model = experiment.problem.model
    if experiment.compute.backend == "stub" and model.token_bytes < DIGEST_BYTES:
        raise UserError(
            f"model.hidden_size: is {model.hidden_size}, so that a hidden state has {model.token_bytes} bytes on the wire, and "
            f"the timing stub's need {DIGEST_BYTES}; raise it, or compute the blocks"
        )
    most = MAX_PAYLOAD_BYTES // model.token_bytes
    if experiment.workload.endpoint_tokens > most:
        raise UserError(
            f"endpoint.max_model_len: {experiment.workload.endpoint_tokens:,} tokens do not fit into one step, which "
            f"holds {most:,} hidden states of this model (2 GiB); lower it"
        )
    longest = longest_prompt(experiment.workload.requests)
    if longest > most:
        raise UserError(
            f"workload.n_input_tokens: a prompt of {longest:,} tokens does not fit into one step, which "
            f"holds {most:,} hidden states of this model (2 GiB); make prompts shorter"
        )
    can_fail = experiment.faults.planned or experiment.network.changes or experiment.policy.online is not None
    recovery = experiment.faults.recovery
    whole = longest_request(experiment)
    if can_fail and recovery.mode == "replay" and recovery.replay == "at_once" and whole > most:
        raise UserError(
            f"recovery.replay: a history of {whole:,} tokens does not fit into one step, which holds "
            f'{most:,} hidden states of this model (2 GiB); use "step_by_step"'
        )


def check_rates(experiment: Experiment) -> None:
    """Raise ``UserError`` for a link on which even one token's hidden state would take longer than a step may.

    A link that is faster at some time from the first arrival on, by an event or a trace, is accepted. What holds after
    the end of all repeated traces does not count.
    """
    network, n_bytes = experiment.network, experiment.problem.model.token_bytes
    limit_s = recovery_of(experiment).step_limit_s(1)

    def takes_s(link: Link) -> float:
        """For one token; infinite on a link that is cut."""
        return link.transmission_s(n_bytes, network.mtu) if link.loss_ratio < 1 else inf

    begins_at_s = min((request.arrival_at_s for request in experiment.workload.requests), default=0.0)
    n_before = bisect_right(network.changes, begins_at_s, key=lambda change: change.at_s)
    links = dict(network.links)
    for change in network.changes[:n_before]:
        links.update(change.links)
    slow = {pair: link for pair, link in links.items() if experiment.uses(pair) and takes_s(link) > limit_s}
    ends_at_s = network.plans.traces_end_at_s if network.plans.traces else inf
    for change in network.changes[n_before:] if slow else ():
        if change.at_s < ends_at_s:
            for pair in slow.keys() & change.links.keys():
                slow[pair] = min(slow[pair], change.links[pair], key=takes_s)
    for (a, b), link in slow.items():
        if limit_s < takes_s(link) < inf:
            n_prompt_bytes = (longest_prompt(experiment.workload.requests) or 1) * n_bytes
            on_way = network.shared_paths.get((a, b), ())
            of = next((f" of {name}" for name in on_way if network.shared_bps[name] == link.rate_bps), "")
            raise UserError(
                f"network: no message crosses the link from {a} to {b} in time: one token's hidden state takes "
                f"{takes_s(link):,.0f} s at {RATE.format(link.rate_bps)}, and the longest "
                f"prompt {link.transmission_s(n_prompt_bytes, network.mtu):,.0f} s, but a step "
                f"without an answer for {limit_s:g} s has failed; raise the rate{of}, or recovery.request_timeout"
            )


def server_limits(experiment: Experiment) -> ServerLimits:
    """Return the default limits, raised for this workload's longest step and twice as many peers as nodes.

    The limit per client is as high: on loopback all nodes have the same address.
    """
    n_bytes = longest_request(experiment) * experiment.problem.model.token_bytes
    payload_bytes = max(n_bytes, ServerLimits.max_payload_bytes)
    n_peers = 2 * len(experiment.nodes)
    return ServerLimits(
        idle_s=idle_s(experiment),
        max_payload_bytes=payload_bytes,
        max_connections=max(n_peers, ServerLimits.max_connections),
        max_connections_per_client=max(n_peers, ServerLimits.max_connections_per_client),
    )


def server_config(
    experiment: Experiment,
    placement: Placement,
    server: int,
    control: Path,
    address: str,
    any_port: bool,
    blocks: BlocksModel | None = None,
) -> ServerConfig:
    """Return the configuration of server number ``server``, with real blocks if ``blocks`` is given."""
    model = experiment.problem.model
    held = placement.ranges[server]
    spec = experiment.problem.servers[server]
    return ServerConfig(
        name=spec.name,
        control_path=control,
        address=address,
        port=0 if any_port else DATA_PORT,
        time_scale=experiment.time_scale,
        hosted=HostedBlocks(
            held.first,
            held.last,
            placement.cache_bytes[server],
            model.cache_bytes_per_token,
            experiment.compute.paging,
            kept_tokens(experiment),
            copies_kept=blocks is not None,
        ),
        compute=blocks.blocks_spec(server, spec.memory_bytes) if blocks else stub_profile(experiment, server),
        limits=server_limits(experiment),
    )


def client_config(
    experiment: Experiment,
    client: str,
    control: Path,
    address: str,
    log: Path,
    blocks: BlocksModel | None = None,
    *,
    sends_times: bool = False,
) -> ClientConfig:
    """Return the configuration of a client, with the real model's hub if ``blocks`` is given.

    ``sends_times``: the routing policy learns from what the client measures.
    """
    model, prefix = experiment.problem.model, experiment.compute.prefix
    return ClientConfig(
        name=client,
        control_path=control,
        address=address,
        port=0,
        time_scale=experiment.time_scale,
        log_path=log,
        model=blocks.hub_spec(experiment.problem.decoding, experiment.compute.draft_model)
        if blocks
        else StubHubSpec(
            model.token_bytes,
            model.n_blocks,
            experiment.problem.hub_s(experiment.problem.clients.index(client)),
            experiment.problem.decoding,
        ),
        forwarding=experiment.problem.forwarding,
        sends_times=sends_times,
        rules=SessionRules(
            initial_delay_s=experiment.problem.initial_delay_s,
            setup_s=experiment.calibration.session_setup_s,
            kept_tokens=kept_tokens(experiment),
            history_bytes=0.0 if prefix is None else prefix.history_bytes,
            hold_s=None if prefix is None or prefix.kind == "shared" else prefix.hold_s,
            backoff=experiment.workload.backoff,
            recovery=recovery_of(experiment),
        ),
    )


def _delay_profile(experiment: Experiment, link: Link) -> DelayProfile:
    """Return a link for a node that delays messages itself, with packet headers as extra bytes."""
    s_per_byte = link.transmission_s(1_000_000, experiment.network.mtu) / 1_000_000
    return DelayProfile(
        link.delay_s,
        s_per_byte,
        link.jitter_s,
        link.loss_ratio,
        experiment.network.mtu - HEADER_BYTES,
    )


def node_view(
    experiment: Experiment,
    node: str,
    addresses: Mapping[str, tuple[str, int]],
    links: Mapping[tuple[str, str], Link] | None,
) -> list[ServerEnd]:
    """Return how ``node`` reaches every server, in order; with ``links`` it delays messages itself."""
    delayed = {link.server: link for link in changed_links(experiment, node, links or {})}
    view = []
    for number, server in enumerate(experiment.problem.servers):
        link = delayed.get(number, ChangedLink(number))
        seed = f"{experiment.seed}:link noise:{node}:{server.name}" if number in delayed else ""
        view.append(ServerEnd(*addresses[server.name], link.up, link.down, seed))
    return view


def changed_links(
    experiment: Experiment, node: str, links: Mapping[tuple[str, str], Link]
) -> list[ChangedLink]:
    """Return those of ``links`` that ``node`` delays by itself, one entry per server, in scenario seconds.

    A client delays both directions, its own messages and the servers' answers. A server delays only what it
    sends to other servers.
    """
    changed = []
    for number, server in enumerate(experiment.problem.servers):
        up, down = links.get((node, server.name)), links.get((server.name, node))
        if node not in experiment.problem.clients:
            down = None
        if up is not None or down is not None:
            profiles = (_delay_profile(experiment, link) if link else None for link in (up, down))
            changed.append(ChangedLink(number, *profiles))
    return changed
