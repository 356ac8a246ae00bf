"""Fits memory against blocks and sessions: the size of a block (the model's s_m) and of a cached
token (s_c).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from testbed.studies.calibrate.linear import Estimate, LinearFit, fit_linear


@dataclass(frozen=True)
class MemorySample:
    """``used_bytes`` with ``n_blocks`` loaded and ``n_sessions`` open, each with ``session_tokens`` on all
    blocks.
    """

    n_blocks: int
    n_sessions: int
    session_tokens: int
    used_bytes: float


@dataclass(frozen=True)
class MemoryFit:
    """The fit of ``base + s_m k + cache k n l`` to memory in bytes, with k blocks and n sessions of l tokens.

    ``base``: memory without blocks; ``s_m``: of a block; ``cache``: of a cached token in a block.
    """

    samples: tuple[MemorySample, ...]
    fit: LinearFit

    @property
    def base_bytes(self) -> Estimate:
        return self.fit.estimates["base_bytes"]

    @property
    def block_bytes(self) -> Estimate:
        return self.fit.estimates["block_bytes"]

    @property
    def token_bytes(self) -> Estimate:
        return self.fit.estimates["cache_bytes_per_token"]

    def used_bytes(self, n_blocks: int, n_sessions: int, session_tokens: int) -> float:
        cached_tokens = n_sessions * session_tokens
        return self.base_bytes.value + n_blocks * (
            self.block_bytes.value + self.token_bytes.value * cached_tokens
        )


def fit_memory(samples: Sequence[MemorySample]) -> MemoryFit | None:
    """Fits memory. Returns None if no sample is above 0, as with a backend that does not measure its
    memory.
    """
    some = [s for s in samples if s.used_bytes > 0]
    if not some:
        return None
    columns: dict[str, list[float]] = {
        "block_bytes": [s.n_blocks for s in some],
        "cache_bytes_per_token": [s.n_blocks * s.n_sessions * s.session_tokens for s in some],
        "base_bytes": [1.0] * len(some),
    }
    return MemoryFit(tuple(some), fit_linear(columns, [s.used_bytes for s in some]))
