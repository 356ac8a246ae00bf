from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any

import aiohttp
import pytest

from nodes import limits as limits_module
from nodes import server as server_module
from nodes import wire
from nodes.compute import StubProfile
from nodes.limits import ServerLimits
from nodes.server import Server
from policies.steps import StepTimes
from tests.support.data_plane import (
    TOKEN_BYTES,
    RawClient,
    make_server,
    raw_client,
    raw_frame,
    serving,
    until,
)
from tests.support.manual_clock import ManualClock

SLOW = StubProfile(TOKEN_BYTES, StepTimes(1.0, 1.0, 0.0))
"""A server whose steps take a second per block, on a clock that stands still."""


async def _open(client: RawClient, key: str, max_tokens: int = 10, last: int = 4) -> list[Any]:
    return await client.ask("open", 1, key, "c", 0, last, max_tokens)


async def test_a_server_takes_so_many_sessions_and_says_which_bound_was_met() -> None:
    server = make_server(limits=ServerLimits(max_sessions=2, max_sessions_per_connection=9))
    async with serving(server) as url, raw_client(url) as one, raw_client(url) as other:
        assert (await _open(one, "a"))[0] == "ok"
        assert (await _open(other, "a"))[0] == "ok"
        answer = await _open(other, "b")
        assert answer == ["error", 1, wire.NO_CAPACITY, "too many sessions on this server"]
        assert await one.ask("close", 2, "a") == ["ok", 2]
        assert (await _open(other, "b"))[0] == "ok"


async def test_a_session_of_absurd_length_is_refused_with_the_length_that_is_taken() -> None:
    server = make_server(cache_bytes=1e300, limits=ServerLimits(max_session_tokens=1000))
    for n_tokens in (1001, 2**63, 2**64 - 1):
        async with serving(server) as url, raw_client(url) as client:
            answer = await _open(client, "s", n_tokens)
            assert answer[:3] == ["error", 1, wire.BAD_FRAME]
            assert f"a session of {n_tokens} tokens; at most 1000" in answer[3]
    assert len(server.account) == 0


async def test_the_connections_of_one_address_are_bounded_and_the_answer_says_so() -> None:
    server = make_server(limits=ServerLimits(max_connections=9, max_connections_per_client=2))
    async with serving(server) as url, raw_client(url), raw_client(url) as second:
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            async with raw_client(url):
                pass
        assert refused.value.status == 503
        async with aiohttp.ClientSession() as http, http.get(url + wire.PATH) as answer:
            assert await answer.text() == "too many connections from 127.0.0.1"
        await second.socket.close()
        await until(lambda: len(server.sessions.live) == 1)
        async with raw_client(url) as third:
            assert (await third.ask("ping", 1, b""))[0] == "out"


async def test_more_steps_than_may_wait_are_answered_and_can_be_asked_again() -> None:
    clock = ManualClock()
    server = make_server(clock=clock, profile=SLOW, limits=ServerLimits(max_pending_steps=2))
    async with serving(server) as url, raw_client(url) as client:
        for key in "abc":
            await _open(client, key)
        for number, key in enumerate("abc"):
            await client.send(raw_frame("step", number, key, 0, 1, bytes(TOKEN_BYTES)))
        answer = await client.answer()
        assert answer[:3] == ["error", 2, wire.TOO_MANY_STEPS]
        assert "2 steps of this connection" in answer[3]
        await clock.advance(4.0)
        assert {(await client.answer())[1] for _ in range(2)} == {0, 1}
        await client.send(raw_frame("step", 3, "c", 0, 1, bytes(TOKEN_BYTES)))
        await until(lambda: clock._sleepers != [])
        await clock.advance(4.0)
        assert (await client.answer())[:2] == ["out", 3]


