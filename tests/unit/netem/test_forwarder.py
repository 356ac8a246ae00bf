"""The forwarder's loop in a process of its own, with socket pairs as devices: no namespaces, no root."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Iterator, Mapping
from typing import Protocol

import pytest

from netem.forwarder import Forwarder
from netem.forwarder_changes import ChangeChannel
from netem.forwarder_stats import StatsPage
from netem.spec import NetworkError, NetworkSpec
from policies.links import Link
from tests.support.packets import tcp_packet
from tests.support.runs import wait_until

_ADDRESSES = {"a": "198.18.0.1", "b": "198.18.0.2"}


class Fabric:
    """A forwarder between ``a`` and ``b``; the tests hold the nodes' ends of the devices."""

    def __init__(self, links: Mapping[tuple[str, str], Link], seed: int) -> None:
        spec = NetworkSpec("test", ("a", "b"), links, seed=seed)
        pairs = {
            node: socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
            for node in spec.nodes
        }
        self.nodes = {node: ends[0] for node, ends in pairs.items()}
        for end in self.nodes.values():
            end.settimeout(20)
        devices = {node: ends[1].fileno() for node, ends in pairs.items()}
        self.page = StatsPage()
        self.changes = ChangeChannel(links)
        addresses = {node: socket.inet_aton(address) for node, address in _ADDRESSES.items()}
        forwarder = Forwarder(spec, devices, addresses, self.page, self.changes)
        self.pid = os.fork()
        if self.pid == 0:
            try:
                forwarder.run()
            finally:
                os._exit(1)
        for ends in pairs.values():
            ends[1].close()

    def send(self, number: int, source: str = "a", target: str = "b") -> None:
        payload = number.to_bytes(4, "big")
        self.nodes[source].send(tcp_packet(payload, source=_ADDRESSES[source], target=_ADDRESSES[target]))

    def receive(self, node: str = "b") -> int:
        return int.from_bytes(self.nodes[node].recv(70_000)[-4:], "big")

    def close(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        for end in self.nodes.values():
            end.close()
        self.changes.close()
        self.page.close()


class Make(Protocol):
    def __call__(self, links: Mapping[tuple[str, str], Link], seed: int = 0) -> Fabric: ...


@pytest.fixture
def fabric() -> Iterator[Make]:
    made: list[Fabric] = []

    def make(links: Mapping[tuple[str, str], Link], seed: int = 0) -> Fabric:
        made.append(Fabric(links, seed))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_packets_reach_the_node_that_they_are_addressed_to(fabric: Make) -> None:
    running = fabric({("a", "b"): Link(0.001, 1e9), ("b", "a"): Link(0.001, 1e9)})
    running.send(1)
    running.send(2, "b", "a")
    assert running.receive("b") == 1
    assert running.receive("a") == 2


def test_a_packet_that_its_receiver_has_no_room_for_counts_as_dropped_and_not_as_delivered(
    fabric: Make,
) -> None:
    n_sent = 2000
    running = fabric({("a", "b"): Link(0.001, 1e9)})
    for number in range(n_sent):
        running.send(number)
    wait_until(lambda: _counted(running) == n_sent, "all packets in the counters")
    stats = running.page.read()
    running.nodes["b"].setblocking(False)
    n_received = 0
    with contextlib.suppress(BlockingIOError):
        while running.receive() >= 0:
            n_received += 1
    assert stats.dropped > 0 and stats.packets == n_received


def _counted(running: Fabric) -> int:
    stats = running.page.read()
    return stats.packets + stats.dropped + stats.lost


def test_packets_keep_their_order_when_the_delay_shrinks_on_their_way(fabric: Make) -> None:
    running = fabric({("a", "b"): Link(0.2, 1e9)})
    for number in range(20):
        running.send(number)
    running.changes.send({("a", "b"): Link(0.0, 1e9)})
    for number in range(20, 40):
        running.send(number)
    assert [running.receive() for _ in range(40)] == list(range(40))


def test_packets_keep_their_order_under_jitter(fabric: Make) -> None:
    running = fabric({("a", "b"): Link(0.02, 1e9, jitter_s=0.02)})
    for number in range(100):
        running.send(number)
    assert [running.receive() for _ in range(100)] == list(range(100))


def test_losses_are_the_same_in_every_run_with_a_seed_and_others_with_another(fabric: Make) -> None:
    def arrived(seed: int) -> list[int]:
        running = fabric({("a", "b"): Link(0.001, 1e9, loss_ratio=0.5)}, seed)
        for number in range(40):
            running.send(number)
        wait_until(lambda: _counted(running) == 40, "all packets in the counters")
        running.changes.send({("a", "b"): Link(0.001, 1e9)})
        running.send(40)
        return list(iter(running.receive, 40))

    first = arrived(0)
    assert 0 < len(first) < 40
    assert first == arrived(0) != arrived(1)


def test_a_change_is_in_force_when_the_call_ends(fabric: Make) -> None:
    running = fabric({("a", "b"): Link(0.001, 1e9)})
    for round_ in range(20):
        running.changes.send({("a", "b"): Link(0.001, 1e9, loss_ratio=1.0)})
        running.send(1000 + round_)
        running.changes.send({("a", "b"): Link(0.001, 1e9)})
        running.send(round_)
        assert running.receive() == round_


def test_a_change_of_a_pair_without_link_is_refused_and_names_it(fabric: Make) -> None:
    running = fabric({("a", "b"): Link(0.001, 1e9)})
    with pytest.raises(NetworkError, match="no link from b to a"):
        running.changes.send({("b", "a"): Link(0.001, 1e9)})


def test_many_pairs_change_at_once() -> None:
    pairs = [(f"n{i}", "hub") for i in range(1000)]
    channel = ChangeChannel(pairs)
    pid = os.fork()
    if pid == 0:
        try:
            seen = 0
            while seen < len(pairs):
                for number, profile in channel.receive():
                    assert number == seen and profile == Link(seen, 1e6, 0.5, 0.25)
                    seen += 1
            os._exit(0)
        finally:
            os._exit(1)
    channel.send({pair: Link(i, 1e6, 0.5, 0.25) for i, pair in enumerate(pairs)})
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    channel.close()


def test_a_forwarder_that_does_not_answer_is_an_error_not_a_wait_for_ever() -> None:
    channel = ChangeChannel([("a", "b")], patience_s=0.01)
    with pytest.raises(NetworkError, match="the forwarder does not accept changes of links: timed out"):
        channel.send({("a", "b"): Link(0.001, 1e9)})
    channel.close()


def test_a_lossy_link_loses_some_and_counts_them_as_lost_not_as_dropped(fabric: Make) -> None:
    running = fabric({("a", "b"): Link(0.001, 1e9, loss_ratio=0.5), ("b", "a"): Link(0.0, 1e9)})
    for number in range(100):
        running.send(number)
    running.changes.send({("a", "b"): Link(0.001, 1e9)})
    running.send(100)
    arrived = [running.receive()]
    while arrived[-1] != 100:
        arrived.append(running.receive())
    assert arrived == sorted(set(arrived))
    assert 20 < len(arrived) - 1 < 80
    while running.page.read().packets < len(arrived):  # the page is written while packets flow
        running.send(101)
        running.receive()
    stats = running.page.read()
    assert stats.lost == 100 - (len(arrived) - 1)
    assert stats.dropped == 0


def test_packets_to_where_no_link_goes_are_astray_and_not_dropped(fabric: Make) -> None:
    running = fabric({("a", "b"): Link(0.001, 1e9)})
    running.nodes["a"].send(tcp_packet(b"lost", source=_ADDRESSES["a"], target="198.18.0.9"))
    while not running.page.read().packets:  # the page is written while packets flow
        running.send(1)
        running.receive()
    assert (running.page.read().astray, running.page.read().dropped) == (1, 0)


def test_a_path_over_an_unknown_shared_link_is_refused_in_one_sentence() -> None:
    with pytest.raises(NetworkError, match="the path from a to b names 'x>y', which is not a shared link"):
        NetworkSpec("test", ("a", "b"), {}, paths={("a", "b"): ("x>y",)})
