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
    """What the load generator asks for. ``arrival_at_s`` is the intended instant.

    Caches are reserved for ``max_new_tokens``; ``None``: for the ``n_output_tokens`` that come.
    """

    index: int
    arrival_at_s: float
    n_input_tokens: int
    n_output_tokens: int
    generation: Generation = Generation()
    max_new_tokens: int | None = None

    @property
    def n_reserved_tokens(self) -> int:
        """Prompt and output that a server keeps cache for."""
        most = self.n_output_tokens if self.max_new_tokens is None else self.max_new_tokens
        return self.n_input_tokens + most


class SessionError(Exception):
    """The request has failed; the message is the reason."""


class WrongTokenError(SessionError):
    """The chain's output differs from the whole model's."""
