"""Measures the emulated network itself: an echo service on servers, a prober on clients.

Plain TCP, no aiohttp, so that the figures are the network's and not the data plane's.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import time
from dataclasses import dataclass
from typing import Any

import uvloop

from nodes import control
from nodes.clock import ScaledClock
from nodes.links import DelayLine, DelayProfile
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
    """Reads a header and its payload, answers the number of bytes asked for."""

    async def prepare(self, config: NodeConfig) -> int:
        server = await asyncio.start_server(self._serve, config.address, config.port)
        return int(server.sockets[0].getsockname()[1])

    def handlers(self) -> dict[str, control.Handler]:
        return {}

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        _no_delay(writer)
        try:
            while True:
                follow, wanted = _HEADER.unpack(await reader.readexactly(_HEADER.size))
                while follow:
                    data = await reader.read(min(follow, 1 << 20))
                    if not data:
                        return
                    follow -= len(data)
                for start in range(0, wanted, 1 << 20):
                    writer.write(bytes(min(wanted - start, 1 << 20)))
                    await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            writer.close()


class _Prober:
    def __init__(self, config: NodeConfig) -> None:
        self._address = config.address
        self._clock = ScaledClock()

    async def prepare(self, config: NodeConfig) -> int:
        return 0

    def handlers(self) -> dict[str, control.Handler]:
        return {"measure": self.measure}

    async def measure(self, fields: dict[str, Any]) -> dict[str, Any]:
        """One pair: ``{"rtt_s": [...], "echo_s": [...], "up_s": s, "down_s": s}``, real seconds.

        ``rtt_s`` are single-byte-sized echoes, ``echo_s`` echoes of ``echo_bytes`` each way, ``up_s``
        and ``down_s`` the times of one bulk transfer, from the first byte sent to the answer's last.
        """
        plan = ProbePlan(**fields)
        local = None if plan.up else (self._address, 0)
        reader, writer = await asyncio.open_connection(plan.address, plan.port, local_addr=local)
        _no_delay(writer)
        up, down = (
            DelayLine(DelayProfile(*pair), self._clock) if pair else None for pair in (plan.up, plan.down)
        )

        async def exchange(n_up: int, n_down: int) -> float:
            started_at = time.monotonic()
            message = _HEADER.pack(n_up, n_down) + bytes(n_up)
            if up is not None:
                await up.carry(len(message))
            writer.write(message)
            left = n_down
            while left:
                data = await reader.read(min(left, 1 << 20))
                if not data:
                    raise ConnectionError("the echo service closed the connection")
                left -= len(data)
            if down is not None:
                await down.carry(n_down)
            return time.monotonic() - started_at

        try:
            await exchange(plan.echo_bytes, plan.echo_bytes)
            return {
                "rtt_s": [await exchange(1, 1) for _ in range(plan.n_echoes)],
                "echo_s": [await exchange(plan.echo_bytes, plan.echo_bytes) for _ in range(plan.n_echoes)],
                "up_s": await exchange(plan.bulk_bytes_up, 1),
                "down_s": await exchange(1, plan.bulk_bytes_down),
            }
        finally:
            writer.close()
            self._clock.close()


def _no_delay(writer: asyncio.StreamWriter) -> None:
    writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


async def _run_node(config: NodeConfig, node: _Echo | _Prober) -> None:
    port = await node.prepare(config)
    stopped = asyncio.Event()

    async def stop() -> None:
        stopped.set()

    peer = await control.connect(config.control_path, {"stop": stop, **node.handlers()})
    peer.tell("hello", config.name, os.getpid(), port)
    await control.until_stopped(peer, stopped)
