"""The data plane's frames: one msgpack array per binary WebSocket message.

Requests (client to server), each answered once, in any order, with the same ``id``:

- ``["open", id, session, client, first, last, max_tokens]``
- ``["step", id, session, position, n_tokens, payload]``; position 0 is the prefill
- ``["close", id, session]``
- ``["ping", id, payload]``

and with forwarding (``nodes.forwarding``) in place of the first two:

- ``["join", id, session, client, first, last, max_tokens, token, peer, next_token]``
- ``["push", id, token, position, n_tokens, timings, payload]``, from the client or another server; it is
  answered as soon as it has arrived

Answers:

- ``["ok", id]``
- ``["out", id, arrived_at_s, departed_at_s, payload]``
- ``["result", id, position, timings, payload]``, from the last server of a chain: what came out of a step.
  ``id`` is that of the ``join``, which is also answered by an error whenever its session fails
- ``["error", id, code, message]``; ``id`` is -1 when the request's cannot be known

``payload`` holds ``n_tokens`` hidden states, ``timings`` what ``pack_timing`` makes of every hop so far.
No error in answer to a ``push`` breaks the protocol, unless the frame itself is bad. Of the others, except ``no-capacity``, ``never-fits`` (the session needs more than the server has in all), ``session-expired``,
``session-moved`` (the server holds other blocks now), ``compute-failed`` (the session is closed, others go on), ``not-passed-on`` (the session's next server did not take what
was pushed to it) and ``too-many-steps`` (nothing was done, it may
be asked again), every error breaks the protocol: the server closes the connection after it.
"""

from __future__ import annotations

import struct
from typing import Any

import msgpack

PATH = "/v1/sessions"
MAX_TIMINGS = 256
"""No chain has more hops."""
_TIMING = struct.Struct("<ddI")
FRAME_OVERHEAD_BYTES = 512 + MAX_TIMINGS * _TIMING.size
"""No frame is larger than its payload by more than this."""

NO_CAPACITY = "no-capacity"
NEVER_FITS = "never-fits"
SESSION_EXPIRED = "session-expired"
SESSION_MOVED = "session-moved"
COMPUTE_FAILED = "compute-failed"
NOT_PASSED_ON = "not-passed-on"
TOO_MANY_STEPS = "too-many-steps"
BAD_FRAME = "bad-frame"
TOO_LARGE = "frame-too-large"
UNKNOWN_SESSION = "unknown-session"
WRONG_SIZE = "wrong-size"
WRONG_POSITION = "wrong-position"
WRONG_BLOCKS = "wrong-blocks"

_SHAPES: dict[str, tuple[type, ...]] = {
    "open": (int, str, str, int, int, int),
    "step": (int, str, int, int, bytes),
    "close": (int, str),
    "ping": (int, bytes),
    "join": (int, str, str, int, int, int, str, int, str),
    "push": (int, str, int, int, bytes, bytes),
}
_ANSWER_SHAPES: dict[str, tuple[type, ...]] = {
    "ok": (int,),
    "out": (int, float, float, bytes),
    "result": (int, int, bytes, bytes),
    "error": (int, str, str),
}
_MAX_NAME = 128
_MAX_NAME_BYTES = 4 * _MAX_NAME
MAX_ERROR_CHARACTERS = 1000
"""An error's message is cut to this."""
_MAX_ERROR_BYTES = 4 * MAX_ERROR_CHARACTERS
_MAX_FIELDS = 1 + max(len(shape) for shape in (*_SHAPES.values(), *_ANSWER_SHAPES.values()))
_NO_CONTAINERS = {"max_array_len": _MAX_FIELDS, "max_map_len": 0, "max_ext_len": 0}
"""A few bytes may claim a list of millions of elements, which would be made before they are missed."""


