"""What a node stands on: its clock, and its ways to others. Another host makes the same node run elsewhere."""

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
        """Stop watching; ends the node if its network has gone."""
        ...


class Host(Protocol):
    """What ``nodes.node`` asks of the machine."""

    def clock(self, scale: float) -> RunClock:
        """A clock whose zero has not been agreed on yet."""
        ...

    def connector(self, address: str) -> aiohttp.BaseConnector:
        """Connects from ``address``."""
        ...

    async def listen(self, runner: web.AppRunner, address: str, port: int) -> int:
        """Have ``runner`` serve there; returns the port, which port 0 leaves open."""
        ...

    async def control(self, path: Path, handlers: control.Handlers) -> control.Peer:
        """Connect to the orchestrator; the caller runs ``serve``."""
        ...

    def watch(self, address: str, lost: asyncio.Event) -> Watch:
        """Sets ``lost`` when the network takes ``address`` away."""
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
