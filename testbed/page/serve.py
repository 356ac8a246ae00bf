"""The page's HTTP server, on loopback only: files, the run's history, updates, changes by hand."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from nodes import control
from nodes.messages import A, Question
from testbed.control.faults.byhand import Fault, check_fault
from testbed.control.links import link_change
from testbed.control.live import SOCKET, ask
from testbed.errors import TestbedError, UserError
from testbed.page.feed import UPDATE_S, Feed
from testbed.page.guard import add_headers, refusal
from testbed.page.history import Position
from testbed.page.waterfall import request_hops

ADDRESS = "127.0.0.1"
_PING_S = 15.0
_MAX_BODY_BYTES = 4096
_TYPES = {
    ".html": "text/html",
    ".js": "text/javascript",
    ".css": "text/css",
    ".json": "application/json",
    ".svg": "image/svg+xml",
}
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def bind(port: int, host: str = ADDRESS) -> socket.socket:
    """Return a socket that listens on ``host`` and ``port`` (0: any free port). Raises ``UserError``."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(64)
        except BaseException:
            listener.close()
            raise
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(f"cannot listen at {host} port {port}: {reason}; give another port") from error
    return listener


def address_of(listener: socket.socket, token: str) -> str:
    """Return the page's address with its token."""
    return f"http://{ADDRESS}:{listener.getsockname()[1]}/#token={token}"


