"""Runs inside the guest, by its path: what the kernel's netem has been told, and what it does with it."""

import socket
from collections.abc import Iterator
from dataclasses import replace

import pytest
from pyroute2 import IPRoute

from netem.kernel import NetemBackend
from netem.probe import become_network_admin
from netem.qdiscs import QUEUE_PACKETS, queue_limit_packets
from netem.spec import LinkProfile, NetworkSpec
from netem.syscalls import inside

NODES = ("hub", *(f"server-{i}" for i in range(149)))
LINKS = {
    pair: LinkProfile(0.001 * (i + 1), 1e6 * (i + 1), 0.0005 * i, i / 1000)
    for i, node in enumerate(NODES[1:])
    for pair in (("hub", node), (node, "hub"))
}
PLAIN = LinkProfile(0.3, 1e9)


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


def leaves(network: NetemBackend, receiver: str) -> dict[int, dict[str, float]]:
    """What the kernel says of each netem leaf towards ``receiver``, by its sender's number."""
    with inside(network._switch), IPRoute() as ip:
        found = [
            q for q in ip.get_qdiscs(network._ports[receiver]) if q.get_attr("TCA_KIND") == "netem"
        ]
    answer = {}
    for leaf in found:
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


def check(found: dict[str, float], link: LinkProfile) -> None:
    assert found["delay_s"] == pytest.approx(link.delay_s, abs=64e-9)
    assert found["jitter_s"] == pytest.approx(link.jitter_s, abs=64e-9)
    assert found["loss_ratio"] == pytest.approx(link.loss_ratio, abs=1e-9)
    assert found["rate_bps"] == pytest.approx(link.rate_bps, rel=1e-4)
    assert found["limit"] == queue_limit_packets(link)


def test_the_kernel_reads_back_every_link_of_150_nodes_as_it_was_asked_for() -> None:
    network = NetemBackend(NetworkSpec("guest", NODES, LINKS))
    network.open()
    try:
        at_hub = leaves(network, "hub")
        assert sorted(at_hub) == sorted(network._minor[node] for node in NODES[1:])
        for node in NODES[1:]:
            check(at_hub[network._minor[node]], LINKS[node, "hub"])
        for node in NODES[1::30]:
            (found,) = leaves(network, node).items()
            assert found[0] == network._minor["hub"]
            check(found[1], LINKS["hub", node])
    finally:
        network.close()


def test_the_kernel_reads_back_an_update_and_the_other_direction_stays(small: NetemBackend) -> None:
    for link in (
        LinkProfile(0.2, 1e6, 0.1, 0.25),
        replace(PLAIN, loss_ratio=1.0),
        LinkProfile(0.001, 1e4),
        PLAIN,
    ):
        small.update({("a", "b"): link})
        check(leaves(small, "b")[small._minor["a"]], link)
        check(leaves(small, "a")[small._minor["b"]], PLAIN)


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


def test_packets_of_a_link_that_jitters_arrive_in_order(small: NetemBackend) -> None:
    outbox, inbox = datagrams(small)
    with outbox, inbox:
        small.update({("a", "b"): LinkProfile(0.05, 1e9, 0.05)})
        for number in range(100):
            outbox.send(number.to_bytes(4, "big"))
        assert [int.from_bytes(inbox.recv(4), "big") for _ in range(100)] == list(range(100))


def test_packets_on_their_way_outlive_a_cut_and_are_not_overtaken_by_those_of_a_shorter_delay(
    small: NetemBackend,
) -> None:
    outbox, inbox = datagrams(small)
    with outbox, inbox:
        small.update({("a", "b"): LinkProfile(5.0, 1e9)})
        outbox.send(b"on its way")
        small.update({("a", "b"): LinkProfile(0.0, 1e9, 0.0, 1.0)})
        outbox.send(b"lost")
        small.update({("a", "b"): LinkProfile(0.0, 1e9)})
        outbox.send(b"after the cut")
        assert leaves(small, "b")[small._minor["a"]]["queued"] == 2
        assert [inbox.recv(100) for _ in range(2)] == [b"on its way", b"after the cut"]


def test_a_long_fast_link_full_of_small_packets_drops_none(small: NetemBackend) -> None:
    outbox, inbox = datagrams(small)
    n_packets = QUEUE_PACKETS + 2_000
    with outbox, inbox:
        small.update({("a", "b"): LinkProfile(200.0, 1e9)})
        for _ in range(n_packets):
            outbox.send(b"x")
    found = leaves(small, "b")[small._minor["a"]]
    assert (found["queued"], found["drops"]) == (n_packets, 0)


def test_a_fifth_of_the_packets_is_lost_where_a_fifth_is_asked(small: NetemBackend) -> None:
    outbox, inbox = datagrams(small)
    with outbox, inbox:
        small.update({("a", "b"): LinkProfile(200.0, 1e9, 0.0, 0.2)})
        for _ in range(2_000):
            outbox.send(b"x")
    found = leaves(small, "b")[small._minor["a"]]
    assert found["queued"] + found["drops"] == 2_000
    assert 280 < found["drops"] < 520, "400 expected, 6.7 standard deviations either way"
