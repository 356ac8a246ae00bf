"""What a hostile client sends to the endpoint of ``testbed serve``, as Hypothesis strategies.

A case is the index of an endpoint, and a list of moves, each on one of ``N_CONNECTIONS`` connections;
``hostile_endpoint`` plays it. A request that is valid, or wrong only in its body, is an ``Ask``: each must be
answered once, in order. Everything else is bytes.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

from hypothesis import strategies as st

MODELS = ("bloom-176b", "bloom-tiny")
"""Models of the two endpoints: one with stub compute, which queues requests, and one with blocks, which needs
a key.
"""
KEY = "s3cret-é"
MAX_MODEL_LEN = 64
MOST_TOKENS = 56
"""The most tokens of a request for which the servers have room."""
N_CONNECTIONS = 3

Strategy = st.SearchStrategy[Any]
Pairs = list[tuple[str, Any]]
"""A JSON object as pairs, since a key may occur twice."""


class Ask(NamedTuple):
    """A whole HTTP request. ``n_tokens``: how many tokens the endpoint of ``model`` must return; None:
    unknown.
    """

    data: bytes
    n_tokens: int | None = None
    model: str = ""

    @property
    def is_plain(self) -> bool:
        """Whether every HTTP parser accepts its head."""
        head = self.data.partition(b"\r\n\r\n")[0]
        return head.isascii() and all(32 <= c < 127 or c in b"\r\n" for c in head) and b"//" not in head


class Raw(NamedTuple):
    """Text that is put into JSON unchanged."""

    text: bytes


def to_json(value: Any) -> bytes:
    """Encodes a value as JSON, with NaN, Infinity and lone surrogates as Python's ``json``. ``Pairs`` become
    objects.
    """
    if isinstance(value, Raw):
        return value.text
    if isinstance(value, list) and value and all(type(one) is tuple for one in value):
        return b"{" + b",".join(to_json(key) + b":" + to_json(inner) for key, inner in value) + b"}"
    if isinstance(value, list):
        return b"[" + b",".join(map(to_json, value)) + b"]"
    return json.dumps(value).encode()


NUMBERS: Strategy = st.one_of(
    st.sampled_from([-1, 0, 1, 2, 17, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**63), -(2**64)]),
    st.floats(),
    st.sampled_from(
        [b"9" * 400, b"9" * 5000, b"-" + b"9" * 5000, b"1e999", b"1e-999", b"-0", b"01", b"1E2"]
    ).map(Raw),
)
TEXTS: Strategy = st.one_of(
    st.text(max_size=10),
    st.sampled_from(
        ["", "\ud800", "\udfff\ud800", "a\udc80", "\0", "\x7f", "é" * 30, "<script>", "\r\nX: y"]
    ),
    st.sampled_from(["a", "e", " ", "word "]).map(lambda text: text * 3000),
    st.sampled_from([b'"\xff"', b'"\xed\xa0\x80"', b'"\\u12"', b'"\\x"', b'"\n"', b'"']).map(Raw),
)
DEEP: Strategy = st.builds(
    lambda depth, left, right, closes: Raw(left * depth + b"1" + right * (depth if closes else 0)),
    *(st.sampled_from([8, 200, 1100, 50_000]), *map(st.just, (b"[", b"]")), st.booleans()),
) | st.sampled_from([100, 1100, 50_000]).map(lambda depth: Raw(b'{"a":' * depth + b"1" + b"}" * depth))
LEAVES: Strategy = st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS)
VALUES: Strategy = st.one_of(
    LEAVES,
    DEEP,
    st.recursive(
        LEAVES,
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.lists(st.tuples(st.text(max_size=3), inner), min_size=1, max_size=3)
        ),
        max_leaves=5,
    ),
)
TOKENS: Strategy = st.lists(
    st.integers(0, 511)
    | st.sampled_from([-1, 512, 2**31, 2**63, 2**64, 2**64 - 1, 1.5, True, None, "a", []]),
    max_size=6,
)
STOPS: Strategy = st.one_of(
    st.sampled_from(["e", " ", "the", "", "\0"]),
    st.lists(st.sampled_from(["e", " a", "xyz", ""]), max_size=20),
    st.sampled_from([16, 17, 5000]).map(lambda n: ["x"] * n),
    st.just(20_000).map(lambda n: ["y" * n] * 16),
)
FIELDS: tuple[tuple[str, Strategy], ...] = (
    ("prompt", TOKENS | TOKENS.map(lambda tokens: [tokens])),
    ("prompt", st.sampled_from(["a", "word ", "\0", "é", " "]).map(lambda text: text * 20_000)),
    (
        "messages",
        st.lists(st.tuples(st.sampled_from(["role", "content", "name"]), VALUES).map(lambda p: [p])),
    ),
    ("messages", st.integers(0, 3000).map(lambda n: [[("role", "user"), ("content", "x")]] * n)),
    ("stop", STOPS),
    ("n", st.sampled_from([0, 1, 2, -1, 10**6])),
    ("logprobs", st.sampled_from([0, 1, 5, True, False])),
    ("max_tokens", st.integers(-2, 70) | NUMBERS),
    ("max_completion_tokens", st.integers(-2, 70) | NUMBERS),
    ("min_tokens", st.integers(-2, 70) | NUMBERS),
    ("temperature", NUMBERS),
    ("top_p", NUMBERS),
    ("top_k", NUMBERS),
    ("seed", NUMBERS),
    ("stream", VALUES),
    (
        "stream_options",
        st.sampled_from(
            [[("include_usage", True)], [("continuous_usage_stats", True)], [("include_usage", 1)]]
        ),
    ),
    (
        "model",
        st.sampled_from(
            [*(f"{model}@client-0" for model in MODELS), "@", "\ud800", "x" * 5000, "bloom-tiny@\0"]
        ),
    ),
    ("logit_bias", st.sampled_from([[("1", 1e308)], [("\ud800", 1)], []])),
    ("tools", st.lists(VALUES, max_size=2)),
    ("response_format", VALUES),
    ("unheard of", VALUES),
)
NAMES = (
    *(name for name, _ in FIELDS),
    "echo",
    "suffix",
    "best_of",
    "user",
    "presence_penalty",
    "ignore_eos",
    "",
)


@st.composite
def proper(draw: Callable[[Strategy], Any]) -> tuple[str, str, Pairs, int]:
    """A valid request: model of the endpoint, path, body, and the number of tokens of its answer."""
    model, path = draw(st.sampled_from(MODELS)), draw(st.sampled_from(["completions", "chat/completions"]))
    n_tokens = draw(st.integers(1, 20))
    asked: tuple[str, Any] = ("messages", [[("role", "user"), ("content", "Hi")]])
    if path == "completions":
        asked = ("prompt", draw(st.sampled_from(["Hello there", [1, 2, 3], ["one"]])))
    body: Pairs = [("model", model), asked, ("max_tokens", n_tokens)]
    if draw(st.booleans()):
        body.append(("stream", True))
        if draw(st.booleans()):
            body.append(
                ("stream_options", [("include_usage", True), ("continuous_usage_stats", draw(st.booleans()))])
            )
    return model, f"/v1/{path}", body, n_tokens


@st.composite
def wrong(draw: Callable[[Strategy], Any]) -> tuple[str, bytes]:
    """A path and a body with wrong fields: of another type, too many, too few or twice; some bytes may be
    replaced.
    """
    _, path, body, _ = draw(proper())
    for _ in range(draw(st.integers(1, 3))):
        what = draw(st.integers(0, 4))
        if what == 0:
            body.append((draw(st.sampled_from(NAMES)), draw(VALUES)))
        elif what == 1 and body:
            del body[draw(st.integers(0, len(body) - 1))]
        else:
            name, values = draw(st.sampled_from(FIELDS))
            body = [pair for pair in body if pair[0] != name] if what == 2 else body
            body.append((name, draw(values)))
    data = to_json(body) if body else b"{}"
    if draw(st.integers(0, 4)) == 0:
        broken = bytearray(data)
        for _ in range(draw(st.integers(1, 3))):
            broken[draw(st.integers(0, len(broken) - 1))] = draw(st.integers(0, 255))
        data = bytes(broken)
    if draw(st.integers(0, 9)) == 0:
        data = data[: draw(st.integers(0, len(data)))]
    return path, data


def request(
    path: str, body: bytes, *headers: str, method: str = "POST", kind: str = "application/json"
) -> bytes:
    lines = [
        f"{method} {path} HTTP/1.1",
        "Host: x",
        f"Content-Type: {kind}",
        f"Content-Length: {len(body)}",
        *headers,
    ]
    return "\r\n".join(lines).encode("utf-8", "surrogateescape") + b"\r\n\r\n" + body


AUTHORIZED = f"Authorization: Bearer {KEY}"
HEADERS: Strategy = st.one_of(
    *map(
        st.just,
        (
            AUTHORIZED,
            AUTHORIZED,
            "Authorization: Bearer \udc80\udcff",
            "Authorization: Basic x",
            "Authorization:",
            "X-Request-Id: mine",
            "X-Request-Id: \udc80\udcff",
            "X-Request-Id: é\u2028\x7f",
            "X-Request-Id: " + "x" * 500,
            "X-Testbed-Client: client-0",
            "X-Testbed-Client: \udc80",
            "Accept: text/html",
            "Accept-Encoding: gzip, deflate, br",
            "Cookie: a=\udc80",
            "Range: bytes=0-1",
            "Content-Encoding: identity",
            "Content-Encoding: nothing",
            "If-Modified-Since: never",
        ),
    )
)
READ_ONLY = ("/v1/models", "/health", "/health/ready", "/metrics", "/version")
PATHS = (
    *READ_ONLY,
    "/",
    "/v1/nothing",
    "/v1/completions",
    "/v1/completions/",
    "//v1/models",
    "/%00",
    "/%ff",
    "/a%2f..%2f",
    "/\udc80",
    "/?a=%zz",
    "/v1/models?\udcff",
    "/v1/models#x",
    "/*",
)


@st.composite
def asks(draw: Callable[[Strategy], Any]) -> Ask:
    """One whole request that is valid HTTP."""
    headers = draw(st.lists(HEADERS, max_size=2))
    which = draw(st.integers(0, 9))
    if which < 4:
        model, path, body, n_tokens = draw(proper())
        return Ask(request(path, to_json(body), AUTHORIZED), n_tokens, model)
    if which < 9:
        path, data = draw(wrong())
        if draw(st.integers(0, 9)) == 0:
            kind = draw(
                st.sampled_from(["text/plain", "application/json; charset=nothing", "\udc80", "a/b/c;;=", ""])
            )
            return Ask(request(path, data, *headers, kind=kind))
        return Ask(request(path, data, AUTHORIZED, *headers))
    method = draw(
        st.sampled_from(["GET", "GET", "HEAD", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "PROPFIND"])
    )
    return Ask(request(draw(st.sampled_from(PATHS)), b"", *headers, method=method))


_BODY = b'{"model": "bloom-176b", "prompt": "x", "max_tokens": 2}'
_HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
_CHUNKED = _HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
_ZEROS = zlib.compress(bytes(40 * 1024**2), 9)
"""A compressed body that becomes larger than a body may be."""
RAW: tuple[bytes, ...] = (
    b"",
    b"\r\n\r\n\r\n",
    b"\0" * 3000,
    b"GET",
    b"GET / HTTP/9.9\r\n\r\n",
    b"GET / HTTP/1.1\r\n\r\n",
    b"GET  /  HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /health HTTP/1.0\r\n\r\n",
    b"GET /health\r\n\r\n",
    b"GET http://other/health HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET http://[::1/ HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET //[/ HTTP/1.1\r\nHost: x\r\n\r\n",
    b"CONNECT x:80 HTTP/1.1\r\nHost: x\r\n\r\n",
    b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n",
    b"G\xffT / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"FLY /health HTTP/1.1\r\nHost: x\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc",
    b"GET /" + b"a" * 20_000,
    b"GET /health HTTP/1.1\r\nHost: x\r\nA: " + b"b" * 20_000 + b"\r\n\r\n",
    b"GET /health HTTP/1.1\r\n" + b"A: b\r\n" * 5000,
    b"GET /health HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: x\r\n folded\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: x\r\nA b: c\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: x\r\nX-Request-Id: a\0b\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: x\r\nX-Request-Id: \x01\x0b\r\n\r\n",
    b"GET /health HTTP/1.1\nHost: x\n\n",
    b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n" + b"\x82\x80" * 9,
    b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n\r\n",
    *(
        _HEAD + b"Content-Length: " + n + b"\r\n\r\n" + _BODY
        for n in (b"-1", b"+5", b"0x10", b"1e3", b"", b"5, 5", b"9" * 30, b"99999999", b"20000000", b"3")
    ),
    _HEAD + b"Content-Length: 56\r\nContent-Length: 5\r\n\r\n" + _BODY,
    _HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n" + _BODY,
    _HEAD + b"Transfer-Encoding: gzip\r\n\r\n" + _BODY,
    _HEAD + b"Transfer-Encoding: chunked, chunked\r\n\r\n0\r\n\r\n",
    _CHUNKED + b"%x\r\n%s\r\n0\r\n\r\n" % (len(_BODY), _BODY),
    _CHUNKED + b"5\r\n" + _BODY + b"\r\n",
    _CHUNKED + b"zz\r\nhello\r\n0\r\n\r\n",
    _CHUNKED + b"-5\r\nhello\r\n",
    _CHUNKED + b"ffffffffffffffffff\r\nhello\r\n",
    _CHUNKED + b"5;" + b"x" * 20_000,
    _CHUNKED + b"5\r\nhello\r\n0\r\nTrailer: " + b"x" * 20_000,
    _CHUNKED + b"1\r\nx\r\n" * 500,
    _CHUNKED + b"5\r\nhelloXX",
    _HEAD + b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(_BODY) + _BODY,
    _HEAD + b"Expect: 100-continue\r\nContent-Length: 9\r\n\r\n",
    _HEAD + b"Expect: a miracle\r\nContent-Length: %d\r\n\r\n" % len(_BODY) + _BODY,
    *(
        _HEAD + b"Content-Encoding: %s\r\nContent-Length: %d\r\n\r\n" % (coding, len(data)) + data
        for coding, data in (
            (b"gzip", b"no gzip"),
            (b"deflate", b"no deflate"),
            (b"br", b"no br"),
            (b"zstd", b"no zstd"),
            (b"deflate", zlib.compress(_BODY)),
            (b"deflate", zlib.compress(_BODY)[:-6]),
        )
    ),
)
"""Invalid HTTP, and rare forms of valid HTTP."""
HEAVY = _HEAD + b"Content-Encoding: deflate\r\nContent-Length: %d\r\n\r\n" % len(_ZEROS) + _ZEROS


@st.composite
def damaged(draw: Callable[[Strategy], Any]) -> bytes:
    """A request in whose first 160 bytes some are replaced."""
    data = bytearray(draw(asks()).data or b"x")
    for _ in range(draw(st.integers(1, 4))):
        data[draw(st.integers(0, min(len(data) - 1, 160)))] = draw(st.integers(0, 255))
    return bytes(data)


BYTES: Strategy = st.one_of(
    st.sampled_from(RAW), st.sampled_from([*RAW, HEAVY]), damaged(), damaged(), st.binary(max_size=60)
)
LEAVING = st.sampled_from(["reset", "close", "half"])
MOVES: Strategy = st.one_of(
    st.tuples(st.just("ask"), asks()),
    st.tuples(st.just("ask"), asks()),
    st.tuples(st.just("ask"), asks()),
    st.tuples(st.just("pieces"), asks(), st.integers(2, 30)),
    st.tuples(st.just("cut"), asks(), st.integers(0, 400), LEAVING),
    st.tuples(st.just("flood"), st.sampled_from(READ_ONLY), st.integers(2, 60)),
    st.tuples(st.just("raw"), BYTES),
    st.tuples(st.just("raw"), BYTES),
    st.tuples(st.just("tokens"), st.integers(1, 6)),
    st.tuples(st.just("tokens"), st.integers(1, 6)),
    st.tuples(st.just("room"), st.booleans()),
    st.tuples(st.just("leave"), LEAVING),
    st.tuples(st.just("leave"), LEAVING),
    st.tuples(st.just("deaf")),
    st.tuples(st.just("look")),
)
CASES: Strategy = st.tuples(
    st.integers(0, len(MODELS) - 1),
    st.lists(st.tuples(st.integers(0, N_CONNECTIONS - 1), MOVES), min_size=1, max_size=10),
)
