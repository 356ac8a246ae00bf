"""From a resolved scenario to what the network and the nodes are told."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from netem.spec import LinkProfile, NetworkSpec, TcpSpec
from nodes.compute import StubProfile
from nodes.node import DATA_PORT, ClientConfig, ServerConfig, StubHubSpec
from nodes.recovery import RecoveryRules
from nodes.server import HostedBlocks, ServerLimits
from nodes.session import SessionRules
from policies.problem import Placement
from testbed.experiment import Experiment, Link

_IDLE_S = 300.0


def idle_s(experiment: Experiment) -> float:
    """How long a server keeps a session of which it hears nothing; scenario seconds."""
    return _IDLE_S + experiment.calibration.session_setup_s


def scaled(link: Link, time_scale: float) -> LinkProfile:
    """A link as the machine must emulate it: real seconds and bits per second."""
    return LinkProfile(
        link.delay_s / time_scale, link.rate_bps * time_scale, link.jitter_s / time_scale, link.loss_ratio
    )


def _is_hub_spoke(experiment: Experiment, pair: tuple[str, str]) -> bool:
    """Whether packets go between these two: a client and a server, in either direction."""
    clients = experiment.problem.clients
    return (pair[0] in clients) != (pair[1] in clients)


def scaled_links(
    experiment: Experiment, links: Mapping[tuple[str, str], Link]
) -> dict[tuple[str, str], LinkProfile]:
    """Those of ``links`` that the machine must emulate (client-server pairs), as it must emulate them."""
    scale = experiment.time_scale
    return {pair: scaled(link, scale) for pair, link in links.items() if _is_hub_spoke(experiment, pair)}


def network_spec(experiment: Experiment, run: str) -> NetworkSpec:
    """All nodes, the client-server pairs in both directions (hub-spoke), and what their paths share."""
    tcp = TcpSpec(
        experiment.tcp_warm, experiment.tcp_slow_start_after_idle, experiment.tcp_congestion_control
    )
    paths = {pair: path for pair, path in experiment.shared_paths.items() if _is_hub_spoke(experiment, pair)}
    used = {link for path in paths.values() for link in path}
    return NetworkSpec(
        run,
        experiment.nodes,
        scaled_links(experiment, experiment.links),
        tcp,
        experiment.mtu,
        {link: rate * experiment.time_scale for link, rate in experiment.shared_bps.items() if link in used},
        paths,
    )


def transmission_s(experiment: Experiment, client: str, server: str, n_tokens: int) -> float:
    """Scenario seconds that ``n_tokens`` hidden states take on the links of a hop, both directions."""
    n_bytes = n_tokens * experiment.problem.model.token_bytes
    return sum(
        scaled(experiment.links[pair], 1.0).transmission_s(n_bytes, experiment.mtu)
        for pair in ((client, server), (server, client))
    )


def stub_profile(experiment: Experiment, server: int) -> StubProfile:
    """Times of one server; published overheads less what the emulated link's transmission takes."""
    spec = experiment.problem.servers[server]
    calibration = experiment.calibration
    token: dict[str, float] = {}
    inputs: dict[str, tuple[float, float]] = {}
    if (
        calibration.token_overhead_s
        or calibration.input_overhead_base_s
        or calibration.input_overhead_slope_s
    ):
        for client in experiment.problem.clients:
            one = transmission_s(experiment, client, spec.name, 1)
            # Transmission grows by whole segments: the mean slope over 100 tokens is exact to 0.01 %.
            slope = transmission_s(experiment, client, spec.name, 100) / 100
            token[client] = max(0.0, calibration.token_overhead_s - one)
            inputs[client] = (
                calibration.input_overhead_base_s,
                calibration.input_overhead_slope_s - slope,
            )
    return StubProfile(
        token_bytes=experiment.problem.model.token_bytes,
        decode_s=spec.decode_s,
        prefill_base_s=spec.prefill_base_s,
        prefill_slope_s=spec.prefill_slope_s,
        token_overhead_s=token,
        input_overhead_s=inputs,
        serial=experiment.serial_compute,
    )


def server_config(
    experiment: Experiment, placement: Placement, server: int, control: Path, address: str, any_port: bool
) -> ServerConfig:
    """What server number ``server`` is told when it is forked."""
    model = experiment.problem.model
    blocks = placement.ranges[server]
    return ServerConfig(
        name=experiment.problem.servers[server].name,
        control_path=control,
        address=address,
        port=0 if any_port else DATA_PORT,
        time_scale=experiment.time_scale,
        hosted=HostedBlocks(
            blocks.first, blocks.last, placement.cache_bytes[server], model.cache_bytes_per_token
        ),
        compute=stub_profile(experiment, server),
        limits=ServerLimits(idle_s=idle_s(experiment)),
    )


def recovery_rules(experiment: Experiment) -> RecoveryRules:
    """What clients do when a hop fails; who is banned is the coordinator's."""
    rules = experiment.recovery
    return RecoveryRules(
        mode=rules.mode,
        request_timeout_s=rules.request_timeout_s,
        connect_timeout_s=rules.connect_timeout_s,
        retry_first_s=rules.retry_first_s,
        retry_max_s=rules.retry_max_s,
        give_up_s=rules.give_up_s,
    )


def client_config(
    experiment: Experiment, client: str, control: Path, address: str, log: Path
) -> ClientConfig:
    """What a client is told when it is forked."""
    backoff = experiment.backoff
    return ClientConfig(
        name=client,
        control_path=control,
        address=address,
        port=0,
        time_scale=experiment.time_scale,
        log_path=log,
        model=StubHubSpec(experiment.problem.model.token_bytes, experiment.problem.model.n_blocks),
        rules=SessionRules(
            initial_delay_s=experiment.problem.initial_delay_s,
            setup_s=experiment.calibration.session_setup_s,
            backoff_first_s=backoff.first_s,
            backoff_max_s=backoff.max_s,
            give_up_s=backoff.give_up_s,
            recovery=recovery_rules(experiment),
        ),
    )


def _delay_profile(experiment: Experiment, link: Link) -> list[float]:
    """Fields of ``nodes.links.DelayProfile`` for a client that delays messages itself; headers are counted as extra bytes."""
    whole_s = scaled(link, 1.0).transmission_s(1_000_000, experiment.mtu)
    return [link.delay_s, whole_s / 1_000_000, link.jitter_s, link.loss_ratio]


def client_view(
    experiment: Experiment, client: str, addresses: dict[str, tuple[str, int]], delays_in_client: bool
) -> list[dict[str, Any]]:
    """How ``client`` reaches every server, in the problem's order."""
    view: list[dict[str, Any]] = []
    links = changed_links(experiment, client, experiment.links) if delays_in_client else []
    for number, server in enumerate(experiment.problem.servers):
        address, port = addresses[server.name]
        entry: dict[str, Any] = {"address": address, "port": port}
        if delays_in_client:
            entry |= links[number] | {"seed": f"{experiment.seed}:link noise:{client}:{server.name}"}
        view.append(entry)
    return view


def changed_links(
    experiment: Experiment, client: str, links: Mapping[tuple[str, str], Link]
) -> list[dict[str, Any]]:
    """Those of ``links`` that ``client`` delays by itself, by server; scenario seconds."""
    changed = []
    for number, server in enumerate(experiment.problem.servers):
        pairs = {"up": (client, server.name), "down": (server.name, client)}
        entry = {key: _delay_profile(experiment, links[pair]) for key, pair in pairs.items() if pair in links}
        if entry:
            changed.append({"server": number, **entry})
    return changed
