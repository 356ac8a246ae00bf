"""Plain TCP streams from one node to others over a ``fabric`` network of their own."""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from netem.fabric import FabricBackend
from netem.probe import become_network_admin
from netem.spec import LinkProfile, NetworkSpec

_PORT = 7300
_WARM_S = 1.0
_CHUNK = bytes(1 << 18)
_TCP_INFO_BYTES = 232
_BYTES_SENT_AT, _BYTES_RETRANSMITTED_AT = 200, 208
"""Offsets in ``struct tcp_info`` of linux/tcp.h (since Linux 4.19)."""


@dataclass
class Streams:
    """What the streams came to: payload per second in all, the forwarder's own account, TCP's retransmissions.

    CPU and ``busy_ratio`` (share of one CPU) count the forwarder's work, not its waiting.
    """

    goodput_bps: float
    least_share_ratio: float
    """The slowest stream's share of all, times the number of streams: 1 when all are alike."""
    late_p99_s: float
    cpu_s_per_mb: float
    busy_ratio: float
    retransmitted_ratio: float
    dropped: int


def in_fork(work: Callable[[], Any]) -> Any:
    """Run ``work`` in a forked process, which may change its own namespaces; answers its result."""

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


def streams(n_pairs: int, link: LinkProfile, seconds: float, shared_bps: float | None = None) -> Streams:
    """``n_pairs`` nodes each receive one stream from the same hub for so long, over a link of their own.

    ``shared_bps``: all of them then pass one shared link of that rate.
    """
    return in_fork(lambda: _streams(n_pairs, link, seconds, shared_bps))  # type: ignore[no-any-return]


def _streams(n_pairs: int, link: LinkProfile, seconds: float, shared_bps: float | None) -> Streams:
    become_network_admin()
    nodes = ("hub", *(f"n{i}" for i in range(n_pairs)))
    back = LinkProfile(link.delay_s, link.rate_bps)
    links = {("hub", node): link for node in nodes[1:]} | {(node, "hub"): back for node in nodes[1:]}
    shared = {"core": shared_bps} if shared_bps else {}
    paths = {("hub", node): ("core",) for node in nodes[1:]} if shared else {}
    backend = FabricBackend(NetworkSpec("streams", nodes, links, shared=shared, paths=paths))
    backend.open()
    pids = [_fork(backend.worker())]
    try:
        ready_in, ready_out = os.pipe()
        counted_in, counted_out = os.pipe()
        for node in nodes[1:]:
            pids.append(_fork(functools.partial(_sink, backend, node, ready_out, counted_out, seconds)))
        for _ in nodes[1:]:
            assert os.read(ready_in, 1) == b"+", "a sink did not start"
        sent_in, sent_out = os.pipe()
        for node in nodes[1:]:
            pids.append(_fork(functools.partial(_source, backend, node, sent_out, seconds)))
        time.sleep(_WARM_S)
        before, late_before, began_at = backend.stats(), backend.lateness(), time.monotonic()
        received = [struct.unpack("d", os.read(counted_in, 8))[0] for _ in nodes[1:]]
        after, took_s = backend.stats(), time.monotonic() - began_at
        worked_s = (after.cpu_s - after.spun_s) - (before.cpu_s - before.spun_s)
        sent = [struct.unpack("QQ", os.read(sent_in, 16)) for _ in nodes[1:]]
        return Streams(
            sum(received) * 8,
            min(received) * n_pairs / sum(received),
            min(backend.lateness().since(late_before).quantile(0.99), after.late_max_s),
            worked_s / ((after.wire_bytes - before.wire_bytes) / 1e6),
            worked_s / took_s,
            sum(again for _, again in sent) / sum(total for total, _ in sent),
            after.dropped,
        )
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        backend.close()


def _fork(run: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            run()
        finally:
            os._exit(1)
    return pid


def _sink(backend: FabricBackend, node: str, ready: int, counted: int, seconds: float) -> None:
    """Counts what arrives per second between the warm-up and the end."""
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
    while True:  # the sinks count a little longer
        connection.send(_CHUNK)
