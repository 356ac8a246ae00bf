"""How many bytes of its connection each message of the data plane takes: for the simulator, which sends sizes only.

Frames are those of ``nodes.wire``, whose sizes depend on what they carry alone, if names and errors are not unusually long.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import NamedTuple

from nodes import wire
from nodes.batching import Composition
from nodes.outbox import Class
from nodes.parts import class_of_payload
from nodes.prefixes import PAGE_ID_BYTES

_MASK_BYTES = 4
"""Clients mask their messages (RFC 6455)."""
_LARGE_BYTES = 16_384
"""aiohttp writes the header of a larger message of a server by itself."""
WRITTEN_BYTES = 256 * 1024
"""aiohttp looks whether it should write on after so many bytes, not after every message."""
WARM_BYTES = 24 * 1024**2
"""Twice the kernel's largest receive window (``netem.tcp``): a connection that has carried as much has its full window."""
WARM_AT_ONCE_BYTES = WARM_BYTES // 2
"""Of these, what is on its way at once."""
_TOKEN = "t" * 32
"""As long as those that ``nodes.forwarding_session`` draws."""


def _own_bytes(frame: wire.Frame) -> int:
    return len(wire.pack(frame))


_STEP = _own_bytes(wire.Step(wire.FIRST_ID, "100", 1000, 1, b""))
_PING = _own_bytes(wire.Ping(wire.FIRST_ID, b""))
_OUT = _own_bytes(wire.Out(wire.FIRST_ID, 0.1, 0.2, Composition(), b""))
_PUSH = _own_bytes(wire.Push(wire.FIRST_ID, _TOKEN, 1000, 1, b"", b""))
_RESULT = _own_bytes(wire.Result(wire.FIRST_ID, 1000, b"", b""))
_MORE = _own_bytes(wire.More(wire.FIRST_ID, bytes(wire.PART_BYTES))) - wire.PART_BYTES
_TIMING = len(wire.pack_timing(wire.Timing(0.0, 0.0, 0)))


def _message(n_bytes: int, is_masked: bool) -> tuple[int, int]:
    """Returns how a WebSocket message of ``n_bytes`` is written: the bytes of all, and those that are written before the rest."""
    header_bytes = 2 if n_bytes < 126 else 4 if n_bytes < 2**16 else 10
    if is_masked:
        return n_bytes + header_bytes + _MASK_BYTES, 0
    return n_bytes + header_bytes, header_bytes if n_bytes > _LARGE_BYTES else 0


class FrameSize(NamedTuple):
    """A frame of class ``kind``: ``n_parts`` messages of ``part_bytes`` each, and one of ``last_bytes``.

    The first ``part_head_bytes`` of a part, and ``last_head_bytes`` of the last message, are written before the rest, so that they
    have a segment of their own. 0: a message is written at once.
    """

    kind: Class
    last_bytes: int
    n_parts: int = 0
    part_bytes: int = 0
    last_head_bytes: int = 0
    part_head_bytes: int = 0


def _frame(own_bytes: int, n_payload: int, is_masked: bool) -> FrameSize:
    n_parts = max(0, n_payload - 1) // wire.PART_BYTES
    n_last = n_payload - n_parts * wire.PART_BYTES
    last_bytes, last_head_bytes = _message(own_bytes + n_last, is_masked)
    part_bytes = part_head_bytes = 0
    if n_parts:
        part_bytes, part_head_bytes = _message(_MORE + wire.PART_BYTES, is_masked)
    return FrameSize(
        class_of_payload(n_payload), last_bytes, n_parts, part_bytes, last_head_bytes, part_head_bytes
    )


_OPENING = wire.FIRST_ID, "100", "client1", 0, 30, 1000
_JOINING = *_OPENING, _TOKEN, 3, _TOKEN
OPEN = _frame(_own_bytes(wire.Open(*_OPENING, 1000, 100.5)), 0, True)
JOIN = _frame(_own_bytes(wire.Join(*_JOINING, 1000, 100.5)), 0, True)
CLOSE = _frame(_own_bytes(wire.Close(wire.FIRST_ID, "100")), 0, True)
OK = _frame(_own_bytes(wire.Ok(wire.FIRST_ID)), 0, False)
FOUND = _frame(_own_bytes(wire.Found(wire.FIRST_ID, 1000)), 0, False)
GOT = _frame(_own_bytes(wire.Got(wire.FIRST_ID)), 0, False)
UPGRADE, UPGRADED = FrameSize(Class.CONTROL, 250), FrameSize(Class.CONTROL, 202)
"""The request for a WebSocket and its answer, as aiohttp makes them."""
ERROR = _frame(_own_bytes(wire.Error(wire.FIRST_ID, wire.NO_CAPACITY, "m" * 60)), 0, False)


@lru_cache(4096)
def opening(n_pages: int, *, forwarding: bool) -> FrameSize:
    """Returns the size of an opening with the ids of ``n_pages`` pages of the prompt."""
    if not n_pages:
        return JOIN if forwarding else OPEN
    ids = bytes(n_pages * PAGE_ID_BYTES)
    with_pages = (
        wire.JoinPages(*_JOINING, 1000, 100.5, ids)
        if forwarding
        else wire.OpenPages(*_OPENING, 1000, 100.5, ids)
    )
    return _frame(_own_bytes(with_pages), 0, True)


@lru_cache(4096)
def keeping(n_pages: int) -> FrameSize:
    """Returns the size of a closing after which the server may keep ``n_pages`` pages."""
    return _frame(_own_bytes(wire.Keep(wire.FIRST_ID, "100", bytes(n_pages * PAGE_ID_BYTES))), 0, True)


def there(at: int, *, forwarding: bool) -> Callable[[int], FrameSize]:
    """Returns what computes the size of a frame to hop number ``at``, by its bytes of hidden states."""
    return partial(push, n_timings=at) if forwarding else step


def back(n_hops: int, *, forwarding: bool) -> Callable[[int], FrameSize]:
    """Returns what computes the size of a frame to the client of a chain of ``n_hops``, by its bytes of hidden states."""
    return partial(result, n_timings=n_hops) if forwarding else out


@lru_cache(4096)
def step(n_payload: int) -> FrameSize:
    """Returns the size of a ``Step`` from a client."""
    return _frame(_STEP, n_payload, True)


def ping(n_payload: int) -> FrameSize:
    """Returns the size of a ``Ping``, which an ``Out`` answers."""
    return _frame(_PING, n_payload, True)


@lru_cache(4096)
def out(n_payload: int) -> FrameSize:
    """Returns the size of a server's ``Out``."""
    return _frame(_OUT, n_payload, False)


@lru_cache(4096)
def push(n_payload: int, n_timings: int) -> FrameSize:
    """Returns the size of a ``Push``, from a client or another server, with the timings of ``n_timings`` hops."""
    return _frame(_PUSH + n_timings * _TIMING, n_payload, True)


@lru_cache(4096)
def result(n_payload: int, n_timings: int) -> FrameSize:
    """Returns the size of a ``Result`` of a chain of ``n_timings`` hops."""
    return _frame(_RESULT + n_timings * _TIMING, n_payload, False)
