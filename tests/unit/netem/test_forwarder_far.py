"""The forwarders of two machines over the loopback interface, with socket pairs as devices."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator, Mapping

import pytest

from netem.fabric import EARLY_S
from netem.forwarder_changes import ChangeChannel
from netem.forwarder_far import FarForwarder
from netem.forwarder_stats import StatsPage
from netem.forwarder_underlay import SETTLED_SAMPLES, Underlay, bind_socket, piece_bytes_to
from netem.spec import Endpoint, NetworkError, NetworkSpec
from policies.links import Link
from tests.support.packets import tcp_packet
from tests.support.runs import wait_until

_NODES = ("a", "b")
_ADDRESSES = {"a": "198.18.0.1", "b": "198.18.0.2"}
_NUMBERS = {"a": 0, "b": 1}
"""Every node is alone on a machine."""
_KEY = bytes(32)
Links = Mapping[tuple[str, str], Link]


class Pair:
    """``a`` and ``b``, each on its own machine; the tests hold the nodes' ends of the devices."""

    def __init__(
        self,
        links: Links,
        keys: Mapping[str, bytes],
        piece_bytes: int | None,
        paths: Mapping[tuple[str, str], tuple[str, ...]],
    ) -> None:
        spec = NetworkSpec(
            "test",
            _NODES,
            links,
            shared={"core": 1e6} if paths else {},
            paths=paths,
            machines={"a": "m0", "b": "m1"},
        )
        sockets = {node: bind_socket("127.0.0.1", 0) for node in _NODES}
        self.endpoints: dict[str, Endpoint] = {node: sock.getsockname() for node, sock in sockets.items()}
        self.nodes: dict[str, socket.socket] = {}
        self.pages: dict[str, StatsPage] = {}
        self.changes: dict[str, ChangeChannel] = {}
        self._pids: dict[str, int] = {}
        for node, other in (("a", "b"), ("b", "a")):
            mine, device = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
            mine.settimeout(20)
            self.nodes[node] = mine
            page = self.pages[node] = StatsPage(2)
            changes = self.changes[node] = ChangeChannel(pair for pair in links if pair[0] == node)
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                fits = piece_bytes or piece_bytes_to(probe, self.endpoints[other])
            number = _NUMBERS[other]
            underlay = Underlay(
                sockets[node], 1 - number, {number: self.endpoints[other]}, {number: fits}, keys[node]
            )
            addresses = {each: socket.inet_aton(address) for each, address in _ADDRESSES.items()}
            forwarder = FarForwarder(
                spec, {node: device.fileno()}, addresses, page, changes, EARLY_S, underlay, _NUMBERS
            )
            self._pids[node] = os.fork()
            if self._pids[node] == 0:
                try:
                    forwarder.run()
                finally:
                    os._exit(1)
            device.close()
        for sock in sockets.values():
            sock.close()

    def send(self, number: int, source: str = "a", target: str = "b", n_bytes: int = 4) -> None:
        payload = number.to_bytes(n_bytes, "big")
        segment_bytes = 1448 if n_bytes > 1448 else 0
        packet = tcp_packet(payload, segment_bytes, _ADDRESSES[source], _ADDRESSES[target])
        self.nodes[source].send(packet)

    def receive(self, node: str = "b") -> int:
        return int.from_bytes(self.nodes[node].recv(70_000)[-4:], "big")

    def wait_for_clocks(self) -> None:
        for node in _NODES:
            wait_until(
                lambda node=node: self.pages[node].machine(1 - _NUMBERS[node]).n_samples >= SETTLED_SAMPLES,
                f"{node} to know the other clock",
            )

    def kill(self, node: str) -> None:
        os.kill(self._pids[node], signal.SIGKILL)
        os.waitpid(self._pids.pop(node), 0)

    def close(self) -> None:
        for node in tuple(self._pids):
            self.kill(node)
        for each in (*self.nodes.values(), *self.pages.values(), *self.changes.values()):
            each.close()


Make = Callable[..., Pair]


@pytest.fixture
def pair() -> Iterator[Make]:
    made: list[Pair] = []

    def make(
        links: Links,
        keys: Mapping[str, bytes] | None = None,
        piece_bytes: int | None = None,
        paths: Mapping[tuple[str, str], tuple[str, ...]] | None = None,
    ) -> Pair:
        made.append(Pair(links, keys or dict.fromkeys(_NODES, _KEY), piece_bytes, paths or {}))
        return made[-1]

    yield make
    for each in made:
        each.close()


_FAST = Link(0.02, 10e9)
_BOTH = {("a", "b"): _FAST, ("b", "a"): _FAST}


def test_packets_of_all_sizes_cross_in_order_both_ways(pair: Make) -> None:
    running = pair(_BOTH, piece_bytes=1402)
    sizes = [4, 1448, 2000, 30_000, 64_000]
    for number, n_bytes in enumerate(sizes):
        running.send(number, n_bytes=n_bytes)
    running.send(99, "b", "a")
    assert [running.receive("b") for _ in sizes] == list(range(len(sizes)))
    assert running.receive("a") == 99


