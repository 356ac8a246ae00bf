"""Results that are kept for the next time, up to a limit."""

from __future__ import annotations

from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


def remember(known: dict[K, V], key: K, value: V, most: int) -> V:
    """Stores ``value`` in ``known``, which first forgets all if it has ``most`` values; returns ``value``."""
    if len(known) >= most:
        known.clear()
    known[key] = value
    return value
