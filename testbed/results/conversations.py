"""What conversations wait for, turn by turn, and what kept caches save."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec import UNSET, UnsetType

from testbed.records.requests import RequestRow
from testbed.records.summary import PrefixUse, Stats
from testbed.results.requests import stats, values_of

_MOST_SHOWN = 6
"""Turns that the text shows one by one."""


def prefix_use(rows: Sequence[RequestRow]) -> PrefixUse | UnsetType:
    """Return what was reused of the prompts of all admitted requests; absent where no cache outlives its request."""
    known = [(row.n_cached_tokens, row.n_input_tokens) for row in rows if row.n_cached_tokens is not None]
    if not known:
        return UNSET
    n_reused = sum(n for n, _ in known)
    return PrefixUse(hit_ratio=n_reused / sum(n for _, n in known), tokens_reused=n_reused)


def ttft_by_turn(rows: Sequence[RequestRow]) -> list[Stats] | UnsetType:
    """Return statistics of ``ttft_s`` of every turn, in order; absent without conversations."""
    of_turn: dict[int, list[RequestRow]] = {}
    for row in rows:
        if row.turn is not None:
            of_turn.setdefault(row.turn, []).append(row)
    if not of_turn:
        return UNSET
    return [stats(values_of(of_turn.get(turn, ()), "ttft_s")) for turn in range(max(of_turn) + 1)]


def conversations_text(prefix: PrefixUse | UnsetType, turns: Sequence[Stats] | UnsetType) -> Iterator[str]:
    """Yield sentences for people."""
    if prefix:
        yield (
            f"kept caches: {prefix.hit_ratio:.1%} of the prompts' tokens were not computed anew "
            f"({prefix.tokens_reused:,} tokens)"
        )
    if turns:
        shown = ", ".join("-" if turn.mean is None else f"{turn.mean:.3g}" for turn in turns[:_MOST_SHOWN])
        more = f" and {len(turns) - _MOST_SHOWN} more" if len(turns) > _MOST_SHOWN else ""
        yield f"first token by turn, in s (mean): {shown}{more}"
