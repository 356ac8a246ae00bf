"""A server's memory for blocks and attention caches: ``s_m m_j + s_c sum k <= M_j``, kept exactly."""

from __future__ import annotations

import threading

from nodes.compute import ComputeError

_SLACK_RATIO = 1e-9
"""As much as a server's cache account grants: rounding never refuses what was promised."""

_STATES_BYTES = 2 * 1024**3 / 14336
"""Per unit of the hidden size: hidden states and attention scores of a step. PETALS sets as much aside."""

_STREAM_BYTES = 96 * 1024**2
"""What a stream takes whatever the model: cuBLAS and cuBLASLt keep 32 MiB each on Hopper, and torch's allocator,
which has a pool per stream, takes 2 MiB for small tensors and 20 MiB at a time for larger ones."""


def states_bytes(hidden_size: int) -> float:
    """What a server sets aside for hidden states and attention scores while it computes, beside blocks and caches."""
    return _STATES_BYTES * hidden_size


def prefill_bytes(hidden_size: int, n_streams: int) -> float:
    """What of that one of the steps may take that ``n_streams`` compute at once: no allocator fills its memory to the last byte."""
    return 0.75 * states_bytes(hidden_size) / n_streams


def step_bytes(n_heads: int, hidden_size: int, feed_forward: int, context: int, value_bytes: int) -> float:
    """What a token of a step takes at most while a block computes it, if ``context`` tokens are cached after it.

    ``feed_forward`` is the width of the feed-forward. Eager attention has its scores three times in the dtype and
    once in float32; the activation of BLOOM's feed-forward has five temporaries of its width.
    """
    attention = n_heads * context * (3 * value_bytes + 4)
    return float(attention + value_bytes * (5 * feed_forward + 10 * hidden_size))


def workspace_bytes(hidden_size: int, largest_matrix_bytes: int, n_streams: int) -> float:
    """What a server takes of a GPU beside blocks and caches.

    ``largest_matrix_bytes``: of a quantised matrix that each stream makes again while it computes, else 0. Loading blocks
    and opening sessions, in the default stream, count as one each beside the ``n_streams`` that compute.
    """
    return states_bytes(hidden_size) + largest_matrix_bytes * n_streams + _STREAM_BYTES * (n_streams + 2)


class MemoryAccount:
    """Bytes taken by blocks and by caches, never more than ``limit_bytes`` together. Safe to share by threads.

    The limit is infinite where nobody has set one.
    """

    def __init__(self, limit_bytes: float) -> None:
        self.limit_bytes = limit_bytes
        self.blocks_bytes = 0
        self.cache_bytes = 0
        self._lock = threading.Lock()

    @property
    def free_bytes(self) -> float:
        return max(0.0, self.limit_bytes - self.blocks_bytes - self.cache_bytes)

    def take_blocks(self, n_blocks: int, block_bytes: int, available_bytes: float) -> None:
        """Set ``n_blocks`` aside. Raises ``ComputeError``, which says how many would fit.

        ``available_bytes`` is what the device has left, whatever the limit.
        """
        with self._lock:
            free_bytes = min(self.free_bytes, available_bytes)
            if n_blocks * block_bytes > free_bytes * (1 + _SLACK_RATIO):
                raise ComputeError(
                    f"{n_blocks} blocks of {amount(block_bytes)} need {amount(n_blocks * block_bytes)} and "
                    f"{amount(free_bytes)} are free: {int(free_bytes // block_bytes)} would fit"
                )
            self.blocks_bytes += n_blocks * block_bytes

    def give_blocks(self, n_bytes: int) -> None:
        """Give back; a negative number corrects what had been set aside to what was really taken."""
        with self._lock:
            self.blocks_bytes -= n_bytes

    def take_cache(self, n_bytes: int) -> None:
        """Set a session's cache aside. Raises ``ComputeError``."""
        with self._lock:
            if n_bytes > self.free_bytes * (1 + _SLACK_RATIO):
                raise ComputeError(
                    f"a cache of {amount(n_bytes)} is asked for and {amount(self.free_bytes)} are free"
                )
            self.cache_bytes += n_bytes

    def give_cache(self, n_bytes: int) -> None:
        with self._lock:
            self.cache_bytes -= n_bytes


def amount(n_bytes: float) -> str:
    """Bytes as a person reads them: ``1.32 GB``."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if n_bytes >= size:
            return f"{n_bytes / size:.3g} {unit}"
    return f"{n_bytes:.0f} B"
