"""What is known of a run's tokens: whether they are those of the whole model on one machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from testbed.scenario.experiment import Experiment

VERIFY = "verify.json"
"""Written after a run with real blocks; see ``testbed.runs.verify``."""

_STUB = "the stub's client compares every token itself, and fails a request with a wrong one"


def unchecked(reason: str) -> dict[str, Any]:
    """An answer that holds no comparison, and why."""
    return {
        "n_tokens_checked": None,
        "n_tokens_altered": None,
        "n_tokens_tied": None,
        "tokens_unchecked_because": reason,
    }


def ties(verification: dict[str, Any]) -> str:
    """A clause on those tokens that are the whole model's but for a tie; empty where there is none."""
    n_tied = verification.get("n_tokens_tied")  # not in records of earlier versions
    return f" ({n_tied} of them by a tie of two logits)" if n_tied else ""


def read_verification(run_dir: Path, experiment: Experiment) -> dict[str, Any]:
    """``{n_tokens_checked, n_tokens_altered, n_tokens_tied, tokens_unchecked_because}``, and which were ``altered``."""
    if experiment.blocks is None:
        return unchecked(_STUB)
    try:
        return dict(json.loads((run_dir / VERIFY).read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return unchecked("the run did not come to its end")
