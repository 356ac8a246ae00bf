"""The endpoint's HTTP server: routes, limits, API key, streams."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import math
import socket
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar

from aiohttp import web
from aiohttp.http import HttpProcessingError

from nodes.request import Generation
from testbed.codeversion import project_version
from testbed.experiments.experiment import Experiment
from testbed.serving.guests import Ended, Generated, Guests, Opened, Refused, Stream
from testbed.serving.metrics import Metrics
from testbed.serving.openai import (
    ANY_TOKEN,
    DONE,
    ApiError,
    Body,
    ChatBody,
    CompletionBody,
    Finish,
    Writer,
    event,
    read_body,
)
from testbed.serving.text import (
    Codec,
    Detokenizer,
    IncrementalDetokenizer,
    StopSequences,
    StubCodec,
    StubDetokenizer,
)

log = logging.getLogger(__name__)
_http_log = logging.getLogger(f"{__name__}.http")
"""aiohttp's log. It has a traceback for every connection that sends no valid HTTP; these are filtered out."""


def _is_no_clients(record: logging.LogRecord) -> bool:
    """Whether a log record is about anything but an invalid request."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, HttpProcessingError | web.RequestPayloadError)


_http_log.addFilter(_is_no_clients)

_MAX_BODY_BYTES = 16 * 1024**2
_PLAIN_TOKENS = 16
"""Default max_tokens of a completion, as in OpenAI's API; a chat continues up to the model's limit."""
_LONGEST_TOKEN = 32
"""Characters per token that no text has on average: a longer text is rejected without encoding it."""
_LAST_WORDS_S = 2.0
"""Real seconds that streams may take to end when the testbed does."""
CLIENT_HEADER = "X-Testbed-Client"
SESSION_HEADER = "X-Session-ID"
"""The name of the conversation: routings can keep it on its chain."""
_LONGEST_NAME = 128
_REQUEST_ID = "X-Request-Id"
INDEX_HEADER = "X-Testbed-Request"
"""The request's number in the run's tables."""
_PREFLIGHT = "Access-Control-Request-Method"
_ENCODINGS = ("identity", "gzip", "deflate")
_MAX_ID = 200
B = TypeVar("B", bound=Body)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True)
class Rules:
    """Settings of the endpoint.

    ``api_key`` None: no key is needed. ``rejects``: a request without room gets HTTP 429 instead of waiting.
    ``model_name``: how the model is called; "": as in the scenario. ``cors``: the origins whose pages may ask from a
    browser; "*" are all.
    """

    api_key: str | None = None
    rejects: bool = False
    max_requests: int = 1024
    model_name: str = ""
    cors: tuple[str, ...] = ()


@dataclass
class _Asked:
    """A request's id and further headers of its response. ``streams``: a streamed response has begun."""

    id: str
    headers: dict[str, str] = field(default_factory=dict)
    streams: bool = False


_asked: ContextVar[_Asked] = ContextVar("asked")
"""The current request: each has its own task, and so its own value."""


