"""The netem backend's real devices, routes and trees, without the netem leaves.

This holds on kernels without sch_netem too; with the leaves the backend is proven in ``tests/vm``.
"""

import contextlib
import errno
import fcntl
import os
import socket
import struct
import termios
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from ipaddress import IPv4Network
from pathlib import Path

import pytest
from pyroute2 import IPRoute

from netem import kernel, qdiscs, rtnetlink
from netem.kernel import NetemBackend
from netem.rtnetlink import NEW_QDISC, TcRequest
from netem.spec import NetworkError, NetworkSpec, NetworkUnavailable
from netem.syscalls import inside, new_network_namespace
from policies.links import Link

NODES = ("hub", "near", "far")
LINK = Link(delay_s=0.01, rate_bps=100e6)
LINKS = dict.fromkeys((("hub", "near"), ("near", "hub"), ("hub", "far"), ("far", "hub")), LINK)


@pytest.fixture
def without_leaves(monkeypatch: pytest.MonkeyPatch) -> list[TcRequest]:
    """Keep requests for netem from the kernel; return those that were made."""
    send = rtnetlink.send
    withheld: list[TcRequest] = []

    def send_others(requests: Iterable[TcRequest]) -> None:
        requests = list(requests)
        withheld.extend(request for request in requests if request.kind == "netem")
        send([request for request in requests if request.kind != "netem"])

    monkeypatch.setattr(kernel.rtnetlink, "send", send_others)
    return withheld


@pytest.fixture
def network(without_leaves: list[TcRequest]) -> Iterator[NetemBackend]:
    backend = NetemBackend(NetworkSpec("test", NODES, LINKS))
    backend.open()
    yield backend
    backend.close()


def descriptors() -> set[str]:
    return {str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()}


def host_devices() -> list[str]:
    return sorted(name for _, name in socket.if_nameindex())


def packets_by_class(network: NetemBackend, receiver: str) -> dict[int, int]:
    """Return the packets sent so far, by class minor, on the switch's port towards ``receiver``."""
    with inside(network._switch), IPRoute() as ip:
        index = ip.link_lookup(ifname=network._port(receiver))[0]
        return {
            c["handle"] & 0xFFFF: c.get_attr("TCA_STATS2").get_attr("TCA_STATS_BASIC")["packets"]
            for c in ip.get_classes(index)
        }


def exchange(network: NetemBackend, sender: str, receiver: str) -> bytes | None:
    """Send one datagram; return what arrives, or ``None`` if nothing has when the kernel is done."""
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
            filters = [
                f.get_attr("TCA_OPTIONS")
                for f in ip.get_filters(network._ports[node], parent=0x10000)
                if f.get_attr("TCA_OPTIONS") is not None
            ]
            assert [f.get_attr("TCA_BPF_OPS_LEN") for f in filters] == [5]


def test_a_packet_goes_through_the_class_of_its_sender(network: NetemBackend) -> None:
    before = packets_by_class(network, "hub")
    assert exchange(network, "near", "hub") == b"hello"
    after = packets_by_class(network, "hub")
    assert {m: after[m] - before[m] for m in after} == {
        qdiscs.DROP_MINOR: 0,
        network._minor["near"]: 1,
        network._minor["far"]: 0,
    }


@pytest.mark.parametrize("subnet", ["10.77.0.0/16", "172.20.144.0/24"])
def test_packets_find_their_classes_in_any_subnet(subnet: str, without_leaves: list[TcRequest]) -> None:
    network = NetemBackend(NetworkSpec("test", NODES, LINKS, subnet=IPv4Network(subnet)))
    network.open()
    try:
        assert network.address("near").startswith(subnet[:7])
        assert exchange(network, "near", "hub") == b"hello"
        counted = packets_by_class(network, "hub")
    finally:
        network.close()
    assert (counted[network._minor["near"]], counted[qdiscs.DROP_MINOR]) == (1, 0)


