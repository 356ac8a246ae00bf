"""Objectives for goodput: ``ttft=5s,tpot=1s``."""

from __future__ import annotations

from testbed.errors import UserError
from testbed.scenario.units import DURATION

NAMES = ("queue", "setup", "ttft", "tpot", "per_token", "e2e")


def parse_slo(text: str) -> dict[str, float]:
    """Metric name (without ``_s``) to its limit in seconds. Raises ``UserError``."""
    objectives: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        if name.strip() not in NAMES:
            raise UserError(f"--slo: no objective {name.strip()!r}; valid: {', '.join(NAMES)}")
        try:
            objectives[name.strip()] = DURATION.parse(value.strip())
        except ValueError as error:
            raise UserError(f"--slo {name.strip()}: {error}") from error
    return objectives
