"""The numbers that the paper prints (``paper_numbers.toml``)."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

from testbed.studies.reproduce.settings import COLUMNS, PLACES

METRICS = {
    "per_token_s": "Time per token, all tokens",
    "ttft_s": "First token",
    "rest_s": "Each remaining token",
}
PRINTED_POLICIES = ("petals", "proposed")
MISMATCH_RATIO = 0.05
"""Printed times that differ by more than this from the sum of their printed parts are reported."""


class Mismatch(NamedTuple):
    """A printed time per token that contradicts the printed times of the first and the remaining tokens."""

    place: str
    policy: str
    rate: float
    n_output_tokens: int
    printed_s: float
    from_parts_s: float


@cache
def _document() -> dict[str, Any]:
    resource = resources.files("testbed.studies.reproduce") / "paper_numbers.toml"
    return tomllib.loads(resource.read_text(encoding="utf-8"))


def printed_s(metric: str, place: str, policy: str, column: int, kind: str = "simulated") -> float:
    """Returns a printed number in seconds. ``column``: index into ``COLUMNS``; ``kind``: simulated or
    measured.
    """
    return float(_document()[metric][place][policy][kind][column])


def printed_decision_s(place: str, policy: str) -> tuple[float, float]:
    """Returns an algorithm's printed run time in MATLAB, in seconds: (mean, the number after +-).

    The clustered places have one number together, under ``clustered``.
    """
    mean_s, plus_minus_s = _document()["decision_s"][place][policy]
    return float(mean_s), float(plus_minus_s)


def printed_blocks(policy: str) -> tuple[int, int]:
    """Returns the number of blocks that the paper reports for its placements: (on an A100, on a MIG)."""
    found = _document()["n_blocks"][policy]
    return int(found["a100"]), int(found["mig-1g"])


def mismatches() -> list[Mismatch]:
    """Returns the simulated times per token that differ from (first + (l - 1) remaining) / l by more than
    ``MISMATCH_RATIO``."""
    found = []
    for place in PLACES:
        for policy in PRINTED_POLICIES:
            for column, (rate, n_output) in enumerate(COLUMNS):
                total_s = printed_s("per_token_s", place, policy, column)
                first_s = printed_s("ttft_s", place, policy, column)
                rest_s = printed_s("rest_s", place, policy, column)
                from_parts_s = (first_s + (n_output - 1) * rest_s) / n_output
                if abs(from_parts_s / total_s - 1) > MISMATCH_RATIO:
                    found.append(Mismatch(place, policy, rate, n_output, total_s, from_parts_s))
    return found