async def test_nothing_more_is_read_while_too_many_bytes_are_pending(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = ManualClock()
    limits = ServerLimits(max_pending_bytes=4 * TOKEN_BYTES)
    server = make_server(clock=clock, profile=SLOW, limits=limits)
    async with serving(server) as url, raw_client(url) as client:
        for key in "ab":
            await _open(client, key)
        await client.send(raw_frame("step", 1, "a", 0, 5, bytes(5 * TOKEN_BYTES)))
        await client.send(raw_frame("step", 2, "b", 0, 5, bytes(5 * TOKEN_BYTES)))
        await until(lambda: "reading nothing more from a client" in caplog.text)
        assert f"{5 * TOKEN_BYTES} bytes of steps pending" in caplog.text
        await clock.advance(20.0)
        assert (await client.answer())[:2] == ["out", 1]
        await until(lambda: any(at_s > 20.0 for at_s, _, future in clock._sleepers if not future.done()))
        await clock.advance(20.0)
        assert (await client.answer())[:2] == ["out", 2]


async def test_a_client_that_does_not_read_is_not_read_either_and_others_go_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = make_server(limits=ServerLimits(max_unread_bytes=100_000))
    big = raw_frame("ping", 1, bytes(50_000))
    async with serving(server) as url, raw_client(url) as other, raw_client(url) as deaf:
        transport = deaf.socket.get_extra_info("socket")
        assert transport is not None
        deaf.socket._response.connection.transport.pause_reading()  # type: ignore[union-attr]
        sending = asyncio.ensure_future(_send_for_ever(deaf, big))
        await until(lambda: "reading nothing more from a client" in caplog.text)
        for _ in range(20):
            assert (await other.ask("ping", 2, b"x"))[0] == "out"
        await until(lambda: _is_stuck(sending, deaf))
        sending.cancel()
        deaf.socket._response.connection.transport.abort()  # type: ignore[union-attr]  # it would not hear a goodbye


async def _send_for_ever(client: RawClient, data: bytes) -> None:
    with contextlib.suppress(ConnectionError):
        while True:
            await client.send(data)


def _is_stuck(sending: asyncio.Future[None], client: RawClient) -> bool:
    """Returns whether TCP has stopped the sender: its own buffer is full."""
    transport = client.socket._response.connection.transport  # type: ignore[union-attr]
    return not sending.done() and transport.get_write_buffer_size() > 0


async def test_who_breaks_the_protocol_gives_back_its_sessions_before_it_hangs_up() -> None:
    server = make_server()
    async with serving(server) as url, raw_client(url) as client:
        await _open(client, "s")
        assert len(server.account) == 1
        assert (await client.ask("close", 2, "t"))[2] == wire.UNKNOWN_SESSION
        assert len(server.account) == 0, "the client has not closed its end yet"
        assert server.account.used_bytes == 0


@pytest.mark.parametrize("said", [b"", b"GET /v1/sess", b"GET /health HTTP/1.1\r\nHost:"])
async def test_a_connection_that_never_asks_anything_is_hung_up_on(
    said: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "HELLO_S", 0.05)
    async with serving(make_server()) as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        writer.write(said)
        # the kernel resets a connection that is closed before the server has read what came
        async with asyncio.timeout(10):
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() == b""
        writer.close()


async def test_a_header_that_claims_gigabytes_is_refused_before_they_come() -> None:
    server: Server = make_server(limits=ServerLimits(max_payload_bytes=1000))
    for claimed in (20_000, 2**31, 2**63 - 1):
        async with serving(server) as url, raw_client(url) as client:
            transport = client.socket._response.connection.transport  # type: ignore[union-attr]
            transport.write(b"\x82\xff" + claimed.to_bytes(8, "big") + b"\0\0\0\0")
            assert (await client.answer())[:3] == ["error", -1, wire.TOO_LARGE]
            assert await client.is_closed_by_server()


async def test_names_are_shown_without_line_ends_or_control_characters(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with serving(make_server()) as url, raw_client(url) as client:
        answer = await client.ask("close", 1, "a\nERROR fake \x1b[2J")
        assert answer[3] == r"no session a\nERROR fake \x1b[2J"
    with caplog.at_level(logging.WARNING):
        assert "\x1b" not in caplog.text


def test_an_error_message_is_cut_to_what_a_frame_of_ours_may_hold() -> None:
    text = limits_module.cut(ValueError("é" * 10_000))
    assert wire.unpack_answer(raw_frame("error", 1, wire.COMPUTE_FAILED, text)).message == text
    assert len(text) == wire.MAX_ERROR_CHARACTERS
