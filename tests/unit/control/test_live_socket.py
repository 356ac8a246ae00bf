"""The socket for faults and links by hand: any input may come, and only valid requests are carried out."""

from __future__ import annotations

import asyncio
import contextlib
import stat
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgpack
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nodes import control
from testbed.control.faults.byhand import Fault, fault_by_hand
from testbed.control.live import SOCKET, LiveSocket
from testbed.errors import UserError
from testbed.experiments.limits import MAX_NUMBER
from testbed.faultkinds import KINDS as ALL_KINDS
from testbed.runs.byhand import fault_command

NAMES = ["a100-0", "mig-1g-0"]
KINDS = list(ALL_KINDS)


class Opened:
    def __init__(self, folder: Path) -> None:
        self.did: list[tuple[str, int, float]] = []
        self.path = folder / SOCKET
        self.socket = LiveSocket(folder, {Fault: self.fault})

    async def fault(self, fault: Fault) -> str | None:
        return await fault_by_hand(fault, NAMES, self._apply)

    async def _apply(self, kind: str, server: int, factor: float) -> str | None:
        self.did.append((kind, server, factor))
        return "it is dead already" if kind == "cont" else None

    async def ask(self, *fields: Any) -> Any:
        peer = await control.connect(self.path, {})
        serving = asyncio.ensure_future(peer.serve())
        try:
            return await peer.ask(Fault(*fields))
        finally:
            peer.close()
            await serving


@pytest.fixture
async def opened(tmp_path: Path) -> AsyncIterator[Opened]:
    made = Opened(tmp_path)
    await made.socket.open()
    yield made
    made.socket.close()
    assert not made.path.exists()


async def test_only_its_owner_may_use_it(opened: Opened) -> None:
    assert stat.S_IMODE(opened.path.stat().st_mode) & 0o077 == 0


async def test_a_fault_is_done_or_the_answer_says_why_not(opened: Opened) -> None:
    assert await opened.ask("slow", "mig-1g-0", 4.0) is None
    assert await opened.ask("cont", "a100-0") == "it is dead already"
    assert opened.did == [("slow", 1, 4.0), ("cont", 0, 1.0)]


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(KINDS) | st.text(), st.sampled_from(NAMES) | st.text(), st.floats())
def test_nothing_but_a_known_fault_of_a_known_server_is_done(
    tmp_path: Path, kind: str, server: str, factor: float
) -> None:
    opened = Opened(tmp_path)
    why_not = asyncio.run(opened.fault(Fault(kind, server, factor)))
    is_whole = kind in KINDS and server in NAMES and 1 <= factor <= MAX_NUMBER
    assert bool(opened.did) == is_whole
    assert is_whole or (isinstance(why_not, str) and why_not)


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(KINDS) | ANYTHING, st.sampled_from(NAMES) | ANYTHING, ANYTHING)
def test_fields_of_other_types_are_no_fault(kind: Any, server: Any, factor: Any) -> None:
    data = msgpack.packb(["Fault", kind, server, factor])
    is_one = isinstance(kind, str) and isinstance(server, str) and type(factor) in (int, float)
    with contextlib.nullcontext() if is_one else pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(data, type=Fault)


async def test_garbage_ends_its_own_connection_only(opened: Opened) -> None:
    for garbage in (b"\xff" * 64, b"\x00\x00\x00\x01\xc1", b"GET / HTTP/1.1\r\n\r\n"):
        reader, writer = await asyncio.open_unix_connection(opened.path)
        writer.write(garbage)
        assert await asyncio.wait_for(reader.read(), 10) == b""
        writer.close()
    assert await opened.ask("kill", "a100-0", 1.0) is None


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("kil", "a", None), "did you mean"),
        (("slow", "a", None), "slow needs --factor"),
        (("kill", "a", 2.0), "--factor is only for slow"),
        (("kill", "a", None), "no testbed is running below runs/"),
    ],
)
def test_what_cannot_be_asked_is_said_before_anybody_is_asked(
    arguments: tuple[str, str, float | None], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=expected):
        fault_command(*arguments, None)


def test_a_folder_that_is_no_run_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a run directory"):
        fault_command("kill", "a", None, tmp_path)
