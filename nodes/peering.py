"""A server's connections to the other servers, as the orchestrator's messages set them up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import aiohttp

from nodes import wire
from nodes.clock import Clock
from nodes.connection import Connection, warm
from nodes.control import Handlers
from nodes.forwarding import Forwarding
from nodes.messages import Links, Peers, Reach, Warm
from policies.rules import RecoveryRules


class Peering:
    """Makes the connections of ``forwarding``. Each is opened at its first use and stays open.

    ``connector(address)``: see ``nodes.host``; ``key``: see ``nodes.node.NodeConfig``.
    """

    def __init__(
        self,
        connector: Callable[[str], aiohttp.BaseConnector],
        address: str,
        clock: Clock,
        forwarding: Forwarding,
        key: str = "",
    ) -> None:
        self._connector = connector
        self._address = address
        self._clock = clock
        self._forwarding = forwarding
        self._key = key
        self._connections: list[Connection] = []
        self._http: aiohttp.ClientSession | None = None

    def handlers(self) -> Handlers:
        """Returns the handlers of the orchestrator's messages."""
        return {Peers: self.peers, Reach: self.reach, Links: self.links, Warm: self.warm}

    async def peers(self, message: Peers) -> None:
        self._http = aiohttp.ClientSession(
            connector=self._connector(self._address),
            timeout=aiohttp.ClientTimeout(total=None),
            headers=wire.headers(self._key),
        )
        for server in message.servers:
            url = wire.url(server.address, server.port)
            self._connections.append(Connection(self._http, url, self._clock, server.up, seed=server.seed))
        self._forwarding.peers = self._connections
        self._forwarding.rules = RecoveryRules(request_timeout_s=message.limit_s, token_s=message.token_s)

    async def reach(self, message: Reach) -> None:
        self._connections[message.server].move(wire.url(message.address, message.port))

    async def links(self, message: Links) -> float:
        for link in message.changed:
            self._connections[link.server].change_links(link.up, link.down)
        return self._clock.now_s()

    async def warm(self, message: Warm) -> None:
        """Connects to the given servers and sends ``n_bytes`` each way.

        Raises ``ConnectionLost``, ``ServerError``.
        """
        connections = (self._connections[server] for server in message.servers or ())
        await warm(connections, message.n_bytes, message.at_once_bytes)

    async def close(self) -> None:
        self._forwarding.close()
        await asyncio.gather(*(connection.close() for connection in self._connections))
        if self._http is not None:
            await self._http.close()
