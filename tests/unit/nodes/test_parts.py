"""The order in which frames are sent over a connection, and frames that are sent in parts."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodes import wire
from nodes.digest import write_rows
from nodes.parts import Receiver, Sender, Sending
from tests.support.data_plane import TOKEN_BYTES, ask, connected, make_server
from tests.support.manual_clock import ManualClock


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "PART_BYTES", 10)
    monkeypatch.setattr(wire, "SMALL_BYTES", 12)


class Wire:
    """Takes a message when it is told to. ``said`` is what was sent."""

    def __init__(self) -> None:
        self.carried: list[bytes] = []
        self._room = asyncio.Semaphore(0)
        self.sender = Sender(self.send_bytes, lambda: 0.0)

    async def send_bytes(self, data: bytes) -> None:
        self.carried.append(data)
        await self._room.acquire()

    async def take(self, n: int = 1) -> None:
        """The other side reads ``n`` messages."""
        for _ in range(n):
            self._room.release()
            for _ in range(5):
                await asyncio.sleep(0)

    @property
    def said(self) -> list[str]:
        """The kind and number of every message."""
        return [f"{type(m).__name__} {m.id}" for m in map(wire.unpack_request, self.carried)]


def received(carried: list[bytes], max_bytes: int = 1000) -> list[wire.Request]:
    receiver: Receiver[wire.Request] = Receiver(max_bytes)
    frames = (receiver.take(wire.unpack_request(data)) for data in carried)
    return [frame for frame in frames if frame is not None]


@given(payload=st.binary(max_size=100), part=st.integers(1, 110))
def test_a_frame_comes_out_as_it_went_in_however_small_its_parts(payload: bytes, part: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire, "PART_BYTES", part)
        frame = wire.Step(3, "s", 0, 1, payload)
        sending, packed = Sending(frame), []
        while not sending.is_done:
            packed.append(sending.next())
    assert len(packed) == max(1, -(-len(payload) // part))
    assert frame.payload == payload, "the frame that was sent is unchanged"
    assert received(packed) == [frame]


async def test_small_frames_pass_large_ones_whose_parts_never_alternate(small_parts: None) -> None:
    link = Wire()
    frames = [
        wire.Step(1, "s", 0, 1, bytes(range(25))),
        wire.Step(2, "t", 0, 1, bytes(range(15))),
        wire.Step(3, "u", 0, 1, bytes(12)),
        wire.Close(4, "v"),
    ]
    sends = [asyncio.ensure_future(link.sender.send(frame)) for frame in frames[:2]]
    await link.take(0)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert link.said == ["More 1"]
    sends += [asyncio.ensure_future(link.sender.send(frame)) for frame in frames[2:]]
    await link.take(8)
    await asyncio.gather(*sends)
    assert link.said == ["More 1", "Close 4", "More 3", "Step 3", "More 1", "Step 1", "More 2", "Step 2"]
    assert received(link.carried) == [frames[number] for number in (3, 2, 0, 1)]


async def test_who_stops_waiting_drops_what_is_not_sent_and_disturbs_nothing_else(small_parts: None) -> None:
    link = Wire()
    payload = bytes(range(35))
    begun, waiting, other = (
        asyncio.ensure_future(link.sender.send(wire.Step(n, "s", 0, 1, payload))) for n in (1, 2, 3)
    )
    await link.take(1)
    assert link.said == ["More 1", "More 1"]
    begun.cancel()
    waiting.cancel()
    await link.take(10)
    await other
    assert link.said == ["More 1", "More 1", "Drop 1", "More 3", "More 3", "More 3", "Step 3"]
    assert received(link.carried) == [wire.Step(3, "s", 0, 1, payload)]


async def test_a_frame_whose_last_part_is_being_sent_is_not_dropped(small_parts: None) -> None:
    link = Wire()
    sending = asyncio.ensure_future(link.sender.send(wire.Step(1, "s", 0, 1, bytes(15))))
    await link.take(1)
    assert link.said == ["More 1", "Step 1"]
    sending.cancel()
    await link.take(5)
    await link.sender.send(wire.Close(2, "t"))
    assert link.said == ["More 1", "Step 1", "Close 2"]


async def test_a_connection_that_breaks_fails_all_that_waits_and_all_that_comes_later(
    small_parts: None,
) -> None:
    lost: list[str] = []

    async def breaks(data: bytes) -> None:
        await asyncio.sleep(0)
        raise ConnectionResetError("the cable was cut")

    sender = Sender(breaks, lambda: 0.0, lambda: lost.append("lost"))
    frames = (wire.Step(n, "s", 0, 1, bytes(25)) for n in (1, 2))
    errors = await asyncio.gather(*map(sender.send, frames), return_exceptions=True)
    assert [str(error) for error in errors] == ["the cable was cut"] * 2
    assert lost == ["lost"]
    with pytest.raises(ConnectionResetError, match="the cable was cut"):
        await sender.send(wire.Close(3, "s"))


async def test_who_waits_for_the_last_part_hears_that_the_connection_broke_with_it(small_parts: None) -> None:
    async def breaks(data: bytes) -> None:
        await asyncio.sleep(0)
        if not isinstance(wire.unpack_request(data), wire.More):
            raise ConnectionResetError("the cable was cut")

    async with asyncio.timeout(5):
        with pytest.raises(ConnectionResetError, match="the cable was cut"):
            await Sender(breaks, lambda: 0.0).send(wire.Step(1, "s", 0, 1, bytes(15)))


def test_other_frames_may_come_between_the_parts_of_one() -> None:
    receiver: Receiver[wire.Request] = Receiver(1000)
    assert receiver.take(wire.More(7, b"ab")) is None
    for between in (wire.Close(8, "t"), wire.Ping(9, b"x"), wire.Close(7, "t")):
        assert receiver.take(between) is between
    assert receiver.take(wire.Ping(7, b"c")) == wire.Ping(7, b"abc")


def test_parts_of_more_than_two_frames_at_once_break_the_protocol() -> None:
    receiver: Receiver[wire.Request] = Receiver(1000)
    for number in (7, 8):
        assert receiver.take(wire.More(number, b"ab")) is None
    with pytest.raises(wire.FrameError, match="parts of more than 2 frames") as caught:
        receiver.take(wire.More(9, b""))
    assert caught.value.code == wire.BAD_FRAME


def test_a_dropped_frame_makes_room_for_the_next() -> None:
    receiver: Receiver[wire.Request] = Receiver(10)
    assert receiver.take(wire.More(7, bytes(10))) is None
    assert receiver.take(wire.More(6, b"")) is None
    assert receiver.take(wire.Drop(5)) is None, "nothing of that one is here"
    with pytest.raises(wire.FrameError):
        receiver.take(wire.More(8, b""))
    assert receiver.take(wire.Drop(7)) is None
    assert receiver.take(wire.More(8, bytes(9))) is None
    assert receiver.take(wire.Ping(8, b"x")) == wire.Ping(8, bytes(9) + b"x")


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