class Endpoint:
    """Serves HTTP on the socket ``bound`` while the testbed serves; ``guests`` connects it to the testbed."""

    def __init__(
        self,
        experiment: Experiment,
        codec: Codec,
        rules: Rules,
        bound: socket.socket,
        ends: Collection[int] = (),
    ) -> None:
        self._experiment = experiment
        self._codec = codec
        self._rules = rules
        self._bound = bound
        self._ends = ends
        """Tokens with which the model ends a text."""
        self._model = rules.model_name or experiment.problem.model.name
        self._clients = experiment.problem.clients
        self._metrics = Metrics(self._model, experiment.time_scale)
        self._begun_at = int(time.time())
        blocks = experiment.compute.blocks
        self._n_known: int = ANY_TOKEN if blocks is None else blocks.config.get("vocab_size", ANY_TOKEN)
        """Token ids are below this."""
        self._ready: Callable[[], None] = lambda: None
        self.generations: dict[int, Generation] = {}
        """How real blocks were asked to generate, by request number."""
        self.guests = Guests(self._metrics, self._listen, self._hang_up, rules.max_requests)
        self._runner = web.AppRunner(
            self._app(),
            logger=_http_log,
            access_log=None,
            handler_cancellation=True,
            shutdown_timeout=_LAST_WORDS_S,
        )

    def _app(self) -> web.Application:
        app = web.Application(middlewares=[self._guarded], client_max_size=_MAX_BODY_BYTES)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{name:.+}", self._one_model)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_get("/health", self._health)
        app.router.add_get("/health/ready", self._is_ready)
        app.router.add_get("/metrics", self._show_metrics)
        app.router.add_get("/version", self._version)
        return app

    @property
    def n_connections(self) -> int:
        """Number of open HTTP connections."""
        return len(self._runner.server.connections) if self._runner.server is not None else 0

    def when_ready(self, call: Callable[[], None]) -> None:
        """Set the function to call once the endpoint accepts requests."""
        self._ready = call

    async def _listen(self) -> None:
        await self._runner.setup()
        await web.SockSite(self._runner, self._bound, backlog=1024).start()
        self._ready()

    async def _hang_up(self) -> None:
        await self._runner.cleanup()

    @web.middleware
    async def _guarded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Check the API key, and turn errors into responses in OpenAI's format."""
        asked = _Asked(_id(request.headers.get(_REQUEST_ID, "")), self._cors_headers(request))
        _asked.set(asked)
        try:
            if asked.headers and request.method == "OPTIONS" and _PREFLIGHT in request.headers:
                return web.Response(status=204, headers={**_preflight(request), **self._headers()})
            self._check_key(request)
            response = await handler(request)
        except ApiError as error:
            response = web.json_response(error.body(), status=error.status)
            if error.retry_after_s is not None:
                response.headers["Retry-After"] = str(math.ceil(error.retry_after_s))
        except web.HTTPException as error:
            wrong = ApiError(error.status, error.reason)
            response = web.json_response(wrong.body(), status=error.status, headers=_allowed(error))
        except Exception:
            if asked.streams:  # too late for another response: aiohttp closes the connection
                raise
            log.exception("a request failed in the endpoint")
            response = web.json_response(
                ApiError(500, "the endpoint has failed; its log says why").body(), status=500
            )
        if not response.prepared:
            response.headers.update(self._headers())
        return response

    def _headers(self) -> dict[str, str]:
        asked = _asked.get()
        headers = {_REQUEST_ID: asked.id, **asked.headers}
        if self._experiment.time_scale != 1:
            headers["X-Testbed-Time-Scale"] = f"{self._experiment.time_scale:g}"
        return headers

    def _cors_headers(self, request: web.Request) -> dict[str, str]:
        """Return the headers with which a browser lets a page of the request's origin read the response."""
        origin = request.headers.get("Origin", "")
        if not (
            origin and origin.isascii() and origin.isprintable() and {"*", origin} & set(self._rules.cors)
        ):
            return {}
        return {
            "Access-Control-Allow-Origin": "*" if "*" in self._rules.cors else origin,
            "Access-Control-Expose-Headers": f"{_REQUEST_ID}, {INDEX_HEADER}, Retry-After",
            "Vary": "Origin",
        }

    def _check_key(self, request: web.Request) -> None:
        key = self._rules.api_key
        if key is None or request.path.startswith("/health"):
            return
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        given = given.strip() if scheme.lower() == "bearer" else scheme  # the name of a scheme has no case
        if not hmac.compare_digest(*(text.encode("utf-8", "surrogateescape") for text in (given, key))):
            raise ApiError(
                401, "the API key is missing or wrong: send Authorization: Bearer KEY", code="invalid_api_key"
            )

    async def _models(self, _: web.Request) -> web.Response:
        rows = [self._model_row(name, client) for name, client in self._models_and_clients().items()]
        return web.json_response({"object": "list", "data": rows})

    async def _one_model(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        client = self._models_and_clients().get(name)
        if client is None:
            raise ApiError(404, f"there is no model {name[:200]!r} here", "model", "model_not_found")
        return web.json_response(self._model_row(name, client))

    def _models_and_clients(self) -> dict[str, int]:
        """Return the names of the model, each with the number of the client that it stands for."""
        names = {self._model: 0}
        if len(self._clients) > 1:
            names |= {f"{self._model}@{client}": number for number, client in enumerate(self._clients)}
        return names

    def _model_row(self, name: str, client: int) -> dict[str, Any]:
        most = self._experiment.workload.endpoint_tokens
        return {
            "id": name,
            "object": "model",
            "created": self._begun_at,
            "owned_by": "testbed",
            "root": self._model,
            "max_model_len": 1 + self.guests.most_tokens(client, 1, most - 1),
        }

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _is_ready(self, _: web.Request) -> web.Response:
        return web.Response(status=200 if self.guests.is_ready else 503)

    async def _version(self, _: web.Request) -> web.Response:
        return web.json_response({"version": project_version()})

    async def _show_metrics(self, _: web.Request) -> web.Response:
        if (host := self.guests.host) is not None:
            self._metrics.servers(await host.statuses())
            self._metrics.links(host.links_now())
        return web.Response(body=self._metrics.text(), content_type="text/plain", charset="utf-8")

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await _read(request, CompletionBody)
        client = self._client(request, body)
        prompts = []
        for prompt in body.asked():
            tokens = self._tokens(prompt) if isinstance(prompt, str) else prompt
            self._check_known(tokens, "prompt")
            prompts.append(tokens)
        return await self._answer(request, body, client, prompts, _PLAIN_TOKENS)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await _read(request, ChatBody)
        client = self._client(request, body)
        turns = body.turns()
        self._check_length(sum(len(text) for _, text in turns))
        try:
            tokens = self._codec.chat(turns)
        except ValueError as error:
            raise ApiError(400, str(error), "messages") from error
        self._check_known(tokens, "messages")
        return await self._answer(request, body, client, [tokens], None)

    def _tokens(self, text: str) -> list[int]:
        """Encode a prompt. Raises ``ApiError``."""
        self._check_length(len(text))
        return self._codec.encode(text)

    def _check_length(self, n_characters: int) -> None:
        """Raise ``ApiError`` for a prompt that is so long that encoding it would block the run."""
        most = self._experiment.workload.endpoint_tokens - 1
        if n_characters > _LONGEST_TOKEN * most:
            message = f"the prompt has {n_characters:,} characters; it must have 1 to {most:,} tokens here"
            raise ApiError(400, message, "prompt", "context_length_exceeded")

    def _check_known(self, tokens: list[int], param: str) -> None:
        if not all(0 <= token < self._n_known for token in tokens):
            raise ApiError(
                400, f"{param}: the model knows only the tokens from 0 to {self._n_known - 1}", param
            )

    def _client(self, request: web.Request, body: Body) -> int:
        """Return the number of the scenario's client that sends the request. Raises ``ApiError``.

        It is named by MODEL@CLIENT or a header; the default is the first client.
        """
        model, _, name = body.model.partition("@")
        if model != self._model:
            text = f"there is no model {body.model[:200]!r} here, only {self._model!r}"
            raise ApiError(404, text, "model", "model_not_found")
        name = name or request.headers.get(CLIENT_HEADER, "") or self._clients[0]
        if name not in self._clients:
            known = ", ".join(self._clients)
            raise ApiError(404, f"there is no client {name[:200]!r} here; clients are {known}", "model")
        return self._clients.index(name)

    def _talk(self, body: Body, client: int, tokens: list[int], plain: int | None, session: str) -> _Talk:
        """Start a request with one prompt, of the conversation ``session`` ("": of none). Raises ``ApiError``."""
        n_prompt, most = len(tokens), self._experiment.workload.endpoint_tokens
        room = most - n_prompt
        if room < 1 or not tokens:
            text = f"the prompt has {n_prompt:,} tokens; it must have 1 to {most - 1:,} here"
            raise ApiError(400, text, "prompt", "context_length_exceeded")
        n_tokens = body.limit() or self.guests.most_tokens(client, n_prompt, min(plain or room, room))
        if n_tokens > room:
            raise ApiError(
                400,
                f"a prompt of {n_prompt:,} tokens and {n_tokens:,} new ones exceed the limit of {most:,}; "
                "ask for fewer",
                "max_tokens",
                "context_length_exceeded",
            )
        if body.min_tokens > n_tokens:
            raise ApiError(
                400,
                f"min_tokens must be from 0 to {n_tokens:,}, the most tokens of the response",
                "min_tokens",
            )
        how = Generation() if self._experiment.compute.prefix is None else Generation(tuple(tokens))
        if self._experiment.compute.blocks is not None:
            how = Generation(tuple(tokens), body.sampling(), not body.ignore_eos, body.min_tokens)
        stream = self.guests.open(client, n_prompt, n_tokens, how, session)
        if self._experiment.compute.blocks is not None:
            self.generations[stream.index] = how
        return _Talk(stream, body, self._detokenizer(stream.index), n_tokens, self._ends if how.stops else ())

    async def _answer(
        self, request: web.Request, body: Body, client: int, prompts: list[list[int]], plain: int | None
    ) -> web.StreamResponse:
        """Have a session answer each of ``prompts``, and respond once all are admitted."""
        talks: list[_Talk] = []
        try:
            for tokens in prompts:
                session = request.headers.get(SESSION_HEADER, "")[:_LONGEST_NAME]
                talks.append(self._talk(body, client, tokens, plain, session))
            for talk in talks:
                await talk.begin(self._rules.rejects, self._experiment.time_scale)
            writer = Writer(
                is_chat=isinstance(body, ChatBody),
                key=_asked.get().id,
                model=body.model,
                created=int(time.time()),
                n_prompt=sum(map(len, prompts)),
                n_cached=lambda: _n_cached(talks),
            )
            _asked.get().headers[INDEX_HEADER] = ",".join(str(talk.stream.index) for talk in talks)
            if body.stream:
                return await self._stream(request, body, talks, writer)
            return await self._whole(talks, writer)
        except ApiError as error:
            self._close(talks, str(error))
            raise
        finally:
            self._close(talks)

    def _close(self, talks: Sequence[_Talk], reason: str = "") -> None:
        """End what has not ended of ``talks``: as failed for ``reason``; without one their user has gone."""
        for talk in talks:
            self.guests.close(talk.stream, enough=talk.finish is not None, reason=reason)

    def _detokenizer(self, index: int) -> Detokenizer:
        return (
            StubDetokenizer(self._codec, index)
            if isinstance(self._codec, StubCodec)
            else IncrementalDetokenizer(self._codec)
        )

    async def _whole(self, talks: Sequence[_Talk], writer: Writer) -> web.Response:
        answers = []
        for talk in talks:
            texts = []
            while talk.finish is None:
                texts.append(await talk.next())
            answers.append(("".join(texts), talk.finish))
        return web.json_response(writer.whole(answers, sum(talk.n_tokens for talk in talks)))

    async def _stream(
        self, request: web.Request, body: Body, talks: Sequence[_Talk], writer: Writer
    ) -> web.StreamResponse:
        usage = body.usage_in_stream
        headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        response = web.StreamResponse(headers={**headers, **self._headers()})
        _asked.get().streams = True
        with contextlib.suppress(ConnectionError):  # the user has disconnected
            await response.prepare(request)
            try:
                async with contextlib.aclosing(_texts(talks)) as texts:
                    async for index, text in texts:
                        n_tokens = (
                            sum(talk.n_tokens for talk in talks) if usage.continuous_usage_stats else None
                        )
                        await response.write(writer.chunk(index, text, talks[index].finish, n_tokens))
                if usage.include_usage:
                    await response.write(writer.last(sum(talk.n_tokens for talk in talks)))
            except ApiError as error:
                self._close(talks, str(error))
                await response.write(event(error.body()))
            await response.write(DONE)
            await response.write_eof()
        return response


def _n_cached(talks: Sequence[_Talk]) -> int | None:
    known = [talk.stream.n_cached for talk in talks if talk.stream.n_cached is not None]
    return sum(known) if known else None


async def _texts(talks: Sequence[_Talk]) -> AsyncGenerator[tuple[int, str], None]:
    """Yield (number of the talk, its next text) as they come, until all have ended."""
    if len(talks) == 1:  # by far the most: without a task per token
        while talks[0].finish is None:
            yield 0, await talks[0].next()
        return
    waiting = {asyncio.ensure_future(talk.next()): index for index, talk in enumerate(talks)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=waiting.__getitem__):
                index = waiting.pop(task)
                text = task.result()
                if talks[index].finish is None:
                    waiting[asyncio.ensure_future(talks[index].next())] = index
                yield index, text
    finally:
        for task in waiting:
            task.cancel()


class _Talk:
    """One response, as it is generated: ``next`` returns text until ``finish`` has the reason of its end."""

    def __init__(
        self, stream: Stream, body: Body, detokenizer: Detokenizer, n_asked: int, ends: Collection[int] = ()
    ) -> None:
        self.stream = stream
        self._detokenizer = detokenizer
        self._stops = StopSequences(body.stops)
        self._n_asked = n_asked
        self._ends = ends
        self._min_tokens = body.min_tokens
        self.n_tokens = 0
        self.finish: Finish | None = None

    async def begin(self, rejects: bool, time_scale: float) -> None:
        """Wait for admission. Raises ``ApiError`` if it is not, or if ``rejects`` and it must wait.

        Afterwards the response begins, and its HTTP status cannot change any more.
        """
        while not isinstance(event := await self.stream.get(), Opened):
            if isinstance(event, Ended):
                raise ApiError(503, event.why or "the testbed ends")
            if isinstance(event, Refused) and rejects:
                text = f"there is no room: {event.reason}"
                raise ApiError(429, text, code="no_room", retry_after_s=event.backoff_s / time_scale)

    async def next(self) -> str:
        """Return the text of the next token, or after the last the held-back text. Raises ``ApiError``."""
        event = await self.stream.get()
        if isinstance(event, Generated):
            self.n_tokens += 1
            text = self._detokenizer.add(event.token_id)
            if self.n_tokens > self._min_tokens:
                text = self._stops.add(text)
            if self._stops.found:
                self.finish = "stop"
            elif (is_end := event.token_id in self._ends) or self.n_tokens == self._n_asked:
                self.finish = "stop" if is_end else "length"
                text += self._rest()
            return text
        if isinstance(event, Ended):
            if event.why is not None:
                raise ApiError(500, event.why)
            self.finish = "stop"
            return self._rest()
        return ""  # it has lost a hop or its chain, and waits for room

    def _rest(self) -> str:
        return self._stops.add(self._detokenizer.rest()) + self._stops.rest()


def _id(given: str) -> str:
    """Return the id that the request has, if it can stand in a header, else a new one."""
    return (given[:_MAX_ID] if given.isascii() and given.isprintable() else "") or uuid.uuid4().hex


def _preflight(request: web.Request) -> dict[str, str]:
    """Return what a browser asks for before a page's request: the methods and headers that it may have."""
    asked = request.headers.get("Access-Control-Request-Headers", "")
    return {
        "Access-Control-Allow-Methods": "GET, POST, OPTIONS",
        "Access-Control-Allow-Headers": asked if asked.isascii() and asked.isprintable() and asked else "*",
        "Access-Control-Max-Age": "600",
    }


def _allowed(error: web.HTTPException) -> dict[str, str]:
    """Return the header Allow, which a response 405 must have."""
    return {"Allow": error.headers["Allow"]} if "Allow" in error.headers else {}


async def _read(request: web.Request, kind: type[B]) -> B:
    """Read and check a request's body. Raises ``ApiError``."""
    encoding = request.headers.get("Content-Encoding", "identity").lower()
    if encoding not in _ENCODINGS:
        raise ApiError(415, f"the body's Content-Encoding must be {', '.join(_ENCODINGS)}, or left out")
    if request.content_type != "application/json":
        raise ApiError(415, "the body must be JSON, with Content-Type: application/json")
    try:
        data = await request.read()
    except web.RequestPayloadError as error:
        raise ApiError(400, "the body does not match the headers of the request") from error
    return read_body(data, kind)
