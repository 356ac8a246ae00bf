"""The client's own part of the model: tokens to hidden states, and hidden states to the next token.

``StubHub`` is the counterpart of the timing stub; ``nodes.blocks.hub`` that of real blocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol

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
from nodes.request import Request, WrongTokenError, known_answer, made_up_prompt
from policies.decoding import Decoding


class TokenSequence(Protocol):
    """The tokens of one request. ``draft`` and ``embed`` are called in turn, once per step, and ``take`` once its answer is there.

    Where further rounds are drafted while others are away, ``draft_ahead`` takes the place of ``draft`` for them.
    """

    tokens: list[int]
    """The ids of the prompt, and of the output so far."""
    ended: bool
    """Whether the model has ended its output. A request for a fixed number of tokens never ends early."""
    n_accepted: int
    """Drafted tokens of the last step that agreed."""

    async def draft(self, n_tokens: int) -> int:
        """Drafts at most ``n_tokens`` tokens; returns how many."""
        ...

    async def draft_ahead(self, n_tokens: int) -> int | None:
        """Drafts behind what is away, if all of that agrees: the model's token after it, and at most ``n_tokens`` more.

        Returns how many more; ``None`` if not even the first can be drafted.
        """
        ...

    async def embed(self) -> bytes:
        """Returns hidden states of tokens that the chain has not seen.

        These are the prompt, then the last token with the drafted ones after it.
        """
        ...

    async def take(self, payload: bytes) -> list[int]:
        """Returns the next tokens' ids, from the last block's hidden states: one, and drafted ones that agree.

        They are those of the step that is away for the longest time. Raises ``WrongTokenError``.
        """
        ...

    def goes_on(self) -> bool:
        """Returns whether what is away now follows the tokens so far: the guess with which it began was right."""
        ...

    def forget(self, n_kept: int) -> None:
        """Forgets what is away, but for its first ``n_kept`` steps."""
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


class _Step(NamedTuple):
    """A step of the stub that is away: the values that were sent, and the drafted tokens among them.

    ``guess``: its first token, if that was drafted, too. ``is_right``: all that was drafted will agree.
    """

    values: list[int]
    drafts: list[int]
    guess: int | None
    is_right: bool


class _Draft(NamedTuple):
    """As ``_Step``: tokens that are about to be sent, the first one at ``position``."""

    position: int
    tokens: list[int]
    guess: int | None
    is_right: bool


class _StubSequence:
    ended = False

    def __init__(self, hub: StubHub, request: Request) -> None:
        self._hub = hub
        self._request = request.index
        self.tokens = list(request.generation.prompt) or made_up_prompt(request, request.history)
        self._answer = known_answer(request)
        self._caches = [0] * hub.n_blocks
        self._token_bytes = hub.token_bytes
        self._verify = hub.verify
        self._decoding = hub.decoding
        self._position = 0
        """The number of tokens in the caches."""
        self._n_taken = 0
        self._embedding_s = 0.0
        self._draft = _Draft(0, list(self.tokens), None, is_right=True)
        self._away: deque[_Step] = deque()
        self.n_accepted = 0

    async def draft(self, n_tokens: int) -> int:
        began_at_s, last, position = self._hub.now_s(), self.tokens[-1], self._position
        drafts, agree = self._drafted(self._caches, last, position, self._n_taken, n_tokens)
        await self._wait_for(len(drafts), began_at_s)
        self._draft = _Draft(position, [last, *drafts], None, agree)
        return len(drafts)

    async def draft_ahead(self, n_tokens: int) -> int:
        decoding = self._decoding
        assert decoding is not None, "only then it drafts"
        caches, number, position, row = list(self._caches), self._n_taken, self._position, 0
        for step in self._away:
            for value in step.values:
                row = apply_blocks(value, 0, caches)
            number, position = number + len(step.drafts) + 1, position + len(step.values)
        before = self._away[-1]
        guess = self._token(number - 1, row)
        is_right = all(step.is_right for step in self._away)
        is_right = is_right and decoding.agrees(self._request, number - 1, len(before.drafts))
        if not is_right:
            guess ^= 1
        began_at_s = self._hub.now_s()
        drafts, agree = self._drafted(caches, guess, position, number, n_tokens)
        await self._wait_for(len(drafts) + 1, began_at_s)
        self._draft = _Draft(position, [guess, *drafts], guess, is_right and agree)
        return len(drafts)

    async def _wait_for(self, n_drafted: int, began_at_s: float) -> None:
        if self._decoding is not None and n_drafted:
            await self._hub.wait_until_s(on_tick(began_at_s + n_drafted * self._decoding.draft_token_s))

    def _drafted(
        self, caches: Sequence[int], token: int, position: int, n_done: int, n_tokens: int
    ) -> tuple[list[int], bool]:
        """Returns at most ``n_tokens`` tokens after ``token``, output token ``n_done`` and on, and whether all agree."""
        if self._decoding is None or not n_tokens:
            return [], True
        round_ = self._decoding.drawn(self._request, n_done, n_tokens)
        foretold, values = [], list(caches)
        for i in range(min(round_.accepted + 1, round_.drafted)):
            token = self._token(n_done + i, apply_blocks(embed(token, position + i), 0, values))
            foretold.append(token)
        if round_.accepted < round_.drafted:
            foretold[-1] = token = token ^ 1
            foretold += [token] * (round_.drafted - len(foretold))
        return foretold, round_.accepted == round_.drafted

    def _token(self, number: int, row: int) -> int:
        """Returns output token ``number``: the known one, or the one that a row says."""
        return self._answer[number] if number < len(self._answer) else token_of(row)

    async def embed(self) -> bytes:
        began_at_s = self._hub.now_s()
        position, tokens, guess, is_right = self._draft
        drafts = tokens[1:] if self._n_taken else []
        if self._decoding is not None and drafts:
            tokens = tokens[: self._decoding.n_sent(len(drafts))]
        values = [embed(token, position + i) for i, token in enumerate(tokens)]
        self._away.append(_Step(values, drafts, guess, is_right))
        payload = write_rows(values, self._token_bytes)
        self._embedding_s = self._hub.now_s() - began_at_s
        return payload

    async def take(self, payload: bytes) -> list[int]:
        # The stub's own computing is part of the token's time, not added to it.
        done_at_s = on_tick(self._hub.now_s() + self._hub.token_s - self._embedding_s)
        rows = read_rows(payload, self._token_bytes)
        values, drafts, _, _ = self._away.popleft()
        if not drafts:
            self.n_accepted, tokens = 0, [self._token(self._n_taken, rows[-1])]
            n_kept = len(values)
        else:
            assert self._decoding is not None, "only then it drafts"
            made = [self._token(self._n_taken + number, row) for number, row in enumerate(rows)]
            self.n_accepted, tokens = self._decoding.kept(made, drafts)
            n_kept = len(tokens)
        if self._verify or self._decoding is not None:
            expected = apply_to_rows(values[:n_kept], 0, self._caches)
            end = n_kept - (
                len(values) - len(rows)
            )  # the first values of a prompt may have been kept, and not sent
            if self._verify and rows[end - len(tokens) : end] != expected[-len(tokens) :]:
                raise WrongTokenError(f"token {self._n_taken} differs from the whole model's")
        self._position += n_kept
        self._n_taken += len(tokens)
        self.tokens += tokens
        self._draft = _Draft(self._position, tokens[-1:], None, is_right=True)
        await self._hub.wait_until_s(done_at_s)
        return tokens

    def goes_on(self) -> bool:
        return bool(self._away) and self._away[0].guess == self.tokens[-1]

    def forget(self, n_kept: int) -> None:
        while len(self._away) > n_kept:
            self._away.pop()


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
