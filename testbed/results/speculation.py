"""What speculative decoding came to in a run."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET, UnsetType

from policies.decoding import Decoding
from testbed.experiments.units import counted
from testbed.records.requests import RequestRow
from testbed.records.summary import Speculation


def speculation_of(decoding: Decoding | None, rows: Sequence[RequestRow]) -> Speculation | UnsetType:
    """Return the figures of all rounds of the requests; ``UNSET`` without speculative decoding.

    A request's first token is the prompt's, and every further one a round's.
    """
    if decoding is None:
        return UNSET
    n_rounds, n_drafted, n_accepted, n_given_up = (
        sum(getattr(row, name) or 0 for row in rows)
        for name in ("n_rounds", "n_drafted", "n_accepted", "n_given_up")
    )
    n_made = sum(max(row.n_tokens_done - 1, 0) for row in rows)
    return Speculation(
        drafter=decoding.drafter,
        n_rounds=n_rounds,
        n_drafted=n_drafted,
        n_accepted=n_accepted,
        n_given_up=n_given_up,
        tokens_per_round=n_made / n_rounds if n_rounds else None,
        acceptance_ratio=n_accepted / n_drafted if n_drafted else None,
    )


def speculation_text(figures: Speculation | UnsetType) -> list[str]:
    """Return the line about it; none without speculative decoding."""
    if isinstance(figures, UnsetType) or figures.tokens_per_round is None:
        return []
    accepted = figures.acceptance_ratio
    rounds = counted(figures.n_rounds, "rounds")
    text = f"drafts ({figures.drafter}): {figures.tokens_per_round:.2f} tokens per round in {rounds}"
    if accepted is not None:
        text += f"; {accepted:.1%} of {figures.n_drafted:,} drafted tokens agreed"
    if figures.n_given_up:
        text += f"; {figures.n_given_up:,} rounds more were sent ahead in vain"
    return [text]
