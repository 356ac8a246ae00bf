"""Drafting without a model: what followed the last tokens when they came up before (prompt lookup)."""

from __future__ import annotations

from collections.abc import Sequence

LONGEST = 3
"""Most of the last tokens that are looked for together."""


def continued(tokens: Sequence[int], n_tokens: int) -> list[int]:
    """Returns at most ``n_tokens`` tokens that may follow ``tokens``.

    They are those that followed the latest earlier place of the last ``LONGEST`` tokens, or of fewer of them if those
    have none. If fewer than ``n_tokens`` followed, what is found so far is continued likewise. Empty if even the last token
    is new.
    """
    found = list(tokens)
    while len(found) < len(tokens) + n_tokens:
        start = _continuation(found)
        if start is None:
            break
        found += found[start : start + len(tokens) + n_tokens - len(found)]
    return found[len(tokens) :]


def _continuation(tokens: Sequence[int]) -> int | None:
    """Returns the index after the latest earlier place of the last tokens; ``None`` if there is none."""
    for size in range(min(LONGEST, len(tokens) - 1), 0, -1):
        last = tokens[-size:]
        for start in range(len(tokens) - size - 1, -1, -1):
            if tokens[start] == last[0] and tokens[start : start + size] == last:
                return start + size
    return None
