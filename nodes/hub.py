"""The client's own part of the model: tokens to hidden states, and hidden states to the next token.

``StubHub`` is the counterpart of the timing stub; ``nodes.blocks.hub`` that of real blocks.
"""

from __future__ import annotations

from typing import Protocol

from nodes.digest import DIGEST_BYTES, apply_blocks, embed, read_rows, token_of, write_rows
from nodes.request import Request, WrongTokenError


class TokenSequence(Protocol):
    """The tokens of one request. ``embed`` and ``take`` are called in turn, once per output token."""

    ended: bool
    """The model has said that it is done; a request for a fixed number of tokens never ends early."""

    async def embed(self) -> bytes:
        """Hidden states of the tokens that the chain has not seen: first the prompt, then the latest one."""
        ...

    async def take(self, payload: bytes) -> int:
        """The next token, from the last block's hidden states. Raises ``WrongTokenError``."""
        ...


class HubModel(Protocol):
    """What the hub needs of a model; the other half of ``nodes.compute.Compute``."""

    token_bytes: int

    def sequence(self, request: Request) -> TokenSequence: ...

    def remember(self, payload: bytes) -> bytes:
        """All that ``recall`` needs to make the same hidden states again; as short as it can be."""
        ...

    def recall(self, memory: bytes) -> bytes:
        """The hidden states of everything remembered, one after another."""
        ...

    def close(self) -> None: ...


class _StubSequence:
    ended = False

    def __init__(self, request: Request, n_blocks: int, token_bytes: int, verify: bool) -> None:
        self._pending = list(request.prompt) or [request.index + i for i in range(request.n_input_tokens)]
        self._caches = [0] * n_blocks
        self._token_bytes = token_bytes
        self._verify = verify
        self._position = 0
        self._n_taken = 0
        self._values: list[int] = []

    async def embed(self) -> bytes:
        self._values = [embed(token, self._position + i) for i, token in enumerate(self._pending)]
        self._position += len(self._pending)
        return write_rows(self._values, self._token_bytes)

    async def take(self, payload: bytes) -> int:
        value = read_rows(payload, self._token_bytes)[-1]
        if self._verify:
            expected = [apply_blocks(v, 0, self._caches) for v in self._values][-1]
            if value != expected:
                raise WrongTokenError(f"token {self._n_taken} differs from the whole model's")
        self._n_taken += 1
        token = token_of(value)
        self._pending = [token]
        return token


class StubHub:
    """The hub of the toy transformer in ``nodes.digest``.

    With ``verify`` every token is compared with the same computation on one machine.
    """

    def __init__(self, token_bytes: int, n_blocks: int, verify: bool = True) -> None:
        self.token_bytes = token_bytes
        self._n_blocks = n_blocks
        self._verify = verify

    def sequence(self, request: Request) -> _StubSequence:
        return _StubSequence(request, self._n_blocks, self.token_bytes, self._verify)

    def remember(self, payload: bytes) -> bytes:
        """The digests alone: they determine the hidden states."""
        return write_rows(read_rows(payload, self.token_bytes), DIGEST_BYTES)

    def recall(self, memory: bytes) -> bytes:
        return write_rows(read_rows(memory, DIGEST_BYTES), self.token_bytes)

    def close(self) -> None:
        pass
