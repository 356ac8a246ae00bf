"""Times of copying hidden states to the device and back: through pinned memory as servers do, and with plain
copies.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks.gpu_parts.record import Job
from nodes.blocks.device import from_bytes, open_device, to_bytes

_HIDDEN_SIZE, _DTYPE = 14336, "bfloat16"
TOKENS = (1, 20, 128, 1024)


def measure_copies(job: Job) -> list[dict[str, Any]]:
    """Returns one row per number of tokens: bytes, and median and 99th percentile of a round trip of either
    kind.

    On the CPU nothing is copied; then the rows have the times of converting the bytes.
    """
    device, dtype = open_device(job.device, _DTYPE)

    def pinned(payload: bytes, n_tokens: int) -> bytes:
        return to_bytes(from_bytes([payload], n_tokens, dtype, device))

    def pageable(payload: bytes, n_tokens: int) -> bytes:
        states = torch.frombuffer(bytearray(payload), dtype=dtype).reshape(n_tokens, -1).to(device)
        return bytes(states.cpu().view(torch.uint8).numpy().tobytes())

    rows = []
    for n_tokens in TOKENS[:2] if job.is_small else TOKENS:
        payload = os.urandom(n_tokens * _HIDDEN_SIZE * dtype.itemsize)
        row: dict[str, Any] = {"n_tokens": n_tokens, "n_bytes": len(payload)}
        repeats = 10 if job.is_small else 200
        for name, trip in (("pinned", pinned), ("pageable", pageable)):
            times = _times(trip, payload, n_tokens, repeats)
            row[f"{name}_p50_s"], row[f"{name}_p99_s"] = np.percentile(times, (50, 99)).tolist()
        rows.append(row)
    return rows


def _times(trip: Callable[[bytes, int], bytes], payload: bytes, n_tokens: int, repeats: int) -> list[float]:
    times = []
    for number in range(-5, repeats):  # the first five allocate memory and do not count
        began_at_s = time.perf_counter()
        answer = trip(payload, n_tokens)
        if number >= 0:
            times.append(time.perf_counter() - began_at_s)
        assert answer == payload, "a round trip must not change hidden states"
    return times
