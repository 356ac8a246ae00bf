from __future__ import annotations

import asyncio
import logging
import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgpack
import pytest

from nodes import control
from nodes.control import FROM_NODES, FROM_ORCHESTRATOR, ControlError, ControlLimits, Handlers, Peer
from nodes.messages import Question, Serve
from nodes.request import Request


class Fine(Question[str], frozen=True):
    text: str = ""


class Fail(Question[None], frozen=True):
    pass


class Much(Question[bytes], frozen=True):
    pass


async def _listening(path: Path, handlers: Handlers) -> asyncio.AbstractServer:
    async def accept(peer: Peer) -> None:
        peer.take(handlers)
        await peer.serve()

    return await control.listen(path, accept)


def _framed(*fields: Any) -> bytes:
    body = msgpack.packb(fields)
    return len(body).to_bytes(4, "big") + body


async def _ended(path: Path, data: bytes) -> None:
    """Sends ``data`` and waits for the end of the connection."""
    reader, writer = await asyncio.open_unix_connection(path)
    writer.write(data)
    async with asyncio.timeout(10):
        await reader.read()
    writer.close()


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ((2**31).to_bytes(4, "big"), "2147483648 bytes; at most 1048576 allowed"),
        (_framed(0, 1, ["Fine", "", 3]), "cannot be read: Expected `array` of at most length"),
        (_framed(0, 1, ["Fine", 5]), "cannot be read: Expected `str`, got `int`"),
        (_framed(3, ["Unknown"]), "cannot be read: Invalid value 'Unknown'"),
        (_framed(0, 1, {}), "cannot be read: Expected `array`, got `object`"),
        ((6).to_bytes(4, "big") + b"\xdd\xff\xff\xff\xff\x00", "cannot be read: "),
        ((3).to_bytes(4, "big") + b"\x92\x03\xc1", "cannot be read: "),
        ((7).to_bytes(4, "big") + b"\x92\x03\x92\xa1\xff\xc0\xc0", "cannot be read: "),
        (_framed(0, [1], ["Fine"]), "cannot be read: Expected `int`, got `array`"),
        (_framed(1, [2], 3), "cannot be read: Expected `int`, got `array`"),
        (_framed(True, ["Fine"]), "cannot be read: "),
        (_framed(float("nan"), ["Fine"]), "cannot be read: "),
    ],
)
async def test_a_node_that_sends_too_much_or_nonsense_is_hung_up_on_and_the_log_says_why(
    data: bytes, said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def fine(_: Fine) -> str:
        return "fine"

    listener = await _listening(tmp_path / "s", {Fine: fine, Fail: fine})
    await _ended(tmp_path / "s", data)
    assert "closed a control connection" in caplog.text
    assert said in caplog.text
    listener.close()


async def test_a_node_may_say_nothing_where_nothing_is_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    listener = await _listening(tmp_path / "s", {})
    await _ended(tmp_path / "s", _framed(3, ["Fine"]))
    assert "a control message where none is accepted" in caplog.text
    listener.close()


async def test_what_is_told_and_fails_is_logged_and_nothing_else_happens(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    heard = asyncio.Event()

    async def fail(_: Fail) -> None:
        raise ZeroDivisionError("by itself")

    async def hear(_: Fine) -> None:
        heard.set()

    listener = await _listening(tmp_path / "s", {Fail: fail, Fine: hear})
    node = await control.connect(tmp_path / "s", {})
    node.notify(Fail())
    node.notify(Fine())
    async with asyncio.timeout(10):
        await heard.wait()
    assert "a Fail could not be carried out" in caplog.text
    assert "ZeroDivisionError: by itself" in caplog.text
    node.close()
    listener.close()


async def test_a_message_that_the_other_side_would_not_take_is_refused_to_its_sender(tmp_path: Path) -> None:
    async def much(_: Much) -> bytes:
        return bytes(300_000_000)

    listener = await _listening(tmp_path / "s", {Much: much})
    node = await control.connect(tmp_path / "s", {})
    serving = asyncio.ensure_future(node.serve())
    with pytest.raises(ControlError, match=f"the other side accepts {FROM_NODES.max_message_bytes}"):
        node.notify(Fine("x" * 2_000_000))
    with pytest.raises(ControlError, match=f"the other side accepts {FROM_ORCHESTRATOR.max_message_bytes}"):
        await node.ask(Much())
    node.close()
    await serving
    listener.close()


async def test_a_workload_of_many_megabytes_reaches_its_node(tmp_path: Path) -> None:
    heard: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def serve(message: Serve) -> None:
        heard.set_result(len(message.requests))

    async def accept(peer: Peer) -> None:
        peer.notify(Serve([Request(number, 0.5, 20, 128) for number in range(300_000)], []))
        await peer.serve()

    listener = await control.listen(tmp_path / "s", accept)
    node = await control.connect(tmp_path / "s", {Serve: serve})
    serving = asyncio.ensure_future(node.serve())
    async with asyncio.timeout(30):
        assert await heard == 300_000
    node.close()
    await serving
    listener.close()


async def test_questions_that_are_never_answered_are_bounded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "FROM_NODES", ControlLimits(1000, max_pending=20))
    never = asyncio.Event()

    async def wait(_: Fail) -> None:
        await never.wait()

    listener = await _listening(tmp_path / "s", {Fail: wait})
    await _ended(tmp_path / "s", _framed(0, 1, ["Fail"]) * 21)
    assert "more than 20 control messages wait" in caplog.text
    never.set()
    listener.close()


async def test_answers_that_are_not_read_are_bounded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "FROM_NODES", ControlLimits(1000, max_unread_bytes=2_000_000))

    async def much(_: Much) -> bytes:
        return bytes(100_000)

    listener = await _listening(tmp_path / "s", {Much: much})
    reader, writer = await asyncio.open_unix_connection(tmp_path / "s", limit=1000)
    async with asyncio.timeout(20):
        try:
            while "answers are not read" not in caplog.text:
                writer.write(_framed(0, 1, ["Much"]))
                await asyncio.sleep(0)
        except ConnectionError:
            assert "answers are not read" in caplog.text
    writer.close()
    assert reader is not None
    listener.close()