def test_each_of_150_nodes_has_its_own_class_behind_one_filter(without_leaves: list[TcRequest]) -> None:
    nodes = ("hub", *(f"server-{i}" for i in range(149)))
    links = {pair: LINK for node in nodes[1:] for pair in (("hub", node), (node, "hub"))}
    network = NetemBackend(NetworkSpec("test", nodes, links))
    network.open()
    try:
        with inside(network._namespaces["hub"]):
            inbox = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        with inbox:
            inbox.bind((network.address("hub"), 0))
            inbox.settimeout(10)
            for node in nodes[1:]:
                with (
                    inside(network._namespaces[node]),
                    socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as outbox,
                ):
                    outbox.sendto(node.encode(), inbox.getsockname())
            missing = set(nodes[1:])
            with contextlib.suppress(TimeoutError):
                while missing:
                    missing.remove(inbox.recv(100).decode())
        counted = packets_by_class(network, "hub")
        with inside(network._switch), IPRoute() as ip:
            filters = [
                f for f in ip.get_filters(network._ports["hub"], parent=0x10000) if f.get_attr("TCA_OPTIONS")
            ]
    finally:
        network.close()
    expected = {qdiscs.DROP_MINOR: 0, **{network._minor[node]: 1 for node in nodes[1:]}}
    assert (missing, counted) == (set(), expected), (
        "a missing packet that is counted was lost behind its class"
    )
    assert len(filters) == 1


def test_a_packet_that_waits_for_its_receiver_no_longer_counts_against_its_sender(
    network: NetemBackend,
) -> None:
    wait = {"rate": 1000, "burst": 2000, "latency": "1000s"}
    with inside(network._switch), IPRoute() as ip:
        parent = 0x10000 | network._minor["hub"]
        ip.tc("add", "tbf", network._ports["near"], 0x20000, parent=parent, **wait)
    with outbox(network, "hub") as sender:
        for _ in range(10):
            sender.sendto(bytes(1000), (network.address("near"), 9))
        assert unsent_bytes(sender) == 0, "the switch's queue does not hold the socket"
    with inside(network._switch), IPRoute() as ip:
        (tbf,) = [q for q in ip.get_qdiscs(network._ports["near"]) if q.get_attr("TCA_KIND") == "tbf"]
    counted = tbf.get_attr("TCA_STATS2")
    n_waiting, n_passed = (
        counted.get_attr("TCA_STATS_QUEUE")["qlen"],
        counted.get_attr("TCA_STATS_BASIC")["packets"],
    )
    assert n_waiting > 4 and n_waiting + n_passed == 10, "one passes at once, and one more each second"
    with inside(network._namespaces["hub"]), IPRoute() as ip:
        ip.tc("add", "tbf", ip.link_lookup(ifname=kernel.DEVICE)[0], 0x20000, **wait)
    with outbox(network, "hub") as sender:
        for _ in range(10):
            sender.sendto(bytes(1000), (network.address("near"), 9))
        assert unsent_bytes(sender) > 9000, "a queue at the sender does"


@contextmanager
def outbox(network: NetemBackend, node: str) -> Iterator[socket.socket]:
    with inside(network._namespaces[node]):
        sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    with sock:
        yield sock


def unsent_bytes(sock: socket.socket) -> int:
    """Return the bytes that the kernel counts as not yet sent, which TCP small queues limit."""
    return int.from_bytes(fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(4)), "little")


def largest_packet(network: NetemBackend, connection: socket.socket, peer: socket.socket) -> int:
    """Return the bytes of the largest packet on the switch's port to ``near`` while 400 kB are sent there."""
    with inside(network._switch):
        tap = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))  # ETH_P_ALL
    with tap:
        tap.bind((network._port("near"), 3))
        tap.setblocking(False)
        connection.sendall(bytes(400_000))
        n_left = 400_000  # a socket with a timeout does not wait for all of it in one go
        while n_left:
            received = peer.recv(n_left)
            assert received, "the connection was closed"
            n_left -= len(received)
        largest = 0
        while True:
            try:
                largest = max(largest, len(tap.recv(1 << 17)))
            except BlockingIOError:
                return largest


def test_where_packets_are_lost_at_random_super_packets_are_cut_also_in_open_connections(
    network: NetemBackend,
) -> None:
    with inside(network._namespaces["near"]):
        listener = socket.create_server((network.address("near"), 0))
    with inside(network._namespaces["hub"]):
        connection = socket.create_connection(listener.getsockname(), timeout=10)
    peer, _ = listener.accept()
    with listener, connection, peer:
        peer.settimeout(10)
        assert largest_packet(network, connection, peer) > 1514
        for loss_ratio, is_cut in ((0.1, True), (1.0, False), (0.1, True), (0.0, False)):
            network.update({("hub", "near"): replace(LINK, loss_ratio=loss_ratio)})
            assert (largest_packet(network, connection, peer) <= 1514) == is_cut


