"""How long a step takes on one server: the law that policies, stub, simulator and calibration share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


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

    def prefill_s(self, n_tokens: int) -> float:
        """Returns the seconds per block of a prefill of ``n_tokens`` tokens."""
        straight_s = self.prefill_base_s + self.prefill_slope_s * n_tokens
        return max(self._least_s(n_tokens), straight_s + self.prefill_curve_s * n_tokens**2)

    def _least_s(self, n_tokens: int) -> float:
        if not self.experts_s:
            return self.prefill_least_s
        return self.prefill_least_s - self.experts_s * (1 - self.experts_ratio) ** n_tokens

    def further_s(self, n_sessions: int) -> float:
        """Returns the seconds per block that ``n_sessions`` >= 1 decodes in one step take longer than one.

        Each adds its arithmetic, and together they read the experts that the first has not read.
        """
        more_s = self.session_slope_s * (n_sessions - 1)
        if not self.experts_s:
            return more_s
        idle = 1 - self.experts_ratio
        return more_s + self.experts_s * (idle - idle**n_sessions)

    def decode_at_s(self, cached_tokens: float) -> float:
        """Returns the seconds per block of a decode step with ``cached_tokens`` in the cache before it."""
        return self.decode_s + self.context_slope_s * (cached_tokens - self.decode_context_tokens)

    def step_s(self, position: float, n_tokens: int, n_blocks: int) -> float:
        """Returns the seconds of a whole step of one session: ``n_tokens`` tokens on ``n_blocks`` blocks.

        ``position`` is the number of tokens cached before; 0 means the prefill. Several tokens at another
        position (a replay) are decoded one after another.
        """
        if not position:
            return self.step_base_s + n_blocks * self.prefill_s(n_tokens)
        return self.step_base_s + n_blocks * n_tokens * self.decode_at_s(position + (n_tokens - 1) / 2)

    def batch_s(self, n_blocks: int, positions: Sequence[int], prompt: range) -> float:
        """Returns the seconds of a step of several sessions: a decode per position, and tokens of one prompt.

        ``positions`` are the tokens that each decoding session has cached before the step. ``prompt`` are the
        positions of the prompt's tokens in this step: all of them, a chunk, or none. One decode alone,
        or a whole prompt alone, takes as long as in ``step_s``.
        """
        block_s, n = 0.0, len(positions)
        if prompt:
            straight_s = self.prefill_base_s + self.prefill_slope_s * len(prompt)
            curve_s = self.prefill_curve_s * (prompt.stop**2 - prompt.start**2)
            block_s += max(self._least_s(len(prompt)), straight_s + curve_s)
        if n:
            block_s += self.decode_s + self.further_s(n)
            block_s += self.context_slope_s * (sum(positions) - self.decode_context_tokens)
        return self.step_base_s + n_blocks * block_s


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
    decode_context_tokens: float = 0.0
