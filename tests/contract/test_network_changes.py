"""One suite for every network backend: jitter, loss, and links that change while packets flow.

As in ``test_network_contract``, a single-threaded process holds the network open, as the launcher does;
here it also changes links whenever the process in the hub asks it to.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from netem.backend import Backend
from netem.probe import become_network_admin
from netem.spec import NetworkError, NetworkSpec
from policies.links import Link
from tests.contract.test_network_contract import (
    LINKS,
    NODES,
    Running,
    backend_class,
    nothing_is_left_in_the_hosts_own_network,
)
from tests.support.children import echo_s, in_child

__all__ = ["backend_class", "nothing_is_left_in_the_hosts_own_network"]  # fixtures

_SINK_PORT = 7200
_END = b"end"
Links = Mapping[tuple[str, str], Link]
Change = Callable[[int], None]


def both_ways(node: str, profile: Link) -> Links:
    return {("hub", node): profile, (node, "hub"): profile}


def with_changes(
    kind: type[Backend],
    work: Callable[[Running, Change], Any],
    changes: Sequence[Links] = (),
    links: Links = LINKS,
) -> Any:
    """Run ``work(running, change)`` inside the hub; ``change(n)`` puts ``changes[n]`` into force."""
    if kind.network.delays_in_client:
        pytest.skip(f"{kind.network.name}: clients delay messages and are told of changes, by design")

    def whole() -> Any:
        become_network_admin()
        backend = kind(NetworkSpec("contract", NODES, links))
        backend.open()
        running = Running(backend)
        _start_sink(running)
        holder, asker = socket.socketpair()

        def change(number: int) -> None:
            asker.send(bytes([number]))
            assert asker.recv(1) == b"+", "the change was refused"

        def inside_hub() -> None:
            signal.alarm(50)
            holder.close()
            backend.enter("hub")
            try:
                answer = {"value": work(running, change)}
            except BaseException as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
            asker.sendall(b"\xff" + json.dumps(answer).encode())

        try:
            running.fork(inside_hub)
            asker.close()
            while (asked := holder.recv(1)) != b"\xff":
                assert asked, "the process in the hub ended without an answer"
                backend.update(changes[asked[0]])
                holder.send(b"+")
            with holder.makefile("rb") as rest:
                return json.loads(rest.read())
        finally:
            holder.close()
            running.stop()
            backend.close()

    answer = in_child(whole)
    assert "error" not in answer, answer["error"]
    return answer["value"]


def _start_sink(running: Running) -> None:
    """In ``far``: record the numbers that datagrams contain, and send them, in their order, when asked."""
    reading, writing = os.pipe()

    def serve() -> None:
        running.backend.enter("far")
        sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        sock.bind((running.backend.address("far"), _SINK_PORT))
        os.write(writing, b"+")
        numbers: list[int] = []
        while True:
            data, sender = sock.recvfrom(2048)
            if data == _END:
                sock.sendto(json.dumps(numbers).encode(), sender)
            else:
                numbers.append(int.from_bytes(data, "big"))

    running.fork(serve)
    os.close(writing)
    assert os.read(reading, 1) == b"+", "the sink did not start"
    os.close(reading)


def _to_sink(running: Running) -> socket.socket:
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.connect((running.backend.address("far"), _SINK_PORT))
    sock.settimeout(2.0)
    return sock


def _send(sock: socket.socket, numbers: range) -> None:
    for number in numbers:
        sock.send(number.to_bytes(4, "big"))


def _arrived(sock: socket.socket) -> list[int]:
    """Return what the sink has received; asks again if the question or the answer is lost."""
    for _ in range(20):
        sock.send(_END)
        try:
            return list(json.loads(sock.recv(65_000)))
        except TimeoutError:
            continue
    raise AssertionError("the sink does not answer")


def test_a_longer_delay_holds_for_packets_sent_after_the_change(backend_class: type[Backend]) -> None:
    def work(running: Running, change: Change) -> list[float]:
        connection = running.connect("hub", "near")
        echo_s(connection, b"x")
        change(0)
        longer = min(echo_s(connection, b"x") for _ in range(3))
        change(1)
        return [longer, min(echo_s(connection, b"x") for _ in range(10))]

    near = LINKS["hub", "near"]
    changes = [both_ways("near", Link(0.15, near.rate_bps)), both_ways("near", near)]
    longer_s, again_s = with_changes(backend_class, work, changes)
    assert longer_s > 0.299
    assert again_s < 0.299  # the earlier delay is back


def test_a_lower_rate_holds_for_messages_sent_after_the_change(backend_class: type[Backend]) -> None:
    slow = Link(0.005, 1e6)

    def work(running: Running, change: Change) -> float:
        connection = running.connect("hub", "near")
        echo_s(connection, bytes(28_672))
        change(0)
        return min(echo_s(connection, bytes(28_672)) for _ in range(2))

    took_s = with_changes(backend_class, work, [{("hub", "near"): slow}])
    # Shapers let the first packets of an idle link pass at once: at most two full segments.
    assert took_s > slow.transmission_s(28_672 - 3000)


def test_a_cut_link_carries_nothing_and_a_mended_one_all_again(backend_class: type[Backend]) -> None:
    def work(running: Running, change: Change) -> list[Any]:
        change(0)
        try:
            running.connect("hub", "near", timeout_s=1.5)
        except OSError as error:
            during = type(error).__name__
        else:
            during = "connected"
        other_s = echo_s(running.connect("hub", "far"), b"x")
        change(1)
        connection = running.connect("hub", "near")
        return [during, other_s, echo_s(connection, bytes(100_000))]

    near = LINKS["hub", "near"]
    cut = Link(near.delay_s, near.rate_bps, loss_ratio=1.0)
    during, other_s, after_s = with_changes(
        backend_class, work, [both_ways("near", cut), both_ways("near", near)]
    )
    assert during == "TimeoutError"
    assert other_s > 0 and after_s > 0  # pairs that did not change went on; the cut one carries data again


def test_no_packet_overtakes_another_when_the_delay_shrinks(backend_class: type[Backend]) -> None:
    def work(running: Running, change: Change) -> list[int]:
        sock = _to_sink(running)
        _send(sock, range(20))
        change(0)
        _send(sock, range(20, 40))
        return _arrived(sock)

    far = LINKS["hub", "far"]
    links = {**LINKS, ("hub", "far"): Link(0.3, far.rate_bps)}
    changes = [{("hub", "far"): Link(0.001, far.rate_bps)}]
    assert with_changes(backend_class, work, changes, links) == list(range(40))


def test_jittered_packets_keep_their_order(backend_class: type[Backend]) -> None:
    def work(running: Running, change: Change) -> list[int]:
        sock = _to_sink(running)
        _send(sock, range(200))
        return _arrived(sock)

    far = LINKS["hub", "far"]
    links = {**LINKS, ("hub", "far"): Link(0.02, far.rate_bps, jitter_s=0.02)}
    assert with_changes(backend_class, work, links=links) == list(range(200))


def test_jitter_moves_the_time_of_single_messages(backend_class: type[Backend]) -> None:
    def work(running: Running, change: Change) -> list[float]:
        connection = running.connect("hub", "far")
        return [echo_s(connection, b"x") for _ in range(20)]

    far = LINKS["hub", "far"]
    links = {**LINKS, ("hub", "far"): Link(0.1, far.rate_bps, jitter_s=0.1)}
    times_s = with_changes(backend_class, work, links=links)
    # Uniform over 0.2 s: 20 draws that all lie above 0.05 s, or all within 0.02 s, do not occur in practice.
    assert max(times_s) - min(times_s) > 0.02
    assert min(times_s) < 0.02 + 0.1


def test_the_stated_share_of_packets_is_lost(backend_class: type[Backend]) -> None:
    def work(running: Running, change: Change) -> int:
        sock = _to_sink(running)
        _send(sock, range(1000))
        return len(_arrived(sock))

    far = LINKS["hub", "far"]
    links = {**LINKS, ("hub", "far"): Link(far.delay_s, far.rate_bps, loss_ratio=0.3)}
    n_arrived = with_changes(backend_class, work, links=links)
    assert 600 < n_arrived < 800  # 700 +- 14.5 (one standard deviation)


def test_a_stream_over_a_lossy_link_arrives_whole(backend_class: type[Backend]) -> None:
    def work(running: Running, change: Change) -> float:
        connection = running.connect("hub", "near")
        return sum(echo_s(connection, os.urandom(200_000)) for _ in range(3))  # compares what comes back

    near = LINKS["hub", "near"]
    links = {**LINKS, **both_ways("near", Link(near.delay_s, near.rate_bps, loss_ratio=0.02))}
    assert with_changes(backend_class, work, links=links) > 0


def test_a_pair_without_a_link_cannot_change(backend_class: type[Backend]) -> None:
    if backend_class.network.delays_in_client:
        pytest.skip("loopback: clients are told of changes, by design")

    def whole() -> str:
        become_network_admin()
        backend = backend_class(NetworkSpec("contract", NODES, LINKS))
        backend.open()
        try:
            backend.update({("near", "far"): Link(0.1, 1e6)})
        except NetworkError as error:
            return str(error)
        finally:
            backend.close()
        return "changed"

    assert "no link from near to far" in in_child(whole)


def test_many_changes_while_a_stream_flows_lose_nothing(backend_class: type[Backend]) -> None:
    def work(running: Running, change: Change) -> float:
        connection = running.connect("hub", "near")
        started_at = time.monotonic()
        for round_ in range(20):
            change(round_ % 2)
            echo_s(connection, os.urandom(50_000))
        return time.monotonic() - started_at

    near = LINKS["hub", "near"]
    changes = [both_ways("near", Link(0.012, 50e6)), both_ways("near", near)]
    took_s = with_changes(backend_class, work, changes)
    assert took_s > 10 * (2 * 0.012 + 2 * near.delay_s) - 0.02
