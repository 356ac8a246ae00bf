"""How long a step takes on one server: the law that policies, stub, simulator and calibration share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from operator import add
from typing import TypeVar

L = TypeVar("L", bound="StepLaw")
Blocks = int | range
"""Blocks that a step goes through: how many, all like the law's own, or which ones of the model."""


class StepLaw:
    """Compute times of a server's blocks in seconds; subclasses contain the numbers.

    Decode, per block: ``decode_s`` if ``decode_context_tokens`` tokens are in the attention cache before the
    step, and ``context_slope_s`` more for every further one. Prefill of l tokens, per block (tau^I_j(l)):
    ``prefill_base_s + prefill_slope_s l + prefill_curve_s l²``, but at least ``prefill_least_s``. A step also
    takes ``step_base_s``, whatever its number of blocks, and ``1 + contention_ratio n`` times as long while n
    other sessions compute. If a server computes several sessions in one step, each further decode adds
    ``session_slope_s`` per block. In the paper's model only ``decode_s`` (tau_j), ``prefill_base_s`` and
    ``prefill_slope_s`` are not 0.

    A block may be a mixture of experts, all of which are read in ``experts_s``. A token chooses the share
    ``experts_ratio`` of them, and n tokens together touch ``1 - (1 - experts_ratio)^n`` of them, as if each
    chose at random. ``decode_s`` reads those of one token, ``prefill_least_s`` all experts.

    GPUs that compute a step together exchange every token's hidden states in ``exchange_s``, after reading and computing.
    ``decode_s`` and ``session_slope_s`` contain it.

    A block may attend to the last ``window_tokens`` only (0: to all).

    Where a model's blocks differ, ``pattern`` has the kind of each: 0 for blocks like this law's own, which
    are the largest, and i for blocks like ``others[i - 1]``.
    """

    decode_s: float
    prefill_base_s: float
    prefill_slope_s: float
    step_base_s: float
    context_slope_s: float
    decode_context_tokens: float
    prefill_curve_s: float
    contention_ratio: float
    session_slope_s: float
    prefill_least_s: float
    experts_s: float
    experts_ratio: float
    exchange_s: float
    window_tokens: int
    others: tuple[StepTimes, ...]
    pattern: tuple[int, ...]

    def prefill_s(self, n_tokens: int) -> float:
        """Returns the seconds per block of a prefill of ``n_tokens`` tokens."""
        return self.computed_s(n_tokens, self.attended(n_tokens))

    def _least_s(self, n_tokens: int) -> float:
        if not self.experts_s:
            return self.prefill_least_s
        return self.prefill_least_s - self.experts_s * (1 - self.experts_ratio) ** n_tokens

    def attended(self, n_tokens: float) -> float:
        """Returns twice the number of pairs of tokens that a prompt's attention has: n² without a window."""
        beyond = max(0, n_tokens - self.window_tokens) if self.window_tokens else 0
        return n_tokens**2 - beyond**2

    def further_s(self, n_sessions: int) -> float:
        """Returns the seconds per block that ``n_sessions`` >= 1 decodes in one step take longer than one.

        Each adds its arithmetic, and together they read the experts that the first has not read.
        """
        return self.session_slope_s * (n_sessions - 1) + self.more_experts_s(n_sessions)

    def more_experts_s(self, n_tokens: int) -> float:
        """Returns the seconds per block in which a step of ``n_tokens`` reads the experts that one token does not."""
        if not self.experts_s:
            return 0.0
        idle = 1 - self.experts_ratio
        return self.experts_s * (idle - idle**n_tokens)

    def decode_at_s(self, cached_tokens: float) -> float:
        """Returns the seconds per block of a decode step with ``cached_tokens`` in the cache before it."""
        if self.window_tokens:
            cached_tokens = min(cached_tokens, self.window_tokens)
        return self.decode_s + self.context_slope_s * (cached_tokens - self.decode_context_tokens)

    def mean_decode_at_s(self, first: int, n_steps: int) -> float:
        """Returns the mean seconds per block of ``n_steps`` decodes, the first with ``first`` tokens cached."""
        n_steps = max(n_steps, 1)
        if not self.window_tokens or first + n_steps - 1 <= self.window_tokens:
            return self.decode_at_s(first + (n_steps - 1) / 2)
        n_below = max(0, self.window_tokens - first)
        below = n_below * (first + (n_below - 1) / 2)
        mean_tokens = (below + (n_steps - n_below) * self.window_tokens) / n_steps
        return self.decode_s + self.context_slope_s * (mean_tokens - self.decode_context_tokens)

    def kinds(self, blocks: Blocks) -> Sequence[tuple[StepLaw, int]]:
        """Returns the laws of ``blocks``, each with the number of blocks that have it."""
        if not isinstance(blocks, range):
            return ((self, blocks),)
        if not self.others:
            return ((self, len(blocks)),)
        counts = _counts(self.pattern, blocks.start, blocks.stop)
        return tuple((self.others[kind - 1] if kind else self, n) for kind, n in counts)

    def prefill_of_s(self, n_tokens: int, blocks: Blocks) -> float:
        """Returns the seconds of a prefill of ``n_tokens`` tokens on ``blocks``, without ``step_base_s``."""
        return sum(n * law.prefill_s(n_tokens) for law, n in self.kinds(blocks))

    def decode_of_s(self, cached_tokens: float, blocks: Blocks) -> float:
        """Returns the seconds of a decode on ``blocks``, without ``step_base_s``."""
        decode_s = 0.0
        for law, n in self.kinds(blocks):
            decode_s += n * law.decode_at_s(cached_tokens)
        return decode_s

    def mean_decode_of_s(self, first: int, n_steps: int, blocks: Blocks) -> float:
        """Returns the mean seconds of ``n_steps`` decodes on ``blocks``, without ``step_base_s``."""
        return sum(n * law.mean_decode_at_s(first, n_steps) for law, n in self.kinds(blocks))

    def grows_with_context(self, blocks: Blocks) -> bool:
        """Whether decodes on ``blocks`` take longer with more tokens in the cache."""
        return any(law.context_slope_s for law, _ in self.kinds(blocks))

    def step_s(self, position: float, n_tokens: int, blocks: Blocks) -> float:
        """Returns the seconds of a whole step of one session: ``n_tokens`` tokens on ``blocks``.

        ``position`` is the number of tokens cached before; 0 means the prefill.
        """
        if not position:
            return self.step_base_s + self.prefill_of_s(n_tokens, blocks)
        if n_tokens == 1:
            return self.step_base_s + self.decode_of_s(position, blocks)
        return self.step_base_s + self.extend_of_s(position, n_tokens, blocks)

    def extend_of_s(self, cached_tokens: float, n_tokens: int, blocks: Blocks) -> float:
        """Returns the seconds of ``n_tokens`` of one session on ``blocks``, without ``step_base_s``."""
        return sum(n * law.extend_s(cached_tokens, n_tokens) for law, n in self.kinds(blocks))

    def by_token(self: L, n_sent: int, n_made: float) -> L:
        """Returns a law whose decode is a token's share of a step with ``n_sent`` tokens that makes ``n_made``.

        It is exact where no window ends and the longer one of a step's two times (``extend_s``) is the same with any
        number of cached tokens; in a batch, where it is the same for all of them, and sessions do not share experts.
        """
        context_tokens = self.decode_context_tokens
        context_s, session_s = self.context_slope_s, self.session_slope_s + self.exchange_s * (n_sent - 1)
        if n_sent > 1 and self._together_s(context_tokens, n_sent) > self._read_s(context_tokens, n_sent):
            context_s = 2 * n_sent * self.prefill_curve_s
            session_s = (self.prefill_slope_s + self.exchange_s) * n_sent
        changed: L = replace(  # type: ignore[type-var]  # laws are dataclasses
            self,
            decode_s=self.extend_s(context_tokens, n_sent) / n_made,
            context_slope_s=context_s / n_made,
            session_slope_s=session_s / n_made,
            step_base_s=self.step_base_s / n_made,
            others=tuple(other.by_token(n_sent, n_made) for other in self.others),
        )
        return changed

    def extend_s(self, cached_tokens: float, n_tokens: int) -> float:
        """Returns the seconds per block of ``n_tokens`` of one session in one step, after ``cached_tokens``.

        One is a decode. Several (a draft that is verified, the rest of a prompt whose beginning was kept, a chunk) take
        the longer of two times: what a decode that reads all their experts takes, and what so many tokens of a prompt
        take, attention to all tokens before them included.
        """
        if n_tokens == 1:
            return self.decode_at_s(cached_tokens)
        return max(self._read_s(cached_tokens, n_tokens), self._together_s(cached_tokens, n_tokens))

    def _read_s(self, cached_tokens: float, n_tokens: int) -> float:
        exchange_s = self.exchange_s * (n_tokens - 1)
        return self.decode_at_s(cached_tokens) + self.more_experts_s(n_tokens) + exchange_s

    def _together_s(self, begin: float, n_tokens: int) -> float:
        return self.computed_s(n_tokens, self.attended(begin + n_tokens) - self.attended(begin))

    def computed_s(self, n_tokens: int, pairs: float) -> float:
        """Returns the seconds per block of as many tokens of prompts, with twice as many ``pairs`` in their attention."""
        straight_s = self.prefill_base_s + self.prefill_slope_s * n_tokens
        computed_s = max(self._least_s(n_tokens), straight_s + self.prefill_curve_s * pairs)
        return computed_s + self.exchange_s * n_tokens

    def batch_s(
        self, blocks: Blocks, positions: Sequence[int], prompt: range, sizes: Sequence[int] = ()
    ) -> float:
        """Returns the seconds of a step of several sessions: a decode per position, and tokens of one prompt.

        ``positions`` are the tokens that each decoding session has cached before the step. ``prompt`` are the
        positions of the prompt's tokens in this step: all of them, a chunk, or none. ``sizes`` are the tokens of each
        decoding session; empty: one each. A step alone takes as long as in ``step_s``.
        """
        blocks_s = sum(n * law._block_s(positions, prompt, sizes) for law, n in self.kinds(blocks))
        return self.step_base_s + blocks_s

    def _block_s(self, positions: Sequence[int], prompt: range, sizes: Sequence[int]) -> float:
        block_s, n, window = 0.0, len(positions), self.window_tokens
        if prompt:
            n_prompt = len(prompt)
            block_s += self.extend_s(prompt.start, n_prompt) if prompt.start else self.prefill_s(n_prompt)
        if n:
            n_tokens = sum(sizes) or n
            n_cached = sum(min(position, window) for position in positions) if window else sum(positions)
            read_s = self.decode_s + self.session_slope_s * (n - 1) + self.more_experts_s(n_tokens)
            read_s += self.context_slope_s * (n_cached - self.decode_context_tokens)
            if n_tokens > n:  # some are drafts
                ends = map(add, positions, sizes)
                pairs = sum(map(self.attended, ends)) - sum(map(self.attended, positions))
                read_s += self.exchange_s * (n_tokens - n)
                read_s = max(read_s, self.computed_s(n_tokens, pairs))
            block_s += read_s
        return block_s


@cache
def _counts(pattern: tuple[int, ...], first: int, last: int) -> tuple[tuple[int, int], ...]:
    """Returns (kind, number of blocks) for the kinds of blocks ``[first, last)``."""
    return tuple(sorted(Counter(pattern[first:last]).items()))


@dataclass(frozen=True)
class StepTimes(StepLaw):
    """The numbers of a ``StepLaw`` without a server."""

    decode_s: float
    prefill_base_s: float
    prefill_slope_s: float
    step_base_s: float = 0.0
    context_slope_s: float = 0.0
    prefill_curve_s: float = 0.0
    contention_ratio: float = 0.0
    session_slope_s: float = 0.0
    prefill_least_s: float = 0.0
    experts_s: float = 0.0
    experts_ratio: float = 0.0
    exchange_s: float = 0.0
    window_tokens: int = 0
    others: tuple[StepTimes, ...] = ()
    pattern: tuple[int, ...] = ()
    decode_context_tokens: float = 0.0
