"""Rows of small runs made by hand: every number in them is known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

MakeRun = Callable[..., Path]
HOP_S = {"hop_compute_s": 0.3, "hop_network_s": 0.1, "hop_client_s": 0.1}
"""The parts of every hop unless a test says otherwise: half a second."""


def request(number: int, **changes: Any) -> dict[str, Any]:
    """A completed request of 2 input and 3 output tokens over one server, half a second each."""
    row = {
        "request": number,
        "client": "client-0",
        "status": "completed",
        "reason": "",
        "arrival_at_s": float(number),
        "n_input_tokens": 2,
        "n_output_tokens": 3,
        "chain": "0:0-4",
        "per_token_s": 0.6,
        "ttft_s": 0.8,
        "tpot_s": 0.5,
        "e2e_s": 1.8,
        "queue_s": 0.0,
    }
    row |= changes
    return {"n_tokens_done": row["n_output_tokens"] if row["status"] == "completed" else 0} | row


def failed(number: int, reason: str) -> dict[str, Any]:
    """A request that got nowhere."""
    nothing = dict.fromkeys(("per_token_s", "ttft_s", "tpot_s", "e2e_s", "queue_s"))
    return request(number, status="failed", reason=reason, chain="", **nothing)


def hops_of(
    requests: Sequence[dict[str, Any]], server: str = "a", n_blocks: int = 4, **parts_s: float
) -> list[dict[str, Any]]:
    """One hop per token of every request."""
    rows = []
    for row in requests:
        for token in range(row["n_output_tokens"]):
            key = {"request": row["request"], "token": token, "hop": 0, "server": server}
            rows.append(key | {"first_block": 0, "last_block": n_blocks} | HOP_S | parts_s)
    return rows