async def test_control_connections_are_bounded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "MAX_PEERS", 2)
    listener = await _listening(tmp_path / "s", {})
    first = [await asyncio.open_unix_connection(tmp_path / "s") for _ in range(2)]
    await _ended(tmp_path / "s", b"")
    assert "refused a control connection: 2 are open" in caplog.text
    for _, writer in first:
        writer.close()
    listener.close()


async def test_a_node_whose_orchestrator_sends_nonsense_stops_and_says_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def orchestrate(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"\xff" * 100)
        await reader.read()
        writer.close()

    listener = await asyncio.start_unix_server(orchestrate, tmp_path / "s")
    node = await control.connect(tmp_path / "s", {})
    with caplog.at_level(logging.WARNING):
        async with asyncio.timeout(10):
            await control.until_stopped(node, asyncio.Event())
    assert "closed the control connection: a control message of 4294967295 bytes" in caplog.text
    listener.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
async def test_nobody_but_its_owner_can_connect_even_where_all_may_enter_its_folder() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "control.sock"
        os.chmod(folder, 0o755)  # noqa: PTH101 - a quick call
        served = asyncio.Event()

        async def accept(peer: Peer) -> None:
            await peer.serve()
            served.set()

        listener = await control.listen(path, accept)
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600  # noqa: PTH116
        assert await asyncio.to_thread(_connects_as, 65_534, path) == "PermissionError"
        assert await asyncio.to_thread(_connects_as, 0, path) == "connected"
        # A listener that closes between accepting a connection and serving it leaves a socket behind, whose
        # warning would be raised in whatever test comes next.
        async with asyncio.timeout(10):
            await served.wait()
        listener.close()


def _connects_as(uid: int, path: Path) -> str:
    """Returns what happens to a connection that a process of user ``uid`` tries to open."""

    code = (
        "import os, socket, sys\n"
        f"os.setgid({uid}); os.setuid({uid})\n"
        "s = socket.socket(socket.AF_UNIX)\n"
        "try:\n    s.connect(sys.argv[1]); print('connected')\n"
        "except OSError as error:\n    print(type(error).__name__)\n"
    )
    python = "/usr/bin/python3" if Path("/usr/bin/python3").exists() else sys.executable
    done = subprocess.run([python, "-c", code, str(path)], capture_output=True, text=True, check=True)
    return done.stdout.strip()
