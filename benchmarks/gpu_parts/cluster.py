"""Nine servers that share the device and are killed while they work: checks tokens, recoveries and memory.

It runs the shipped scenario ``clustered-gpu``, at small size with a tiny model. Every token is compared with
the whole model's on the same device. Afterwards the device must have as much free memory as before.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from benchmarks.gpu_parts.commands import up
from benchmarks.gpu_parts.record import Record
from nodes.blocks.device import available_bytes, open_device
from nodes.blocks.memory import amount

_SMALL = {
    "model": '{ family = "bloom", n_blocks = 8, hidden_size = 64, heads = 4, vocab = 512 }',
    "servers.0.memory": "0.8 MB",
    "servers.1.memory": "1.6 MB",
    "compute.dtype": "float32",
    "workload.n_requests": "6",
    "workload.n_output_tokens": "24",
    "churn.mtbf": "3 s",
    "churn.mttr": "4 s",
}
_KEPT = (
    "n_requests", "n_completed", "failed_because", "network", "startup_s", "n_faults", "n_replays", "recovery_s",
    "n_tokens_checked", "n_tokens_altered", "tokens_unchecked_because", "leaks", "memory", "metrics",
)  # fmt: skip
_FREED_RATIO = 0.01
"""This share of the free memory may be missing afterwards, since the driver keeps some."""
_FREED_WITHIN_S = 20.0


def run(record: Record) -> None:
    job = record.job
    device, _ = open_device(job.device, "float32")
    free_before = available_bytes(device)
    settings = {"compute.backend": "blocks", "compute.device": job.device, **(_SMALL if job.is_small else {})}
    options = ["--no-twin"]  # nothing here is compared with it
    options += [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    summary = up("clustered-gpu", job.folder / "cluster", options, job.left_s)
    record.put(settings=settings, **{key: summary[key] for key in _KEPT if key in summary})
    if device.type == "cuda":
        _check_freed(record, free_before, lambda: available_bytes(device))
    _conclude(record, summary)


def _check_freed(record: Record, free_before: float, free_now: Callable[[], float]) -> None:
    until_s = time.monotonic() + _FREED_WITHIN_S
    while (free := free_now()) < free_before * (1 - _FREED_RATIO) and time.monotonic() < until_s:
        time.sleep(0.5)
    record.put(free_before_bytes=free_before, free_after_bytes=free)
    words = f"Free memory of the device: {amount(free_before)} before and {amount(free)} after."
    (record.find if free >= free_before * (1 - _FREED_RATIO) else record.fail)(words)


def _conclude(record: Record, summary: dict[str, Any]) -> None:
    record.find(
        f"{summary['n_completed']} of {summary['n_requests']} requests completed on {summary['network']}; "
        f"{summary['n_faults']} servers were killed, sessions replayed {summary['n_replays']} times."
    )
    if summary["n_completed"] < summary["n_requests"]:
        record.fail(f"Requests failed: {summary['failed_because']}.")
    record.say_tokens(summary)
    if any(summary["leaks"].values()):
        record.fail(f"Something was left: {summary['leaks']}.")
