"""Requests that broke the endpoint when its fuzzer sent them (``tests.stress.hostile_endpoint``)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.stress.hostile_endpoint import EndpointTarget
from tests.stress.hostile_http import AUTHORIZED, RAW, Ask, request

COMPLETIONS = "/v1/completions"
STREAM = b'{"model": "bloom-tiny", "prompt": [1], "max_tokens": 3, "stream": true}'


@pytest.fixture(scope="module")
def target() -> Iterator[EndpointTarget]:
    target = EndpointTarget()
    yield target
    target.close()


def asked(fields: bytes, *headers: str) -> Ask:
    """A request for a completion to an endpoint with real blocks."""
    body = b'{"model": "bloom-tiny", ' + fields + b"}"
    return Ask(request(COMPLETIONS, body, AUTHORIZED, *headers))


@pytest.mark.parametrize("data", RAW)
def test_what_is_hardly_http_gets_no_traceback_and_no_500(target: EndpointTarget, data: bytes) -> None:
    for which in (0, 1):
        target.check((which, [(0, ("raw", data)), (0, ("look",))]))


@pytest.mark.parametrize(
    "header",
    [
        "Authorization: Bearer \udc80",
        "X-Request-Id: \udc80",
        "X-Request-Id: \x7f",
        "X-Testbed-Client: \udc80",
    ],
)
@pytest.mark.parametrize("fields", [b'"prompt": [1]', b'"prompt": [1], "stream": true'])
def test_headers_that_are_no_text_are_a_clients_mistake(
    target: EndpointTarget, fields: bytes, header: str
) -> None:
    target.check((1, [(0, ("ask", asked(fields, header))), (0, ("tokens", 3))]))
    target.check((1, [(0, ("ask", Ask(request("/v1/models", b"", header, method="GET"))))]))


@pytest.mark.parametrize(
    "fields",
    [
        b'"prompt": "\xff"',
        b'"prompt": [512]',
        b'"prompt": [-1]',
        b'"prompt": [18446744073709551616]',
        b'"prompt": [1], "min_tokens": 18446744073709551616',
        b'"prompt": [1], "min_tokens": 17',
        b'"prompt": [1], "top_k": 18446744073709551616',
        b'"prompt": [1], "seed": -18446744073709551616',
    ],
)
def test_numbers_that_no_model_knows_and_texts_that_are_none_break_nothing(
    target: EndpointTarget, fields: bytes
) -> None:
    target.check((1, [(0, ("ask", asked(fields)))]))


def test_a_reader_that_hangs_up_as_its_stream_begins_is_no_failure(target: EndpointTarget) -> None:
    before = target.counts.copy()
    for how in ("reset", "close", "half"):
        for _ in range(30):
            stream = Ask(request(COMPLETIONS, STREAM, AUTHORIZED))
            target.check(
                (1, [(0, ("ask", stream)), (0, ("tokens", 1)), (0, ("leave", how)), (0, ("tokens", 1))])
            )
    assert target.counts["500"] == before["500"]


def test_a_text_that_is_far_too_long_does_not_hold_up_everybody_else(target: EndpointTarget) -> None:
    read: list[Any] = []
    hosted = target._hosted[1]
    encode = hosted.endpoint._codec.encode
    hosted.endpoint._codec.encode = lambda text: read.append(len(text)) or encode(text)  # type: ignore[method-assign, func-returns-value]
    target.check((1, [(0, ("ask", asked(b'"prompt": "' + b"a" * 1_000_000 + b'"')))]))
    assert max(read) < 10_000
