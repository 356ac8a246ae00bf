"""Nodes on several machines: what is refused before anything is made."""

from __future__ import annotations

from typing import Any

import pytest

from netem.fabric import FabricBackend
from netem.networks import NETWORKS, Network
from netem.spec import NetworkError, NetworkSpec
from policies.links import Link

_NODES = ("a", "b", "c")
_LINK = Link(0.01, 1e9)
_LINKS = {(source, target): _LINK for source in _NODES for target in _NODES if source != target}
_TWO = {"a": "m0", "b": "m0", "c": "m1"}


def spec(machines: dict[str, str], **keys: Any) -> NetworkSpec:
    return NetworkSpec("test", _NODES, _LINKS, machines=machines, **keys)


@pytest.mark.parametrize(
    ("machines", "spans"), [({}, False), (dict.fromkeys(_NODES, "m0"), False), (_TWO, True)]
)
def test_a_network_spans_machines_only_if_there_are_several(machines: dict[str, str], spans: bool) -> None:
    assert spec(machines).spans_machines is spans


def test_every_node_or_none_has_a_machine() -> None:
    with pytest.raises(NetworkError, match="the node c has no machine: name one for every node, or for none"):
        spec({"a": "m0", "b": "m1"})


def test_virtual_time_is_for_one_machine() -> None:
    assert spec(dict.fromkeys(_NODES, "m0"), is_virtual=True).is_virtual
    with pytest.raises(NetworkError, match="virtual time works on one machine only: run in real time"):
        spec(_TWO, is_virtual=True)


def test_a_shared_link_has_its_senders_on_one_machine() -> None:
    keys: dict[str, Any] = {"shared": {"core": 1e9}}
    spec(_TWO, paths={("a", "b"): ("core",), ("b", "c"): ("core",)}, **keys)
    sentence = (
        "the shared link 'core' carries packets of a on machine m0 and of c on machine m1, .* put them on "
        "the same machine, or let pairs share no links"
    )
    with pytest.raises(NetworkError, match=sentence):
        spec(_TWO, paths={("a", "b"): ("core",), ("c", "b"): ("core",)}, **keys)


PROCESSES = [network for network in NETWORKS.values() if network.nodes_are_processes]


@pytest.mark.parametrize("network", PROCESSES, ids=lambda network: str(network.name))
def test_only_fabric_and_hosts_join_machines_and_the_others_say_so(network: Network) -> None:
    make = network.backend()
    if network.joins_machines:
        assert network.name in ("fabric", "hosts")
        make(spec(_TWO))
        return
    with pytest.raises(
        NetworkError, match=f"the {network.name} network works on one machine only: .* use fabric"
    ):
        make(spec(_TWO))
    alone = make(spec(dict.fromkeys(_NODES, "m0")))
    for call in (lambda: alone.bind("m0", "127.0.0.1"), lambda: alone.join({}, bytes(32)), alone.check):
        with pytest.raises(NetworkError, match=f"the {network.name} network works on one machine only"):
            call()


@pytest.mark.parametrize("network", PROCESSES, ids=lambda network: str(network.name))
def test_a_network_without_virtual_time_refuses_it(network: Network) -> None:
    nodes = NetworkSpec("virtual", _NODES, {}, is_virtual=True)
    if "virtual" in network.clocks:
        network.backend()(nodes)
    else:
        with pytest.raises(NetworkError, match=f"the {network.name} network needs real time"):
            network.backend()(nodes)


def test_fabric_says_what_it_lacks_to_join_machines() -> None:
    backend = FabricBackend(spec(_TWO))
    with pytest.raises(NetworkError, match=r"call bind\(\)"):
        backend.open()
    with pytest.raises(NetworkError, match=r"call bind\(\)"):
        backend.join({}, bytes(32))
    with pytest.raises(NetworkError, match="no node is on machine m7: leave the machine out"):
        backend.bind("m7", "127.0.0.1")
    address, port = backend.bind("m0", "127.0.0.1")
    assert address == "127.0.0.1"
    assert port > 0
    with pytest.raises(
        NetworkError, match=r"the forwarder of machine m1 has no address: call bind\(\) there"
    ):
        backend.join({"m0": (address, port)}, bytes(32))
    with pytest.raises(NetworkError, match="a run's key has 16 to 64 bytes"):
        backend.join({"m0": (address, port), "m1": (address, 9)}, b"")
    backend.close()
