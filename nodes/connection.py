"""The client's end of the data plane: one kept-alive connection per server, requests multiplexed."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
from typing import Any

import aiohttp

from nodes import wire
from nodes.clock import Clock
from nodes.links import DelayLine, DelayProfile


class ServerError(Exception):
    """The server answered with an error frame; ``code`` is one of the codes of ``nodes.wire``."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code


class ConnectionLost(Exception):
    """The connection to the server is gone."""


class Connection:
    """A WebSocket to one server. ``up`` and ``down`` delay messages when the kernel does not."""

    def __init__(
        self,
        http: aiohttp.ClientSession,
        url: str,
        clock: Clock,
        up: DelayProfile | None = None,
        down: DelayProfile | None = None,
        max_frame_bytes: int = 256 * 1024**2,
        seed: str = "",
    ) -> None:
        self._http = http
        self._url = url
        self._clock = clock
        self._up = DelayLine(up, clock, random.Random(f"{seed}:up")) if up else None
        self._down = DelayLine(down, clock, random.Random(f"{seed}:down")) if down else None
        self._max_frame_bytes = max_frame_bytes
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._waiting: dict[int, asyncio.Future[tuple[list[Any], float]]] = {}
        self._next_id = 0
        self._reader: asyncio.Task[None] | None = None
        self._late: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        """Connect. Raises ``aiohttp.ClientError`` or ``OSError`` when the server cannot be reached."""
        self._socket = await self._http.ws_connect(
            self._url,
            compress=0,
            autoping=True,
            max_msg_size=self._max_frame_bytes + wire.FRAME_OVERHEAD_BYTES,
        )
        raw = self._socket.get_extra_info("socket")
        if raw is not None:
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._reader = asyncio.ensure_future(self._read(self._socket))

    def change_links(self, up: DelayProfile | None, down: DelayProfile | None) -> None:
        """Delay messages that are sent from now on by other profiles; ``None`` leaves a direction as it is."""
        for line, profile in ((self._up, up), (self._down, down)):
            if profile is not None:
                assert line is not None, "the kernel delays messages: there is no link to change here"
                line.change(profile)

    async def ask(self, kind: str, *fields: Any) -> tuple[list[Any], float, float]:
        """Send a request; answer ``(answer frame, sent_at_s, received_at_s)``.

        Raises ``ServerError`` for an error frame and ``ConnectionLost`` when no answer can come.
        """
        if self._socket is None or self._socket.closed:
            raise ConnectionLost(f"not connected to {self._url}")
        self._next_id += 1
        request_id = self._next_id
        future: asyncio.Future[tuple[list[Any], float]] = asyncio.get_running_loop().create_future()
        self._waiting[request_id] = future
        data = wire.pack(kind, request_id, *fields)
        sent_at_s = self._clock.now_s()
        try:
            if self._up is not None:
                await self._carry(self._up, len(data))
            await self._socket.send_bytes(data)
            frame, received_at_s = await future
        except (ConnectionError, aiohttp.ClientError) as error:
            raise ConnectionLost(f"{self._url}: {error}") from error
        finally:
            self._waiting.pop(request_id, None)
        if frame[0] == "error":
            raise ServerError(frame[2], frame[3])
        return frame, sent_at_s, received_at_s

    async def _read(self, ws: aiohttp.ClientWebSocketResponse) -> None:
        reason = "was closed"
        try:
            async for message in ws:
                if message.type != aiohttp.WSMsgType.BINARY:
                    reason = f"carried a {message.type.name} message"
                    break
                frame = wire.unpack_answer(message.data)
                if self._down is None:
                    self._deliver(frame, self._clock.now_s())
                else:
                    task = asyncio.ensure_future(self._deliver_late(frame, len(message.data), self._down))
                    self._late.add(task)
                    task.add_done_callback(self._late.discard)
        except wire.FrameError as error:
            reason = f"carried what is no answer: {error}"
        finally:
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(ConnectionLost(f"the connection to {self._url} {reason}"))
            await ws.close()  # nothing is read any more, so nothing may be asked any more

    async def _deliver_late(self, frame: list[Any], n_bytes: int, down: DelayLine) -> None:
        with contextlib.suppress(
            ConnectionError
        ):  # _carry has closed the socket: everybody who waits hears it
            await self._carry(down, n_bytes)
            self._deliver(frame, self._clock.now_s())

    async def _carry(self, line: DelayLine, n_bytes: int) -> None:
        """As ``DelayLine.carry``; a link that gives up ends the connection, as the kernel would."""
        try:
            await line.carry(n_bytes)
        except ConnectionError:
            assert self._socket is not None
            await self._socket.close()
            raise

    def _deliver(self, frame: list[Any], received_at_s: float) -> None:
        future = self._waiting.get(frame[1])
        if future is not None and not future.done():
            future.set_result((frame, received_at_s))

    async def close(self) -> None:
        if self._socket is not None:
            await self._socket.close()
        if self._reader is not None:
            await asyncio.gather(self._reader, return_exceptions=True)
