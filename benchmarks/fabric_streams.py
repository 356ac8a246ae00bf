"""Measures plain TCP streams and datagrams between nodes of a small ``fabric`` network."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.fabric_machines import open_two
from netem.fabric import FabricBackend
from netem.probe import become_network_admin
from netem.spec import NetworkSpec
from policies.links import Link

_PORT = 7300
_WARM_S = 1.0
_CHUNK = bytes(1 << 18)
_TCP_INFO_BYTES = 232
_BYTES_SENT_AT, _BYTES_RETRANSMITTED_AT = 200, 208
"""Offsets in ``struct tcp_info`` of linux/tcp.h (since Linux 4.19)."""


@dataclass
class Streams:
    """The result of the streams: total payload rate, the forwarder's own counters, TCP's retransmissions.

    ``cpu_s_per_mb`` and ``busy_ratio`` (share of one CPU) count the forwarder's work without its waiting.
    Over two machines the first counts both forwarders, the second the busier one. ``packets_per_s``: packets
    that receivers got; most are super-packets.
    """

    goodput_bps: float
    least_share_ratio: float
    """The slowest stream's share of the total rate, times the number of streams: 1 if all are equally
    fast.
    """
    late_p99_s: float
    cpu_s_per_mb: float
    busy_ratio: float
    retransmitted_ratio: float
    dropped: int
    packets_per_s: float
    underlay_lost: int


def in_fork(work: Callable[[], Any]) -> Any:
    """Runs ``work`` in a forked process, which may change its own namespaces. Returns its result."""

    def run(answer: Connection) -> None:
        answer.send(work())

    context = multiprocessing.get_context("fork")
    mine, theirs = context.Pipe()
    process = context.Process(target=run, args=(theirs,))
    process.start()
    theirs.close()
    try:
        return mine.recv()
    finally:
        process.join()


def streams(
    n_pairs: int, link: Link, seconds: float, shared_bps: float | None = None, n_machines: int = 1
) -> Streams:
    """Measures ``n_pairs`` streams from one hub to a node each, over a link each, for so many seconds.

    ``shared_bps``: all streams also pass one shared link of that rate. ``n_machines`` 2: the hub is on one
    machine, the other nodes are on the other one.
    """
    return in_fork(lambda: _streams(n_pairs, link, seconds, shared_bps, n_machines))  # type: ignore[no-any-return]


def _streams(n_pairs: int, link: Link, seconds: float, shared_bps: float | None, n_machines: int) -> Streams:
    become_network_admin()
    nodes = ("hub", *(f"n{i}" for i in range(n_pairs)))
    back = Link(link.delay_s, link.rate_bps)
    links = {("hub", node): link for node in nodes[1:]} | {(node, "hub"): back for node in nodes[1:]}
    shared = {"core": shared_bps} if shared_bps else {}
    paths = {("hub", node): ("core",) for node in nodes[1:]} if shared else {}
    machines = {node: "m0" if node == "hub" or n_machines == 1 else "m1" for node in nodes}
    spec = NetworkSpec("streams", nodes, links, shared=shared, paths=paths, machines=machines)
    with _opened(spec) as (backends, pids):
        sender, receiver = backends[0], backends[-1]
        ready_in, ready_out = os.pipe()
        counted_in, counted_out = os.pipe()
        for node in nodes[1:]:
            pids.append(_fork(functools.partial(_sink, receiver, node, ready_out, counted_out, seconds)))
        for _ in nodes[1:]:
            assert os.read(ready_in, 1) == b"+", "a sink did not start"
        sent_in, sent_out = os.pipe()
        for node in nodes[1:]:
            pids.append(_fork(functools.partial(_source, sender, node, sent_out, seconds)))
        time.sleep(_WARM_S)
        before = [backend.stats() for backend in backends]
        late_before, began_at = receiver.lateness(), time.monotonic()
        received = [struct.unpack("d", os.read(counted_in, 8))[0] for _ in nodes[1:]]
        after, took_s = [backend.stats() for backend in backends], time.monotonic() - began_at
        worked_s = [
            (late.cpu_s - late.spun_s) - (early.cpu_s - early.spun_s)
            for early, late in zip(before, after, strict=True)
        ]
        sent = [struct.unpack("QQ", os.read(sent_in, 16)) for _ in nodes[1:]]
        return Streams(
            sum(received) * 8,
            min(received) * n_pairs / sum(received),
            min(receiver.lateness().since(late_before).quantile(0.99), after[-1].late_max_s),
            sum(worked_s) / ((after[0].wire_bytes - before[0].wire_bytes) / 1e6),
            max(worked_s) / took_s,
            sum(again for _, again in sent) / sum(total for total, _ in sent),
            sum(each.dropped for each in after),
            (after[-1].packets - before[-1].packets) / took_s,
            sum(each.underlay_lost for each in after),
        )


@contextlib.contextmanager
def _opened(spec: NetworkSpec) -> Iterator[tuple[list[FabricBackend], list[int]]]:
    """Yields the backends of one machine or two, and the list of their forwarders' process ids. At the end all
    processes in that list are killed, and the backends closed.
    """
    pids: list[int] = []
    if spec.spans_machines:
        backends = list(open_two(spec, lambda run: pids.append(_fork(run))).values())
    else:
        backends = [FabricBackend(spec)]
        backends[0].open()
        pids.append(_fork(backends[0].worker()))
    try:
        yield backends, pids
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        for backend in backends:
            backend.close()


def one_way(delay_s: float, n_datagrams: int, n_machines: int) -> list[float]:
    """Returns the delays (seconds) of small datagrams from one node to another, minus ``delay_s``; one is
    sent per 5 ms.

    Both "machines" are this one, so that sender and receiver have the same clock.
    """
    return in_fork(lambda: _one_way(delay_s, n_datagrams, n_machines))  # type: ignore[no-any-return]


def _one_way(delay_s: float, n_datagrams: int, n_machines: int) -> list[float]:
    become_network_admin()
    machines = {"a": "m0", "b": "m0" if n_machines == 1 else "m1"}
    link = Link(delay_s, 10e9)
    spec = NetworkSpec("ways", ("a", "b"), {("a", "b"): link}, machines=machines)
    with _opened(spec) as (backends, pids):
        ready_in, ready_out = os.pipe()
        seen_in, seen_out = os.pipe()
        target = backends[-1].address("b")

        def receive() -> None:
            backends[-1].enter("b")
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
                sock.bind((target, _PORT))
                os.write(ready_out, b"+")
                for _ in range(n_datagrams):
                    (sent_at,) = struct.unpack("d", sock.recv(8))
                    os.write(seen_out, struct.pack("d", time.monotonic() - sent_at - delay_s))

        def send() -> None:
            backends[0].enter("a")
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
                for _ in range(n_datagrams):
                    time.sleep(0.005)
                    sock.sendto(struct.pack("d", time.monotonic()), (target, _PORT))

        pids.append(_fork(receive))
        assert os.read(ready_in, 1) == b"+", "the receiver did not start"
        pids.append(_fork(send))
        return [struct.unpack("d", os.read(seen_in, 8))[0] for _ in range(n_datagrams)]


def _fork(run: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            run()
        finally:
            os._exit(1)
    return pid


def _sink(backend: FabricBackend, node: str, ready: int, counted: int, seconds: float) -> None:
    """Receives a stream, and writes its bytes per second between the warm-up and the end to ``counted``."""
    backend.enter(node)
    listener = socket.create_server((backend.address(node), _PORT))
    os.write(ready, b"+")
    connection, _ = listener.accept()
    buffer = bytearray(1 << 20)
    started_at = time.monotonic()
    n_bytes, from_s, now_s = 0, 0.0, 0.0
    while now_s < seconds:
        size = connection.recv_into(buffer)
        now_s = time.monotonic() - started_at
        if from_s:
            n_bytes += size
        elif now_s > _WARM_S:
            from_s = now_s
    os.write(counted, struct.pack("d", n_bytes / (now_s - from_s)))
    while True:
        connection.recv_into(buffer)


def _source(backend: FabricBackend, node: str, sent: int, seconds: float) -> None:
    backend.enter("hub")
    connection = socket.create_connection((backend.address(node), _PORT))
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        connection.send(_CHUNK)
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    total, again = (struct.unpack_from("Q", info, at)[0] for at in (_BYTES_SENT_AT, _BYTES_RETRANSMITTED_AT))
    os.write(sent, struct.pack("QQ", total, again))
    while True:  # the sinks began later, so they still count
        connection.send(_CHUNK)
