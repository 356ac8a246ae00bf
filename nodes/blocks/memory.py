"""A server's memory for blocks and attention caches: ``s_m m_j + s_c sum k <= M_j``, kept exactly."""

from __future__ import annotations

import threading

from nodes.compute import ComputeError

_SLACK_RATIO = 1e-9
"""As much as a server's cache account grants: rounding never refuses what was promised."""


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