class FrameError(Exception):
    """A frame that breaks the protocol; ``code`` goes into the error frame."""

    def __init__(self, code: str, message: str, request_id: int = -1) -> None:
        super().__init__(message)
        self.code = code
        self.request_id = request_id


def url(address: str, port: int) -> str:
    """Where the server that listens there takes connections."""
    return f"http://{address}:{port}{PATH}"


def pack(*fields: Any) -> bytes:
    """One frame."""
    return msgpack.packb(fields)  # type: ignore[no-any-return]


def pack_timing(arrived_at_s: float, departed_at_s: float, n_bytes: int) -> bytes:
    """One hop's part of ``timings``: when a payload of ``n_bytes`` came and what came of it was ready."""
    return _TIMING.pack(arrived_at_s, departed_at_s, n_bytes)


def unpack_timings(timings: bytes) -> list[tuple[float, float, int]]:
    """(arrived_at_s, departed_at_s, n_bytes) of every hop. Raises ``FrameError`` (``bad-frame``)."""
    if len(timings) % _TIMING.size or len(timings) > MAX_TIMINGS * _TIMING.size:
        raise FrameError(BAD_FRAME, "not the timings of a chain")
    return list(_TIMING.iter_unpack(timings))


def unpack_request(data: bytes) -> list[Any]:
    """A request frame, checked: known kind, right number and types of fields, no negative numbers.

    Raises ``FrameError`` (``bad-frame``).
    """
    frame = _unpack(data, _MAX_NAME_BYTES)
    kind = frame[0]
    if not isinstance(kind, str):  # not shown: the text of a deeply nested value can exhaust the stack
        raise FrameError(BAD_FRAME, f"a frame starts with its kind, not with a {type(kind).__name__}")
    shape = _SHAPES.get(kind)
    if shape is None:
        raise FrameError(BAD_FRAME, f"unknown kind of frame {kind[:40]!r}")
    request_id = frame[1] if len(frame) > 1 and type(frame[1]) is int else -1
    if len(frame) != len(shape) + 1:
        raise FrameError(BAD_FRAME, f"{kind!r} takes {len(shape)} fields, not {len(frame) - 1}", request_id)
    for value, wanted in zip(frame[1:], shape, strict=True):
        if type(value) is not wanted:
            raise FrameError(
                BAD_FRAME, f"{kind!r} has a {type(value).__name__} instead of a {wanted.__name__}", request_id
            )
        if isinstance(value, int) and value < 0:
            raise FrameError(BAD_FRAME, f"{kind!r} has a negative number", request_id)
        if isinstance(value, str) and len(value) > _MAX_NAME:
            raise FrameError(BAD_FRAME, f"{kind!r} has a name longer than {_MAX_NAME}", request_id)
    if kind == "push":
        unpack_timings(frame[5])
    return frame


def unpack_answer(data: bytes) -> list[Any]:
    """An answer frame. Raises ``FrameError`` if it is none."""
    frame = _unpack(data, _MAX_ERROR_BYTES)
    shape = _ANSWER_SHAPES.get(frame[0]) if isinstance(frame[0], str) else None
    if shape is None or len(frame) != len(shape) + 1:
        raise FrameError(BAD_FRAME, "not an answer frame")
    if not all(isinstance(value, wanted) for value, wanted in zip(frame[1:], shape, strict=True)):
        raise FrameError(BAD_FRAME, f"{frame[0]!r} has a field of another type")
    return frame


def _unpack(data: bytes, max_text_bytes: int) -> list[Any]:
    try:
        frame = msgpack.unpackb(data, max_str_len=max_text_bytes, **_NO_CONTAINERS)
    except Exception as error:  # msgpack raises a dozen kinds, among them ValueError and RecursionError
        raise FrameError(
            BAD_FRAME, f"not msgpack, or longer fields than a frame has ({type(error).__name__})"
        ) from error
    if not isinstance(frame, list) or not frame:
        raise FrameError(BAD_FRAME, "not a msgpack array")
    return frame
