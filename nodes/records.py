"""What a client records of a token: one type from the session to the tables of a run."""

from __future__ import annotations

from typing import NamedTuple


class HopRecord(NamedTuple):
    """One message to a server and its answer. Instants are scenario seconds, blocks half-open, sizes bytes."""

    server: int
    first: int
    last: int
    sent_at_s: float
    arrived_at_s: float
    departed_at_s: float
    received_at_s: float
    up_bytes: int
    down_bytes: int
    replayed_tokens: int = 0
    """Tokens of a history that it replayed; 0: it was no replay."""