def test_a_packet_in_time_is_not_late_and_is_delivered_at_its_instant(pair: Make) -> None:
    running = pair({("a", "b"): Link(0.3, 1e9), ("b", "a"): _FAST})
    running.wait_for_clocks()
    for number in range(50):
        running.send(number)
    assert [running.receive() for _ in range(50)] == list(range(50))
    wait_until(lambda: running.pages["b"].read().packets == 50, "the counters")
    stats, machine = running.pages["b"].read(), running.pages["b"].machine(0)
    assert (stats.underlay_late, machine.late, machine.lost, machine.broken) == (0, 0, 0, 0)
    assert stats.underlay_rtt_s == machine.rtt_s > machine.rtt_min_s > 0
    assert 0 < machine.uncertainty_s <= machine.uncertainty_max_s == stats.clock_uncertainty_s
    assert abs(machine.offset_s) <= machine.uncertainty_s  # both are this machine's clock


def test_a_packet_that_comes_after_its_instant_is_delivered_at_once_and_counts_as_late(pair: Make) -> None:
    running = pair({("a", "b"): Link(0.0, 100e9), ("b", "a"): _FAST})
    running.wait_for_clocks()
    for number in range(50):
        running.send(number)
        assert running.receive() == number
    wait_until(lambda: running.pages["b"].read().underlay_late == 50, "the counters")
    assert running.pages["b"].machine(0).late_max_s > 0


def test_packets_keep_their_order_when_the_delay_shrinks_on_their_way(pair: Make) -> None:
    running = pair({("a", "b"): Link(0.2, 1e9)})
    for number in range(20):
        running.send(number)
    running.changes["a"].send({("a", "b"): Link(0.03, 1e9)})
    for number in range(20, 40):
        running.send(number)
    assert [running.receive() for _ in range(40)] == list(range(40))


def test_packets_that_wait_for_a_slow_link_keep_their_order_too(pair: Make) -> None:
    running = pair({("a", "b"): Link(0.02, 2e6)})  # 6 ms per packet: most are held back by the sender
    for number in range(40):
        running.send(number, n_bytes=1448)
    running.changes["a"].send({("a", "b"): Link(0.02, 1e9)})
    for number in range(40, 60):
        running.send(number)
    assert [running.receive() for _ in range(60)] == list(range(60))


def test_packets_keep_their_order_under_jitter(pair: Make) -> None:
    running = pair({("a", "b"): Link(0.02, 1e9, jitter_s=0.02)})
    for number in range(100):
        running.send(number)
    assert [running.receive() for _ in range(100)] == list(range(100))


def test_packets_cross_shared_links_before_they_leave_the_machine(pair: Make) -> None:
    running = pair({("a", "b"): Link(0.02, 1e9)}, paths={("a", "b"): ("core",)})
    for number in range(20):
        running.send(number)
    assert [running.receive() for _ in range(20)] == list(range(20))


def test_a_change_is_in_force_when_the_call_ends(pair: Make) -> None:
    running = pair({("a", "b"): Link(0.01, 1e9)})
    for round_ in range(10):
        running.changes["a"].send({("a", "b"): Link(0.01, 1e9, loss_ratio=1.0)})
        running.send(1000 + round_)
        running.changes["a"].send({("a", "b"): Link(0.01, 1e9)})
        running.send(round_)
        assert running.receive() == round_


def test_a_forwarder_with_another_key_is_not_heard(pair: Make) -> None:
    running = pair(_BOTH, keys={"a": _KEY, "b": bytes(range(32))})
    running.send(1)
    wait_until(lambda: running.pages["b"].read().underlay_refused > 0, "something refused")
    assert running.pages["b"].read().packets == 0
    assert running.pages["a"].machine(1).n_samples == 0


def test_what_strangers_send_to_the_port_is_refused_and_packets_still_cross(pair: Make) -> None:
    running = pair(_BOTH)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        for n_bytes in (0, 1, 40, 52, 68, 69, 70, 71, 1400, 60_000):
            stranger.sendto(bytes(n_bytes), running.endpoints["b"])
    running.send(1)
    assert running.receive() == 1
    wait_until(lambda: running.pages["b"].read().underlay_refused == 10, "the counters")


def test_when_the_other_forwarder_dies_packets_are_gone_and_nothing_fails(pair: Make) -> None:
    running = pair(_BOTH)
    running.send(1)
    assert running.receive() == 1
    running.kill("b")
    for number in range(100):
        running.send(number, n_bytes=30_000)
    running.changes["a"].send({("a", "b"): _FAST})  # it still takes changes


def test_a_key_that_is_too_short_is_refused_in_one_sentence() -> None:
    with (
        bind_socket("127.0.0.1", 0) as sock,
        pytest.raises(NetworkError, match="a run's key has 16 to 64 bytes, this one 3"),
    ):
        Underlay(sock, 0, {}, {}, b"key")


def test_an_address_of_another_machine_cannot_be_bound() -> None:
    with pytest.raises(
        NetworkError, match=r"cannot use 192\.0\.2\.1 port 0: .*; name an IPv4 address of this machine"
    ):
        bind_socket("192.0.2.1", 0)
