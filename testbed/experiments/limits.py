"""The largest scenarios and values that are accepted. Beyond them floats are too coarse, or memory runs out.

At 1e9 s a float of seconds still has steps of about 0.1 us; service times are milliseconds.
"""

from __future__ import annotations

import math

from testbed.experiments.problems import Key, KeyedError

MAX_DURATION_S = 1e9
MAX_SIZE_BYTES = 1e18
MAX_RATE_BPS = 1e15
MAX_NUMBER = 1e15
"""Largest number without a unit, such as requests per second. Its inverse is the smallest positive one."""
MAX_REQUESTS = 10_000_000
MAX_NODES = 100_000
MAX_LINKS = 10_000_000
MAX_TRACE_STEPS = 1_000_000
"""Most steps of one trace of links."""
MAX_LINK_CHANGES = 5_000_000
"""Most changes that a trace makes with its repetitions, those of each pair of nodes counted; some 100 bytes each."""
MAX_BLOCKS = 10_000
MAX_TOKENS = 10_000_000
MAX_DRAFTED = 1_000
"""Most tokens that a client drafts per round."""
MAX_IN_FLIGHT = 16
"""Most rounds of a session that are away at a time."""
MAX_HIDDEN_SIZE = 10_000_000
MAX_TOML_BYTES = 512 * 1024**2
"""Large enough for a resolved scenario, which lists the requests of its trace: up to ten million rows."""
MAX_KEY_PARTS = 32
"""Most parts of a dotted key, or of a table's name."""


def too_late(last_at_s: float) -> str | None:
    """Return what is wrong with a last arrival at ``last_at_s``; ``None`` if it is early enough."""
    if last_at_s <= MAX_DURATION_S:
        return None
    when = f"at {last_at_s:.3g} s" if math.isfinite(last_at_s) else "never"
    return f"puts the last request {when}; arrivals must end within {MAX_DURATION_S:,.0f} s, about 30 years"


def check_counts(n_servers: int, n_clients: int) -> None:
    """Raise ``KeyedError`` for too many nodes, or too many links between them."""
    key: Key = ("servers",) if n_servers >= n_clients else ("clients",)
    if n_servers + n_clients > MAX_NODES:
        raise KeyedError(
            key,
            f"{n_servers:,} servers and {n_clients:,} clients are too many; at most {MAX_NODES:,} nodes "
            "in total are allowed, so lower a count",
        )
    n_links = n_servers * (n_servers + n_clients)
    if n_links > MAX_LINKS:
        raise KeyedError(
            key,
            f"{n_servers:,} servers and {n_clients:,} clients have {n_links:,} links between them; at most "
            f"{MAX_LINKS:,} are allowed, so lower a count",
        )
