"""Byte streams between machines in which every chunk is authenticated with the run's key.

Both sides first send 16 random bytes. One key for each direction is derived from these and the run's key. A
chunk is sent as its length (4 bytes, big-endian), a keyed BLAKE2b of its number in the stream and its bytes
(16 bytes), and the bytes themselves. A chunk of another run, and one that was changed, repeated or left out,
ends the stream. Nothing is encrypted.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import os
import socket
from hashlib import blake2b

KEY_BYTES = 32
MAX_CHUNK_BYTES = 1024**2
_NONCE_BYTES = _MAC_BYTES = 16
_GREETING = b"testbed run 1\n"
STRANGER_S = 5.0
"""Seconds in which a new connection must show the key; otherwise it is closed."""


class AuthenticationError(Exception):
    """The other side does not have this run's key, or data was changed on the way."""


def new_key() -> bytes:
    """Return a new random key for a run."""
    return os.urandom(KEY_BYTES)


class SealedStream:
    """Both directions of one TCP connection. Use ``connect`` or ``accept``."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, mine: bytes, theirs: bytes
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._mine, self._theirs = mine, theirs
        self._n_sent = self._n_received = 0

    def send(self, chunk: bytes) -> None:
        """Send at most ``MAX_CHUNK_BYTES``. Does not wait; see ``drain``."""
        assert len(chunk) <= MAX_CHUNK_BYTES, "a chunk that the other side would refuse"
        self._writer.write(
            len(chunk).to_bytes(4, "big") + _mac(self._mine, self._n_sent, chunk) + chunk,
        )
        self._n_sent += 1

    async def drain(self) -> None:
        """Wait until most of what was sent has left. Raises ``ConnectionError`` if the connection is lost."""
        await self._writer.drain()

    async def receive(self) -> bytes:
        """Return the next chunk; empty at the end of the stream. Raises ``AuthenticationError``."""
        try:
            size = int.from_bytes(await self._reader.readexactly(4), "big")
            if size > MAX_CHUNK_BYTES:
                raise AuthenticationError("a chunk that is too large")
            mac = await self._reader.readexactly(_MAC_BYTES)
            chunk = await self._reader.readexactly(size)
        except (asyncio.IncompleteReadError, ConnectionError, TimeoutError):
            return b""
        if not hmac.compare_digest(mac, _mac(self._theirs, self._n_received, chunk)):
            raise AuthenticationError("a chunk that was not sealed with the key of this run")
        self._n_received += 1
        return chunk

    def close(self) -> None:
        self._writer.close()

    def abort(self) -> None:
        """Close at once: what was not yet sent is dropped, since the other side may be gone."""
        self._writer.transport.abort()


async def connect(address: str, port: int, key: bytes) -> SealedStream:
    """Connect to the other side, which must ``accept``. Raises ``OSError`` and ``AuthenticationError``."""
    reader, writer = await asyncio.open_connection(address, port)
    return await _greeted(reader, writer, key, is_caller=True)


async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: bytes) -> SealedStream:
    """Return the stream of an accepted connection. Raises ``AuthenticationError`` if the other side sends no greeting."""
    return await _greeted(reader, writer, key, is_caller=False)


async def _greeted(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: bytes, *, is_caller: bool
) -> SealedStream:
    with contextlib.suppress(OSError):
        writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    nonce = os.urandom(_NONCE_BYTES)
    writer.write(_GREETING + nonce)
    try:
        async with asyncio.timeout(STRANGER_S):
            greeting = await reader.readexactly(len(_GREETING) + _NONCE_BYTES)
    except (asyncio.IncompleteReadError, ConnectionError, TimeoutError):
        writer.close()
        raise AuthenticationError("the other side sends no greeting") from None
    if not greeting.startswith(_GREETING):
        writer.close()
        raise AuthenticationError("the other side is not a testbed of this version")
    other = greeting[len(_GREETING) :]
    both = nonce + other if is_caller else other + nonce
    keys = [blake2b(way + both, key=key, digest_size=32).digest() for way in (b"to accept", b"to caller")]
    mine, theirs = keys if is_caller else reversed(keys)
    return SealedStream(reader, writer, mine, theirs)


def _mac(key: bytes, number: int, chunk: bytes) -> bytes:
    return blake2b(number.to_bytes(8, "big") + chunk, key=key, digest_size=_MAC_BYTES).digest()
