"""What the scenarios of these parts share: servers and client in one place, and hardware that nobody has measured."""

from __future__ import annotations

from typing import Any

GUESSED = {
    "decode": "1 ms",
    "prefill_base": "1 ms",
    "prefill_per_token": "0.02 ms",
    "petals_forward_rps": 2000,
    "petals_network_rps": 400,
}
"""What policies plan with when there is no calibration; with one kind of server they plan the same."""
SITE = "Here"


def one_place() -> dict[str, Any]:
    """``[clients]`` and ``[network]`` of a scenario whose servers are at ``SITE``."""
    pair = {"sites": [SITE, SITE], "rtt": "2 ms", "rate": "10 Gbit/s"}
    return {"clients": {"site": SITE}, "network": {"kind": "clusters", "pairs": [pair]}}
