"""The data plane's frames: one msgpack array per binary WebSocket message, its kind first.

A payload that is larger than ``PART_BYTES`` goes in several messages (``nodes.parts``).

A client sends a ``Request``; each is answered once, in any order, by an ``Answer`` with the same ``id``.
With forwarding (``nodes.forwarding``) ``Join`` and ``Push`` take the place of ``Open`` and ``Step``.

After an error with one of the codes from ``BAD_FRAME`` on the server closes the connection, unless a ``Push``
was answered with it whose frame itself was right.
"""

from __future__ import annotations

import struct
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from nodes.batching import Composition

PATH = "/v1/sessions"
MAX_TIMINGS = 256
"""No chain has more hops."""
_TIMING = struct.Struct("<ddIIIIIId")
MAX_PAYLOAD_BYTES = 2 * 1024**3
"""Hidden states of one step, however many messages bring them."""
PART_BYTES = 64 * 1024**2
"""Hidden states in one message."""
FRAME_OVERHEAD_BYTES = 512 + MAX_TIMINGS * _TIMING.size
"""No frame is larger than its payload by more than this."""

NO_CAPACITY = "no-capacity"
NEVER_FITS = "never-fits"
"""The session needs more than the server has in all."""
SESSION_EXPIRED = "session-expired"
SESSION_MOVED = "session-moved"
"""The server holds other blocks now."""
COMPUTE_FAILED = "compute-failed"
"""The session is closed; others go on."""
NOT_PASSED_ON = "not-passed-on"
"""The session's next server did not take what was pushed to it."""
PREEMPTED = "preempted"
"""The session's cache was needed for one that came earlier; it may start over."""
TOO_MANY_STEPS = "too-many-steps"
"""Nothing was done; it may be asked again."""
BAD_FRAME = "bad-frame"
TOO_LARGE = "frame-too-large"
UNKNOWN_SESSION = "unknown-session"
WRONG_SIZE = "wrong-size"
WRONG_POSITION = "wrong-position"
WRONG_BLOCKS = "wrong-blocks"

MAX_ERROR_CHARACTERS = 1000
"""An error's message is cut to this."""
_MAX_REASON_CHARACTERS = 160

Name = Annotated[str, Meta(max_length=128)]
Count = Annotated[int, Meta(ge=0)]


class Frame(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """What all frames have. ``id`` is the sender's number of a request."""


class Opening(Frame):
    """Reserve room for ``max_tokens`` in blocks ``first`` to ``last`` (half-open)."""

    id: Count
    session: Name
    client: Name
    first: Count
    last: Count
    max_tokens: Count


class Open(Opening, tag="open"):
    """As part of nothing: the client brings and fetches every step.

    Where caches grow, ``first_tokens`` come at once (0: all of them), and of sessions that arrived later room is taken.
    """

    first_tokens: Count = 0
    arrived_at_s: float = 0.0


class More(Frame, tag="more"):
    """The beginning of a payload, or more of it; the frame with the same ``id`` that follows has its end."""

    id: int
    payload: bytes


class Join(Opening, tag="join"):
    """As part of a chain.

    Whoever knows ``token`` may push. What comes out goes to server number ``peer`` under ``next_token``, or
    from the last server (an empty ``next_token``) to the client. The last two are as in ``Open``.
    """

    token: Name
    peer: Count
    next_token: Name
    first_tokens: Count = 0
    arrived_at_s: float = 0.0


class Step(Frame, tag="step"):
    """``n_tokens`` hidden states from ``position`` on; position 0 is the prefill."""

    id: Count
    session: Name
    position: Count
    n_tokens: Count
    payload: bytes


class Push(Frame, tag="push"):
    """A step of a chain, from the client or another server; answered as soon as it has arrived.

    ``timings`` holds what ``pack_timing`` gives for every hop so far.
    """

    id: Count
    token: Name
    position: Count
    n_tokens: Count
    timings: bytes
    payload: bytes


class Close(Frame, tag="close"):
    """End a session."""

    id: Count
    session: Name


class Ping(Frame, tag="ping"):
    """Answered by an ``Out`` with the same payload."""

    id: Count
    payload: bytes


class Ok(Frame, tag="ok"):
    """The request was carried out."""

    id: int


class Out(Frame, tag="out"):
    """What came out of a step, and the server's instants (scenario seconds)."""

    id: int
    arrived_at_s: float
    departed_at_s: float
    together: Composition
    payload: bytes


class Result(Frame, tag="result"):
    """What came out of a step of a chain, from its last server. ``id`` is that of its ``Join``."""

    id: int
    position: int
    timings: bytes
    payload: bytes


class Error(Frame, tag="error"):
    """``id`` is -1 when the request's cannot be known; that of a ``Join`` when its session fails."""

    id: int
    code: str
    message: str


Request = Open | Join | Step | Push | Close | Ping
Answer = Ok | Out | Result | Error

_requests: msgspec.msgpack.Decoder[Request | More] = msgspec.msgpack.Decoder(Request | More)
_answers: msgspec.msgpack.Decoder[Answer | More] = msgspec.msgpack.Decoder(Answer | More)


class _Head(msgspec.Struct, array_like=True):
    """The beginning of any frame."""

    kind: Any
    id: int


class FrameError(Exception):
    """A frame that breaks the protocol; ``code`` goes into the error frame."""

    def __init__(self, code: str, message: str, request_id: int = -1) -> None:
        super().__init__(message)
        self.code = code
        self.request_id = request_id


def url(address: str, port: int) -> str:
    """Where the server that listens there takes connections."""
    return f"http://{address}:{port}{PATH}"


def headers(key: str) -> dict[str, str]:
    """What a request for a connection says to servers that take only those of one run; empty: to others."""
    return {"Authorization": f"Bearer {key}"} if key else {}


def pack(frame: Frame) -> bytes:
    """The bytes of a frame."""
    return msgspec.msgpack.encode(frame)


class Timing(NamedTuple):
    """One hop's part of ``timings``: when a payload of ``n_bytes`` came and what came of it was ready.

    ``together`` is what was computed in the same batch.
    """

    arrived_at_s: float
    departed_at_s: float
    n_bytes: int
    together: Composition = Composition()


def pack_timing(timing: Timing) -> bytes:
    """A hop's part of ``timings``."""
    *instants, together = timing
    return _TIMING.pack(*instants, *together)


def unpack_timings(timings: bytes) -> list[Timing]:
    """What every hop has said. Raises ``FrameError`` (``bad-frame``)."""
    if len(timings) % _TIMING.size or len(timings) > MAX_TIMINGS * _TIMING.size:
        raise FrameError(BAD_FRAME, "not the timings of a chain")
    rows = _TIMING.iter_unpack(timings)
    return [Timing(arrived, departed, size, Composition(*rest)) for arrived, departed, size, *rest in rows]


def unpack_request(data: bytes) -> Request | More:
    """A request of a known kind with the right fields. Raises ``FrameError`` (``bad-frame``)."""
    try:
        frame = _requests.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FrameError(BAD_FRAME, _reason(error), _id_of(data)) from error
    if isinstance(frame, Push):
        unpack_timings(frame.timings)
    return frame


def unpack_answer(data: bytes) -> Answer | More:
    """An answer. Raises ``FrameError`` (``bad-frame``)."""
    try:
        return _answers.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FrameError(BAD_FRAME, f"not an answer: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    return str(error)[:_MAX_REASON_CHARACTERS]


def _id_of(data: bytes) -> int:
    """The request's id in a frame that has something else wrong; -1 if there is none."""
    try:
        return msgspec.msgpack.decode(data, type=_Head).id
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return -1
