"""The client's own part of the model: tokens to hidden states, and hidden states to the next token.

``StubHub`` is the counterpart of the timing stub; ``nodes.blocks.hub`` that of real blocks.
"""

from __future__ import annotations

from typing import Protocol

from nodes.clock import Clock, on_tick
from nodes.digest import DIGEST_BYTES, apply_to_rows, embed, read_rows, token_of, write_rows
from nodes.request import Request, WrongTokenError


class TokenSequence(Protocol):
    """The tokens of one request. ``embed`` and ``take`` are called in turn, once per output token."""

    tokens: list[int]
    """The ids of the prompt, and of the output so far."""
    ended: bool
    """Whether the model has ended its output. A request for a fixed number of tokens never ends early."""

    async def embed(self) -> bytes:
        """Returns hidden states of tokens that the chain has not seen: the prompt, then the last token."""
        ...

    async def take(self, payload: bytes) -> int:
        """Returns the next token's id, from the last block's hidden states. Raises ``WrongTokenError``."""
        ...


class HubModel(Protocol):
    """The client's part of a model. The servers' part is ``nodes.compute.Compute``."""

    token_bytes: int

    def sequence(self, request: Request) -> TokenSequence: ...

    def remember(self, payload: bytes) -> bytes:
        """Returns what ``recall`` needs to make the same hidden states again, as short as possible."""
        ...

    def recall(self, memory: bytes) -> bytes:
        """Returns the hidden states for joined results of ``remember``, one after another."""
        ...

    def close(self) -> None: ...


def _made_up(request: Request) -> list[int]:
    """Returns the tokens of a prompt: the conversation so far, blocks by their ids, and what only this request has."""
    size = request.block_tokens
    blocks = (size * number + i for number in request.block_ids for i in range(size))
    known = [*request.history, *blocks][: request.n_input_tokens]
    return [*known, *(request.index + i for i in range(request.n_input_tokens - len(known)))]


class _StubSequence:
    ended = False

    def __init__(self, hub: StubHub, request: Request) -> None:
        self._hub = hub
        self._pending = list(request.generation.prompt) or _made_up(request)
        self.tokens = list(self._pending)
        self._caches = [0] * hub.n_blocks
        self._token_bytes = hub.token_bytes
        self._verify = hub.verify
        self._position = 0
        self._n_taken = 0
        self._embedding_s = 0.0
        self._values: list[int] = []

    async def embed(self) -> bytes:
        began_at_s = self._hub.now_s()
        self._values = [embed(token, self._position + i) for i, token in enumerate(self._pending)]
        self._position += len(self._pending)
        payload = write_rows(self._values, self._token_bytes)
        self._embedding_s = self._hub.now_s() - began_at_s
        return payload

    async def take(self, payload: bytes) -> int:
        # The stub's own computing is part of the token's time, not added to it.
        done_at_s = on_tick(self._hub.now_s() + self._hub.token_s - self._embedding_s)
        value = read_rows(payload, self._token_bytes)[-1]
        if self._verify:
            expected = apply_to_rows(self._values, 0, self._caches)[-1]
            if value != expected:
                raise WrongTokenError(f"token {self._n_taken} differs from the whole model's")
        self._n_taken += 1
        token = token_of(value)
        self._pending = [token]
        self.tokens.append(token)
        await self._hub.wait_until_s(done_at_s)
        return token


class StubHub:
    """The hub of the toy transformer in ``nodes.digest``.

    With ``verify`` every token is compared with the same computation on one machine. An output token takes
    the client ``token_s`` seconds of ``clock``, for embedding and choice together, spent after the last hop.
    Sessions do not wait for each other here. Without a clock it takes no time.
    """

    def __init__(
        self,
        token_bytes: int,
        n_blocks: int,
        verify: bool = True,
        *,
        clock: Clock | None = None,
        token_s: float = 0.0,
    ) -> None:
        assert clock is not None or not token_s, "a hub that takes time needs a clock"
        self.token_bytes = token_bytes
        self.n_blocks = n_blocks
        self.verify = verify
        self.token_s = token_s
        self._clock = clock if token_s else None

    def sequence(self, request: Request) -> _StubSequence:
        return _StubSequence(self, request)

    def now_s(self) -> float:
        return self._clock.now_s() if self._clock is not None else 0.0

    async def wait_until_s(self, at_s: float) -> None:
        if self._clock is not None:
            await self._clock.sleep_until_s(at_s)

    def remember(self, payload: bytes) -> bytes:
        """Returns the digests only: they determine the hidden states."""
        return write_rows(read_rows(payload, self.token_bytes), DIGEST_BYTES)

    def recall(self, memory: bytes) -> bytes:
        return write_rows(read_rows(memory, DIGEST_BYTES), self.token_bytes)

    def close(self) -> None:
        pass
