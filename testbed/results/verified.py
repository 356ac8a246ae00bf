"""Reads whether the tokens of a run with real blocks are those of the whole model on one machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from testbed.scenario.experiment import Experiment

VERIFY = "verify.json"
"""Written after a run with real blocks; see ``testbed.runs.verify``."""

_STUB = "the stub's client compares every token itself, and fails a request with a wrong one"


def unchecked(reason: str) -> dict[str, Any]:
    """Return a result without a comparison, with the reason why there is none."""
    return {
        "n_tokens_checked": None,
        "n_tokens_altered": None,
        "n_tokens_tied": None,
        "tokens_unchecked_because": reason,
    }


def ties(verification: dict[str, Any]) -> str:
    """Return a clause on the tokens that differ only by a tie of two logits; empty if there are none."""
    n_tied = verification.get("n_tokens_tied")  # not in records of earlier versions
    return f" ({n_tied} of them by a tie of two logits)" if n_tied else ""


def read_verification(run_dir: Path, experiment: Experiment) -> dict[str, Any]:
    """Return ``{n_tokens_checked, n_tokens_altered, n_tokens_tied, tokens_unchecked_because}``.

    After a comparison, ``altered`` lists altered tokens, too.
    """
    if experiment.compute.blocks is None:
        return unchecked(_STUB)
    try:
        return dict(json.loads((run_dir / VERIFY).read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return unchecked("the run did not come to its end")
