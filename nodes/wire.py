"""The data plane's frames: one msgpack array per binary WebSocket message, its kind first.

A frame with a payload larger than ``PART_BYTES`` is sent in several messages (``nodes.parts``). Other frames may come
between them, also one more that is sent in parts. The server acknowledges every part of a request with ``Got``.

A client sends a ``Request``. The server sends an ``Answer`` with the same ``id`` to each, in any order.
With forwarding (``nodes.forwarding``) ``Join`` and ``Push`` take the place of ``Open`` and ``Step``.

``BAD_FRAME`` and the codes below it report a broken protocol: after such an error the server closes the
connection. The exception is an error about a ``Push`` that could be decoded: then the connection stays open.
"""

from __future__ import annotations

import struct
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from nodes.batching import Composition

PATH = "/v1/sessions"
MAX_TIMINGS = 256
"""Largest number of hops in a chain."""
_TIMING = struct.Struct("<ddIIIIIId")
MAX_PAYLOAD_BYTES = 2 * 1024**3
"""Largest payload of one step, over all messages that carry it."""
PART_BYTES = 60 * 1024
"""Largest payload in one message. Small frames wait for no more than one such message (``nodes.outbox``). With its
headers it is no more than TCP sends at once."""
SMALL_BYTES = 1024**2
"""Largest payload of a frame that passes larger ones: any token, and prompts of some dozens."""
FIRST_ID = 2**16
"""The first id of a connection's requests: from here on ids take the same bytes, however many requests came before."""
FRAME_OVERHEAD_BYTES = 512 + MAX_TIMINGS * _TIMING.size
"""Most bytes that a frame has besides its payload."""

NO_CAPACITY = "no-capacity"
NEVER_FITS = "never-fits"
"""The session needs more cache than the server has in total."""
SESSION_EXPIRED = "session-expired"
SESSION_MOVED = "session-moved"
"""The server ended the session because it moves to other blocks."""
COMPUTE_FAILED = "compute-failed"
"""A step failed and its session is closed; other sessions go on."""
NOT_PASSED_ON = "not-passed-on"
"""The session's next server did not accept the hidden states pushed to it."""
PREEMPTED = "preempted"
"""The session lost its cache, usually to a session whose request arrived earlier. It may start over."""
TOO_MANY_STEPS = "too-many-steps"
"""The step was not begun; it may be sent again."""
BAD_FRAME = "bad-frame"
TOO_LARGE = "frame-too-large"
UNKNOWN_SESSION = "unknown-session"
WRONG_SIZE = "wrong-size"
WRONG_POSITION = "wrong-position"
WRONG_BLOCKS = "wrong-blocks"

MAX_ERROR_CHARACTERS = 1000
"""Error messages are cut to this length."""
_MAX_REASON_CHARACTERS = 160

Name = Annotated[str, Meta(max_length=128)]
Count = Annotated[int, Meta(ge=0)]


