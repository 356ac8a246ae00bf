"""Runs inside the guest, by its path: what netem says that it was told, and what it does with packets.

What every network must do is in ``tests/contract``, which runs in the guest too.
"""

import os
import socket
from collections.abc import Iterator
from dataclasses import replace

import pytest
from pyroute2 import IPRoute

from netem import rtnetlink
from netem.kernel import NetemBackend
from netem.probe import become_network_admin
from netem.qdiscs import FIRST_NODE_MINOR, QUEUE_PACKETS, queue_limit_packets, receiver_tree
from netem.spec import NetworkSpec
from netem.syscalls import inside, new_network_namespace
from policies.links import Link

PLAIN = Link(0.3, 1e9)


@pytest.fixture(scope="module", autouse=True)
def administrator() -> None:
    become_network_admin()


@pytest.fixture
def small() -> Iterator[NetemBackend]:
    links = {("a", "b"): PLAIN, ("b", "a"): PLAIN}
    network = NetemBackend(NetworkSpec("guest", ("a", "b"), links))
    network.open()
    yield network
    network.close()


def leaf(network: NetemBackend, sender: str, receiver: str) -> dict[str, float]:
    with inside(network._switch), IPRoute() as ip:
        return leaves(ip, network._ports[receiver])[network._minor[sender]]


def leaves(ip: IPRoute, device: int) -> dict[int, dict[str, float]]:
    """What the kernel says of each netem leaf of a device, by its sender's number."""
    answer = {}
    for leaf in ip.get_qdiscs(device):
        if leaf.get_attr("TCA_KIND") != "netem":
            continue
        options, queue = leaf.get_attr("TCA_OPTIONS"), leaf.get_attr("TCA_STATS2").get_attr("TCA_STATS_QUEUE")
        answer[leaf["parent"] & 0xFFFF] = {
            "delay_s": options["delay"] * 64e-9,
            "jitter_s": options["jitter"] * 64e-9,
            "loss_ratio": options["loss"] / (2**32 - 1),
            "limit": options["limit"],
            "rate_bps": options.get_attr("TCA_NETEM_RATE")["rate"] * 8 * 1500 / 1514,
            "drops": queue["drops"],
            "queued": queue["qlen"],
        }
    return answer


def check(found: dict[str, float], link: Link) -> None:
    assert found["delay_s"] == pytest.approx(link.delay_s, abs=64e-9)
    assert found["jitter_s"] == pytest.approx(link.jitter_s, abs=64e-9)
    assert found["loss_ratio"] == pytest.approx(link.loss_ratio, abs=1e-9)
    assert found["rate_bps"] == pytest.approx(link.rate_bps, abs=8, rel=1e-4)
    assert found["limit"] == queue_limit_packets(link)


def test_the_kernel_reads_back_every_link_of_150_nodes_as_it_was_asked_for() -> None:
    links = {
        FIRST_NODE_MINOR + i: Link(0.001 * (i + 1), 1e6 * (i + 1), 0.0005 * i, i / 1000) for i in range(149)
    }
    namespace = new_network_namespace()
    try:
        with inside(namespace), IPRoute() as ip:
            ip.link("add", ifname="port0", kind="veth", peer={"ifname": "port1"})
            index = ip.link_lookup(ifname="port0")[0]
            rtnetlink.send(receiver_tree(index, links, 1500))
            found = leaves(ip, index)
    finally:
        os.close(namespace)
    assert sorted(found) == sorted(links)
    for minor, link in links.items():
        check(found[minor], link)


def test_the_kernel_reads_back_an_update_and_the_other_direction_stays(small: NetemBackend) -> None:
    for link in (
        Link(0.2, 1e6, 0.1, 0.25),
        replace(PLAIN, loss_ratio=1.0),
        Link(0.001, 1e4),
        PLAIN,
    ):
        small.update({("a", "b"): link})
        check(leaf(small, "a", "b"), link)
        check(leaf(small, "b", "a"), PLAIN)


def datagrams(network: NetemBackend) -> tuple[socket.socket, socket.socket]:
    """A socket in ``a`` that sends to one in ``b``, which has room for all that a test sends."""
    with inside(network._namespaces["b"]):
        inbox = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    with inside(network._namespaces["a"]):
        outbox = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    inbox.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
    inbox.bind((network.address("b"), 0))
    inbox.settimeout(30)
    outbox.connect(inbox.getsockname())
    return outbox, inbox


def test_packets_on_their_way_outlive_a_cut_and_are_not_overtaken_by_those_of_a_shorter_delay(
    small: NetemBackend,
) -> None:
    outbox, inbox = datagrams(small)
    with outbox, inbox:
        small.update({("a", "b"): Link(3.0, 1e9)})
        outbox.send(b"on its way")
        small.update({("a", "b"): Link(0.0, 1e9, 0.0, 1.0)})
        outbox.send(b"lost")
        small.update({("a", "b"): Link(0.0, 1e9)})
        outbox.send(b"after the cut")
        assert leaf(small, "a", "b")["queued"] == 2
        assert [inbox.recv(100) for _ in range(2)] == [b"on its way", b"after the cut"]


def test_a_long_fast_link_full_of_small_packets_drops_none(small: NetemBackend) -> None:
    outbox, inbox = datagrams(small)
    n_packets = QUEUE_PACKETS + 2_000
    with outbox, inbox:
        small.update({("a", "b"): Link(200.0, 1e9)})
        for _ in range(n_packets):
            outbox.send(b"x")
    found = leaf(small, "a", "b")
    assert (found["queued"], found["drops"]) == (n_packets, 0)
