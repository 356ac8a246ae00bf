"""Plays hostile cases against the endpoint of ``testbed serve``, in this process and in front of a stub host.

The stub computes tokens when a case requests it. After each case nothing may be left: no session, no
connection, and no exception in a log. Each valid request must have been answered once, in order, with its
tokens. A well-behaved client (the witness) must still be served.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, SupportsIndex

import msgspec

from nodes import messages
from nodes.records import Admitted, Arrived, Cancelled, Completed, Failed, Rejected, Routed
from nodes.request import Generation, Request
from policies.links import Link
from testbed.experiments import load_experiment
from testbed.experiments.experiment import Experiment
from testbed.page.serve import bind
from testbed.serving.app import Endpoint, Rules
from testbed.serving.text import SMALL, Codec, StubCodec
from tests.stress import hostile_http
from tests.stress.hostile_common import PATIENCE_S, LoopTarget, RawLine, connected
from tests.stress.hostile_http import AUTHORIZED, KEY, MAX_MODEL_LEN, MOST_TOKENS, Ask, request, to_json

MAX_REQUESTS = 8
_GOOD_TOKENS = 5
_PIPELINED = 30
"""A connection with so many requests is not checked: aiohttp 3.14 loses some if more than 47 requests arrive
at once after a body that arrived in pieces.
"""
_VOCABULARY = 512
Pause = Callable[[int], Awaitable[None]]
"""Waits until about so many more tokens of each request have been computed."""


class Answer(NamedTuple):
    """One HTTP answer. ``is_whole``: the connection did not end before the answer did."""

    status: int
    headers: dict[str, str]
    body: bytes
    is_whole: bool

    @property
    def is_from_parser(self) -> bool:
        """Whether it is aiohttp's own answer to invalid HTTP, or to an ``Expect`` header that cannot
        be met.
        """
        return self.status in (400, 417) and self.headers.get("content-type", "").startswith("text/plain")


def read_answers(data: bytes) -> Iterator[Answer]:
    """Yields the answers in the data of a connection. Raises ``AssertionError`` if they are not HTTP."""
    while data:
        head, ends, rest = data.partition(b"\r\n\r\n")
        if not ends:
            yield Answer(0, {}, b"", False)
            return
        first, *lines = head.decode("latin-1").split("\r\n")
        assert first.startswith("HTTP/"), f"not the first line of an answer: {first[:200]!r}"
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        status, body, is_whole = int(first.split(" ")[1]), b"", True
        if headers.get("transfer-encoding") == "chunked":
            body, rest, is_whole = _chunks(rest)
        elif rest.startswith(b"HTTP/"):  # the answer to HEAD has no body
            pass
        elif "content-length" in headers:
            size = int(headers["content-length"])
            body, rest, is_whole = rest[:size], rest[size:], len(rest) >= size
        elif status >= 200:  # the body ends with the connection
            body, rest = rest, b""
        if status >= 200:
            yield Answer(status, headers, body, is_whole)
        data = rest


def _chunks(data: bytes) -> tuple[bytes, bytes, bool]:
    """Reads a chunked body. Returns the body, the data after it, and whether it is complete."""
    body = b""
    while True:
        size, ends, rest = data.partition(b"\r\n")
        n = int(size, 16) if ends else 0
        if not ends or len(rest) < n + 2:
            return body, b"", False
        body, data = body + rest[:n], rest[n + 2 :]
        if n == 0:
            return body, data, True


def check_answer(answer: Answer, ask: Ask | None, model: str) -> None:
    """Raises ``AssertionError`` unless the answer is right. ``ask``: the request that it answers, if that is
    known.
    """
    assert answer.status < 500, f"{answer.status} for a client's mistake: {answer.body[:500]!r} to {ask}"
    assert b"Traceback" not in answer.body, answer.body
    if not answer.is_whole or answer.is_from_parser or (ask and ask.data.startswith(b"HEAD")):
        return
    if answer.status >= 400 and answer.body:
        error = json.loads(answer.body)["error"]
        assert set(error) == {"message", "type", "param", "code"}, error
        assert isinstance(error["message"], str) and error["message"], error
    if ask is not None and ask.n_tokens is not None and ask.model == model:
        assert answer.status in (200, 429), (
            f"{answer.status} to a proper request: {answer.body[:500]!r} to {ask}"
        )
        if answer.status == 200:
            assert n_tokens_of(answer) == ask.n_tokens, f"not {ask.n_tokens} tokens: {answer.body!r}"


def n_tokens_of(answer: Answer) -> int:
    """Returns the number of tokens in a whole answer. Raises ``AssertionError`` for a stream that ends with
    an error.
    """
    if not answer.headers["content-type"].startswith("text/event-stream"):
        return int(json.loads(answer.body)["usage"]["completion_tokens"])
    *events, done, end = answer.body.decode().split("\n\n")
    assert (done, end) == ("data: [DONE]", ""), answer.body
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    assert not any("error" in chunk for chunk in chunks), answer.body
    return sum(bool(chunk["choices"]) for chunk in chunks)


class _Received(asyncio.StreamReader):
    """Keeps all data that arrived. If the server closes while it has unread requests, the connection is
    reset, and a plain reader would lose data that had arrived before.
    """

    def __init__(self) -> None:
        super().__init__()
        self.data = bytearray()

    def feed_data(self, data: Iterable[SupportsIndex]) -> None:
        self.data += bytes(data)
        super().feed_data(data)


class Line(RawLine):
    """A client's end of a connection. ``asks``: the requests that were sent. ``is_clean``: nothing else was
    sent, and the client neither left nor stopped reading.
    """

    def __init__(self, reader: _Received, writer: asyncio.StreamWriter) -> None:
        super().__init__(writer)
        self._reader = reader
        self.asks: list[Ask] = []
        self.is_clean = True
        self.listening = asyncio.ensure_future(self._listen())

    @classmethod
    async def open(cls, address: tuple[str, int], takes_little: bool) -> Line:
        raw = await connected(address, takes_little)
        reader = _Received()
        protocol = asyncio.StreamReaderProtocol(reader)
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_connection(lambda: protocol, sock=raw)
        return cls(reader, asyncio.StreamWriter(transport, protocol, reader, loop))

    async def _listen(self) -> None:
        with contextlib.suppress(ConnectionError):
            while not self.deaf and await self._reader.read(65_536):
                pass

    @property
    def data(self) -> bytes:
        return bytes(self._reader.data)

    @property
    def was_reset(self) -> bool:
        return self._reader.exception() is not None

    def leave(self, how: str) -> None:
        """Hang up: ``reset`` with an RST, ``close`` without, ``half`` only stops sending."""
        self.is_clean = False
        super().leave(how)


async def play(
    moves: Sequence[tuple[int, Any]], address: tuple[str, int], model: str, pause: Pause, counts: Counter[str]
) -> None:
    """Plays a case's moves. Raises ``AssertionError`` if a promise is broken."""
    everything: list[Line] = []
    try:
        await _play_all(moves, address, pause, everything)
        clean = [line for line in everything if line.is_clean and len(line.asks) < _PIPELINED]
        for line in clean:
            line.asks.append(Ask(request("/health", b"", "Connection: close", method="GET")))
            line.send(line.asks[-1].data)
        async with asyncio.timeout(PATIENCE_S):
            while not all(line.listening.done() for line in clean):
                await pause(MAX_MODEL_LEN)
    except TimeoutError:
        raise AssertionError(f"not answered: {[(line.asks, line.data) for line in clean]}") from None
    finally:
        for line in everything:
            line.leave("reset")
        await asyncio.gather(*(line.listening for line in everything))
    for line in everything:
        _check(line, line in clean, model, counts)