class Frame(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """Base of all frames. ``id`` is the number that its sender gave to a request."""

    id: int


class Padded(Frame, kw_only=True):
    """A frame with numbers or names. ``pack`` pads it, so that its size and time depend on what it carries alone."""

    pad: Annotated[bytes, Meta(max_length=255)] = b""


class Opening(Padded):
    """Base of ``Open`` and ``Join``: open a session of at most ``max_tokens`` in blocks ``[first, last)``."""

    id: Count
    session: Name
    client: Name
    first: Count
    last: Count
    max_tokens: Count


class Open(Opening, tag="open"):
    """Hub-spoke session: the client sends every step to this server and receives its result.

    Where caches grow page by page, cache for ``first_tokens`` is reserved at once (0: for ``max_tokens``).
    ``arrived_at_s`` is when the request arrived: the session whose request arrived last is preempted first.
    """

    first_tokens: Count = 0
    arrived_at_s: float = 0.0


class OpenPages(Open, tag="open-pages"):
    """As ``Open``, of a session whose prompt begins with pages of these ids (``nodes.prefixes``), one after another.

    The answer is ``Found``: the first step may begin at the end of any page that is there.
    """

    pages: bytes = b""


class More(Frame, tag="more"):
    """A part of a large payload. The frame that follows with the same ``id`` carries the last part."""

    id: int
    payload: bytes


class Drop(Frame, tag="drop"):
    """The rest of the frame with that ``id`` does not follow its parts: nobody wants it any more."""

    id: int


class Got(Frame, tag="got"):
    """A part of the request with that ``id`` has arrived. Shows that the server is alive while a large frame comes."""

    id: int


class Join(Opening, tag="join"):
    """Session in a chain of servers that forward.

    Any sender that knows ``token`` may push steps to it. The server pushes the results to server number
    ``peer`` with ``next_token``. The chain's last server has an empty ``next_token`` and sends them to the
    client. ``first_tokens`` and ``arrived_at_s``: see ``Open``.
    """

    token: Name
    peer: Count
    next_token: Name
    first_tokens: Count = 0
    arrived_at_s: float = 0.0


class JoinPages(Join, tag="join-pages"):
    """As ``Join``, with the ``pages`` of ``OpenPages``."""

    pages: bytes = b""


class Step(Padded, tag="step"):
    """A step of an ``Open`` session: ``n_tokens`` hidden states from ``position`` on; 0 is the prefill.

    A ``position`` before the session's present one makes the session go back: what it has cached from there on is
    void. So it is with ``Push``.
    """

    id: Count
    session: Name
    position: Count
    n_tokens: Count
    payload: bytes


class Fill(Step, tag="fill"):
    """As ``Step``, for the cache alone: the answer has no hidden states."""


class Behind(Step, tag="behind"):
    """As ``Step``; those of its session that are on their way may not be computed yet. It begins where the last one ends."""


class Instead(Step, tag="instead"):
    """As ``Step``, in place of those of the session that begin no earlier and may not be computed yet: they get no answer."""


class Push(Padded, tag="push"):
    """A step of a ``Join`` session, sent by the client or another server.

    It is answered on arrival, before it is computed.
    ``timings`` holds the bytes of ``pack_timing`` for every hop so far.
    """

    id: Count
    token: Name
    position: Count
    n_tokens: Count
    timings: bytes
    payload: bytes


class PushRound(Push, tag="push-round"):
    """As ``Push``, of a round of which several may be on their way: its result says its ``number``.

    ``kind``: whether it is as ``Step``, ``Behind`` or ``Instead``.
    """

    number: Count
    kind: Literal["step", "behind", "instead"]


class Close(Padded, tag="close"):
    """End a session."""

    id: Count
    session: Name


class Keep(Close, tag="keep"):
    """As ``Close``; the server may keep the session's cache for later ones.

    ``pages`` are the ids of its pages after those with which it was opened.
    """

    pages: bytes = b""


class Ping(Padded, tag="ping"):
    """Ask for an ``Out`` with the same payload."""

    id: Count
    payload: bytes


class Ok(Frame, tag="ok"):
    """The request was carried out."""

    id: int


class Found(Padded, tag="found"):
    """The session is open, and the server has the cache of the first ``n_tokens`` tokens of its prompt."""

    id: int
    n_tokens: int


class Out(Padded, tag="out"):
    """Result of a step.

    The server received the step at ``arrived_at_s`` and had its result at ``departed_at_s``, in scenario
    seconds. ``together`` describes the batch in which the step ended.
    """

    id: int
    arrived_at_s: float
    departed_at_s: float
    together: Composition
    payload: bytes


class Result(Padded, tag="result"):
    """Result of a chain's step, sent to the client by the last server. ``id`` is that of its ``Join``."""

    id: int
    position: int
    timings: bytes
    payload: bytes


class RoundResult(Result, tag="round-result"):
    """As ``Result``, of a ``PushRound`` with that ``number``."""

    number: int


class Error(Padded, tag="error"):
    """A request or a session failed.

    ``id`` is the request's, or -1 if it could not be read. If a chain's session fails, it is its ``Join``'s.
    """

    id: int
    code: str
    message: str


Request = (
    Open
    | OpenPages
    | Join
    | JoinPages
    | Step
    | Fill
    | Behind
    | Instead
    | Push
    | PushRound
    | Close
    | Keep
    | Ping
)
Answer = Ok | Found | Out | Result | RoundResult | Error

_requests: msgspec.msgpack.Decoder[Request | More | Drop] = msgspec.msgpack.Decoder(Request | More | Drop)
_answers: msgspec.msgpack.Decoder[Answer | More | Drop | Got] = msgspec.msgpack.Decoder(
    Answer | More | Drop | Got
)


class _Head(msgspec.Struct, array_like=True):
    """The first two fields of any frame."""

    kind: Any
    id: int


_CONTENTS = "payload", "timings", "pages"
_NAME, _TOKEN, _NUMBER = "n" * 16, "t" * 32, 2**32 - 1
_OPENING = _NUMBER, _NAME, _NAME, _NUMBER, _NUMBER, _NUMBER
_JOINING = *_OPENING, _TOKEN, _NUMBER, _TOKEN, _NUMBER, 0.0
_PASSING = _NUMBER, _TOKEN, _NUMBER, _NUMBER, b"", b""
_STEPPING = _NUMBER, _NAME, _NUMBER, _NUMBER, b""
_LARGEST: tuple[Padded, ...] = (
    *(Open(*_OPENING, _NUMBER), OpenPages(*_OPENING, _NUMBER), Join(*_JOINING), JoinPages(*_JOINING)),
    *(kind(*_STEPPING) for kind in (Step, Fill, Behind, Instead)),
    *(Push(*_PASSING), PushRound(*_PASSING, _NUMBER, "instead")),
    *(Close(_NUMBER, _NAME), Keep(_NUMBER, _NAME), Ping(_NUMBER, b""), Found(_NUMBER, _NUMBER)),
    Out(_NUMBER, 0.0, 0.0, Composition(*[_NUMBER] * 5), b""),
    *(Result(_NUMBER, _NUMBER, b"", b""), RoundResult(_NUMBER, _NUMBER, b"", b"", _NUMBER)),
    Error(_NUMBER, _NAME, "m" * _MAX_REASON_CHARACTERS),
)
_LENGTH_BYTES = 3
"""What the length of contents takes at most, beyond that of none."""


def _room(largest: Padded) -> tuple[int, tuple[str, ...]]:
    contents = tuple(name for name in _CONTENTS if hasattr(largest, name))
    return len(msgspec.msgpack.encode(largest)) + _LENGTH_BYTES * len(contents), contents


_ROOM = {type(frame): _room(frame) for frame in _LARGEST}
"""Of each kind of ``Padded`` frame the bytes beside its contents, and the names of these."""


class FrameError(Exception):
    """A frame breaks the protocol. ``code`` and ``request_id`` go into the error frame."""

    def __init__(self, code: str, message: str, request_id: int = -1) -> None:
        super().__init__(message)
        self.code = code
        self.request_id = request_id


def url(address: str, port: int) -> str:
    """Returns the URL for connections to the server that listens at ``address`` and ``port``."""
    return f"http://{address}:{port}{PATH}"


def headers(key: str) -> dict[str, str]:
    """Returns the HTTP headers that present a run's ``key`` to its servers; none if ``key`` is empty."""
    return {"Authorization": f"Bearer {key}"} if key else {}


def pack(frame: Frame) -> bytes:
    """Returns the bytes of a frame. A ``Padded`` one has a fixed number of them beside its contents, if its names are of usual length."""
    data = msgspec.msgpack.encode(frame)
    if isinstance(frame, Padded):
        n_bytes, contents = _ROOM[type(frame)]
        for name in contents:
            n_bytes += len(getattr(frame, name))
        if (short := n_bytes - len(data)) > 0:
            frame.pad = bytes(short)
            data = msgspec.msgpack.encode(frame)
            frame.pad = b""
    return data


class Timing(NamedTuple):
    """One hop's part of ``timings``: when ``n_bytes`` of hidden states arrived and their result was ready.

    Instants are scenario seconds. ``together`` describes the batch in which the step ended.
    """

    arrived_at_s: float
    departed_at_s: float
    n_bytes: int
    together: Composition = Composition()


def pack_timing(timing: Timing) -> bytes:
    """Returns the bytes of one hop's timing."""
    *instants, together = timing
    return _TIMING.pack(*instants, *together)


def unpack_timings(timings: bytes) -> list[Timing]:
    """Returns the timings of all hops, in the chain's order. Raises ``FrameError`` (``bad-frame``)."""
    if len(timings) % _TIMING.size or len(timings) > MAX_TIMINGS * _TIMING.size:
        raise FrameError(BAD_FRAME, "not the timings of a chain")
    rows = _TIMING.iter_unpack(timings)
    return [Timing(arrived, departed, size, Composition(*rest)) for arrived, departed, size, *rest in rows]


def unpack_request(data: bytes) -> Request | More | Drop:
    """Decodes a request. Raises ``FrameError`` (``bad-frame``) for unknown kinds and wrong fields."""
    try:
        frame = _requests.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FrameError(BAD_FRAME, _reason(error), _id_of(data)) from error
    if isinstance(frame, Push):
        unpack_timings(frame.timings)
    if isinstance(frame, Padded):
        frame.pad = b""
    return frame


def unpack_answer(data: bytes) -> Answer | More | Drop | Got:
    """Decodes an answer. Raises ``FrameError`` (``bad-frame``)."""
    try:
        frame = _answers.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FrameError(BAD_FRAME, f"not an answer: {_reason(error)}") from error
    if isinstance(frame, Padded):
        frame.pad = b""
    return frame


def _reason(error: Exception) -> str:
    return str(error)[:_MAX_REASON_CHARACTERS]


def _id_of(data: bytes) -> int:
    """Returns the request's id in a frame that could not be decoded; -1 if it has none."""
    try:
        return msgspec.msgpack.decode(data, type=_Head).id
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return -1
