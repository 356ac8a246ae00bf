from __future__ import annotations

import asyncio
import contextlib
import os
import stat
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgpack
import pytest

from nodes import control
from nodes.control import ControlError, Handlers, Peer
from nodes.messages import Question, Stop


class Double(Question[int], frozen=True):
    value: int


class Gather(Question[dict[int, list[str]]], frozen=True):
    parts: list[str]


class Fail(Question[None], frozen=True):
    pass


class Fine(Question[str], frozen=True):
    pass


@contextlib.asynccontextmanager
async def pair(path: Path, node: Handlers, orchestrator: Handlers) -> AsyncIterator[list[Peer]]:
    """(node, orchestrator): both ends of a control connection, serving."""
    accepted: asyncio.Future[Peer] = asyncio.get_running_loop().create_future()

    async def accept(peer: Peer) -> None:
        peer.take(orchestrator)
        accepted.set_result(peer)
        await peer.serve()

    listener = await control.listen(path, accept)
    peer = await control.connect(path, node)
    serving = asyncio.ensure_future(peer.serve())
    try:
        async with asyncio.timeout(10):
            yield [peer, await accepted]
    finally:
        peer.close()
        await serving
        listener.close()


async def test_either_side_asks_and_gets_its_own_answer(tmp_path: Path) -> None:
    async def double(message: Double) -> int:
        for _ in range(message.value % 3):  # answers arrive in another order than the questions
            await asyncio.sleep(0)
        return 2 * message.value

    async def join(message: Gather) -> dict[int, list[str]]:
        return {1: message.parts}

    async with pair(tmp_path / "s", {Gather: join}, {Double: double}) as (node, orchestrator):
        assert await asyncio.gather(*(node.ask(Double(i)) for i in range(30))) == list(range(0, 60, 2))
        assert await orchestrator.ask(Gather(["a", "b"])) == {1: ["a", "b"]}


async def test_notifications_arrive_in_order(tmp_path: Path) -> None:
    heard: list[int] = []
    everything = asyncio.Event()

    async def hear(message: Double) -> None:
        heard.append(message.value)
        if message.value == 99:
            everything.set()

    async with pair(tmp_path / "s", {}, {Double: hear}) as (node, _):
        for value in range(100):
            node.notify(Double(value))
        await everything.wait()
    assert heard == list(range(100))


async def test_an_error_on_the_other_side_is_the_askers_error_and_ends_nothing_else(tmp_path: Path) -> None:
    async def fail(_: Fail) -> None:
        raise ValueError("no such server")

    async def fine(_: Fine) -> str:
        return "fine"

    async def unsendable(_: Double) -> object:
        return object()

    async with pair(tmp_path / "s", {}, {Fail: fail, Fine: fine, Double: unsendable}) as (node, _):
        with pytest.raises(ControlError, match=r"^ValueError: no such server$"):
            await node.ask(Fail())
        with pytest.raises(ControlError, match="TypeError"):
            await node.ask(Double(1))
        assert await node.ask(Fine()) == "fine"


async def test_an_answer_of_another_type_ends_the_connection_and_fails_the_question(tmp_path: Path) -> None:
    async def lie(_: Double) -> str:
        return "forty-two"

    accepted = asyncio.get_running_loop().create_future()

    async def accept(peer: Peer) -> None:
        peer.take({Double: lie})
        accepted.set_result(peer)
        await peer.serve()

    listener = await control.listen(tmp_path / "s", accept)
    node = await control.connect(tmp_path / "s", {})
    serving = asyncio.ensure_future(node.serve())
    with pytest.raises(ControlError, match="the control connection was closed"):
        await node.ask(Double(21))
    with pytest.raises(ControlError, match="Expected `int`, got `str`"):
        await serving
    listener.close()


