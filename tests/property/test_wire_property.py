from __future__ import annotations

from random import Random
from typing import Any

import msgpack
import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nodes import wire
from nodes.batching import Composition
from tests.support.data_plane import raw_frame, unpadded
from tests.support.effort import n_drawn

NATURAL = st.integers(0, 2**63 - 1)
NAME = st.text(max_size=128)
PAYLOAD = st.binary(max_size=300)
TOGETHER = st.tuples(*[NATURAL] * 5, st.floats(0, 1e9))
REQUESTS = st.one_of(
    st.tuples(*(st.just("open"), NATURAL, NAME, NAME, NATURAL, NATURAL, NATURAL, NATURAL, st.floats(0, 1e9))),
    st.tuples(
        st.sampled_from(["step", "fill", "behind", "instead"]), NATURAL, NAME, NATURAL, NATURAL, PAYLOAD
    ),
    st.tuples(st.just("close"), NATURAL, NAME),
    st.tuples(st.just("ping"), NATURAL, PAYLOAD),
    st.tuples(st.just("more"), st.integers(-(2**63), 2**63 - 1), PAYLOAD),
)
ANSWERS = st.one_of(
    st.tuples(st.just("ok"), NATURAL),
    st.tuples(st.just("out"), NATURAL, st.floats(0, 1e9), st.floats(0, 1e9), TOGETHER, PAYLOAD),
    st.tuples(st.just("error"), st.integers(-1, 2**31), NAME, NAME),
)
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(),
    st.text(max_size=20),
    st.binary(max_size=20),
    st.sampled_from(["open", "step", "close", "ping", "ok", "out", "error"]),
    st.builds(msgpack.ExtType, st.integers(0, 127), st.binary(max_size=20)),
)
MSGPACK_VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=8)
        | st.dictionaries(st.text(max_size=5) | st.integers(0, 9), inner, max_size=4)
    ),
    max_leaves=12,
)


def fields(frame: wire.Frame) -> list[Any]:
    return unpadded(list(msgspec.to_builtins(frame, builtin_types=[bytes])))


def read_everything(data: bytes) -> None:
    """Both directions; a frame that is refused is refused with ``FrameError``, and so it can be answered."""
    for unpack in (wire.unpack_request, wire.unpack_answer):
        try:
            frame = unpack(data)
        except wire.FrameError as error:
            assert error.code == wire.BAD_FRAME
            assert str(error)
            assert len(str(error)) < 200
            wire.pack(wire.Error(error.request_id, error.code, str(error)))
        else:
            assert wire.pack(frame)


@settings(max_examples=n_drawn(100), deadline=None)
@given(REQUESTS)
def test_a_request_comes_out_as_it_went_in_and_costs_little_more_than_its_payload(frame: Any) -> None:
    data = raw_frame(*frame)
    assert fields(wire.unpack_request(data)) == list(frame)
    payload = frame[-1] if isinstance(frame[-1], bytes) else b""
    names = sum(len(field.encode()) for field in frame if isinstance(field, str))
    assert len(data) <= len(payload) + names + 64
    assert len(wire.pack(wire.unpack_request(data))) <= len(payload) + names + 96


NUMBER = st.integers(0, 2**32 - 1)
SHORT = st.text("abc.019", max_size=16)
OF_ONE_SIZE = st.one_of(
    st.builds(wire.Open, NUMBER, SHORT, SHORT, NUMBER, NUMBER, NUMBER, NUMBER, st.floats(0, 1e9)),
    st.builds(wire.Step, NUMBER, SHORT, NUMBER, NUMBER, PAYLOAD),
    st.builds(wire.Push, NUMBER, st.just("t" * 32), NUMBER, NUMBER, st.binary(max_size=300), PAYLOAD),
    st.builds(
        wire.Out,
        *(NUMBER, st.floats(0, 1e9), st.floats(0, 1e9)),
        st.tuples(*[NUMBER] * 5, st.floats(0, 1e9)).map(lambda numbers: Composition(*numbers)),
        PAYLOAD,
    ),
    st.builds(wire.Result, NUMBER, NUMBER, st.binary(max_size=300), PAYLOAD),
    st.builds(wire.Found, NUMBER, NUMBER),
    st.builds(wire.Close, NUMBER, SHORT),
    st.builds(wire.Keep, NUMBER, SHORT, st.binary(max_size=300)),
    st.builds(wire.Error, NUMBER, SHORT, st.text("abc ", max_size=160)),
)


