"""What a client is asked for, and how a request can fail."""

from __future__ import annotations

import msgspec


class Request(msgspec.Struct, frozen=True, array_like=True):
    """What the load generator asks for. ``arrival_at_s`` is the intended instant.

    ``prompt`` are the input tokens' ids; empty: the hub makes up ``n_input_tokens`` of them, the same
    ones for the same ``index``.
    """

    index: int
    arrival_at_s: float
    n_input_tokens: int
    n_output_tokens: int
    prompt: tuple[int, ...] = ()


class SessionError(Exception):
    """The request has failed; the message is the reason."""


class WrongTokenError(SessionError):
    """The chain's output differs from the whole model's."""
