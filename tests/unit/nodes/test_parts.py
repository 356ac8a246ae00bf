"""Frames that are sent in parts."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodes import wire
from nodes.clock import ManualClock
from nodes.digest import write_rows
from nodes.parts import Receiver, Sender, messages
from tests.support.data_plane import TOKEN_BYTES, ask, connected, make_server


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "PART_BYTES", 10)


class Wire:
    """Receives messages slowly."""

    def __init__(self) -> None:
        self.carried: list[bytes] = []

    async def send_bytes(self, data: bytes) -> None:
        self.carried.append(data)
        await asyncio.sleep(0)


def received(carried: list[bytes], max_bytes: int = 1000) -> list[wire.Request]:
    receiver: Receiver[wire.Request] = Receiver(max_bytes)
    frames = (receiver.take(wire.unpack_request(data)) for data in carried)
    return [frame for frame in frames if frame is not None]


@given(payload=st.binary(max_size=100), part=st.integers(1, 110))
def test_a_frame_comes_out_as_it_went_in_however_small_its_parts(payload: bytes, part: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire, "PART_BYTES", part)
        frame = wire.Step(3, "s", 0, 1, payload)
        packed = messages(frame)
    assert len(packed) == max(1, -(-len(payload) // part))
    assert frame.payload == payload, "the frame that was sent is unchanged"
    assert received(packed) == [frame]


async def test_no_frame_comes_between_the_parts_of_another(small_parts: None) -> None:
    carried = Wire()
    sender = Sender(carried)
    frames = [wire.Step(1, "s", 0, 1, bytes(range(45))), wire.Close(2, "t"), wire.Ping(3, bytes(25))]
    await asyncio.gather(*(sender.send(frame) for frame in frames))
    assert len(carried.carried) == 5 + 1 + 3
    assert received(carried.carried) == frames


@pytest.mark.parametrize(
    "between", [wire.Close(8, "t"), wire.Ping(9, b""), wire.Close(7, "t"), wire.More(9, b"")]
)
def test_another_frame_between_parts_breaks_the_protocol(between: wire.Request | wire.More) -> None:
    receiver: Receiver[wire.Request] = Receiver(1000)
    assert receiver.take(wire.More(7, b"ab")) is None
    with pytest.raises(wire.FrameError, match="between the parts") as caught:
        receiver.take(between)
    assert caught.value.code == wire.BAD_FRAME


def test_parts_that_add_up_to_too_much_are_refused() -> None:
    receiver: Receiver[wire.Request] = Receiver(100)
    assert receiver.take(wire.More(7, bytes(60))) is None
    with pytest.raises(wire.FrameError, match="more than 100 bytes") as caught:
        receiver.take(wire.Ping(7, bytes(41)))
    assert caught.value.code == wire.TOO_LARGE


async def test_a_server_takes_and_gives_steps_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    n_tokens = 7
    payload = write_rows(list(range(n_tokens)), TOKEN_BYTES)
    answers = []
    for part in (wire.PART_BYTES, 10):
        monkeypatch.setattr(wire, "PART_BYTES", part)
        async with connected([make_server()], ManualClock()) as (connection,):
            await ask(connection, "open", "s", "c", 0, 4, 10)
            answers.append((await ask(connection, "step", "s", 0, n_tokens, payload)).frame.payload)
    assert answers[0] == answers[1]
    assert len(answers[0]) == n_tokens * TOKEN_BYTES
