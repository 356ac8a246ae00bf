"""Plays hostile cases against both ends of the control plane: the orchestrator's listener, and a node.

At the same time a well-behaved peer (the witness) asks the same listener; it must always get the right
answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
from hypothesis import strategies as st

from nodes import control
from nodes.control import ControlError, Handlers, Peer
from nodes.messages import Question
from tests.stress.hostile_common import PATIENCE_S, LoopTarget
from tests.stress.hostile_frames import CLAIMS, DEEP, VALUES

Strategy = st.SearchStrategy[Any]


class Double(Question[int], frozen=True):
    value: int


class Fail(Question[None], frozen=True):
    pass


class Fall(Question[None], frozen=True):
    pass


class Never(Question[int], frozen=True):
    pass


KINDS = st.sampled_from(["Double", "Fail", "Fall", "Never", "__class__", "Nothing", "", "x" * 5000])
INNER: Strategy = st.tuples(KINDS, st.lists(VALUES | st.integers(0, 9), max_size=3)).map(
    lambda drawn: (drawn[0], *drawn[1])
) | st.sampled_from([("Fail",), ("Fall",), ("Never",)])
MESSAGES: Strategy = st.one_of(
    st.tuples(st.just(0), st.integers(-1, 2**40), INNER),
    st.tuples(st.just(0), st.integers(0, 5), st.tuples(st.just("Double"), st.integers(0, 99))),
    st.tuples(st.just(1), st.integers(0, 40), VALUES),
    st.tuples(st.just(2), st.integers(0, 40), st.text(max_size=20)),
    st.tuples(st.just(3), INNER),
)
WRONG: Strategy = st.one_of(
    st.tuples(VALUES, VALUES),
    st.lists(VALUES, max_size=6).map(tuple),
    st.tuples(st.integers(0, 4), VALUES, VALUES),
    st.tuples(st.integers(0, 4), VALUES, VALUES, VALUES),
)


def framed(body: bytes) -> bytes:
    return len(body).to_bytes(4, "big") + body


@st.composite
def damaged(draw: Callable[[Strategy], Any]) -> bytes:
    """A valid message in which some bytes, which may be those of its length, are replaced."""
    data = bytearray(framed(msgpack.packb(draw(MESSAGES))))
    for _ in range(draw(st.integers(1, 3))):
        data[draw(st.integers(0, min(len(data) - 1, 40)))] = draw(st.integers(0, 255))
    return bytes(data)


PIECES: Strategy = st.one_of(
    MESSAGES.map(lambda m: framed(msgpack.packb(m))),
    MESSAGES.map(lambda m: framed(msgpack.packb(m))),
    st.tuples(MESSAGES, st.integers(2, 60)).map(lambda m: framed(msgpack.packb(m[0])) * m[1]),
    WRONG.map(lambda m: framed(msgpack.packb(m))),
    (DEEP | CLAIMS).map(framed),
    damaged(),
    st.sampled_from([2**31, 2**32 - 1, 2**20 + 1, 2**20, 0]).map(
        lambda n: n.to_bytes(4, "big") + b"\x93" * 20
    ),
    st.binary(max_size=40),
)
CASES: Strategy = st.tuples(
    st.sampled_from(["orchestrator", "node"]),
    st.lists(PIECES, min_size=1, max_size=8),
    st.integers(0, 400),
    st.sampled_from(["close", "abort", "half", "deaf"]),
)
"""The end that is attacked, the pieces that are sent, how many of the last bytes are left out, and how the
attacker leaves.
"""


class ControlTarget(LoopTarget):
    """The control plane under attack."""

    name = "control"
    cases = CASES

    def __init__(self) -> None:
        super().__init__(n_resident=2)
        self._folder = tempfile.TemporaryDirectory()
        self._path = Path(self._folder.name) / "control.sock"
        self._hostile_path = Path(self._folder.name) / "hostile.sock"
        self._never: asyncio.Event
        self._serving: set[Peer] = set()
        self._loop.run_until_complete(self._start())

    def _handlers(self) -> Handlers:
        async def double(message: Double) -> int:
            return 2 * message.value

        async def fail(_: Fail) -> None:
            raise ValueError("as it should" * 1000)

        async def fall(_: Fall) -> Any:
            return {"cannot be packed": object()}

        async def never(_: Never) -> None:
            await self._never.wait()

        return {Double: double, Fail: fail, Fall: fall, Never: never}

    async def _start(self) -> None:
        self._never = asyncio.Event()

        async def accept(peer: Peer) -> None:
            peer.take(self._handlers())
            self._serving.add(peer)
            try:
                await peer.serve()
            except ControlError:
                self.counts["connections closed over a message"] += 1
                raise
            finally:
                self._serving.discard(peer)

        self._listener = await control.listen(self._path, accept)
        self._witness = await control.connect(self._path, self._handlers())
        self._witness_serves = asyncio.ensure_future(self._witness.serve())
        self._attack: tuple[bytes, str] = (b"", "close")
        self._attacked = asyncio.Event()

        async def orchestrate(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await self._send(reader, writer)
            self._attacked.set()

        self._hostile_listener = await asyncio.start_unix_server(orchestrate, self._hostile_path)

    def check(self, case: tuple[str, list[bytes], int, str]) -> None:
        """Plays a case. Raises ``AssertionError`` if a promise is broken."""
        self._play(self._check(case))

    async def _check(self, case: tuple[str, list[bytes], int, str]) -> None:
        end, pieces, n_missing, leave = case
        data = b"".join(pieces)
        self._attack = (data[: max(1, len(data) - n_missing)], leave)
        async with asyncio.timeout(PATIENCE_S):
            if end == "orchestrator":
                await self._send(*await asyncio.open_unix_connection(self._path))
            else:
                await self._be_a_node()
            assert await self._witness.ask(Double(21)) == 42
            self._never.set()  # ends the handlers that were to wait for ever
            while len(self._serving) != 1:  # noqa: ASYNC110 - there is no event for the last one
                await asyncio.sleep(0.0002)
            self._never.clear()

    async def _be_a_node(self) -> None:
        """Connects a node to a hostile orchestrator: the node must stop, and its question must be answered or
        fail.
        """
        self._attacked.clear()
        node = await control.connect(self._hostile_path, self._handlers())
        asking = asyncio.ensure_future(node.ask(Never()))
        await control.until_stopped(node, asyncio.Event())
        try:
            self.counts[f"answered {type(await asking).__name__}"] += 1
        except ControlError:
            self.counts["asked in vain"] += 1
        await self._attacked.wait()

    async def _send(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        data, leave = self._attack
        middle = len(data) // 2
        with contextlib.suppress(ConnectionError):
            writer.write(data[:middle])
            await asyncio.sleep(0)
            writer.write(data[middle:])
            if leave == "half":
                writer.write_eof()
            if leave in ("half", "close"):
                await self._count(reader)
            else:
                await asyncio.sleep(0.0005)
        if leave == "abort":
            writer.transport.abort()
        writer.close()

    async def _count(self, reader: asyncio.StreamReader) -> None:
        """Reads and counts answers, until none arrives for 2 ms."""
        with contextlib.suppress(TimeoutError, asyncio.IncompleteReadError):
            while True:
                async with asyncio.timeout(0.002):
                    size = int.from_bytes(await reader.readexactly(4), "big")
                    message = msgpack.unpackb(await reader.readexactly(size), strict_map_key=False)
                text = str(message[2])[:30] if message[0] == 2 else ""
                self.counts[" ".join(("kind", str(message[0]), text.partition(":")[0])).strip()] += 1

    def close(self) -> None:
        async def stop() -> None:
            self._witness.close()
            await self._witness_serves
            self._listener.close()
            self._hostile_listener.close()
            await asyncio.sleep(0.01)

        self._loop.run_until_complete(stop())
        self._loop.close()
        self._folder.cleanup()
