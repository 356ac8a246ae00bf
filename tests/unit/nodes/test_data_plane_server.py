"""A server over real WebSockets: its answers to clients, and what one client cannot do to another."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from nodes import wire
from nodes.compute import Computed, StubCompute, StubProfile
from nodes.digest import apply_blocks, embed, read_rows, write_rows
from nodes.server import Server, ServerLimits
from policies.steps import StepTimes
from tests.support.data_plane import (
    INSTANT,
    TOKEN_BYTES,
    RawClient,
    make_server,
    raw_client,
    raw_frame,
    serving,
    until,
)
from tests.support.manual_clock import ManualClock


def rows(*values: int) -> bytes:
    return write_rows(list(values), TOKEN_BYTES)


async def test_a_session_opens_steps_and_closes_with_answers_of_the_right_size() -> None:
    clock = ManualClock()
    await clock.advance(3.0)
    server = make_server(2, 6, clock=clock)
    async with serving(server) as url, raw_client(url) as client:
        assert await client.ask("open", 1, "s", "c", 2, 5, 10) == ["ok", 1]
        assert server.account.used_bytes == 3 * 10
        prompt = [embed(token, position) for position, token in enumerate((7, 8, 9))]
        caches = [0, 0, 0]
        kind, request_id, arrived_at_s, departed_at_s, *_, payload = await client.ask(
            "step", 2, "s", 0, 3, rows(*prompt)
        )
        assert (kind, request_id, arrived_at_s, departed_at_s) == ("out", 2, 3.0, 3.0)
        assert len(payload) == 3 * TOKEN_BYTES
        assert read_rows(payload, TOKEN_BYTES) == [apply_blocks(value, 2, caches) for value in prompt]
        payload = (await client.ask("step", 3, "s", 3, 1, rows(5)))[-1]
        assert payload == rows(apply_blocks(5, 2, caches))
        assert await client.ask("close", 4, "s") == ["ok", 4]
        assert server.account.used_bytes == 0.0
        assert (server.counters.opened, server.counters.steps, server.counters.closed) == (1, 2, 1)


async def test_a_step_reports_when_it_arrived_and_when_it_left() -> None:
    clock = ManualClock()
    server = make_server(clock=clock, profile=StubProfile(TOKEN_BYTES, StepTimes(0.5, 1.0, 0.25)))
    async with serving(server) as url, raw_client(url) as client:
        await client.ask("open", 1, "s", "c", 0, 4, 10)
        await client.send(raw_frame("step", 2, "s", 0, 2, rows(1, 2)))
        await until(lambda: bool(clock._sleepers and clock._sleepers[0][0] == 4 * 1.5))
        await clock.advance(10.0)
        assert (await client.answer())[2:4] == [0.0, 6.0]
        assert server.counters.compute_s == 6.0


async def test_a_ping_is_answered_with_its_payload() -> None:
    async with serving(make_server()) as url, raw_client(url) as client:
        assert await client.ask("ping", 9, b"x" * 1000) == ["out", 9, 0.0, 0.0, [0] * 6, b"x" * 1000]


async def test_sessions_on_one_connection_are_answered_as_they_finish() -> None:
    clock = ManualClock()
    server = make_server(clock=clock, profile=StubProfile(TOKEN_BYTES, StepTimes(1.0, 1.0, 0.0)))
    async with serving(server) as url, raw_client(url) as client:
        await client.ask("open", 1, "long", "c", 0, 4, 10)
        await client.ask("open", 2, "short", "c", 3, 4, 10)
        await client.send(raw_frame("step", 3, "long", 0, 1, rows(1)))
        await client.send(raw_frame("step", 4, "short", 0, 1, rows(1)))
        await until(lambda: len([s for s in clock._sleepers if s[0] in (1.0, 4.0)]) == 2)
        await clock.advance(4.0)
        assert [(await client.answer())[1:4], (await client.answer())[1:4]] == [[4, 0.0, 1.0], [3, 0.0, 4.0]]


async def test_a_server_without_room_says_so_and_keeps_the_connection() -> None:
    server = make_server(cache_bytes=50.0)
    async with serving(server) as url, raw_client(url) as client:
        assert await client.ask("open", 1, "a", "c", 0, 4, 10) == ["ok", 1]
        answer = await client.ask("open", 2, "b", "c", 0, 4, 10)
        assert answer == ["error", 2, wire.NO_CAPACITY, "40 B asked for, 10 B free"]
        assert await client.ask("close", 3, "a") == ["ok", 3]
        assert await client.ask("open", 4, "b", "c", 0, 4, 10) == ["ok", 4]
        assert (server.counters.refused, server.counters.errors) == (1, 0)


async def test_a_connection_with_too_many_sessions_is_refused_more_and_keeps_them() -> None:
    server = make_server(limits=ServerLimits(max_sessions_per_connection=2))
    async with serving(server) as url, raw_client(url) as client, raw_client(url) as other:
        for i in range(2):
            assert await client.ask("open", i, f"s{i}", "c", 0, 1, 1) == ["ok", i]
        answer = await client.ask("open", 2, "s2", "c", 0, 1, 1)
        assert answer == ["error", 2, wire.NO_CAPACITY, "too many sessions on this connection"]
        assert (await client.ask("step", 3, "s0", 0, 1, rows(1)))[0] == "out"
        assert await other.ask("open", 1, "s2", "c", 0, 1, 1) == ["ok", 1]


async def test_clients_may_use_the_same_names_for_their_sessions() -> None:
    server = make_server()
    async with serving(server) as url, raw_client(url) as one, raw_client(url) as two:
        for client, value in ((one, 1), (two, 2)):
            assert await client.ask("open", 1, "s", "c", 0, 4, 10) == ["ok", 1]
            expected = rows(apply_blocks(value, 0, [0] * 4))
            assert (await client.ask("step", 2, "s", 0, 1, rows(value)))[-1] == expected
        assert len(server.account) == 2


OFFENCES: dict[str, tuple[bytes | str, str, int]] = {
    "wrong size": (raw_frame("step", 9, "s", 0, 2, bytes(TOKEN_BYTES)), wire.WRONG_SIZE, 9),
    "no tokens": (raw_frame("step", 9, "s", 0, 0, b""), wire.WRONG_SIZE, 9),
    "a row too long": (raw_frame("step", 9, "s", 0, 1, bytes(TOKEN_BYTES + 1)), wire.WRONG_SIZE, 9),
    "unknown session": (raw_frame("step", 9, "t", 0, 1, bytes(TOKEN_BYTES)), wire.UNKNOWN_SESSION, 9),
    "another client's session": (
        raw_frame("step", 9, "bystander", 1, 1, bytes(TOKEN_BYTES)),
        wire.UNKNOWN_SESSION,
        9,
    ),
    "close of an unknown session": (raw_frame("close", 9, "t"), wire.UNKNOWN_SESSION, 9),
    "wrong position": (raw_frame("step", 9, "s", 5, 1, bytes(TOKEN_BYTES)), wire.WRONG_POSITION, 9),
    "more tokens than reserved": (
        raw_frame("step", 9, "s", 0, 11, bytes(11 * TOKEN_BYTES)),
        wire.WRONG_POSITION,
        9,
    ),
    "blocks before the first": (raw_frame("open", 9, "t", "c", 1, 3, 1), wire.WRONG_BLOCKS, 9),
    "blocks after the last": (raw_frame("open", 9, "t", "c", 3, 7, 1), wire.WRONG_BLOCKS, 9),
    "no blocks": (raw_frame("open", 9, "t", "c", 3, 3, 1), wire.WRONG_BLOCKS, 9),
    "open twice": (raw_frame("open", 9, "s", "c", 2, 3, 1), wire.BAD_FRAME, 9),
    "room for nothing": (raw_frame("open", 9, "t", "c", 2, 3, 0), wire.BAD_FRAME, 9),
    "text": ("hello", wire.BAD_FRAME, -1),
    "a part that is too large": (raw_frame("more", 9, bytes(50_001)), wire.TOO_LARGE, 9),
    "garbage": (b"\xc1\xff\x00garbage", wire.BAD_FRAME, -1),
    "nothing": (b"", wire.BAD_FRAME, -1),
    "deeply nested": (b"\x91" * 1000 + b"\x01", wire.BAD_FRAME, -1),
    "an answer": (raw_frame("ok", 9), wire.BAD_FRAME, 9),
    "a field too few": (raw_frame("close", 9), wire.BAD_FRAME, 9),
    "oversized": (raw_frame("ping", 9, bytes(100_000)), wire.TOO_LARGE, -1),
}


@pytest.mark.parametrize(("data", "code", "request_id"), OFFENCES.values(), ids=OFFENCES.keys())
async def test_a_frame_that_breaks_the_protocol_costs_its_sender_the_connection_and_nobody_else_anything(
    data: bytes | str, code: str, request_id: int, caplog: pytest.LogCaptureFixture
) -> None:
    server = make_server(2, 6, limits=ServerLimits(max_payload_bytes=50_000))
    async with serving(server) as url, raw_client(url) as bystander, raw_client(url) as offender:
        caches = [0] * 4
        await bystander.ask("open", 1, "bystander", "c", 2, 6, 10)
        answer = await bystander.ask("step", 2, "bystander", 0, 1, rows(11))
        assert answer[-1] == rows(apply_blocks(11, 2, caches))
        assert await offender.ask("open", 1, "s", "c", 2, 6, 10) == ["ok", 1]
        assert server.account.used_bytes == 80.0

        await offender.send(data)
        error = await offender.answer()
        assert error[:3] == ["error", request_id, code]
        assert error[3], "the error frame has the reason"
        assert await offender.is_closed_by_server()
        await until(lambda: server.account.used_bytes == 40.0)
        assert server.counters.errors == 1

        answer = await bystander.ask("step", 3, "bystander", 1, 1, rows(12))
        assert answer[-1] == rows(apply_blocks(12, 2, caches))
        assert await bystander.ask("close", 4, "bystander") == ["ok", 4]
        assert server.account.used_bytes == 0.0
    assert [record.message for record in caplog.records if record.levelno >= logging.ERROR] == []


async def test_a_second_step_of_a_session_before_the_first_is_answered_is_a_wrong_position() -> None:
    server = make_server(profile=StubProfile(TOKEN_BYTES, StepTimes(1.0, 1.0, 0.0)))
    async with serving(server) as url, raw_client(url) as client:
        await client.ask("open", 1, "s", "c", 0, 4, 10)
        await client.send(raw_frame("step", 2, "s", 0, 1, rows(1)))
        assert (await client.ask("step", 3, "s", 0, 1, rows(1)))[:3] == ["error", 3, wire.WRONG_POSITION]
        assert await client.is_closed_by_server()
        await until(lambda: server.account.used_bytes == 0.0)


async def test_a_frame_of_the_largest_size_is_served() -> None:
    n_tokens = 50
    server = make_server(limits=ServerLimits(max_payload_bytes=n_tokens * TOKEN_BYTES))
    async with serving(server) as url, raw_client(url) as client:
        key = "ü" * 128
        await client.ask("open", 2**40, key, "c", 0, 4, n_tokens)
        answer = await client.ask("step", 2**40, key, 0, n_tokens, bytes(n_tokens * TOKEN_BYTES))
        assert len(answer[-1]) == n_tokens * TOKEN_BYTES


@pytest.mark.parametrize("doing", ["nothing", "steps", "questions"])
async def test_losing_the_client_frees_its_cache(doing: str, caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    server = make_server(clock=clock, profile=StubProfile(TOKEN_BYTES, StepTimes(1.0, 1.0, 0.0)))
    async with serving(server) as url, raw_client(url) as stays:
        await stays.ask("open", 1, "s", "c", 0, 4, 10)
        async with aiohttp.ClientSession() as http:
            client = RawClient(await http.ws_connect(url + wire.PATH))
            for i in range(5):
                await client.ask("open", i, f"s{i}", "c", 0, 4, 10)
                if doing == "steps":
                    await client.send(raw_frame("step", 10 + i, f"s{i}", 0, 1, rows(1)))
            assert len(server.account) == 6
            if doing == "questions":
                for i in range(500):
                    await client.send(raw_frame("ping", i, bytes(1000)))
            response = client.socket._response
            assert response.connection is not None
            assert response.connection.transport is not None
            response.connection.transport.abort()
        await until(lambda: len(server.account) == 1)
        assert server.account.used_bytes == 40.0
        await clock.advance(10.0)
        assert await stays.ask("close", 2, "s") == ["ok", 2]
        assert server.account.used_bytes == 0.0
    assert [record.message for record in caplog.records if record.levelno >= logging.ERROR] == []


async def test_a_session_that_is_idle_for_too_long_expires_and_its_connection_goes_on() -> None:
    clock = ManualClock()
    server = make_server(clock=clock, limits=ServerLimits(idle_s=300.0))
    async with serving(server) as url, raw_client(url) as client:
        await client.ask("open", 1, "idle", "c", 0, 4, 10)
        await client.ask("open", 2, "used", "c", 0, 4, 10)
        await clock.advance(200.0)
        await client.ask("step", 3, "used", 0, 1, rows(1))
        await clock.advance(99.0)
        assert len(server.account) == 2, "not before its time"
        await clock.advance(76.0 + 25.0)
        assert len(server.account) == 1
        assert server.counters.expired == 1
        answer = await client.ask("step", 4, "idle", 0, 1, rows(1))
        assert answer == ["error", 4, wire.SESSION_EXPIRED, "session idle was idle for too long"]
        assert await client.ask("close", 5, "idle") == ["ok", 5]
        assert (await client.ask("step", 6, "used", 1, 1, rows(1)))[0] == "out"
        assert await client.ask("open", 7, "idle", "c", 0, 4, 10) == ["ok", 7]
        assert (await client.ask("step", 8, "idle", 0, 1, rows(1)))[0] == "out"
        assert server.counters.errors == 0


async def test_a_session_does_not_expire_while_it_computes() -> None:
    clock = ManualClock()
    profile = StubProfile(TOKEN_BYTES, StepTimes(1.0, 1000.0, 0.0))
    server = make_server(clock=clock, profile=profile, limits=ServerLimits(idle_s=300.0))
    async with serving(server) as url, raw_client(url) as client:
        await client.ask("open", 1, "s", "c", 0, 1, 10)
        await client.send(raw_frame("step", 2, "s", 0, 1, rows(1)))
        await until(lambda: any(at_s == 1000.0 for at_s, _, _ in clock._sleepers))
        await clock.advance(1001.0)
        assert (await client.answer())[:2] == ["out", 2]
        assert server.counters.expired == 0


@pytest.mark.parametrize("at_once", [False, True], ids=["one by one", "at once"])
async def test_more_connections_than_allowed_get_503_until_one_leaves(at_once: bool) -> None:
    server = make_server(limits=ServerLimits(max_connections=3))
    async with serving(server) as url, aiohttp.ClientSession() as http:

        async def connect() -> aiohttp.ClientWebSocketResponse | int:
            try:
                return await http.ws_connect(url + wire.PATH)
            except aiohttp.WSServerHandshakeError as error:
                return error.status

        if at_once:
            results = await asyncio.gather(*(connect() for _ in range(12)))
        else:
            results = [await connect() for _ in range(12)]
        sockets = [result for result in results if not isinstance(result, int)]
        assert len(sockets) == 3
        assert [result for result in results if isinstance(result, int)] == [503] * 9
        await sockets[0].close()
        await until(lambda: len(server.sessions.live) == 2)
        again = await connect()
        assert not isinstance(again, int)
        for socket in (*sockets, again):
            await socket.close()


@contextlib.asynccontextmanager
async def _tcp(url: str) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rsplit(":", 1)[1]))
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


UPGRADE = (
    b"GET /v1/sessions HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)


@pytest.mark.parametrize(
    "data",
    [
        b"\x00\xff\xfe" * 500 + b"\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /v1/sessions HTTP/1.1\r\nHost: x\r\n\r\n",
        b"A" * 20_000 + b"\r\n\r\n",
        UPGRADE + b"\xff" * 200,
        UPGRADE + b"\x82\x05hello",  # not masked, not msgpack
        UPGRADE + b"\x82\xff\x7f\xff\xff\xff\xff\xff\xff\xff\x00\x00\x00\x00",  # announces 2^63 bytes
    ],
    ids=["bytes", "version", "no upgrade", "long line", "broken frames", "no msgpack", "endless frame"],
)
async def test_bytes_that_are_no_protocol_at_all_do_not_touch_other_connections(data: bytes) -> None:
    server = make_server()
    async with serving(server) as url, raw_client(url) as client:
        await client.ask("open", 1, "s", "c", 0, 4, 10)
        async with _tcp(url) as (reader, writer):
            writer.write(data)
            writer.write_eof()
            async with asyncio.timeout(10):
                with contextlib.suppress(ConnectionError):
                    await reader.read()
        assert (await client.ask("step", 2, "s", 0, 1, rows(3)))[-1] == rows(apply_blocks(3, 0, [0] * 4))
        await until(lambda: len(server.sessions.live) == 1)


class _Breaks(StubCompute):
    """Raises on the value 13."""

    async def step(
        self, session: Any, position: int, n_tokens: int, payload: bytes, arrived_at_s: float
    ) -> Computed:
        if 13 in read_rows(payload, self.token_bytes):
            raise RuntimeError("out of memory")
        return await super().step(session, position, n_tokens, payload, arrived_at_s)


async def test_a_compute_that_raises_ends_the_connection_and_is_logged_and_others_go_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = make_server(compute=_Breaks(INSTANT, ManualClock()))
    async with serving(server) as url, raw_client(url) as unlucky, raw_client(url) as other:
        for client in (unlucky, other):
            await client.ask("open", 1, "s", "c", 0, 4, 10)
        await unlucky.send(raw_frame("step", 2, "s", 0, 1, rows(13)))
        assert await unlucky.is_closed_by_server()
        await until(lambda: len(server.account) == 1)
        assert (await other.ask("step", 2, "s", 0, 1, rows(14)))[0] == "out"
    assert "out of memory" in caplog.text


async def _get(url: str) -> tuple[str, str]:
    async with aiohttp.ClientSession() as http, http.get(url) as response:
        assert response.status == 200
        return response.content_type, await response.text()


async def test_health_says_what_the_server_hosts_and_what_it_has_done() -> None:
    server: Server = make_server(2, 6, name="a100-0", cache_bytes=50.0)
    async with serving(server) as url, raw_client(url) as client:
        await client.ask("open", 1, "s", "c", 2, 6, 10)
        await client.ask("open", 2, "t", "c", 2, 6, 10)
        await client.ask("step", 3, "s", 0, 1, rows(1))
        kind, text = await _get(url + "/health")
    assert kind == "application/json"
    health = json.loads(text)
    assert health == {
        "name": "a100-0",
        "first_block": 2,
        "phase": "serving",
        "last_block": 6,
        "n_sessions": 1,
        "cache_used_bytes": 40.0,
        "cache_capacity_bytes": 50.0,
        "opened": 1,
        "refused": 1,
        "closed": 0,
        "expired": 0,
        "preempted": 0,
        "steps": 1,
        "errors": 0,
        "connections": 1,
        "compute_s": 0.0,
        "memory": {},
    }


async def test_metrics_are_prometheus_text_with_the_names_of_vllm_where_one_exists() -> None:
    server = make_server(2, 6, name="a100-0", cache_bytes=80.0)
    async with serving(server) as url, raw_client(url) as client:
        await client.ask("open", 1, "s", "c", 2, 6, 10)
        kind, text = await _get(url + "/metrics")
    assert kind == "text/plain"
    types: dict[str, str] = {}
    values: dict[str, float] = {}
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            _, _, name, form = line.split(" ")
            types[name] = form
        elif not line.startswith("# HELP "):
            name, value = line.split(" ")
            assert name.endswith('{server="a100-0"}')
            values[name.partition("{")[0]] = float(value)
    assert set(types) == set(values)
    assert all(types[name] == ("counter" if name.endswith("_total") else "gauge") for name in types)
    assert values["vllm:num_requests_running"] == 1
    assert values["vllm:kv_cache_usage_perc"] == 0.5
    assert values["testbed_sessions_opened_total"] == 1
    assert values["testbed_hosted_blocks"] == 4
    assert {name.partition("_")[0] for name in values if not name.startswith("vllm:")} == {"testbed"}
