"""Plays hostile cases against a real server on the loopback interface, together with a well-behaved session.

After each case nothing may be left of the hostile connections, and the well-behaved session (the witness)
must still get the right answers. The cases advance the server's clock.
"""

from __future__ import annotations

import asyncio
import struct
from typing import Any

import aiohttp
import msgpack
from aiohttp import web

from nodes import wire
from nodes.admission import HostedBlocks
from nodes.compute import StubCompute, StubProfile
from nodes.connection import Connection
from nodes.digest import apply_blocks, embed, read_rows, write_rows
from nodes.server import Server, ServerLimits
from policies.steps import StepTimes
from tests.stress.hostile_common import PATIENCE_S, LoopTarget, RawLine, connected
from tests.stress.hostile_frames import CASES, N_BLOCKS, N_PEERS, TOKEN_BYTES
from tests.support.manual_clock import ManualClock

LIMITS = ServerLimits(
    max_payload_bytes=65_536,
    max_sessions_per_connection=4,
    max_sessions=8,
    max_session_tokens=1000,
    max_connections=7,
    max_connections_per_client=5,
    max_pending_steps=2,
    max_pending_bytes=4096,
    max_unread_bytes=131_072,
)
_HELLO = (
    b"GET /v1/sessions HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)


class Line(RawLine):
    """A client's end of a WebSocket, written by hand so that it can send any bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        super().__init__(writer)
        self._reader = reader
        self.positions: dict[str, int] = {}
        self.answers: list[list[Any]] = []

    @classmethod
    async def open(cls, port: int) -> Line:
        raw = await connected(("127.0.0.1", port), takes_little=True)
        return cls(*await asyncio.open_connection(sock=raw))

    async def greet(self) -> bool:
        """Requests a WebSocket. Returns whether the server accepted it."""
        self.writer.write(_HELLO)
        try:
            status = await self._reader.readuntil(b"\r\n\r\n")
        except (asyncio.IncompleteReadError, ConnectionError):
            return False
        return status.startswith(b"HTTP/1.1 101 ")

    async def answer(self) -> list[Any] | None:
        """Returns the next frame that the server sends; None at the end of the connection."""
        try:
            while True:
                head = await self._reader.readexactly(2)
                size = head[1] & 127
                if size > 125:
                    size = int.from_bytes(await self._reader.readexactly(2 if size == 126 else 8), "big")
                data = await self._reader.readexactly(size)
                if head[0] & 15 == 2:
                    return list(msgpack.unpackb(data))
                if head[0] & 15 == 8:
                    return None
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    async def listen(self) -> None:
        """Reads all answers until the connection ends, or until ``deaf`` is set."""
        while not self.deaf:
            answer = await self.answer()
            if answer is None:
                return
            self.answers.append(answer)


def ws_frame(data: bytes, opcode: int = 2, last: bool = True) -> bytes:
    """Returns a client's WebSocket frame. Its mask is zero, which leaves the data unchanged."""
    head = bytes([opcode | (128 if last else 0)])
    if len(data) < 126:
        return head + bytes([128 | len(data)]) + b"\0\0\0\0" + data
    if len(data) < 65_536:
        return head + b"\xfe" + struct.pack("!H", len(data)) + b"\0\0\0\0" + data
    return head + b"\xff" + struct.pack("!Q", len(data)) + b"\0\0\0\0" + data


class Witness:
    """A well-behaved session on a connection of its own. ``step`` raises ``AssertionError`` if the answer is
    wrong.
    """

    def __init__(self, line: Line, clock: ManualClock) -> None:
        self._line, self._clock = line, clock
        self._position = -1
        self._caches: list[int] = []

    async def step(self) -> None:
        if self._position < 0 or self._position >= 200:
            if self._position > 0:
                assert await self._ask("close", 1, "witness") == ["ok", 1]
            assert await self._ask("open", 2, "witness", "c", 0, N_BLOCKS, 201) == ["ok", 2]
            self._position, self._caches = 0, [0] * N_BLOCKS
        value = embed(7, self._position)
        answer = await self._ask("step", 3, "witness", self._position, 1, write_rows([value], TOKEN_BYTES))
        assert answer is not None and answer[:2] == ["out", 3], f"the witness was answered {answer}"
        assert read_rows(answer[5], TOKEN_BYTES) == [apply_blocks(value, 0, self._caches)], "a wrong token"
        self._position += 1

    async def _ask(self, *fields: Any) -> list[Any] | None:
        self._line.send(ws_frame(msgpack.packb(fields)))
        answering = asyncio.ensure_future(self._line.answer())
        async with asyncio.timeout(PATIENCE_S):
            while not answering.done():
                await asyncio.wait({answering}, timeout=0.002)
                if not answering.done():
                    await self._clock.advance(0.01)
        return answering.result()


class ServerTarget(LoopTarget):
    """The data plane under attack."""

    name = "server"
    cases = CASES

    def __init__(self) -> None:
        super().__init__(n_resident=3)
        self._loop.run_until_complete(self._start())

    async def _start(self) -> None:
        self.clock = ManualClock()
        compute = StubCompute(StubProfile(TOKEN_BYTES, StepTimes(0.0005, 0.0005, 0.0)), self.clock)
        self.server = Server("s", HostedBlocks(0, N_BLOCKS, 1200.0, 1.0), compute, self.clock, LIMITS)
        self._runner = web.AppRunner(
            self.server.app(), access_log=None, handle_signals=False, shutdown_timeout=0.1
        )
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self._port = self._runner.addresses[0][1]
        self._http = aiohttp.ClientSession()
        line = await Line.open(self._port)
        assert await line.greet()
        self._witness_line = line
        self._witness = Witness(line, self.clock)
        await self._witness.step()

    def check(self, case: list[tuple[int, Any]]) -> None:
        """Plays a case. Raises ``AssertionError`` if a promise is broken."""
        self._play(self._check(case))

    async def _check(self, case: list[tuple[int, Any]]) -> None:
        """Plays a case. The server forwards to itself, over connections that are closed after the case."""
        url = wire.url("127.0.0.1", self._port)
        forwarding = self.server.sessions.forwarding
        self._chains: dict[str, int] = {}
        """Access token of a chain of this case -> the position of its next push."""
        peers = forwarding.peers = [Connection(self._http, url, self.clock) for _ in range(N_PEERS)]
        await self._play_all(case)
        for peer in peers:
            await peer.close()
        await self._until_clean()
        assert not forwarding.n_places, f"{forwarding.n_places} places of chains are left"
        await self._witness.step()

    async def _play_all(self, case: list[tuple[int, Any]]) -> None:
        lines: dict[int, Line] = {}
        listening: list[asyncio.Task[None]] = []
        everything: list[Line] = []
        for at, (what, *rest) in case:
            if what == "time":
                await self.clock.advance(rest[0])
                await self._witness.step()
                continue
            if at not in lines or lines[at].writer.is_closing():
                lines[at] = line = await Line.open(self._port)
                everything.append(line)
                if what == "http":
                    line.send(rest[0])
                    continue
                if not await line.greet():
                    self.counts["refused connections"] += 1
                    continue
                listening.append(asyncio.ensure_future(line.listen()))
            await self._move(lines[at], what, rest)
        await self._witness.step()
        for line in everything:
            line.leave("close")
        for line in everything:
            self._count(line)
        await asyncio.gather(*listening)

    async def _move(self, line: Line, what: str, rest: list[Any]) -> None:
        if what in ("chain", "push on"):
            self._chained(line, what, *rest)
        elif what in ("begin", "go on", "end"):
            self._in_order(line, what, rest)
        elif what == "frame":
            line.send(ws_frame(rest[0]))
        elif what == "split":
            data = ws_frame(rest[0])
            line.send(data[: rest[1]])
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            line.send(data[rest[1] :])
        elif what == "pieces":
            data, n = rest
            cuts = [len(data) * i // n for i in range(n + 1)]
            for i in range(n):
                line.send(ws_frame(data[cuts[i] : cuts[i + 1]], 0 if i else 2, i == n - 1))
        elif what == "flood":
            line.send(ws_frame(rest[0]) * rest[1])
        elif what == "half":
            line.send(ws_frame(rest[0])[: rest[1]])
            line.leave("close")
        elif what == "text":
            line.send(ws_frame(rest[0].encode(), 1))
        elif what == "control":
            line.send(ws_frame(rest[1], rest[0]))
        elif what in ("header", "http"):
            line.send(rest[0])
        elif what == "leave":
            line.leave(rest[0])
        elif what == "deaf":
            line.deaf = True
        elif what == "look":
            await asyncio.sleep(0.001)

    def _chained(self, line: Line, what: str, token: str, given: Any) -> None:
        """Opens a session that forwards its results to the session with the next access token on the same
        server, or push to one.
        """
        if what == "push on" and token not in self._chains:
            what, token, given = (
                ("push on", next(iter(self._chains)), given) if self._chains else ("chain", token, "")
            )
        if what == "chain":
            self._chains.setdefault(token, 0)
            frame = msgpack.packb(("join", 4, f"chain {token}", "c", 0, N_BLOCKS, 20, token, 0, given))
        else:
            frame = msgpack.packb(
                ("push", 5, token, self._chains[token], given, b"", bytes(given * TOKEN_BYTES))
            )
            self._chains[token] += given
        line.send(ws_frame(frame))

    def _in_order(self, line: Line, what: str, rest: list[Any]) -> None:
        key = rest[0]
        if what == "go on" and key not in line.positions:
            key = next(iter(line.positions), key)
        if what == "begin":
            line.positions[key] = 0
            line.send(ws_frame(msgpack.packb(("open", 1, key, "c", 0, N_BLOCKS, rest[1]))))
        elif what == "end":
            line.positions.pop(key, None)
            line.send(ws_frame(msgpack.packb(("close", 2, key))))
        else:
            position = line.positions.get(key, 0)
            line.positions[key] = position + rest[1]
            payload = bytes(rest[1] * TOKEN_BYTES)
            line.send(ws_frame(msgpack.packb(("step", 3, key, position, rest[1], payload))))

    def _count(self, line: Line) -> None:
        for answer in line.answers:
            self.counts[answer[2] if answer[0] == "error" else answer[0]] += 1

    async def _until_clean(self) -> None:
        """Waits until only the witness's session and cache are left. Raises ``AssertionError`` if more cache
        is held.
        """
        async with asyncio.timeout(PATIENCE_S):
            while len(self.server.sessions.live) != 1:  # noqa: ASYNC110 - there is no event for the last one
                await asyncio.sleep(0.0005)
        account = self.server.account
        assert len(account) == 1, f"{len(account) - 1} sessions are left"
        assert account.used_bytes == 201 * N_BLOCKS, f"{account.used_bytes} bytes of cache are held"

    def close(self) -> None:
        async def stop() -> None:
            self._witness_line.leave("close")
            await self._http.close()
            await self._runner.cleanup()

        self._loop.run_until_complete(stop())
        self._loop.close()
