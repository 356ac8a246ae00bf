"""Objectives (``ttft=5s,tpot=1s``) and the goodput under them."""

from __future__ import annotations

from typing import Any

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
        if name.strip() in objectives:
            raise UserError(f"--slo: {name.strip()} is given twice; keep one")
        try:
            objectives[name.strip()] = DURATION.parse(value.strip())
        except ValueError as error:
            raise UserError(f"--slo {name.strip()}: {error}") from error
    return objectives


def goodput_rps(rows: list[dict[str, Any]], objectives: dict[str, float]) -> float | None:
    """Completed requests per second that met every objective, from the first arrival to the last end.

    A metric that a request does not have (``tpot_s`` of a single token) fails no objective. Failed
    requests count as not good, and their arrivals count as time.
    """
    done = [row for row in rows if row["status"] == "completed"]
    if not done:
        return None
    good = [row for row in done if all((row[f"{k}_s"] or 0.0) <= v for k, v in objectives.items())]
    began_at_s = min(row["arrived_at_s"] for row in rows if row["arrived_at_s"] is not None)
    span_s = max(row["arrived_at_s"] + row["e2e_s"] for row in done) - began_at_s
    return len(good) / span_s if span_s > 0 else None
