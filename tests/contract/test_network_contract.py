"""One suite for every network backend: what ``netem.backend`` promises, tried with plain TCP sockets.

Each test builds a network of three nodes (a hub with links to two others, which have none between
them) in a forked single-threaded process, as the launcher does.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from netem.backend import Backend
from netem.networks import NETWORKS, Network
from netem.probe import become_network_admin
from netem.spec import NetworkSpec
from policies.links import Link
from tests.support.children import echo_s, in_child

NODES = ("hub", "near", "far")
LINKS = {
    ("hub", "near"): Link(0.005, 100e6),
    ("near", "hub"): Link(0.005, 100e6),
    ("hub", "far"): Link(0.020, 1e9),
    ("far", "hub"): Link(0.020, 1e9),
}
PORT = 7100


EMULATED = [network for network in NETWORKS.values() if network.nodes_are_processes and network.emulates]


@pytest.fixture(params=EMULATED, ids=lambda network: network.name)
def backend_class(request: pytest.FixtureRequest) -> type[Backend]:
    network: Network = request.param
    missing = network.missing()
    if missing is not None:
        if network.name in os.environ.get("TESTBED_REQUIRE", "").split(","):
            pytest.fail(f"the {network.name} network must work here, but: {missing}")
        pytest.skip(f"network {network.name}: {missing}")
    return network.backend()


class Running:
    """An open network with its worker, and an echo server in every node but the hub."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self._pids: list[int] = []
        worker = backend.worker()
        if worker is not None:
            self.fork(worker)
        reading, writing = os.pipe()
        for number, node in enumerate(NODES[1:]):
            self.fork(lambda node=node, number=number: self._echo(node, PORT + number, writing))
        os.close(writing)
        for _ in NODES[1:]:
            assert os.read(reading, 1) == b"+", "an echo server did not start"
        os.close(reading)

    def fork(self, run: Callable[[], None]) -> None:
        pid = os.fork()
        if pid == 0:
            try:
                run()
            finally:
                os._exit(0)
        self._pids.append(pid)

    def _echo(self, node: str, port: int, listening: int) -> None:
        self.backend.enter(node)
        listener = socket.create_server((self.backend.address(node), port))
        os.write(listening, b"+")
        while True:
            connection, _ = listener.accept()
            while header := connection.recv(8, socket.MSG_WAITALL):
                size = int.from_bytes(header, "big")
                connection.sendall(connection.recv(size, socket.MSG_WAITALL))

    def connect(self, source: str, target: str, timeout_s: float = 10.0) -> socket.socket:
        """Connect from within ``source``, whose network the caller has entered."""
        port = PORT + NODES.index(target) - 1
        connection = socket.create_connection((self.backend.address(target), port), timeout_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection

    def stop(self) -> None:
        for pid in self._pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def with_network(backend_class: type[Backend], work: Callable[[Running], Any]) -> Any:
    """Open the network in a child process, run ``work`` in a further child inside the hub."""

    def whole() -> Any:
        if not backend_class.network.delays_in_client:
            become_network_admin()
        backend = backend_class(NetworkSpec("contract", NODES, LINKS))
        backend.open()
        running = Running(backend)
        try:

            def inside_hub() -> Any:
                backend.enter("hub")
                return work(running)

            return in_child(inside_hub)
        finally:
            running.stop()
            backend.close()
            backend.close()

    return in_child(whole)


def test_a_message_crosses_a_link_intact_and_takes_at_least_the_round_trip(
    backend_class: type[Backend],
) -> None:
    payload = bytes(range(256)) * 112  # 28,672 bytes

    def work(running: Running) -> dict[str, float]:
        times = {}
        for node in NODES[1:]:
            connection = running.connect("hub", node)
            echo_s(connection, b"x")
            times[node] = min(echo_s(connection, payload) for _ in range(5))
        return times

    times = with_network(backend_class, work)
    if not backend_class.network.delays_in_client:
        for node in NODES[1:]:
            up, down = LINKS["hub", node], LINKS[node, "hub"]
            asked = up.delay_s + down.delay_s + up.transmission_s(28_672) + down.transmission_s(28_672)
            # Shapers let the first packets of an idle link pass at once: 2 x 3200 bytes at 100 Mbit/s.
            assert times[node] > asked - 0.001


def test_a_prompt_sized_message_needs_no_further_round_trips_on_a_warm_connection(
    backend_class: type[Backend],
) -> None:
    payload = os.urandom(573_440)

    def work(running: Running) -> float:
        connection = running.connect("hub", "far")
        echo_s(connection, payload)
        return min(echo_s(connection, payload) for _ in range(10))  # the best: machines are shared

    took_s = with_network(backend_class, work)
    if not backend_class.network.delays_in_client:
        link = LINKS["hub", "far"]
        one_flight = 2 * (link.delay_s + link.transmission_s(573_440))
        assert took_s < one_flight + 2 * link.delay_s  # slow start would add at least one round trip


def test_nodes_without_a_link_cannot_reach_each_other(backend_class: type[Backend]) -> None:
    if backend_class.network.delays_in_client:
        pytest.skip("loopback: all nodes share the machine's own network, by design")

    def whole() -> str:
        become_network_admin()
        backend = backend_class(NetworkSpec("contract", NODES, LINKS))
        backend.open()
        running = Running(backend)
        try:

            def inside_near() -> str:
                backend.enter("near")
                try:
                    running.connect("near", "far", timeout_s=1.0)
                except OSError as error:
                    return type(error).__name__
                return "connected"

            return str(in_child(inside_near))
        finally:
            running.stop()
            backend.close()

    assert in_child(whole) != "connected"


def _devices() -> list[str]:
    return sorted(path.name for path in Path("/sys/class/net").iterdir())


def test_closing_leaves_no_device_and_no_descriptor(backend_class: type[Backend]) -> None:
    def whole() -> tuple[int, int, list[str], list[str]]:
        if not backend_class.network.delays_in_client:
            become_network_admin()
        descriptors, devices = len(os.listdir("/proc/self/fd")), _devices()
        backend = backend_class(NetworkSpec("contract", NODES, LINKS))
        backend.open()
        backend.close()
        backend.close()
        return descriptors, len(os.listdir("/proc/self/fd")), devices, _devices()

    descriptors, descriptors_after, devices, devices_after = in_child(whole)
    assert descriptors_after == descriptors
    assert devices_after == devices


def test_an_open_that_fails_half_way_leaves_nothing(backend_class: type[Backend]) -> None:
    if backend_class.network.delays_in_client:
        pytest.skip("loopback: open() builds nothing that could fail")

    def whole() -> tuple[int, int]:
        become_network_admin()
        before = len(os.listdir("/proc/self/fd"))
        spec = NetworkSpec("contract", ("hub", "near", "hub"), LINKS, mtu=1)  # no device takes this MTU
        backend = backend_class(spec)
        try:
            backend.open()
        except Exception:
            return before, len(os.listdir("/proc/self/fd"))
        raise AssertionError("an MTU of 1 was accepted")

    before, after = in_child(whole)
    assert after == before


@pytest.fixture(autouse=True)
def nothing_is_left_in_the_hosts_own_network() -> Iterator[None]:
    before = _devices()
    yield
    assert _devices() == before
