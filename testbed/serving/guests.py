"""Requests from outside: starts them as sessions of the scenario's clients, and streams their tokens back."""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from nodes.messages import NewToken
from nodes.records import ENDED, Admitted, Completed, Failed, Rejected, Reused, States
from nodes.request import Generation
from testbed.runtime.guests import Host
from testbed.serving.metrics import Metrics
from testbed.serving.openai import ApiError


class Opened(NamedTuple):
    """The request is admitted: its tokens will follow."""


class Generated(NamedTuple):
    """The next output token."""

    token_id: int


class Refused(NamedTuple):
    """There was no room; the session tries again after ``backoff_s`` scenario seconds."""

    reason: str
    backoff_s: float


class Ended(NamedTuple):
    """The request has ended; ``why`` is None if it completed, else the reason."""

    why: str | None


StreamEvent = Opened | Generated | Refused | Ended


class Stream:
    """The events of one request, in order."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.has_ended = False
        self.n_cached: int | None = None
        """Tokens of its prompt that were not computed anew; ``None``: no cache outlives its request."""
        self._events: asyncio.Queue[StreamEvent] = asyncio.Queue()

    def put(self, event: StreamEvent) -> None:
        self.has_ended |= isinstance(event, Ended)
        self._events.put_nowait(event)

    async def get(self) -> StreamEvent:
        return await self._events.get()


@dataclass
class Guests:
    """The endpoint's side of ``testbed.runtime.guests.Guests``: ``open`` starts a request, ``close`` ends it.

    ``listen`` is called once the testbed can serve requests, ``hang_up`` when it ends.
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
        """Number of requests whose users still wait for a response."""
        return len(self._streams)

    def most_tokens(self, client: int, n_prompt: int, most: int) -> int:
        """Return how many of ``most`` tokens an answer can have that a chain could hold with its prompt.

        ``most`` if there is no chain for any, as ``open`` says.
        """
        if self.host is None or self.host.could_hold(client, n_prompt, most):
            return most
        could_hold = partial(self.host.could_hold, client, n_prompt)
        return bisect_left(range(1, most), True, key=lambda n_tokens: not could_hold(n_tokens)) or most

    def open(self, client: int, n_prompt: int, n_tokens: int, how: Generation, session: str = "") -> Stream:
        """Start a request at client number ``client``; ``n_prompt`` and ``n_tokens`` are in tokens. ``session``: its
        conversation, if that has a name.

        Raises ``ApiError`` if the testbed is not ready, could never hold the request, or has too many.
        """
        if self.host is None:
            raise ApiError(503, "the testbed is not ready", retry_after_s=1.0)
        if not self.host.could_hold(client, n_prompt, n_tokens):
            text = (
                f"prompt and answer have {n_prompt + n_tokens:,} tokens, more than any chain of these "
                "servers could hold; ask for fewer"
            )
            raise ApiError(400, text, "max_tokens", "context_length_exceeded")
        if self.n_open >= self.max_requests:
            text = (
                f"{self.max_requests} requests are open, and this endpoint accepts no more; try again later"
            )
            raise ApiError(429, text, retry_after_s=1.0)
        stream = Stream(self.host.submit(client, n_prompt, n_tokens, how, session))
        self._streams[stream.index] = stream
        return stream

    def close(self, stream: Stream, *, enough: bool, reason: str = "") -> None:
        """End a stream. ``enough``: its user has all that was wanted; otherwise the request fails for ``reason``, or
        without one the user has disconnected."""
        if self._streams.pop(stream.index, None) is not None and not stream.has_ended:
            assert self.host is not None, "streams are opened only while the testbed serves"
            self.host.end_request(stream.index, enough=enough, reason=reason)

    async def begin(self, host: Host) -> None:
        self.host = host
        await self.listen()

    async def end(self) -> None:
        self.host = None
        for stream in list(self._streams.values()):
            stream.put(Ended("the testbed ends"))
        await self.hang_up()

    def recorded(self, record: States) -> None:
        self.metrics.recorded(record)
        stream = self._streams.get(record.request)
        if stream is None:
            return
        if isinstance(record, Admitted):
            stream.put(Opened())
        elif isinstance(record, Reused):
            stream.n_cached = record.tokens
        elif isinstance(record, Rejected):
            stream.put(Refused(record.reason, record.backoff_s))
        elif isinstance(record, ENDED):
            why = record.reason if isinstance(record, Failed) else "the testbed ends"
            stream.put(Ended(None if isinstance(record, Completed) else why))

    def token(self, message: NewToken) -> None:
        self.metrics.token(message)
        if (stream := self._streams.get(message.request)) is not None:
            stream.put(Generated(message.token_id))
