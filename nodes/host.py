"""What a node needs of the machine: its clock and its connections.

With another ``Host`` it runs elsewhere.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Protocol

import aiohttp
from aiohttp import web

from nodes import control
from nodes.clock import RunClock, run_clock
from nodes.device import AddressWatch


class Watch(Protocol):
    def close(self) -> None:
        """Stops watching. Ends the node's process if its network has gone."""
        ...


class Host(Protocol):
    """What ``nodes.node`` needs of the machine."""

    def clock(self, scale: float) -> RunClock:
        """Returns a clock whose zero has not been agreed on yet."""
        ...

    def connector(self, address: str) -> aiohttp.BaseConnector:
        """Returns a connector that connects from ``address``."""
        ...

    async def listen(self, runner: web.AppRunner, address: str, port: int) -> int:
        """Has ``runner`` serve at ``address`` and ``port`` (0: any free port). Returns the port."""
        ...

    async def control(self, path: Path, handlers: control.Handlers) -> control.Peer:
        """Connects to the orchestrator. The caller runs the peer's ``serve``."""
        ...

    def watch(self, address: str, lost: asyncio.Event) -> Watch:
        """Watches ``address``; sets ``lost`` when it is removed from the network."""
        ...


class KernelHost:
    """The kernel's own TCP, in the network namespace that the process is in."""

    def clock(self, scale: float) -> RunClock:
        return run_clock(scale)

    def connector(self, address: str) -> aiohttp.BaseConnector:
        return aiohttp.TCPConnector(local_addr=(address, 0), limit=0)

    async def listen(self, runner: web.AppRunner, address: str, port: int) -> int:
        await web.TCPSite(runner, address, port).start()
        return int(runner.addresses[0][1])

    async def control(self, path: Path, handlers: control.Handlers) -> control.Peer:
        return await control.connect(path, dict(handlers))

    def watch(self, address: str, lost: asyncio.Event) -> Watch:
        return AddressWatch(address, lost)
