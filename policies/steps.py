"""How long a step takes on one server: the one law that policies, the stub, the model and calibration share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class StepLaw:
    """Compute times of a server's blocks in seconds; a subclass has the numbers.

    Decode, per block: ``decode_s`` with ``decode_context_tokens`` in the attention cache before the step, and
    ``context_slope_s`` more for every further one. Prefill of l tokens, per block (tau^I_j(l)):
    ``prefill_base_s + prefill_slope_s l + prefill_curve_s l²``, and at least ``prefill_least_s``. A step also takes ``step_base_s`` however many blocks
    it has, and ``1 + contention_ratio n`` times as long while n other sessions compute. Where a server computes several
    sessions in one step, each further decode adds ``session_slope_s`` per block. The paper's model has
    ``decode_s`` (tau_j), the prefill's base and slope, and zeros.
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

    def prefill_s(self, n_tokens: int) -> float:
        """Prefill of ``n_tokens`` tokens, per block."""
        straight_s = self.prefill_base_s + self.prefill_slope_s * n_tokens
        return max(self.prefill_least_s, straight_s + self.prefill_curve_s * n_tokens**2)

    def decode_at_s(self, cached_tokens: float) -> float:
        """Decode of one token, per block, with ``cached_tokens`` in the attention cache before the step."""
        return self.decode_s + self.context_slope_s * (cached_tokens - self.decode_context_tokens)

    def step_s(self, position: float, n_tokens: int, n_blocks: int) -> float:
        """A whole step alone: ``n_tokens`` at ``position`` (0: the prefill), which is the number of tokens cached.

        Several tokens above position 0 (a replay) are decoded one after another.
        """
        if not position:
            return self.step_base_s + n_blocks * self.prefill_s(n_tokens)
        return self.step_base_s + n_blocks * n_tokens * self.decode_at_s(position + (n_tokens - 1) / 2)

    def batch_s(self, n_blocks: int, positions: Sequence[int], prompt: range) -> float:
        """A step of several sessions: a decode each at ``positions``, and the tokens ``prompt`` of one prompt.

        ``positions`` count the tokens cached before the step; ``prompt`` may be empty, or a part (a chunk). One decode
        alone, or a whole prompt alone, takes as long as ``step_s`` says.
        """
        block_s, n = 0.0, len(positions)
        if prompt:
            straight_s = self.prefill_base_s + self.prefill_slope_s * len(prompt)
            curve_s = self.prefill_curve_s * (prompt.stop**2 - prompt.start**2)
            block_s += max(self.prefill_least_s, straight_s + curve_s)
        if n:
            block_s += self.decode_s + self.session_slope_s * (n - 1)
            block_s += self.context_slope_s * (sum(positions) - self.decode_context_tokens)
        return self.step_base_s + n_blocks * block_s


@dataclass(frozen=True)
class StepTimes(StepLaw):
    """The numbers alone."""

    decode_s: float
    prefill_base_s: float
    prefill_slope_s: float
    step_base_s: float = 0.0
    context_slope_s: float = 0.0
    prefill_curve_s: float = 0.0
    contention_ratio: float = 0.0
    session_slope_s: float = 0.0
    prefill_least_s: float = 0.0
    decode_context_tokens: float = 0.0
