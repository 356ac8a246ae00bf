"""The client's own part of the model: tokens to hidden states, and hidden states to the next token.

``StubHub`` is the counterpart of the timing stub; ``nodes.blocks.hub`` that of real blocks.
"""

from __future__ import annotations

from typing import Protocol

from nodes.clock import Clock, on_tick
from nodes.digest import (
    DIGEST_BYTES,
    apply_blocks,
    apply_to_rows,
    embed,
    read_rows,
    token_of,
    write_rows,
)
from nodes.request import Request, WrongTokenError, made_up_prompt
from policies.decoding import Decoding


class TokenSequence(Protocol):
    """The tokens of one request. ``draft``, ``embed`` and ``take`` are called in turn, once per step."""

    tokens: list[int]
    """The ids of the prompt, and of the output so far."""
    ended: bool
    """Whether the model has ended its output. A request for a fixed number of tokens never ends early."""
    n_accepted: int
    """Drafted tokens of the last step that agreed."""

    async def draft(self, n_tokens: int) -> int:
        """Drafts at most ``n_tokens`` tokens; returns how many."""
        ...

    async def embed(self) -> bytes:
        """Returns hidden states of tokens that the chain has not seen.

        These are the prompt, then the last token with the drafted ones after it.
        """
        ...

    async def take(self, payload: bytes) -> list[int]:
        """Returns the next tokens' ids, from the last block's hidden states: one, and drafted ones that agree.

        Raises ``WrongTokenError``.
        """
        ...


class HubModel(Protocol):
    """The client's part of a model. The servers' part is ``nodes.compute.Compute``."""

    token_bytes: int
    decoding: Decoding | None
    """How tokens are drafted; ``None``: they are not, and every step makes one token."""

    def sequence(self, request: Request) -> TokenSequence: ...

    def remember(self, payload: bytes) -> bytes:
        """Returns what ``recall`` needs to make the same hidden states again, as short as possible."""
        ...

    def recall(self, memory: bytes) -> bytes:
        """Returns the hidden states for joined results of ``remember``, one after another."""
        ...

    def close(self) -> None: ...


class _StubSequence:
    ended = False

    def __init__(self, hub: StubHub, request: Request) -> None:
        self._hub = hub
        self._request = request.index
        self._pending = list(request.generation.prompt) or made_up_prompt(request, request.history)
        self.tokens = list(self._pending)
        self._caches = [0] * hub.n_blocks
        self._token_bytes = hub.token_bytes
        self._verify = hub.verify
        self._decoding = hub.decoding
        self._position = 0
        """The number of tokens in the caches."""
        self._n_taken = 0
        self._embedding_s = 0.0
        self._drafts: list[int] = []
        self._values: list[int] = []
        self.n_accepted = 0

    async def draft(self, n_tokens: int) -> int:
        self._drafts = []
        if self._decoding is None or not n_tokens:
            return 0
        began_at_s = self._hub.now_s()
        round_ = self._decoding.drawn(self._request, self._n_taken, n_tokens)
        self._drafts = self._foretold(round_.accepted, round_.drafted)
        await self._hub.wait_until_s(on_tick(began_at_s + round_.drafted * self._decoding.draft_token_s))
        return round_.drafted

    def _foretold(self, n_right: int, n_drafted: int) -> list[int]:
        """Returns ``n_drafted`` tokens: ``n_right`` as the whole model will have them, then wrong ones."""
        caches, token, found = list(self._caches), self._pending[0], []
        for i in range(min(n_right + 1, n_drafted)):
            token = token_of(apply_blocks(embed(token, self._position + i), 0, caches))
            found.append(token)
        if n_right < n_drafted:
            found[-1] = token = token ^ 1
            found += [token] * (n_drafted - len(found))
        return found

    async def embed(self) -> bytes:
        began_at_s = self._hub.now_s()
        tokens = self._pending
        if self._decoding is not None and self._drafts:
            tokens = [*tokens, *self._drafts][: self._decoding.n_sent(len(self._drafts))]
        self._values = [embed(token, self._position + i) for i, token in enumerate(tokens)]
        payload = write_rows(self._values, self._token_bytes)
        self._embedding_s = self._hub.now_s() - began_at_s
        return payload

    async def take(self, payload: bytes) -> list[int]:
        # The stub's own computing is part of the token's time, not added to it.
        done_at_s = on_tick(self._hub.now_s() + self._hub.token_s - self._embedding_s)
        rows = read_rows(payload, self._token_bytes)
        if not self._drafts:
            self.n_accepted, tokens = 0, [token_of(rows[-1])]
            n_kept = len(self._values)
        else:
            assert self._decoding is not None, "only then it drafts"
            self.n_accepted, tokens = self._decoding.kept([token_of(row) for row in rows], self._drafts)
            n_kept = len(tokens)
        if self._verify or self._decoding is not None:
            expected = apply_to_rows(self._values[:n_kept], 0, self._caches)
            end = n_kept - (
                len(self._values) - len(rows)
            )  # the first values of a prompt may have been kept, and not sent
            if self._verify and rows[end - len(tokens) : end] != expected[-len(tokens) :]:
                raise WrongTokenError(f"token {self._n_taken} differs from the whole model's")
        self._position += n_kept
        self._n_taken += len(tokens)
        self._pending = tokens[-1:]
        self.tokens += tokens
        await self._hub.wait_until_s(done_at_s)
        return tokens


class StubHub:
    """The hub of the toy transformer in ``nodes.digest``.

    With ``verify`` every token is compared with the same computation on one machine. A step takes the client
    ``token_s`` seconds of ``clock``, for embedding and choice together, spent after the last hop.
    Sessions do not wait for each other here. Without a clock it takes no time.

    With ``decoding`` it drafts: tokens of the whole model, or wrong ones where drafted tokens shall not agree.
    """

    def __init__(
        self,
        token_bytes: int,
        n_blocks: int,
        verify: bool = True,
        *,
        clock: Clock | None = None,
        token_s: float = 0.0,
        decoding: Decoding | None = None,
    ) -> None:
        takes_time = token_s or (decoding is not None and decoding.draft_token_s)
        assert clock is not None or not takes_time, "a hub that takes time needs a clock"
        self.token_bytes = token_bytes
        self.n_blocks = n_blocks
        self.verify = verify
        self.token_s = token_s
        self.decoding = decoding
        self._clock = clock if takes_time else None

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
