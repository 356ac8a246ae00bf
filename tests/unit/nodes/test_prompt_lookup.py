"""Drafting by what followed the last tokens before."""

from __future__ import annotations

import pytest

from nodes.drafting import continued


@pytest.mark.parametrize(
    ("tokens", "n_tokens", "drafted"),
    [
        ([1, 2, 3, 4], 3, []),
        ([1, 2, 3, 1], 3, [2, 3, 1]),
        ([1, 2, 3, 9, 1, 2, 5, 9, 1, 2], 2, [5, 9]),
        ([4, 1, 2, 3, 8, 5, 2, 3, 7, 4, 1, 2, 3], 2, [8, 5]),
        ([7, 7], 4, [7, 7, 7, 7]),
        ([1, 2, 1], 0, []),
        ([1], 3, []),
    ],
    ids=["new", "one token", "the latest place", "the longest end", "goes on", "none asked", "no history"],
)
def test_a_draft_is_what_followed(tokens: list[int], n_tokens: int, drafted: list[int]) -> None:
    assert continued(tokens, n_tokens) == drafted
