"""Measures the emulated network itself: an echo service on servers, a prober on clients.

Plain TCP, no aiohttp, so that the figures are the network's and not the data plane's.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import threading
import time
from dataclasses import dataclass
from typing import Any

import uvloop

from nodes import control
from nodes.node import NodeConfig

_HEADER = struct.Struct("!QQ")
"""Bytes that follow, bytes wanted back."""


@dataclass(frozen=True)
class ProbePlan:
    """How to measure one pair; real seconds. ``up`` and ``down`` only where the client delays."""

    address: str
    port: int
    n_echoes: int
    echo_bytes: int
    bulk_bytes_up: int
    bulk_bytes_down: int
    up: tuple[float, float] | None = None
    down: tuple[float, float] | None = None


def run_echo(config: NodeConfig) -> None:
    """Answer probes until the orchestrator says ``stop`` or is gone."""
    uvloop.run(_run_node(config, _Echo()))


def run_prober(config: NodeConfig) -> None:
    """Measure pairs as the orchestrator asks."""
    uvloop.run(_run_node(config, _Prober(config)))


class _Echo:
    """Reads a header and its payload, answers the number of bytes asked for; a thread per connection.

    Blocking sockets on both ends: an event loop would add its own time to what is measured.
    """

    def prepare(self, config: NodeConfig) -> int:
        listener = socket.create_server((config.address, config.port), backlog=64)
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()
        return int(listener.getsockname()[1])

    def handlers(self) -> dict[str, control.Handler]:
        return {}

    def _accept(self, listener: socket.socket) -> None:
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(ConnectionError):  # the prober has left
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while True:
                follow, wanted = _HEADER.unpack(_receive(connection, _HEADER.size))
                _discard(connection, follow)
                connection.sendall(bytes(wanted))


class _Prober:
    def __init__(self, config: NodeConfig) -> None:
        self._address = config.address

    def prepare(self, config: NodeConfig) -> int:
        return 0

    def handlers(self) -> dict[str, control.Handler]:
        return {"measure": self.measure}

    async def measure(self, fields: dict[str, Any]) -> dict[str, Any]:
        """One pair: ``{"rtt_s": [...], "echo_s": [...], "up_s": s, "down_s": s}``, real seconds.

        ``rtt_s`` are one-byte echoes, ``echo_s`` echoes of ``echo_bytes`` each way. ``up_s`` and
        ``down_s`` are the times of a bulk transfer on a warm connection, one round trip included.
        """
        return await asyncio.to_thread(self._measure, ProbePlan(**fields))

    def _measure(self, plan: ProbePlan) -> dict[str, Any]:
        source = None if plan.up else (self._address, 0)
        with socket.create_connection((plan.address, plan.port), timeout=60, source_address=source) as link:
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

            def exchange(n_up: int, n_down: int) -> float:
                message = _HEADER.pack(n_up, n_down) + bytes(n_up)
                started_at = time.monotonic()
                _hold(plan.up, len(message))
                link.sendall(message)
                _discard(link, n_down)
                _hold(plan.down, n_down)
                return time.monotonic() - started_at

            exchange(plan.echo_bytes, plan.echo_bytes)
            rtt_s = [exchange(1, 1) for _ in range(plan.n_echoes)]
            echo_s = [exchange(plan.echo_bytes, plan.echo_bytes) for _ in range(plan.n_echoes)]
            exchange(plan.bulk_bytes_up, 1)  # opens the windows as far as this link needs
            up_s = exchange(plan.bulk_bytes_up, 1)
            exchange(1, plan.bulk_bytes_down)
            down_s = exchange(1, plan.bulk_bytes_down)
        return {"rtt_s": rtt_s, "echo_s": echo_s, "up_s": up_s, "down_s": down_s}


def _hold(link: tuple[float, float] | None, n_bytes: int) -> None:
    """Wait as long as the link would take, where the kernel delays nothing."""
    if link is not None:
        time.sleep(link[0] + n_bytes * link[1])


def _receive(connection: socket.socket, n_bytes: int) -> bytes:
    data = b""
    while len(data) < n_bytes:
        part = connection.recv(n_bytes - len(data))
        if not part:
            raise ConnectionError("closed")
        data += part
    return data


def _discard(connection: socket.socket, n_bytes: int) -> None:
    buffer = memoryview(bytearray(min(max(n_bytes, 1), 1 << 20)))
    while n_bytes:
        got = connection.recv_into(buffer[: min(n_bytes, len(buffer))])
        if not got:
            raise ConnectionError("closed")
        n_bytes -= got


async def _run_node(config: NodeConfig, node: _Echo | _Prober) -> None:
    port = node.prepare(config)
    stopped = asyncio.Event()

    async def stop() -> None:
        stopped.set()

    peer = await control.connect(config.control_path, {"stop": stop, **node.handlers()})
    peer.tell("hello", config.name, os.getpid(), port)
    await control.until_stopped(peer, stopped)