class PageServer:
    """Serves ``feed``. Requests with ``token`` may do what ``testbed fault`` and ``testbed link`` can."""

    def __init__(self, feed: Feed, token: str) -> None:
        self._feed = feed
        self._token = token
        self._static = _static_files()
        self._streams: set[asyncio.Task[Any]] = set()

    def app(self) -> web.Application:
        """Return the application, which follows the run while it is served."""
        app = web.Application(middlewares=[self._guarded], client_max_size=_MAX_BODY_BYTES)
        app.on_response_prepare.append(add_headers)
        app.cleanup_ctx.append(self._watching)
        app.router.add_get("/api/run", self._run)
        app.router.add_get("/api/news", self._news)
        app.router.add_get("/api/twin", self._twin)
        app.router.add_get("/api/others", self._others)
        app.router.add_get("/api/links", self._use_of_links)
        app.router.add_get("/api/requests/{request}/hops", self._hops)
        app.router.add_post("/api/faults", self._fault)
        app.router.add_post("/api/links", self._link)
        app.router.add_get("/{path:.*}", self._file)
        return app

    async def serve(self, listener: socket.socket, until: asyncio.Event) -> None:
        """Serve on ``listener`` until ``until`` is set."""
        runner = web.AppRunner(self.app(), access_log=None, shutdown_timeout=0.5)
        await runner.setup()
        await web.SockSite(runner, listener).start()
        await until.wait()
        for stream in self._streams:
            stream.cancel()
        await runner.cleanup()

    @web.middleware
    async def _guarded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        why = refusal(request, self._token)
        if why is not None:
            return _error(403, why)
        return await handler(request)

    async def _watching(self, app: web.Application) -> AsyncIterator[None]:
        watching = asyncio.create_task(self._feed.watch())
        yield
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching

    async def _run(self, request: web.Request) -> web.Response:
        """Respond with the header and the history so far."""
        if self._feed.header is None:
            return _error(503, "the run is starting; try again soon")
        body, _, _ = self._feed.update(Position())
        head = msgspec.json.encode(self._feed.header)
        return _json(b'{"header":' + head + b',"update":' + body + b"}")

    async def _twin(self, request: web.Request) -> web.Response:
        if self._feed.twin is None:
            return _error(404, "this run has no twin yet")
        return _json(self._feed.twin)

    async def _others(self, request: web.Request) -> web.Response:
        return _json(self._feed.others)

    async def _use_of_links(self, request: web.Request) -> web.Response:
        try:
            body = await asyncio.to_thread(self._feed.links)
        except (TestbedError, OSError, ValueError) as error:
            return _error(404, f"the use of links cannot be shown: {error}")
        return _json(body)

    async def _hops(self, request: web.Request) -> web.Response:
        """Respond with the hops of every token of one request."""
        try:
            number = int(request.match_info["request"])
        except ValueError:
            return _error(404, "the request must be a number")
        rows = await asyncio.to_thread(request_hops, self._feed.run_dir, number)
        return _json(msgspec.json.encode(rows))

    async def _news(self, request: web.Request) -> web.StreamResponse:
        """Respond with server-sent events: all updates after the page's position."""
        at = self._position(request)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        task = asyncio.current_task()
        assert task is not None, "aiohttp runs handlers in tasks"
        self._streams.add(task)
        try:
            if at is None:
                await response.write(b"event: again\ndata: {}\n\n")  # reload: of an earlier server
                return response
            n_statuses = -1
            while True:
                try:
                    await asyncio.wait_for(self._feed.news(at, n_statuses), _PING_S)
                except TimeoutError:
                    await response.write(b": still here\n\n")
                    continue
                body, at, n_statuses = self._feed.update(at)
                place = ".".join(map(str, at))
                await response.write(
                    b"id: %s.%s\ndata: %s\n\n" % (self._feed.name.encode(), place.encode(), body)
                )
                await asyncio.sleep(UPDATE_S)
        except (ConnectionError, asyncio.CancelledError):
            return response
        finally:
            self._streams.discard(task)

    def _position(self, request: web.Request) -> Position | None:
        """Return the position that the page has, or None if it is not one of this feed."""
        text = request.headers.get("Last-Event-ID") or request.query.get("from", "")
        name, *numbers = text.split(".")
        if name != self._feed.name or self._feed.header is None or len(numbers) != len(Position()):
            return None
        try:
            at = Position(*map(int, numbers))
        except ValueError:
            return None
        inside = all(0 <= have <= there for have, there in zip(at, self._feed.history.position, strict=True))
        return at if inside else None

    async def _fault(self, request: web.Request) -> web.Response:
        """Cause a fault of a server, as ``testbed fault`` does."""
        try:
            asked = msgspec.json.decode(await request.read(), type=FaultAsked)
            fault = Fault(asked.kind, asked.server, check_fault(asked.kind, asked.factor))
        except (msgspec.DecodeError, UserError) as error:
            return _error(400, str(error))
        return await self._by_hand(fault, lambda why_not: why_not, f"{asked.kind} {asked.server}")

    async def _link(self, request: web.Request) -> web.Response:
        """Change a link, as ``testbed link`` does."""
        try:
            asked = msgspec.json.decode(await request.read(), type=LinkAsked)
            change = link_change(*msgspec.structs.astuple(asked))
        except (msgspec.DecodeError, UserError) as error:
            return _error(400, str(error))
        done = f"{asked.action} {asked.a} and {asked.b}"
        return await self._by_hand(change, lambda changed: changed.why_not, done)

    async def _by_hand(
        self, question: Question[A], why_not: Callable[[A], str | None], done: str
    ) -> web.Response:
        """Send ``question`` to the run; responds with ``done``, or with ``why_not`` of the run's reply."""
        if not self._feed.is_live or not (self._feed.run_dir / SOCKET).exists():
            return _error(409, "the run does not serve now, so its servers and links cannot be changed")
        try:
            reason = why_not(await ask(self._feed.run_dir, question))
        except (OSError, control.ControlError) as error:
            return _error(502, f"the run did not answer: {error}")
        if reason is not None:
            return _error(409, reason)
        return _json(msgspec.json.encode({"done": done}))

    async def _file(self, request: web.Request) -> web.Response:
        path = request.match_info["path"] or "index.html"
        found = self._static.get(path)
        if found is None:
            return _error(404, "there is no such file")
        kind, body, packed = found
        headers = {"Content-Type": f"{kind}; charset=utf-8"}
        if "gzip" in request.headers.get("Accept-Encoding", ""):
            return web.Response(body=packed, headers={**headers, "Content-Encoding": "gzip"})
        return web.Response(body=body, headers=headers)


class FaultAsked(msgspec.Struct, forbid_unknown_fields=True):
    """The body of POST /api/faults."""

    kind: str
    server: str
    factor: float | None = None


class LinkAsked(msgspec.Struct, forbid_unknown_fields=True):
    """The body of POST /api/links; values have units, as in scenarios."""

    action: str
    a: str
    b: str
    rtt: str | None = None
    rate: str | None = None
    loss: str | None = None


def _static_files() -> dict[str, tuple[str, bytes, bytes]]:
    """Return (type, content, compressed content) of all files for the browser, by path."""
    root = Path(str(resources.files("testbed.page") / "static"))
    found = {}
    for path in sorted(root.rglob("*")):
        if path.suffix in _TYPES:
            body = path.read_bytes()
            found[path.relative_to(root).as_posix()] = _TYPES[path.suffix], body, gzip.compress(body, 6)
    return found


def _json(body: bytes) -> web.Response:
    response = web.Response(body=body, content_type="application/json")
    response.enable_compression()
    return response


def _error(status: int, sentence: str) -> web.Response:
    return web.json_response({"error": sentence}, status=status)
