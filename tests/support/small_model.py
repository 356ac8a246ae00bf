"""The tables of a small model and of hardware that holds two of its four blocks, for scenarios about links."""

from typing import Any

SMALL_MODEL: dict[str, Any] = {
    "name": "small",
    "n_blocks": 4,
    "hidden_size": 4096,
    "value_bytes": 2,
    "block_size": "100 MB",
    "cache_per_token": "1 kB",
}
SMALL_HARDWARE = {
    "memory": "250 MB",
    "decode": "3 ms",
    "prefill_base": "1 ms",
    "prefill_per_token": "10 us",
}
