"""Server-to-server forwarding, the client's part: one push per step, and one result.

The client keeps the inputs of the first hop only. So when any hop fails, a whole new chain replaces the old
one, and everything is replayed through it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

from nodes import wire
from nodes.chain import FAILURES, Chain, HopFailed, OpenHop, Preempted, Refusal
from nodes.errors import ConnectionLost, ServerError
from nodes.records import HopRecord
from nodes.request import SessionError
from nodes.rounds import Answer, Round
from nodes.session import HubSession
from nodes.watchdog import Limit, Overdue
from policies.problem import Hop

_MAY_FAIL = (*FAILURES, wire.NOT_PASSED_ON, wire.TOO_MANY_STEPS)
"""Errors after which the session can go on with another chain."""


_LIMITS = 10
"""How many limits a step may take while all servers of its chain answer pings."""


class _Place(NamedTuple):
    token: str
    peer: int
    next_token: str


class _News(NamedTuple):
    """What happened to a session on ``server``.

    ``frame`` is what the server sent, ``None`` if its connection was lost, or the error of a failed push.
    """

    server: int
    frame: wire.Answer | Exception | None
    received_at_s: float


class _NewsOfRounds:
    """Keeps news for the rounds that are away: results for their own, all others for the oldest, also if it comes later."""

    def __init__(self) -> None:
        self.results: dict[int, _News | None] = {}
        """By the numbers of the rounds that are away."""
        self._others: deque[_News] = deque()
        self._changed = asyncio.Event()

    @contextlib.contextmanager
    def of(self, number: int) -> Iterator[None]:
        """Keeps the result of a round while the body runs. Nobody wants those of others."""
        self.results[number] = None
        try:
            yield
        finally:
            del self.results[number]
            self._changed.set()

    def put(self, news: _News) -> None:
        """Adds news."""
        if not isinstance(news.frame, wire.RoundResult):
            self._others.append(news)
        elif news.frame.number in self.results:
            self.results[news.frame.number] = news
        self._changed.set()

    async def get(self, number: int) -> _News:
        """Returns the next news for a round."""
        while (result := self.results[number]) is None:
            if self._others and number == min(self.results):
                return self._others.popleft()
            self._changed.clear()
            await self._changed.wait()
        return result


class ForwardingChain(Chain):
    """A chain whose servers push hidden states on; each of them may send frames to the client."""

    _news: _NewsOfRounds
    _places: dict[int, _Place]

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._join_ids: dict[tuple[int, str], int] = {}
        self._silent: frozenset[int] = frozenset()
        self._round_numbers = itertools.count()

    async def open(
        self, plan: Sequence[Hop], first_tokens: int, *, is_replacement: bool = False
    ) -> list[OpenHop] | Refusal:
        """As ``Chain.open``, with a secret token for every hop: only senders that know it can push to it."""
        self._news, self._silent = _NewsOfRounds(), frozenset()  # news of an earlier chain are dropped
        tokens = [secrets.token_hex(16) for _ in plan]
        following = [*((hop[0], token) for hop, token in zip(plan[1:], tokens[1:], strict=True)), (0, "")]
        self._places = {
            hop[0]: _Place(token, *after) for hop, token, after in zip(plan, tokens, following, strict=True)
        }
        return await super().open(plan, first_tokens, is_replacement=is_replacement)

    async def _ask_to_open(
        self,
        server: int,
        first: int,
        last: int,
        key: str,
        first_tokens: int,
        pages: bytes,
        generation: int,
        limit: Limit,
    ) -> wire.Answer:
        news = self._news

        def on_answer(frame: wire.Answer | None, received_at_s: float) -> None:
            news.put(_News(server, frame, received_at_s))

        connection = self._connections[server]
        fields = (
            connection.next_id(),
            key,
            self._client,
            first,
            last,
            self.request.n_reserved_tokens,
            *self._places[server],
            first_tokens,
            self.request.arrival_at_s,
        )
        request = wire.JoinPages(*fields, pages) if pages else wire.Join(*fields)
        answer = await connection.ask(request, generation=generation, on_answer=on_answer, limit=limit)
        self._join_ids[server, key] = request.id
        return answer.frame

    async def run(
        self, hops: Sequence[OpenHop], n_tokens: int, payload: bytes, on_left: Callable[[], object] | None
    ) -> tuple[bytes, list[wire.Timing], float, float]:
        """Sends ``n_tokens`` hidden states that the chain has not seen through all its hops.

        ``on_left``: called when they have left; ``None``: no others are sent behind them. Returns the result, the timing of every hop, and when (scenario seconds) the hidden states were sent
        and the result was received. Raises ``HopFailed`` if another chain may succeed, ``SessionError`` if
        none can.
        """
        asked_at_s, limit_s = self._clock.now_s(), self._rules.step_limit_s(n_tokens, len(hops))
        first, news = hops[0], self._news
        connection, token = self._connections[first.server], self._places[first.server].token
        position, number = first.n_cached + first.n_away, next(self._round_numbers)
        fields = connection.next_id(), token, position, n_tokens, b"", payload
        request = wire.Push(*fields)
        if on_left is not None:
            kind: Literal["step", "behind", "instead"] = "behind" if first.n_away else "step"
            if first.is_given_up:
                kind, first.is_given_up = "instead", False
            request = wire.PushRound(*fields, number, kind)
        sent_at_s = self._clock.now_s()

        async def push() -> None:
            try:
                await connection.ask(request, generation=first.generation, on_left=on_left)
            except Exception as error:
                news.put(_News(first.server, error, self._clock.now_s()))

        # The result may come before the first hop's answer to the push.
        pushing = asyncio.ensure_future(push())
        first.n_away += n_tokens
        try:
            with self._news.of(number):
                server, frame, received_at_s = await self._hear(hops, limit_s, asked_at_s, number)
        finally:
            pushing.cancel()
            first.n_away -= n_tokens
        if isinstance(frame, ConnectionLost):
            raise HopFailed(first, str(frame), asked_at_s) from frame
        if isinstance(frame, ServerError):
            raise self._failure(hops, 0, frame.code, str(frame), asked_at_s) from frame
        if isinstance(frame, Exception):
            raise frame
        at = next(i for i, hop in enumerate(hops) if hop.server == server)
        if frame is None:
            raise HopFailed(hops[at], "the connection was lost", asked_at_s)
        if isinstance(frame, wire.Error):
            raise self._failure(hops, at, frame.code, f"{frame.code}: {frame.message}", asked_at_s)
        wrong = SessionError(f"server {server}: its answer is not the result of {n_tokens} hidden states")
        if not isinstance(frame, wire.Result) or frame.position != position:
            raise wrong
        try:
            timings = wire.unpack_timings(frame.timings)
        except wire.FrameError:
            raise wrong from None
        if len(timings) != len(hops) or len(frame.payload) != len(payload):
            raise wrong
        return frame.payload, timings, sent_at_s, received_at_s

    async def _hear(self, hops: Sequence[OpenHop], limit_s: float, asked_at_s: float, number: int) -> _News:
        """Waits for news of round ``number``. Whenever none has come for ``limit_s``, pings all servers.

        While all of them answer, the step is on its way: each reports what it cannot pass on. But nobody waits longer
        than ``_LIMITS`` limits. Raises ``HopFailed``: the silent servers are to blame, or all if all answer.
        """
        for _ in range(_LIMITS):
            with contextlib.suppress(Overdue), self._watchdog.limit(limit_s):
                return await self._news.get(number)
            silent = await self._who_is_silent(hops)
            if silent and self._news.results[number] is None:
                break
        waited_s = self._clock.now_s() - asked_at_s
        blamed = silent or list(hops)
        self._silent = frozenset(hop.server for hop in blamed)
        raise HopFailed(blamed[0], f"no result for {waited_s:g} s", asked_at_s, is_overdue=True)

    def _failure(
        self, hops: Sequence[OpenHop], at: int, code: str, text: str, asked_at_s: float
    ) -> HopFailed | SessionError:
        """Returns the exception for an error that ``hops[at]`` reported about itself or the next hop."""
        if code == wire.PREEMPTED:
            return Preempted(hops[at], text, asked_at_s)
        if code not in _MAY_FAIL:
            return SessionError(f"server {hops[at].server}: {text}")
        if code == wire.NOT_PASSED_ON and at + 1 < len(hops):
            before = hops[at].server
            return HopFailed(hops[at + 1], f"server {before} could not push to it ({text})", asked_at_s)
        return HopFailed(hops[at], text, asked_at_s)

    async def _who_is_silent(self, hops: Sequence[OpenHop]) -> list[OpenHop]:
        """Returns the hops whose servers do not answer a ping either."""
        limit_s = min(self._rules.connect_timeout_s, self._rules.request_timeout_s)

        async def answers(hop: OpenHop) -> bool:
            try:
                with self._watchdog.limit(limit_s) as limit:
                    connection = self._connections[hop.server]
                    ping = wire.Ping(connection.next_id(), b"")
                    await connection.ask(ping, generation=hop.generation, limit=limit)
            except (Overdue, ConnectionLost, ServerError):
                return False
            return True

        heard = await asyncio.gather(*(answers(hop) for hop in hops))
        return [hop for hop, is_heard in zip(hops, heard, strict=True) if not is_heard]

    def is_there(self, hop: OpenHop) -> bool:
        return hop.server not in self._silent and super().is_there(hop)

    def end_of_loss(self, hops: Sequence[OpenHop], at: int) -> int:
        return len(hops)

    def _close(self, hop: OpenHop, pages: bytes | None = None) -> asyncio.Task[None] | None:
        join_id = self._join_ids.pop((hop.server, hop.key), None)
        if join_id is not None:
            self._connections[hop.server].ignore(join_id, hop.generation)
        return super()._close(hop, pages)


class ForwardingSession(HubSession):
    """A session whose servers forward. Only its steps and their recovery differ from hub-spoke."""

    chain_kind = ForwardingChain

    async def _step(self, round_: Round) -> Answer:
        assert self._rounds is not None, "it was sent"
        rows, on_left = round_.payload, partial(round_.left, 0) if self._rounds.overlap else None
        while True:
            await round_.has_way(0)
            first = self.hops[0]
            n_new = round_.end - first.n_cached - first.n_away
            rows = rows[-n_new * self._model.token_bytes :]
            try:
                async with self._sending(round_, first, rows):
                    answer, timings = await self._run(round_, n_new, rows, on_left)
            except Preempted as failure:
                rows = await self._start_over(failure, self._n_done)
                continue
            except HopFailed as failure:
                rows = await self._recovery.replace(self.hops, 0, failure, round_.position, self._n_done)
                continue
            break
        for hop, following in itertools.zip_longest(self.hops, self.hops[1:]):
            self._recovery.passed(hop, following, n_new)
        return answer[-round_.n_tokens * self._model.token_bytes :], timings

    async def _run(
        self, round_: Round, n_new: int, rows: bytes, on_left: Callable[[], object] | None
    ) -> Answer:
        """As ``_pass``, through all hops.

        Times of a hop that is not the last: it sends when its step is done.
        """
        assert isinstance(self._chain, ForwardingChain), "the chain is made by this class's chain_kind"
        is_replay = self.hops[0].lacks_history
        timings: list[HopRecord] = []
        answer, begin = b"", 0
        for n_tokens in self._parts(self.hops[0], n_new):
            end = begin + n_tokens * self._model.token_bytes
            answer, said, sent_at_s, received_at_s = await self._chain.run(
                self.hops, n_tokens, rows[begin:end], on_left
            )
            await round_.is_oldest()
            n_replayed = n_tokens if is_replay else 0
            for hop, (arrived_at_s, departed_at_s, n_bytes, together) in zip(self.hops, said, strict=True):
                is_last = hop is self.hops[-1]
                instants = sent_at_s, arrived_at_s, departed_at_s, received_at_s if is_last else departed_at_s
                sizes = n_bytes, len(answer) if is_last else 0
                timings.append(
                    HopRecord(hop.server, hop.first, hop.last, *instants, *sizes, n_replayed, together)
                )
                hop.n_cached += n_tokens
                sent_at_s = departed_at_s
            begin = end
        return answer, timings
