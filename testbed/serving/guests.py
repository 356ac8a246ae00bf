"""Requests from outside as sessions of the scenario's clients, and what becomes of them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import NamedTuple

from nodes.messages import NewToken
from nodes.records import ENDED, Admitted, Completed, Failed, Rejected, States
from nodes.request import Generation
from testbed.runtime.guests import Host
from testbed.serving.metrics import Metrics
from testbed.serving.openai import ApiError


class Opened(NamedTuple):
    """Its chain is open: tokens will come."""


class Came(NamedTuple):
    """A token."""

    token_id: int


class Refused(NamedTuple):
    """There was no room; the session asks again ``backoff_s`` (scenario seconds) later."""

    reason: str
    backoff_s: float


class Over(NamedTuple):
    """Nothing more comes; ``why`` says why not all of it did."""

    why: str | None


News = Opened | Came | Refused | Over


class Stream:
    """What comes of one request, in order."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.is_over = False
        self._news: asyncio.Queue[News] = asyncio.Queue()

    def put(self, news: News) -> None:
        self.is_over = isinstance(news, Over)
        self._news.put_nowait(news)

    async def get(self) -> News:
        return await self._news.get()


@dataclass
class Guests:
    """``testbed.runtime.guests.Guests`` of an endpoint: ``open`` begins a request, ``close`` ends it.

    ``listen`` begins to take requests once the testbed can serve them, ``hang_up`` ends that.
    """

    metrics: Metrics
    listen: Callable[[], Awaitable[None]]
    hang_up: Callable[[], Awaitable[None]]
    max_requests: int
    host: Host | None = None

    def __post_init__(self) -> None:
        self._streams: dict[int, Stream] = {}

    @property
    def is_ready(self) -> bool:
        return self.host is not None

    @property
    def n_open(self) -> int:
        """Requests that somebody waits for."""
        return len(self._streams)

    def open(self, client: int, n_prompt: int, n_tokens: int, how: Generation) -> Stream:
        """Ask for ``n_tokens`` tokens after a prompt of ``n_prompt`` at the client of that number.

        Raises ``ApiError`` if the testbed takes no more.
        """
        if self.host is None:
            raise ApiError(503, "the testbed is not ready", retry_after_s=1.0)
        if not self.host.could_hold(client, n_prompt, n_tokens):
            text = (
                f"{n_prompt + n_tokens:,} tokens, prompt and answer, are more than any chain of these servers could "
                "hold; ask for fewer"
            )
            raise ApiError(400, text, "max_tokens", "context_length_exceeded")
        if self.n_open >= self.max_requests:
            text = f"{self.max_requests} requests are under way, and no more are taken"
            raise ApiError(429, text, retry_after_s=1.0)
        stream = Stream(self.host.submit(client, n_prompt, n_tokens, how))
        self._streams[stream.index] = stream
        return stream

    def close(self, stream: Stream, *, enough: bool) -> None:
        """Nobody waits for the rest of ``stream``: there is ``enough`` of it, or its reader has gone."""
        if self._streams.pop(stream.index, None) is not None and not stream.is_over:
            assert self.host is not None, "a stream before there was a testbed"
            self.host.end_request(stream.index, enough=enough)

    async def begin(self, host: Host) -> None:
        self.host = host
        await self.listen()

    async def end(self) -> None:
        self.host = None
        for stream in list(self._streams.values()):
            stream.put(Over("the testbed ends"))
        await self.hang_up()

    def recorded(self, record: States) -> None:
        self.metrics.recorded(record)
        stream = self._streams.get(record.request)
        if stream is None:
            return
        if isinstance(record, Admitted):
            stream.put(Opened())
        elif isinstance(record, Rejected):
            stream.put(Refused(record.reason, record.backoff_s))
        elif isinstance(record, ENDED):
            why = record.reason if isinstance(record, Failed) else "the testbed ends"
            stream.put(Over(None if isinstance(record, Completed) else why))

    def token(self, message: NewToken) -> None:
        self.metrics.token(message)
        if (stream := self._streams.get(message.request)) is not None:
            stream.put(Came(message.token_id))
