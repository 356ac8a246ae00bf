"""How a scenario asks for server-to-server forwarding, and what the machine is told then."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from nodes.messages import ServerEnd
from policies.links import HEADER_BYTES
from policies.problem import BlockRange, Hop, Placement, RequestSpec, service_s
from testbed.experiments import dump_toml, load_experiment
from testbed.experiments.experiment import Experiment
from testbed.experiments.stub import stub_profile
from testbed.runtime.peering import followers
from testbed.runtime.wiring import changed_links, network_spec, node_view

SMALL = ("servers=[{hardware='mig-1g', site='Cluster2', count=2}, {hardware='a100', site='Cluster1'}]",)


def small(*options: str) -> Experiment:
    return load_experiment("clustered", [*SMALL, *options])


@pytest.mark.parametrize("communication", ["server-to-server", "hub-spoke"])
def test_the_way_of_communication_is_read_and_stored(communication: str, tmp_path: Path) -> None:
    experiment = small(f"policy.communication={communication}")
    assert experiment.problem.forwarding is (communication == "server-to-server")
    assert experiment.document["policy"]["communication"] == communication
    stored = tmp_path / "stored.toml"
    stored.write_text(dump_toml(experiment), encoding="utf-8")
    assert load_experiment(str(stored)).problem.forwarding is experiment.problem.forwarding
    assert not load_experiment(str(stored), ["policy.communication=hub-spoke"]).problem.forwarding


def test_in_virtual_time_links_between_servers_are_emulated_only_where_servers_forward() -> None:
    servers = {"mig-1g-0", "mig-1g-1", "a100-0"}
    hub, chain = (
        network_spec(small(f"policy.communication={way}"), "r", is_virtual=True).links
        for way in ("hub-spoke", "server-to-server")
    )
    assert not [pair for pair in hub if set(pair) <= servers]
    assert len([pair for pair in chain if set(pair) <= servers]) == 6
    assert all(chain[pair] == link for pair, link in hub.items())


def test_a_server_delays_what_it_sends_to_other_servers_and_nothing_else() -> None:
    experiment = small("policy.communication=server-to-server")
    links = changed_links(experiment, "mig-1g-0", experiment.network.links)
    assert [(link.server, link.down) for link in links] == [(1, None), (2, None)]
    assert [link.up.delay_s for link in links] == [0.0025, 0.05]
    ends = dict.fromkeys(experiment.nodes, ("127.0.0.1", 7))
    assert [
        end.up is not None for end in node_view(experiment, "mig-1g-0", ends, experiment.network.links)
    ] == [
        False,
        True,
        True,
    ]
    assert node_view(experiment, "mig-1g-0", ends, None) == [ServerEnd("127.0.0.1", 7)] * 3


def test_packets_of_a_link_that_a_node_plays_are_as_large_as_the_mtu_allows() -> None:
    for mtu in (1500, 9000):
        experiment = load_experiment("clustered", [f"network.mtu={mtu}"])
        [first, *_] = changed_links(experiment, "client-0", experiment.network.links)
        assert first.up is not None and first.up.segment_bytes == mtu - HEADER_BYTES


def test_servers_connect_to_those_that_hold_the_block_after_their_last() -> None:
    ranges = (BlockRange(0, 3), BlockRange(3, 6), BlockRange(0, 0), BlockRange(2, 6), BlockRange(0, 6))
    placement = Placement("p", ranges, (1.0,) * 5)
    assert [list(followers(placement, server)) for server in range(5)] == [[1, 3, 4], [], [], [], []]


@pytest.mark.parametrize("calibration", ["none", "petals-clustered"])
def test_a_chain_takes_what_every_one_of_its_links_takes(calibration: str) -> None:
    experiment = small("policy.communication=server-to-server", f"calibration.set={calibration}")
    problem, links = experiment.problem, experiment.network.links
    request = RequestSpec(0, 20, 3)
    hops = (Hop(0, 0, 30), Hop(1, 30, 50), Hop(2, 50, 70))
    names = [problem.clients[0], *(problem.servers[hop.server].name for hop in hops), problem.clients[0]]
    pairs = list(pairwise(names))
    assert len({links[pair].rate_bps for pair in pairs}) > 1, "links that differ"

    def seconds(n_tokens: int, position: int) -> float:
        n_bytes = n_tokens * problem.model.token_bytes
        sent_s = [
            links[pair].transmission_s(n_bytes, experiment.network.mtu) + links[pair].delay_s
            for pair in pairs
        ]
        profiles = [stub_profile(experiment, hop.server) for hop in hops]
        return sum(sent_s) + sum(
            profile.times.step_s(position, n_tokens, hop.n_blocks)
            + profile.overhead_s(problem.clients[0], position, n_tokens)
            for hop, profile in zip(hops, profiles, strict=True)
        )

    first_s, all_s = service_s(problem, request, hops)
    assert first_s == pytest.approx(seconds(20, 0), rel=1e-4)  # but for a prompt's last segment
    assert all_s - first_s == pytest.approx(2 * seconds(1, 20), rel=1e-9)
