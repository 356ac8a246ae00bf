"""One measured figure."""

from __future__ import annotations

from typing import Any


def figure(name: str, value: float, unit: str, goal: str = "") -> dict[str, Any]:
    """Returns a measured figure, with ``value`` rounded to four significant digits. ``goal``: the target, as
    text.
    """
    return {"name": name, "value": float(f"{value:.4g}"), "unit": unit, "goal": goal}
