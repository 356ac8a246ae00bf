"""Relays control connections of nodes on other machines, from a Unix socket there to one on this machine.

Nodes use ``nodes.control`` as if the orchestrator were on their machine; the bytes are passed on unchanged
over a sealed stream.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from testbed.runtime.hosts.sealed import AuthenticationError, SealedStream

_READ_BYTES = 256 * 1024


async def carry(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    stream: SealedStream,
    warn: Callable[[str], None],
) -> None:
    """Pass on bytes in both directions until one direction ends, then close both."""

    async def out() -> None:
        while chunk := await reader.read(_READ_BYTES):
            stream.send(chunk)
            await stream.drain()

    async def back() -> None:
        while chunk := await stream.receive():
            writer.write(chunk)
            await writer.drain()

    ways = [asyncio.ensure_future(out()), asyncio.ensure_future(back())]
    try:
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for way in ways:
            way.cancel()
        for ended in await asyncio.gather(*ways, return_exceptions=True):
            if isinstance(ended, AuthenticationError):
                warn(f"closed a control connection between machines: {ended}")
        stream.close()
        with contextlib.suppress(ConnectionError):
            writer.close()