@settings(max_examples=n_drawn(200), deadline=None)
@given(OF_ONE_SIZE)
def test_a_frames_size_is_that_of_what_it_carries_whatever_its_numbers_and_names(frame: Any) -> None:
    """Else some bytes would decide which of two steps comes first, and simulated times would not be the system's."""
    contents = ("payload", "timings", "pages")
    n_bytes = sum(len(getattr(frame, name, b"")) for name in contents)
    empty = {name: b"" for name in contents if hasattr(frame, name)}
    smallest = type(frame)(*(_SMALLEST.get(field, 0) for field in frame.__struct_fields__[:-1]))
    assert len(wire.pack(frame)) - n_bytes == len(wire.pack(msgspec.structs.replace(smallest, **empty)))
    unpack = wire.unpack_request if isinstance(frame, wire.Request) else wire.unpack_answer
    if isinstance(frame, wire.Push):
        frame.timings = b""
    assert unpack(wire.pack(frame)) == frame


_SMALLEST = dict.fromkeys(("session", "client", "code", "message"), "") | {
    "token": "t" * 32,
    "together": Composition(),
    "arrived_at_s": 0.0,
    "departed_at_s": 0.0,
    **dict.fromkeys(("payload", "timings", "pages"), b""),
}


@settings(max_examples=n_drawn(100), deadline=None)
@given(ANSWERS)
def test_an_answer_comes_out_as_it_went_in(frame: Any) -> None:
    assert fields(wire.unpack_answer(raw_frame(*frame))) == list(frame)


@settings(max_examples=n_drawn(250), deadline=None)
@given(st.binary(max_size=200))
@example(b"")
@example(b"\xc1")
@example(b"\xdd\xff\xff\xff\xff")
@example(b"\x91\xd7\xff" + b"\xff" * 8)
def test_random_bytes_are_refused_with_a_frame_error_and_nothing_else(data: bytes) -> None:
    read_everything(data)


@pytest.mark.parametrize("depth", [100, 500, 900, 1000, 1020, 5000, 100_000])
@pytest.mark.parametrize("head", [b"", b"\x93", b"\x92\xa4ping"])
def test_a_deeply_nested_frame_is_refused_with_a_frame_error_and_nothing_else(
    head: bytes, depth: int
) -> None:
    # Not under Hypothesis, which raises Python's recursion limit.
    read_everything(head + b"\x91" * depth + b"\x01")


@settings(max_examples=n_drawn(250), deadline=None)
@given(MSGPACK_VALUES)
def test_random_msgpack_values_are_refused_with_a_frame_error_and_nothing_else(value: Any) -> None:
    read_everything(msgpack.packb(value))


@settings(max_examples=n_drawn(150), deadline=None)
@given(st.data())
def test_a_frame_with_a_field_of_another_kind_is_refused_with_a_frame_error_and_nothing_else(
    data: st.DataObject,
) -> None:
    frame = list(data.draw(REQUESTS | ANSWERS))
    frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(MSGPACK_VALUES)
    read_everything(msgpack.packb(frame))


@settings(max_examples=n_drawn(150), deadline=None)
@given(REQUESTS | ANSWERS, st.data())
def test_a_mutated_frame_is_refused_with_a_frame_error_and_nothing_else(
    frame: Any, data: st.DataObject
) -> None:
    mutated = bytearray(raw_frame(*frame))
    for _ in range(data.draw(st.integers(1, 4))):
        mutated[data.draw(st.integers(0, len(mutated) - 1))] = data.draw(st.integers(0, 255))
    read_everything(bytes(mutated))