async def _play_all(
    moves: Sequence[tuple[int, Any]], address: tuple[str, int], pause: Pause, everything: list[Line]
) -> None:
    lines: dict[int, Line] = {}
    for at, (what, *rest) in moves:
        if what in ("tokens", "room", "look"):
            await pause(rest[0] if what == "tokens" else 0)
            continue
        if at not in lines or lines[at].writer.is_closing():
            lines[at] = await Line.open(address, what == "deaf")
            everything.append(lines[at])
        await _play(lines[at], what, rest, pause)
    await pause(0)


async def _play(line: Line, what: str, rest: list[Any], pause: Pause) -> None:
    if what == "ask":
        line.asks.append(rest[0])
        line.send(rest[0].data)
    elif what == "pieces":
        ask, n = rest
        line.asks.append(ask)
        for number in range(n):
            line.send(ask.data[len(ask.data) * number // n : len(ask.data) * (number + 1) // n])
            await asyncio.sleep(0)
    elif what == "flood":
        path, n = rest
        asks = [Ask(request(path, b"", AUTHORIZED, method="GET"))] * n
        line.asks += asks
        line.send(b"".join(ask.data for ask in asks))
    elif what == "cut":
        line.is_clean = False
        line.send(rest[0].data[: -rest[1] - 1])
        await pause(0)
        line.leave(rest[2])
    elif what == "raw":
        line.is_clean = False
        line.send(rest[0])
    elif what == "leave":
        line.leave(rest[0])
    elif what == "deaf":
        line.is_clean, line.deaf = False, True


def _check(line: Line, is_clean: bool, model: str, counts: Counter[str]) -> None:
    answers = list(read_answers(line.data))
    for number, answer in enumerate(answers):
        counts[f"{answer.status}{'' if answer.is_whole else ' cut'}"] += 1
        ask = line.asks[number] if is_clean and number < len(line.asks) else None
        check_answer(answer, ask, model)
        if ask is not None:
            assert not answer.is_from_parser or not ask.is_plain, f"{answer} to {ask}"
    # If the server closes because of an invalid request, the connection is reset, since it has unread requests.
    # The answer may be lost with it.
    has_reason = line.was_reset and not all(ask.is_plain for ask in line.asks)
    if is_clean and not has_reason and not any(answer.is_from_parser for answer in answers):
        assert len(answers) == len(line.asks), (
            f"{len(line.asks)} requests have {len(answers)} answers: {answers}"
        )
        assert all(answer.is_whole for answer in answers), answers


def good_request(model: str, streams: bool) -> bytes:
    body = {"model": model, "prompt": "Hello there", "max_tokens": _GOOD_TOKENS, "stream": streams}
    return request("/v1/completions", to_json(list(body.items())), AUTHORIZED)


class Witness:
    """A well-behaved client, on a connection that stays open."""

    def __init__(self, address: tuple[str, int], model: str) -> None:
        self._address, self._model = address, model
        self._streams = False

    async def begin(self) -> None:
        self._reader, self._writer = await asyncio.open_connection(*self._address)

    async def ask(self, data: bytes, pause: Pause) -> Answer:
        """Sends a request and returns its answer. Raises ``TimeoutError`` if none arrives."""
        self._writer.write(data)
        came = b""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                reading = asyncio.ensure_future(self._reader.read(65_536))
                while not reading.done():
                    await asyncio.wait({reading}, timeout=0.0005)
                    await pause(1)
                came += reading.result()
                answer, *more = read_answers(came)
                assert not more, more
                if answer.is_whole and answer.status:
                    return answer
                assert not self._reader.at_eof(), f"the endpoint hung up on a well-behaved client: {came!r}"

    async def is_served(self, pause: Pause) -> None:
        self._streams = not self._streams
        answer = await self.ask(good_request(self._model, self._streams), pause)
        assert answer.status == 200, answer
        assert n_tokens_of(answer) == _GOOD_TOKENS, answer

    def end(self) -> None:
        self._writer.transport.abort()


class Hall:
    """The stub host of the cases, a ``testbed.runtime.guests.Host``. It computes tokens only when ``give`` is
    called.
    """

    def __init__(self, guests: Any, n_clients: int) -> None:
        self._guests, self._n_clients = guests, n_clients
        self._n_submitted = 0
        self.has_room = True
        self.live: dict[int, tuple[int, int]] = {}
        """Request that has not ended -> (tokens computed, tokens requested)."""
        self._open: set[int] = set()

    def links_now(self) -> Mapping[tuple[str, str], Link]:
        return {}

    async def statuses(self) -> Mapping[str, messages.ServerStatus | None]:
        await asyncio.sleep(0)
        return {"gone": None}

    def could_hold(self, client: int, n_input_tokens: int, n_output_tokens: int) -> bool:
        assert 0 <= client < self._n_clients
        return n_input_tokens + n_output_tokens <= MOST_TOKENS

    def submit(
        self, client: int, n_input_tokens: int, n_output_tokens: int, how: Generation, session: str = ""
    ) -> int:
        index = self._n_submitted
        self._n_submitted += 1
        asked = Request(index, 0.0, n_input_tokens, n_output_tokens, how)
        sent = msgspec.msgpack.encode(messages.Submit(asked))  # as it is sent to the client's process
        assert msgspec.msgpack.decode(sent, type=messages.Submit).request == asked
        assert all(0 <= token < _VOCABULARY for token in how.prompt), "a token that no model has"
        assert min(n_input_tokens, n_output_tokens) >= 1 and 0 <= how.min_tokens <= n_output_tokens, asked

        def begin() -> None:
            self.live[index] = (0, n_output_tokens)
            client_name = f"client-{client}"
            self._guests.recorded(Arrived(index, 0.0, client_name, 0.0, n_input_tokens, n_output_tokens))

        asyncio.get_running_loop().call_soon(begin)  # as if the client's process had received it
        return index

    def end_request(self, index: int, *, enough: bool, reason: str = "") -> None:
        def end() -> None:
            if self.live.pop(index, None) is not None:
                failed = Failed(index, 1.0, reason) if reason else Cancelled(index, 1.0)
                self._guests.recorded(Completed(index, 1.0) if enough else failed)

        asyncio.get_running_loop().call_soon(end)

    def give(self, n_tokens: int) -> None:
        """Computes so many more tokens for each request. Requests that have no room yet are rejected or
        admitted.
        """
        for index, (n_done, n_asked) in list(self.live.items()):
            if index not in self._open:
                self._guests.recorded(Routed(index, 0.1, [], 0.0, 0.0, 0.0))
                if not self.has_room:
                    self._guests.recorded(Rejected(index, 0.1, 0, "no room", 1.0, [0], []))
                    continue
                self._guests.recorded(Admitted(index, 0.2, []))
                self._open.add(index)
            now = min(n_done + n_tokens, n_asked)
            for number in range(n_done, now):
                token = (37 * index + number * number) % _VOCABULARY
                self._guests.token(messages.NewToken(index, number + 1, token, 0.3 + number))
            self.live[index] = (now, n_asked)
            if now == n_asked:
                del self.live[index]
                self._guests.recorded(Completed(index, 1.0))
        self._open &= self.live.keys()


_MOST_PIPELINED = 32
"""Requests that wait on one connection before aiohttp (3.14) stops reading from it."""


class _Plain:
    """A codec that is not the stub's, as with transformer blocks; its tokens are below ``_VOCABULARY``."""

    def __init__(self, codec: StubCodec) -> None:
        self._codec = codec
        self.decode = codec.decode

    def encode(self, text: str) -> list[int]:
        return [token % _VOCABULARY for token in self._codec.encode(text)]

    def chat(self, messages: Sequence[tuple[str, str]]) -> list[int]:
        return [token % _VOCABULARY for token in self._codec.chat(messages)]


class _Kept(logging.Handler):
    """Passes logged warnings and errors to ``keep`` as text."""

    def __init__(self, keep: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._keep = keep

    def emit(self, record: logging.LogRecord) -> None:
        self._keep(self.format(record))


def experiments() -> list[Experiment]:
    """Returns the experiments of the two endpoints: with stub compute, and with transformer blocks."""
    longest = f'endpoint={{max_model_len = {MAX_MODEL_LEN}, workload = "none"}}'
    two = 'clients=[{site="Cluster0"}, {site="Cluster1", name="far"}]'
    return [
        load_experiment("clustered", [longest, two]),
        load_experiment("bloom-tiny", [longest, 'compute.backend="blocks"']),
    ]


class _Hosted:
    """An endpoint, the stub host behind it, and a well-behaved client in front of it."""

    def __init__(self, experiment: Experiment, codec: Codec, rules: Rules) -> None:
        bound = bind(0)
        self.address: tuple[str, int] = bound.getsockname()
        self.endpoint = Endpoint(experiment, codec, rules, bound)
        self.guests = self.endpoint.guests
        self.hall = Hall(self.guests, len(experiment.problem.clients))
        self.model = experiment.problem.model.name
        self.witness = Witness(self.address, self.model)

    async def begin(self) -> None:
        await self.guests.begin(self.hall)
        await self.witness.begin()
        await self.witness.is_served(self.pause)

    async def pause(self, n_tokens: int) -> None:
        await asyncio.sleep(0)
        self.hall.give(n_tokens)
        await asyncio.sleep(0.0002 if n_tokens == 0 else 0)

    async def check(self, moves: Sequence[tuple[int, Any]], counts: Counter[str]) -> None:
        self.hall.has_room = not any(move == ("room", False) for _, move in moves)
        await play(moves, self.address, self.model, self._paused(moves), counts)
        self.hall.has_room = True
        # aiohttp reads nothing behind so many requests, the end neither, until it has answered the first of them.
        n_behind = sum(move[2] for _, move in moves if move[0] == "flood")
        async with asyncio.timeout(PATIENCE_S):
            while self.hall.live or self.guests.n_open or self.endpoint.n_connections != 1:
                await asyncio.sleep(0.0005)
                if n_behind >= _MOST_PIPELINED:
                    self.hall.give(1)
        await self.witness.is_served(self.pause)
        page = (await self.witness.ask(request("/metrics", b"", AUTHORIZED, method="GET"), self.pause)).body
        assert b'vllm:num_requests_running{model_name="%s"} 0.0' % self.model.encode() in page, page
        assert b'vllm:num_requests_waiting{model_name="%s"} 0.0' % self.model.encode() in page, page

    def _paused(self, moves: Sequence[tuple[int, Any]]) -> Pause:
        """Returns a pause after which, once it was called more often than there are moves, there is room
        again.
        """
        n_left = len(moves)

        async def pause(n_tokens: int) -> None:
            nonlocal n_left
            n_left -= 1
            self.hall.has_room |= n_left < 0
            await self.pause(n_tokens)

        return pause

    async def end(self) -> None:
        self.witness.end()
        await self.guests.end()


class EndpointTarget(LoopTarget):
    """The endpoint under attack."""

    name = "endpoint"
    cases = hostile_http.CASES

    def __init__(self) -> None:
        super().__init__()
        self._kept = _Kept(self._failures.append)
        self._was_disabled = logging.root.manager.disable
        logging.disable(logging.NOTSET)
        logging.root.addHandler(self._kept)
        codec = StubCodec(SMALL)
        stub, blocks = experiments()
        self._hosted = [
            _Hosted(stub, codec, Rules(max_requests=MAX_REQUESTS)),
            _Hosted(blocks, _Plain(codec), Rules(KEY, rejects=True, max_requests=MAX_REQUESTS)),
        ]
        for hosted in self._hosted:
            self._loop.run_until_complete(hosted.begin())
        self._n_resident = len(asyncio.all_tasks(self._loop))

    def check(self, case: tuple[int, list[tuple[int, Any]]]) -> None:
        """Plays a case. Raises ``AssertionError`` if a promise is broken."""
        which, moves = case
        self._play(self._hosted[which].check(moves, self.counts))

    def close(self) -> None:
        for hosted in self._hosted:
            self._loop.run_until_complete(hosted.end())
        self._loop.close()
        logging.root.removeHandler(self._kept)
        logging.disable(self._was_disabled)
