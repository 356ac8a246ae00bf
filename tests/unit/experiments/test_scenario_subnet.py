"""``network.subnet``: where the nodes' addresses come from."""

from __future__ import annotations

from collections.abc import Callable
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any

import pytest

from netem.fabric import FabricBackend
from netem.kernel import NetemBackend
from netem.memory import MemoryNetwork
from netem.spec import NetworkError, NetworkSpec
from testbed.experiments import dump_toml, load_experiment
from testbed.experiments.experiment import Experiment
from testbed.runtime.wiring import network_spec

Load = Callable[..., Experiment]
Complain = Callable[..., str]


def test_addresses_are_those_set_aside_for_benchmarks_unless_said_otherwise(load: Load) -> None:
    spec = network_spec(load(), "run")
    assert FabricBackend(spec).address("client-0") == "198.18.0.1"
    assert NetemBackend(spec).address("client-0") == "198.18.0.2"


async def test_every_network_takes_its_addresses_from_the_subnet(load: Load, tmp_path: Path) -> None:
    e = load("network.subnet=10.77.128.0/17")
    (tmp_path / "stored.toml").write_text(dump_toml(e), encoding="utf-8")
    stored = load_experiment(str(tmp_path / "stored.toml"))
    assert stored.network.subnet == e.network.subnet == IPv4Network("10.77.128.0/17")
    spec = network_spec(e, "run")
    fabric, netem, memory = FabricBackend(spec), NetemBackend(spec), MemoryNetwork(spec)
    for node in e.nodes:
        addresses = fabric.address(node), netem.address(node), memory.addresses[node]
        assert all(address.startswith("10.77.128.") for address in addresses)


@pytest.mark.parametrize(
    ("subnet", "expected"),
    [
        ("10.77.0.5/16", "host bits set"),
        ("fd00::/64", "must be an IPv4 network"),
        ("here", "must be an IPv4 network"),
        ("127.0.0.0/8", "is reserved for other purposes"),
        ("224.0.0.0/8", "is reserved for other purposes"),
        ("10.77.0.0/30", "addresses for 0 nodes, but there are 3"),
        ("10.77.0.0/32", "addresses for 0 nodes, but there are 3"),
    ],
)
def test_a_subnet_that_cannot_be_used_is_refused(complaint: Complain, subnet: str, expected: str) -> None:
    sentence = complaint(f"network.subnet={subnet}")
    assert "network.subnet" in sentence and expected in sentence


def test_a_network_with_more_nodes_than_addresses_is_refused() -> None:
    nodes: Any = tuple(f"n{i}" for i in range(5))
    with pytest.raises(NetworkError, match="no room for 5 nodes"):
        NetworkSpec("run", nodes, {}, subnet=IPv4Network("10.0.0.0/29"))
