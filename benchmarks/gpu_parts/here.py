"""Parts of scenarios that are shared: servers and client at one site, and hardware with guessed times."""

from __future__ import annotations

from typing import Any

GUESSED = {
    "decode": "1 ms",
    "prefill_base": "1 ms",
    "prefill_per_token": "0.02 ms",
    "petals_forward_rps": 2000,
    "petals_network_rps": 400,
}
"""Times that policies use if there is no calibration. With only one kind of server they do not change the
placement.
"""
SITE = "Here"


def one_place() -> dict[str, Any]:
    """Returns ``[clients]`` and ``[network]`` of a scenario whose servers are all at ``SITE``."""
    pair = {"sites": [SITE, SITE], "rtt": "2 ms", "rate": "10 Gbit/s"}
    return {"clients": {"site": SITE}, "network": {"kind": "clusters", "pairs": [pair]}}
