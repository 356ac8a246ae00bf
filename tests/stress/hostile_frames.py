"""Frames of a hostile client as Hypothesis strategies: valid sequences, and everything that can be wrong with
them.

A case is a list of moves, each on one of ``N_CONNECTIONS`` connections; ``hostile_server`` plays it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgpack
from hypothesis import strategies as st

from nodes import wire

TOKEN_BYTES = 16
N_BLOCKS = 4
N_CONNECTIONS = 3
TOKENS = ("A", "B", "C")
"""Access tokens of sessions that forward: a client that knows one can push to its session."""
N_PEERS = 2
SESSIONS = ("s", "t", "u", "\n\x1b[2J", "é" * 128)

Strategy = st.SearchStrategy[Any]

BAD_NUMBERS = st.sampled_from([-1, 2**31, 2**63 - 1, 2**64 - 1, -(2**63)]) | st.integers(-(2**63), 2**64 - 1)
LEAVES: Strategy = st.one_of(
    st.none(),
    st.booleans(),
    BAD_NUMBERS,
    st.floats(),
    st.text(max_size=10),
    st.text("x", min_size=129, max_size=600),
    st.binary(max_size=40),
    st.builds(msgpack.ExtType, st.integers(0, 127), st.binary(max_size=8)),
)
VALUES: Strategy = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=10) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
DEEP = st.builds(
    lambda depth, head, tail: head * depth + tail,
    st.sampled_from([8, 100, 1000, 1100, 5000]),
    st.sampled_from(
        [b"\x91", b"\x81\x01", b"\xdd\xff\xff\xff\xff", b"\xdd\x00\x00\xff\xff", b"\xdf\xff\xff\xff\xff"]
    ),
    st.binary(max_size=20),
)
"""Deeply nested lists and maps, some of which claim millions of elements."""
CLAIMS = st.builds(
    lambda head, size, tail: head + size.to_bytes(4, "big") + tail,
    st.sampled_from([b"\xdd", b"\xdf", b"\xdb", b"\xc6", b"\xc9"]),
    st.sampled_from([2**31, 2**32 - 1, 2**20, 1000]),
    st.binary(max_size=40),
)
"""A list, map, text, bytes or extension that claims to be far longer than it is."""

session = st.sampled_from(SESSIONS)
number = st.integers(0, 5)
blocks = st.integers(0, N_BLOCKS + 1)
token = st.sampled_from([*TOKENS, ""])
FRAMES: Strategy = st.one_of(
    st.tuples(
        st.just("open"), number, session, st.sampled_from(["c", ""]), blocks, blocks, st.integers(0, 40)
    ),
    st.tuples(
        st.sampled_from(["step", "step", "behind", "instead", "fill"]),
        number,
        session,
        st.integers(0, 12),
        st.integers(0, 4),
        st.integers(0, 5).map(lambda n: bytes(n * TOKEN_BYTES)),
    ),
    st.tuples(
        *(st.just("join"), number, session, st.sampled_from(["c", ""]), blocks, blocks, st.integers(0, 40)),
        *(token, st.integers(0, N_PEERS), token),
    ),
    st.tuples(
        *(st.just("join"), number, session, st.just("c"), blocks, blocks, st.integers(0, 40)),
        *(token, st.integers(0, N_PEERS), token, st.integers(0, 12), st.floats(0, 9)),
    ),
    st.tuples(
        *(st.just("push"), number, token, st.integers(0, 12), st.integers(0, 4)),
        st.integers(0, 3).map(lambda n: wire.pack_timing(wire.Timing(0.0, 1.0, 16)) * n),
        st.integers(0, 5).map(lambda n: bytes(n * TOKEN_BYTES)),
    ),
    st.tuples(st.just("close"), number, session),
    st.tuples(st.just("more"), number, st.sampled_from([0, 1, 2 * TOKEN_BYTES, 70_000]).map(bytes)),
    st.tuples(st.just("ping"), number, st.sampled_from([0, 1, 1000, 70_000]).map(bytes)),
)
OTHERS: Strategy = st.builds(
    lambda kind, fields: (kind, *fields),
    st.sampled_from(
        ["open", "step", "close", "ping", "join", "push", "more", "ok", "out", "result", "error", "", "fly"]
    ),
    st.lists(LEAVES | session | number, max_size=10),
)


@st.composite
def wrong_frames(draw: Callable[[Strategy], Any]) -> bytes:
    """A valid frame in which a field has another type, or with fields too many or too few."""
    fields = list(draw(FRAMES))
    what = draw(st.integers(0, 2))
    at = draw(st.integers(0, len(fields) - 1))
    if what == 0:
        fields[at] = draw(VALUES | BAD_NUMBERS)
    elif what == 1:
        del fields[at:]
    else:
        fields.insert(at, draw(VALUES))
    return bytes(msgpack.packb(fields))


@st.composite
def damaged_frames(draw: Callable[[Strategy], Any]) -> bytes:
    """A valid frame in which some bytes are replaced, and which may be cut short or have more bytes at its
    end.
    """
    data = bytearray(msgpack.packb(draw(FRAMES)))
    for _ in range(draw(st.integers(1, 4))):
        data[draw(st.integers(0, min(len(data) - 1, 60)))] = draw(st.integers(0, 255))
    tail: bytes = draw(st.just(b"") | st.binary(max_size=5))
    return bytes(data[: draw(st.integers(0, len(data)))]) + tail


RAW: Strategy = st.one_of(
    wrong_frames(), damaged_frames(), OTHERS.map(msgpack.packb), DEEP, CLAIMS, st.binary(max_size=60)
)
"""Frames that are meant to be wrong; some are valid by chance."""
GOOD: Strategy = FRAMES.map(msgpack.packb)
ANY: Strategy = st.one_of(GOOD, RAW)

IN_ORDER: Strategy = st.one_of(
    st.tuples(st.just("begin"), session, st.integers(1, 60)),
    st.tuples(st.just("go on"), session, st.integers(1, 3)),
    st.tuples(st.just("go on"), session, st.integers(1, 3)),
    st.tuples(st.just("end"), session),
    st.tuples(st.just("chain"), st.sampled_from(TOKENS), token),
    st.tuples(st.just("push on"), st.sampled_from(TOKENS), st.integers(1, 3)),
    st.tuples(st.just("push on"), st.sampled_from(TOKENS), st.integers(1, 3)),
)
"""Moves of a well-behaved client: the name of the move, then what ``hostile_server.ServerTarget`` needs for it.
The target keeps track of the positions.
"""

WRONG_HEADERS = st.binary(min_size=2, max_size=14) | st.sampled_from(
    [
        b"\x82\xff" + (2**31).to_bytes(8, "big") + b"\0\0\0\0",
        b"\x82\xff" + (2**63 - 1).to_bytes(8, "big") + b"\0\0\0\0",
        b"\x82\xff" + b"\xff" * 8 + b"\0\0\0\0",
        b"\x82\x05hello",
        b"\x89\xfe\x01\x00\0\0\0\0",
        b"\x83\x80\0\0\0\0",
        b"\xf2\x80\0\0\0\0",
        b"\x80\x80\0\0\0\0",
    ]
)
"""Wrong WebSocket headers: 2 GB announced, no mask, a long ping, reserved opcodes and bits, a continuation of
nothing.
"""

MOVES: Strategy = st.one_of(
    IN_ORDER,
    IN_ORDER,
    st.tuples(st.just("frame"), ANY),
    st.tuples(st.just("split"), ANY, st.integers(0, 80)),
    st.tuples(st.just("pieces"), ANY, st.integers(1, 5)),
    st.tuples(st.just("flood"), GOOD, st.integers(2, 60)),
    st.tuples(st.just("half"), ANY, st.integers(0, 80)),
    st.tuples(st.just("text"), st.text(max_size=20)),
    st.tuples(st.just("control"), st.sampled_from([8, 9, 10]), st.binary(max_size=125)),
    st.tuples(st.just("header"), WRONG_HEADERS),
    st.tuples(st.just("time"), st.sampled_from([0.05, 1.0, 100.0, 200.0])),
    st.tuples(st.just("leave"), st.sampled_from(["reset", "close", "half"])),
    st.tuples(st.just("deaf")),
    st.tuples(st.just("look")),
)
HTTP = st.sampled_from(
    [
        b"",
        b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n" * 20,
        b"POST /v1/sessions HTTP/1.1\r\nHost: x\r\nContent-Length: 4000000000\r\n\r\nxx",
        b"GET /v1/sessions HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /" + b"a" * 20_000,
        b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 5000,
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc",
    ]
) | st.binary(max_size=60)
CASES: Strategy = st.lists(
    st.tuples(st.integers(0, N_CONNECTIONS - 1), MOVES | st.tuples(st.just("http"), HTTP)),
    min_size=1,
    max_size=14,
)
