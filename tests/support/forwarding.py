"""A farm whose servers forward to each other."""

from __future__ import annotations

import contextlib
import math
from collections.abc import AsyncIterator, Sequence
from typing import Any

import aiohttp

from nodes.clock import Clock
from nodes.connection import Connection
from nodes.forwarding import Forwarding
from policies.rules import RecoveryRules
from tests.support.farm import Farm, farm


@contextlib.asynccontextmanager
async def forwarding_farm(
    ranges: Sequence[tuple[int, int]], clock: Clock, limit_s: float = math.inf, **caches: Any
) -> AsyncIterator[Farm]:
    """As ``farm``; every server knows where all of them are, and none has connected yet."""
    async with (
        farm(ranges, clock, **caches) as servers,
        aiohttp.ClientSession() as http,
        contextlib.AsyncExitStack() as stack,
    ):
        begin = servers.begin

        def introduce(number: int) -> None:
            forwarding = servers.servers[number].sessions.forwarding = Forwarding(clock)
            forwarding.rules = RecoveryRules(request_timeout_s=limit_s)
            forwarding.peers = [Connection(http, servers.url(other), clock) for other in range(len(ranges))]
            for peer in forwarding.peers:
                stack.push_async_callback(peer.close)
            stack.callback(forwarding.close)

        async def begin_and_introduce(number: int) -> None:
            await begin(number)
            introduce(number)

        for number in servers.servers:
            introduce(number)
        servers.begin = begin_and_introduce  # type: ignore[method-assign]
        yield servers
