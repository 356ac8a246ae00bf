"""Reads whether the tokens of a run with real blocks are those of the whole model on one machine."""

from __future__ import annotations

from pathlib import Path

import msgspec
from msgspec import UnsetType

from testbed.experiments.experiment import Experiment
from testbed.records.summary import RunSummary, Verification

VERIFY = "verify.json"
"""Written after a run with real blocks; see ``testbed.runs.verify``."""

MOST_TIED_RATIO = 0.05
"""Rounding decides fewer tokens than this; a run with more ties, and more than one, counts as wrong."""
_STUB = "the stub's client compares every token itself, and fails a request with a wrong one"


def unchecked(reason: str) -> Verification:
    """Return a result without a comparison, with the reason why there is none."""
    return Verification(tokens_unchecked_because=reason)


def ties(n_tied: int | UnsetType | None) -> str:
    """Return a clause on the tokens that differ only by a tie of two logits; empty if there are none."""
    return f" ({n_tied} of them by a tie of two logits)" if n_tied else ""


def too_many_ties(n_checked: int | UnsetType | None, n_tied: int | UnsetType | None) -> str:
    """Return a sentence if more tokens are tied than rounding explains; else an empty string."""
    if not n_checked or not n_tied or n_tied == 1 or n_tied <= MOST_TIED_RATIO * n_checked:
        return ""
    return (
        f"{n_tied} of {n_checked} tokens differ from those of the whole model by a tie of two logits: more than "
        f"{100 * MOST_TIED_RATIO:g} % is not rounding alone, so the tokens count as wrong"
    )


def verdict(summary: RunSummary | Verification) -> str:
    """Return whether the tokens of a run with real blocks are those of the whole model."""
    checked, altered, tied = summary.n_tokens_checked, summary.n_tokens_altered, summary.n_tokens_tied
    if checked is None:
        return f"tokens were not compared with the whole model's: {summary.tokens_unchecked_because}"
    if altered:
        return f"{altered} of {checked} tokens are NOT those of the whole model on one machine"
    return too_many_ties(checked, tied) or (
        f"all {checked} tokens are those of the whole model on one machine{ties(tied)}"
    )


def read_verification(run_dir: Path, experiment: Experiment) -> Verification:
    """Return the result of the comparison of a run, or why there is none."""
    if experiment.compute.blocks is None:
        return unchecked(_STUB)
    try:
        return msgspec.json.decode((run_dir / VERIFY).read_bytes(), type=Verification)
    except (OSError, msgspec.MsgspecError):
        return unchecked("the run did not come to its end")
