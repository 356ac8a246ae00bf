"""The netem backend's real devices, routes and trees, without the netem leaves.

This holds on kernels without sch_netem too; with the leaves the backend is proven in ``tests/vm``.
"""

import errno
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyroute2 import IPRoute

from netem import kernel, qdiscs, rtnetlink
from netem.kernel import NetemBackend
from netem.rtnetlink import NEW_QDISC, TcRequest
from netem.spec import LinkProfile, NetworkError, NetworkSpec, NetworkUnavailable
from netem.syscalls import inside, new_network_namespace

NODES = ("hub", "near", "far")
LINK = LinkProfile(delay_s=0.01, rate_bps=100e6)
LINKS = dict.fromkeys((("hub", "near"), ("near", "hub"), ("hub", "far"), ("far", "hub")), LINK)


@pytest.fixture
def without_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    complete = qdiscs.receiver_tree

    def tree(device: int, links: dict[int, LinkProfile], mtu: int) -> list[TcRequest]:
        return [request for request in complete(device, links, mtu) if request.kind != "netem"]

    monkeypatch.setattr(kernel.qdiscs, "receiver_tree", tree)


@pytest.fixture
def network(without_leaves: None) -> Iterator[NetemBackend]:
    backend = NetemBackend(NetworkSpec("test", NODES, LINKS))
    backend.open()
    yield backend
    backend.close()


def descriptors() -> set[str]:
    return {str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()}


def host_devices() -> list[str]:
    return sorted(name for _, name in socket.if_nameindex())


def packets_by_class(network: NetemBackend, receiver: str) -> dict[int, int]:
    """Packets sent so far, by class minor, on the switch's port towards ``receiver``."""
    with inside(network._switch), IPRoute() as ip:
        index = ip.link_lookup(ifname=network._port(receiver))[0]
        return {
            c["handle"] & 0xFFFF: c.get_attr("TCA_STATS2").get_attr("TCA_STATS_BASIC")["packets"]
            for c in ip.get_classes(index)
        }


def exchange(network: NetemBackend, sender: str, receiver: str) -> bytes | None:
    """Send one datagram; answer what arrives, ``None`` if nothing did although the kernel is done."""
    with inside(network._namespaces[receiver]):
        inbox = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    with inside(network._namespaces[sender]):
        outbox = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    with inbox, outbox:
        inbox.bind((network.address(receiver), 0))
        inbox.settimeout(0.2)
        outbox.sendto(b"hello", inbox.getsockname())
        try:
            return inbox.recv(100)
        except TimeoutError:
            return None


def test_the_kernel_reads_back_one_class_per_sender_with_the_same_rate_and_burst(
    network: NetemBackend,
) -> None:
    with inside(network._switch), IPRoute() as ip:
        classes = ip.get_classes(ip.link_lookup(ifname=network._port("hub"))[0])
    params = {c["handle"] & 0xFFFF: c.get_attr("TCA_OPTIONS").get_attr("TCA_HTB_PARMS") for c in classes}
    assert sorted(params) == [qdiscs.DROP_MINOR, network._minor["near"], network._minor["far"]]
    for param in params.values():
        assert param["rate"] == param["ceil"] == 4_000_000_000
        assert param["buffer"] * 64e-9 * param["rate"] == pytest.approx(1_000_000, rel=0.01)


def test_the_kernel_reads_back_one_filter_per_receiver(network: NetemBackend) -> None:
    with inside(network._switch), IPRoute() as ip:
        for node in NODES:
            filters = ip.get_filters(ip.link_lookup(ifname=network._port(node))[0], parent=0x10000)
            assert {f.get_attr("TCA_KIND") for f in filters} == {"bpf"}


def test_a_packet_goes_through_the_class_of_its_sender(network: NetemBackend) -> None:
    before = packets_by_class(network, "hub")
    assert exchange(network, "near", "hub") == b"hello"
    after = packets_by_class(network, "hub")
    assert {m: after[m] - before[m] for m in after} == {
        qdiscs.DROP_MINOR: 0,
        network._minor["near"]: 1,
        network._minor["far"]: 0,
    }


def test_a_pair_without_a_link_exchanges_nothing(network: NetemBackend) -> None:
    assert exchange(network, "near", "far") is None


def test_a_node_reaches_itself(network: NetemBackend) -> None:
    assert exchange(network, "near", "near") == b"hello"


def test_neighbours_are_permanent_so_that_the_shared_table_never_fills(network: NetemBackend) -> None:
    assert exchange(network, "near", "hub") == b"hello"
    for namespace in (network._switch, *network._namespaces.values()):
        with inside(namespace), IPRoute() as ip:
            unicast = [
                n for n in ip.get_neighbours() if not n.get_attr("NDA_DST", "").startswith(("ff", "224"))
            ]
            assert unicast
            assert {n["state"] for n in unicast} == {0x80}


def test_a_network_leaves_neither_descriptors_nor_devices_behind_and_closes_twice(
    without_leaves: None,
) -> None:
    before = descriptors(), host_devices()
    backend = NetemBackend(NetworkSpec("test", NODES, LINKS))
    backend.open()
    assert host_devices() == before[1], "the host's own network is never touched"
    backend.close()
    backend.close()
    assert (descriptors(), host_devices()) == before


def test_a_network_that_fails_half_way_leaves_nothing_and_says_why(
    without_leaves: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = descriptors(), host_devices()
    sent = []

    def send(requests: list[TcRequest]) -> None:
        sent.append(requests)
        if len(sent) == 2:
            raise OSError(errno.ENOSPC, "no room")

    monkeypatch.setattr(kernel.rtnetlink, "send", send)
    backend = NetemBackend(NetworkSpec("test", NODES, LINKS))
    with pytest.raises(NetworkError, match=r"cannot build the netem network: .*no room"):
        backend.open()
    assert (descriptors(), host_devices()) == before


def test_the_kernels_refusal_names_the_discipline_and_the_reason() -> None:
    namespace = new_network_namespace()
    try:
        with inside(namespace), pytest.raises(OSError, match="adding nonesuch 0x10000"):
            rtnetlink.send([TcRequest(NEW_QDISC, 1, 0x10000, 0xFFFF_FFFF, "nonesuch", b"")])
    finally:
        os.close(namespace)


def test_where_the_kernel_lacks_netem_the_probe_names_the_module_and_opening_says_unavailable() -> None:
    missing = NetemBackend.missing()
    backend = NetemBackend(NetworkSpec("test", NODES, LINKS))
    if missing is None:
        backend.open()
        backend.close()
    else:
        assert "modprobe sch_netem" in missing
        with pytest.raises(NetworkUnavailable, match="netem"):
            backend.open()
