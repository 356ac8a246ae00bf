"""Streams between machines: what is sent arrives, and nothing that was not sealed with the run's key does."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import pytest

from testbed.runtime.hosts.relay import carry
from testbed.runtime.hosts.sealed import (
    MAX_CHUNK_BYTES,
    AuthenticationError,
    SealedStream,
    accept,
    connect,
    new_key,
)

KEY = new_key()
Meddle = Callable[[bytes], bytes]


@contextlib.asynccontextmanager
async def pair(
    key: bytes = KEY, meddle: Meddle | None = None
) -> AsyncIterator[tuple[SealedStream, asyncio.Future[SealedStream]]]:
    """The caller's end, which has ``key``, and the other's; ``meddle`` changes what the caller sends after its greeting."""
    accepted: asyncio.Future[SealedStream] = asyncio.get_running_loop().create_future()

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            accepted.set_result(await accept(reader, writer, KEY))
        except AuthenticationError as error:
            accepted.set_exception(error)

    server = await asyncio.start_server(take, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    writers: list[asyncio.StreamWriter] = []
    if meddle is not None:
        target, change = port, meddle

        async def between(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", target)
            writers.extend([writer, far_writer])
            far_writer.write(await reader.readexactly(30))
            writer.write(await far_reader.readexactly(30))
            far_writer.write(change(await reader.read(65536)))

        middle = await asyncio.start_server(between, "127.0.0.1", 0)
        port = middle.sockets[0].getsockname()[1]
    stream = await connect("127.0.0.1", port, key)
    try:
        yield stream, accepted
    finally:
        (await accepted).close()
        stream.close()
        for writer in writers:
            writer.close()
        server.close()
        if meddle is not None:
            middle.close()
        await asyncio.sleep(0)


async def test_chunks_arrive_in_order_and_whole_in_both_directions() -> None:
    async with pair() as (caller, accepted):
        other = await accepted
        chunks = [b"a", bytes(MAX_CHUNK_BYTES), b"c"]
        for chunk in chunks:
            caller.send(chunk)
            other.send(chunk[::-1])
        assert [await other.receive() for _ in chunks] == chunks
        assert [await caller.receive() for _ in chunks] == [chunk[::-1] for chunk in chunks]
        caller.close()
        assert await other.receive() == b""


async def test_a_stream_with_another_key_is_refused() -> None:
    async with pair(new_key()) as (caller, accepted):
        caller.send(b"let me in")
        with pytest.raises(AuthenticationError, match="not sealed with the key"):
            await (await accepted).receive()


@pytest.mark.parametrize(
    "meddle",
    [
        lambda sent: sent[:-1] + b"!",
        lambda sent: sent[:4] + bytes(16) + sent[20:],
        lambda sent: sent[25:] + sent[:25],  # both have five bytes
    ],
    ids=["changed", "without a seal", "in another order"],
)
async def test_a_chunk_that_was_changed_on_the_way_is_refused(meddle: Meddle) -> None:
    async with pair(meddle=meddle) as (caller, accepted):
        caller.send(b"first")
        caller.send(b"again")
        other = await accepted
        with pytest.raises(AuthenticationError, match="not sealed with the key"):
            assert [await other.receive(), await other.receive()] == "refused"


async def test_a_chunk_that_is_sent_again_is_refused() -> None:
    async with pair(meddle=lambda sent: sent + sent) as (caller, accepted):
        caller.send(b"once")
        other = await accepted
        assert await other.receive() == b"once"
        with pytest.raises(AuthenticationError):
            await other.receive()


async def test_a_chunk_of_any_size_is_not_waited_for() -> None:
    async with pair(meddle=lambda sent: b"\xff\xff\xff\xff" + sent[4:]) as (caller, accepted):
        caller.send(b"large")
        other = await accepted
        with pytest.raises(AuthenticationError, match="too large"):
            await other.receive()


async def test_a_caller_that_sends_no_greeting_is_cut_off() -> None:
    ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await accept(reader, writer, KEY)
        except AuthenticationError as error:
            ended.set_result(str(error))

    server = await asyncio.start_server(take, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection("127.0.0.1", server.sockets[0].getsockname()[1])
    writer.write(b"GET / HTTP/1.1\r\nHost: somebody-else\r\n\r\n")
    assert "not a testbed of this version" in await ended
    assert len(await reader.read()) == 30  # its greeting, and the end
    writer.close()
    server.close()


async def test_a_relay_carries_what_both_sides_say_until_one_ends() -> None:
    said: list[str] = []

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1000):
            writer.write(data.upper())
        writer.close()

    echoing = await asyncio.start_server(echo, "127.0.0.1", 0)
    near = await asyncio.open_connection("127.0.0.1", echoing.sockets[0].getsockname()[1])
    async with pair() as (caller, accepted):
        carrying = asyncio.ensure_future(carry(*near, await accepted, said.append))
        caller.send(b"hello")
        assert await caller.receive() == b"HELLO"
        caller.close()
        await carrying
        assert said == []
    echoing.close()