@pytest.mark.parametrize("seed", range(4))
def test_thousands_of_damaged_frames_are_refused_with_a_frame_error_and_nothing_else(seed: int) -> None:
    random = Random(seed)
    valid = [
        raw_frame("open", 300, "session", "client", 0, 70, 148),
        raw_frame("step", 70_000, "session", 5, 2, bytes(128)),
        raw_frame("close", 3, "session"),
        raw_frame("ping", 4, b"x" * 40),
        raw_frame("out", 5, 1.5, 2.5, 1, 1, bytes(64)),
        raw_frame("error", -1, wire.NO_CAPACITY, "no room"),
    ]
    for _ in range(5000):
        damaged = bytearray(random.choice(valid))
        for _ in range(random.randint(1, 3)):
            at = random.randrange(len(damaged) + 1)
            damaged[at : at + random.choice((0, 1, 1, 4))] = random.randbytes(random.choice((0, 1, 1, 5)))
        read_everything(bytes(damaged))
        read_everything(random.randbytes(random.randrange(40)))


@settings(max_examples=n_drawn(100), deadline=None)
@given(REQUESTS, st.data())
def test_a_truncated_frame_and_one_with_bytes_after_its_end_are_refused(
    frame: Any, data: st.DataObject
) -> None:
    whole = raw_frame(*frame)
    cut = data.draw(st.integers(0, len(whole) - 1))
    for broken in (whole[:cut], whole + b"\x00"):
        with pytest.raises(wire.FrameError):
            wire.unpack_request(broken)
        with pytest.raises(wire.FrameError):
            wire.unpack_answer(broken)


@pytest.mark.parametrize(
    ("frame", "sentence"),
    [
        (("fly", 1), "Invalid value 'fly' - at `$[0]`"),
        ((["step"], 1), "Expected `str`, got `array` - at `$[0]`"),
        (("close", 1), "Expected `array` of at least length 3, got 2"),
        (("close", 1, "s", b"", 2), "Expected `array` of at most length"),
        (("close", 1, "s", 2), "Expected `bytes`, got `int` - at `$[3]`"),
        (("close", True, "s"), "Expected `int`, got `bool` - at `$[1]`"),
        (("close", 1, b"s"), "Expected `str`, got `bytes` - at `$[2]`"),
        (("step", 1, "s", -1, 1, b""), "Expected `int` >= 0 - at `$[3]`"),
        (("close", 1, "s" * 129), "Expected `str` of length <= 128 - at `$[2]`"),
    ],
)
def test_a_refused_request_is_told_what_is_wrong_with_it(frame: Any, sentence: str) -> None:
    with pytest.raises(wire.FrameError) as caught:
        wire.unpack_request(raw_frame(*frame))
    assert sentence in str(caught.value)


def test_a_refused_request_is_answered_under_its_own_id_where_that_can_be_read() -> None:
    for frame, request_id in (
        (("close", 7), 7),
        (("close", 7, 1), 7),
        (("close",), -1),
        (("close", "7", "s"), -1),
    ):
        with pytest.raises(wire.FrameError) as caught:
            wire.unpack_request(raw_frame(*frame))
        assert caught.value.request_id == request_id


@pytest.mark.parametrize(
    "frame",
    [
        ("ok",),
        ("out", 1),
        ("out", 1, 0.0, 0.0, 1, 1),
        ("out", 1, 0.0, "x", 1, 1, b""),
        ("out", 1, 0.0, 0.0, 1, 1, "text"),
        ("error", 1),
        ("error", 1, "code"),
        ("error", 1, 2, 3),
    ],
)
def test_an_answer_without_all_its_fields_is_refused(frame: Any) -> None:
    with pytest.raises(wire.FrameError):
        wire.unpack_answer(raw_frame(*frame))