def test_a_link_that_loses_packets_from_the_start_gets_them_cut(without_leaves: list[TcRequest]) -> None:
    lossy = replace(LINK, loss_ratio=0.1)
    with opened(NetemBackend(NetworkSpec("test", NODES, LINKS | {("hub", "near"): lossy}))) as network:
        assert {node: segments(network, node) for node in NODES} == {"hub": 1, "near": 65_535, "far": 65_535}


def segments(network: NetemBackend, node: str) -> int:
    with inside(network._namespaces[node]), IPRoute() as ip:
        found: int = ip.get_links(ip.link_lookup(ifname=kernel.DEVICE)[0])[0].get_attr("IFLA_GSO_MAX_SEGS")
    return found


@contextmanager
def opened(network: NetemBackend) -> Iterator[NetemBackend]:
    network.open()
    try:
        yield network
    finally:
        network.close()


def test_an_update_changes_the_leaf_of_each_pair_and_nothing_else(
    network: NetemBackend, without_leaves: list[TcRequest]
) -> None:
    added = {(request.device, request.parent): request for request in without_leaves}
    without_leaves.clear()
    slow = Link(delay_s=0.2, rate_bps=1e6, jitter_s=0.1)
    network.update({("near", "hub"): slow, ("hub", "far"): slow})
    hub, far = network._ports["hub"], network._ports["far"]
    assert [(request.device, request.parent) for request in without_leaves] == [
        (hub, 0x10000 | network._minor["near"]),
        (far, 0x10000 | network._minor["hub"]),
    ]
    for request in without_leaves:
        assert request.change
        assert request.handle == added[request.device, request.parent].handle
        assert request.options == qdiscs.netem_options(slow, 1500)


def test_an_update_of_a_pair_without_a_link_changes_nothing_and_says_which(
    network: NetemBackend, without_leaves: list[TcRequest]
) -> None:
    without_leaves.clear()
    with pytest.raises(NetworkError, match="no link from near to far"):
        network.update({("hub", "near"): LINK, ("near", "far"): LINK})
    assert without_leaves == []


def test_an_update_that_netem_cannot_express_changes_nothing(
    network: NetemBackend, without_leaves: list[TcRequest]
) -> None:
    without_leaves.clear()
    with pytest.raises(NetworkError, match="netem's delays are from 0 to 275 s"):
        network.update({("hub", "near"): LINK, ("hub", "far"): Link(300.0, 1e9, 0.0, 0.5)})
    assert without_leaves == []
    assert segments(network, "hub") == 65_535


def test_the_kernel_changes_a_discipline_that_exists_and_refuses_one_that_does_not() -> None:
    def pfifo(limit: int, change: bool) -> TcRequest:
        return TcRequest(NEW_QDISC, 1, 0x10000, 0xFFFF_FFFF, "pfifo", struct.pack("=I", limit), change=change)

    namespace = new_network_namespace()
    try:
        with inside(namespace), IPRoute() as ip:
            with pytest.raises(OSError, match="changing pfifo 0x10000"):
                rtnetlink.send([pfifo(5, change=True)])
            rtnetlink.send([pfifo(5, change=False), pfifo(7, change=True)])
            (found,) = [q for q in ip.get_qdiscs(1) if q.get_attr("TCA_KIND") == "pfifo"]
            assert found.get_attr("TCA_OPTIONS")["limit"] == 7
    finally:
        os.close(namespace)


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
    without_leaves: list[TcRequest],
) -> None:
    before = descriptors(), host_devices()
    backend = NetemBackend(NetworkSpec("test", NODES, LINKS))
    backend.open()
    assert host_devices() == before[1], "the host's own network is never touched"
    backend.close()
    backend.close()
    assert (descriptors(), host_devices()) == before


def test_a_network_that_fails_half_way_leaves_nothing_and_says_why(
    without_leaves: list[TcRequest], monkeypatch: pytest.MonkeyPatch
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
