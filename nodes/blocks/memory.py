"""A server's memory for blocks and attention caches: ``s_m m_j + s_c sum k <= M_j``, kept exactly."""

from __future__ import annotations

import threading

from nodes.cache import ROUNDING
from nodes.compute import ComputeError

_STATES_BYTES = 2 * 1024**3 / 14336
"""Bytes per unit of the hidden size for a step's hidden states and attention scores, as in PETALS."""

_STREAM_BYTES = 96 * 1024**2
"""Bytes that a CUDA stream takes with any model.

cuBLAS and cuBLASLt keep 32 MiB each on Hopper. torch's allocator has a pool per stream, which takes 2 MiB for
small tensors and 20 MiB at a time for larger ones.
"""


def states_bytes(hidden_size: int) -> float:
    """Returns the bytes that a server reserves for hidden states and attention scores of its steps."""
    return _STATES_BYTES * hidden_size


def prefill_bytes(hidden_size: int, n_streams: int) -> float:
    """Returns the part of ``states_bytes`` that each of ``n_streams`` steps at once may use.

    A quarter is left over: allocators never fill all memory.
    """
    return 0.75 * states_bytes(hidden_size) / n_streams


def step_bytes(n_heads: int, hidden_size: int, feed_forward: int, context: int, value_bytes: int) -> float:
    """Returns the most bytes that one token of a step takes while a block computes it.

    ``context`` tokens are in the cache after the step, ``feed_forward`` is the width of the feed-forward
    layer, ``value_bytes`` the size of the dtype. Eager attention holds its scores three times in the dtype
    and once in float32; the activation of BLOOM's feed-forward layer has five temporaries of its width.
    """
    attention = n_heads * context * (3 * value_bytes + 4)
    return float(attention + value_bytes * (5 * feed_forward + 10 * hidden_size))


def workspace_bytes(hidden_size: int, largest_matrix_bytes: int, n_streams: int) -> float:
    """Returns the bytes of a GPU that a server takes beside blocks and caches.

    ``largest_matrix_bytes`` is for a quantised matrix that each stream restores while it computes; 0 if there is none.
    Loading blocks and opening sessions, both in the default stream, count as one stream each, beside the
    ``n_streams`` that compute.
    """
    return states_bytes(hidden_size) + largest_matrix_bytes * n_streams + _STREAM_BYTES * (n_streams + 2)


class MemoryAccount:
    """Bytes reserved for blocks and for caches, together at most ``limit_bytes`` (may be infinite).

    Thread-safe.
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
        """Reserves memory for ``n_blocks``. Raises ``ComputeError`` with how many would fit.

        ``available_bytes`` is free on the device, which may be less than the limit leaves.
        """
        with self._lock:
            free_bytes = min(self.free_bytes, available_bytes)
            if n_blocks * block_bytes > free_bytes * ROUNDING:
                raise ComputeError(
                    f"{n_blocks} blocks of {amount(block_bytes)} need {amount(n_blocks * block_bytes)} and "
                    f"{amount(free_bytes)} are free: {int(free_bytes // block_bytes)} would fit"
                )
            self.blocks_bytes += n_blocks * block_bytes

    def give_blocks(self, n_bytes: int) -> None:
        """Releases ``n_bytes`` of blocks. A negative number reserves more, without a check."""
        with self._lock:
            self.blocks_bytes -= n_bytes

    def take_cache(self, n_bytes: int) -> None:
        """Reserves ``n_bytes`` for a session's cache. Raises ``ComputeError`` if they are not free."""
        with self._lock:
            if n_bytes > self.free_bytes * ROUNDING:
                raise ComputeError(
                    f"a cache of {amount(n_bytes)} is needed and {amount(self.free_bytes)} are free"
                )
            self.cache_bytes += n_bytes

    def give_cache(self, n_bytes: int) -> None:
        with self._lock:
            self.cache_bytes -= n_bytes


def amount(n_bytes: float) -> str:
    """Returns a number of bytes for people: ``1.32 GB``."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if n_bytes >= size:
            return f"{n_bytes / size:.3g} {unit}"
    return f"{n_bytes:.0f} B"