async def test_a_closed_connection_fails_what_is_pending_and_takes_no_more(tmp_path: Path) -> None:
    asked = asyncio.Event()

    async def never(_: Fail) -> None:
        asked.set()
        await asyncio.Event().wait()

    async with pair(tmp_path / "s", {}, {Fail: never}) as (node, orchestrator):
        pending = [asyncio.ensure_future(node.ask(Fail())) for _ in range(3)]
        await asked.wait()
        orchestrator.close()
        for future in pending:
            with pytest.raises(ControlError, match="the control connection was closed"):
                await future
        with pytest.raises(ControlError, match="closed"):
            await node.ask(Fail())
        with pytest.raises(ControlError, match="closed"):
            node.notify(Fail())


async def test_a_run_directory_deeper_than_a_socket_address_works(tmp_path: Path) -> None:
    folder = tmp_path / ("d" * 100) / ("e" * 100)
    folder.mkdir(parents=True)

    async def ping(_: Fine) -> str:
        return "pong"

    n_open = len(os.listdir("/proc/self/fd"))
    async with pair(folder / "control.sock", {}, {Fine: ping}) as (node, _):
        assert await node.ask(Fine()) == "pong"
        assert stat.S_ISSOCK((folder / "control.sock").stat().st_mode)
    await asyncio.sleep(0)
    assert len(os.listdir("/proc/self/fd")) <= n_open + 1, "only the listening socket may still be closing"


async def test_only_the_owner_may_use_the_socket_and_the_umask_stays_as_it_was(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        async with pair(tmp_path / "s", {}, {}):
            assert stat.S_IMODE((tmp_path / "s").stat().st_mode) & 0o077 == 0
        assert os.umask(0o022) == 0o022
    finally:
        os.umask(before)


def _message(*fields: Any) -> bytes:
    body = msgpack.packb(fields)
    return len(body).to_bytes(4, "big") + body


@pytest.mark.parametrize(
    "data",
    [
        (control.FROM_ORCHESTRATOR.max_message_bytes + 1).to_bytes(4, "big") + b"x" * 100,
        b"\xff" * 50,
        (3).to_bytes(4, "big") + b"\xc1\xc1\xc1",
        _message(),
        _message(0),
        _message(9, 1, 2),
        (1).to_bytes(4, "big") + b"\x05",
    ],
    ids=["oversized", "garbage", "not msgpack", "empty", "too short", "unknown kind", "no array"],
)
async def test_a_message_that_breaks_the_protocol_ends_its_connection_with_a_control_error(
    tmp_path: Path, data: bytes
) -> None:
    ended: asyncio.Future[BaseException | None] = asyncio.get_running_loop().create_future()

    async def accept(peer: Peer) -> None:
        pending = asyncio.ensure_future(peer.ask(Fine()))
        await asyncio.sleep(0)
        try:
            await peer.serve()
        except ControlError as error:
            with pytest.raises(ControlError, match="closed"):
                await pending
            ended.set_result(error)
        except Exception as error:
            pending.cancel()
            ended.set_result(error)

    listener = await control.listen(tmp_path / "s", accept)
    reader, writer = await asyncio.open_unix_connection(tmp_path / "s")
    writer.write(data)
    async with asyncio.timeout(10):
        assert isinstance(await ended, ControlError)
        await reader.read()  # what was asked, and the end of the connection
        writer.close()
        await writer.wait_closed()
    listener.close()


async def test_a_node_stops_when_it_is_told_to_and_when_the_orchestrator_is_gone(tmp_path: Path) -> None:
    for end in ("told", "gone"):
        accepted: asyncio.Future[Peer] = asyncio.get_running_loop().create_future()

        async def accept(peer: Peer, accepted: asyncio.Future[Peer] = accepted) -> None:
            accepted.set_result(peer)
            await peer.serve()

        listener = await control.listen(tmp_path / end, accept)
        stopped = asyncio.Event()

        async def stop(_: Stop, stopped: asyncio.Event = stopped) -> None:
            stopped.set()

        node = await control.connect(tmp_path / end, {Stop: stop})
        running = asyncio.ensure_future(control.until_stopped(node, stopped))
        orchestrator = await accepted
        if end == "told":
            orchestrator.notify(Stop())
        else:
            orchestrator.close()
        async with asyncio.timeout(10):
            await running
        node.close()
        listener.close()
