"""A server's connections to the other servers, and what the orchestrator says about them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import aiohttp

from nodes import wire
from nodes.clock import Clock
from nodes.connection import Connection
from nodes.control import Handler
from nodes.forwarding import Forwarding
from nodes.links import profiles


class Peering:
    """Makes ``forwarding``'s connections; each is opened when it is first needed, and stays.

    ``connector(address)``: see ``nodes.host``.
    """

    def __init__(
        self,
        connector: Callable[[str], aiohttp.BaseConnector],
        address: str,
        clock: Clock,
        forwarding: Forwarding,
    ) -> None:
        self._connector = connector
        self._address = address
        self._clock = clock
        self._forwarding = forwarding
        self._connections: list[Connection] = []
        self._http: aiohttp.ClientSession | None = None

    def handlers(self) -> dict[str, Handler]:
        """What the orchestrator may call, by name."""
        return {"peers": self.peers, "reach": self.reach, "links": self.links, "warm": self.warm}

    async def peers(self, servers: list[dict[str, Any]], limit_s: float) -> None:
        """Where all servers are: ``{address, port, up, seed}`` by number; the last two only for loopback.

        Port 0: it is not there yet. ``limit_s``: see ``Forwarding``.
        """
        self._http = aiohttp.ClientSession(
            connector=self._connector(self._address), timeout=aiohttp.ClientTimeout(total=None)
        )
        for server in servers:
            up, _ = profiles(server)
            url = wire.url(server["address"], server["port"])
            seed = server.get("seed", "")
            self._connections.append(Connection(self._http, url, self._clock, up, seed=seed))
        self._forwarding.peers = self._connections
        self._forwarding.limit_s = limit_s

    async def reach(self, server: int, address: str, port: int) -> None:
        """Where a server is that has just begun."""
        self._connections[server].move(wire.url(address, port))

    async def links(self, changed: list[dict[str, Any]]) -> float:
        """Change the links to servers: ``{server, up}``, by number; answers when that was done."""
        for entry in changed:
            self._connections[entry["server"]].change_links(*profiles(entry))
        return self._clock.now_s()

    async def warm(self, servers: list[int], n_bytes: int) -> None:
        """Connect to ``servers`` and send a message of ``n_bytes``, if any, each way.

        Raises ``ConnectionLost``.
        """
        payload = bytes(n_bytes)

        async def warm_one(connection: Connection) -> None:
            generation = await connection.ready()
            if payload:
                await connection.ask(wire.Ping(connection.next_id(), payload), generation=generation)

        await asyncio.gather(*(warm_one(self._connections[server]) for server in servers))

    async def close(self) -> None:
        self._forwarding.close()
        await asyncio.gather(*(connection.close() for connection in self._connections))
        if self._http is not None:
            await self._http.close()
