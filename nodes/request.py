"""What a client is asked for, and how a request can fail."""

from __future__ import annotations

import msgspec

from nodes.blocks.spec import Sampling


class Generation(msgspec.Struct, frozen=True, omit_defaults=True):
    """What real blocks need to know of a request.

    ``prompt`` are the input tokens' ids; empty: the hub makes up as many as there are to be, the same ones for
    the same request. ``sampling`` ``None``: the most probable token each time. ``stops``: the model's end token
    ends the text, though not before ``min_tokens`` have come.
    """

    prompt: tuple[int, ...] = ()
    sampling: Sampling | None = None
    stops: bool = False
    min_tokens: int = 0


class Request(msgspec.Struct, frozen=True, array_like=True):
    """What the load generator asks for. ``arrival_at_s`` is the intended instant."""

    index: int
    arrival_at_s: float
    n_input_tokens: int
    n_output_tokens: int
    generation: Generation = Generation()


class SessionError(Exception):
    """The request has failed; the message is the reason."""


class WrongTokenError(SessionError):
    """The chain's output differs from the whole model's."""
