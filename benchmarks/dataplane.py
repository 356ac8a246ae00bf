"""Times of the messages of one decode step (28,672 bytes each way) over WebSocket, HTTP and plain TCP.

Server and client are two processes on the loopback interface. The plain-TCP echo is the baseline; the data
plane uses WebSocket.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import socket
import time
from multiprocessing.connection import Connection
from typing import Any

import aiohttp
import numpy as np
import uvloop
from aiohttp import web

from benchmarks.figure import figure

_BYTES = 28_672
_STEPS = 3000


def measure() -> list[dict[str, Any]]:
    parent, child = multiprocessing.Pipe()
    server = multiprocessing.Process(target=_serve, args=(child,), daemon=True)
    server.start()
    ports = parent.recv()
    times = uvloop.run(_client(ports))
    server.terminate()
    server.join()
    return [
        figure(f"{name}: step of {_BYTES} B each way, {quantile}", value * 1e3, "ms")
        for name, values in times.items()
        for quantile, value in zip(("p50", "p99"), np.percentile(values, (50, 99)), strict=True)
    ]


def _serve(pipe: Connection) -> None:
    uvloop.run(_serve_all(pipe))


async def _serve_all(pipe: Connection) -> None:
    async def over_websocket(request: web.Request) -> web.StreamResponse:
        socket = web.WebSocketResponse(compress=False)
        await socket.prepare(request)
        async for message in socket:
            await socket.send_bytes(message.data)
        return socket

    async def over_http(request: web.Request) -> web.Response:
        return web.Response(body=await request.read())

    async def over_tcp(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)

    app = web.Application()
    app.router.add_get("/ws", over_websocket)
    app.router.add_post("/http", over_http)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    plain = await asyncio.start_server(over_tcp, "127.0.0.1", 0)
    pipe.send((runner.addresses[0][1], plain.sockets[0].getsockname()[1]))
    await asyncio.Event().wait()


async def _client(ports: tuple[int, int]) -> dict[str, list[float]]:
    payload = bytes(_BYTES)
    url = f"http://127.0.0.1:{ports[0]}"
    times: dict[str, list[float]] = {"plain TCP (baseline)": [], "WebSocket": [], "HTTP POST": []}
    async with aiohttp.ClientSession() as http, http.ws_connect(f"{url}/ws", compress=0) as ws:
        reader, writer = await asyncio.open_connection("127.0.0.1", ports[1])
        writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        async def by_tcp() -> None:
            writer.write(payload)
            await reader.readexactly(_BYTES)

        async def by_websocket() -> None:
            await ws.send_bytes(payload)
            await ws.receive_bytes()

        async def by_http() -> None:
            async with http.post(f"{url}/http", data=payload) as response:
                await response.read()

        for _ in range(_STEPS):
            for name, step in zip(times, (by_tcp, by_websocket, by_http), strict=True):
                started_at = time.perf_counter()
                await step()
                times[name].append(time.perf_counter() - started_at)
        writer.close()
    return times
