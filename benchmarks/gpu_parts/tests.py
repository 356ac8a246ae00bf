"""The project's tests that need a GPU."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

from benchmarks.gpu_parts.record import Record

_ROOT = Path(__file__).resolve().parents[2]
_CHOSEN = {
    "Tests marked gpu": ["-m", "gpu", "tests/unit/blocks"],
    "Tests of what is imported before a fork": ["tests/unit/blocks/test_preloading.py"],
}


def run(record: Record) -> None:
    if record.job.device == "cpu":
        record.find("Not here: a GPU, which these tests need.")
        return
    if importlib.util.find_spec("pytest") is None:
        record.find("Not here: pytest (pip install '.[dev]' in the checkout).")
        return
    env = {**os.environ, "TESTBED_REQUIRE": "gpu", **_only(record.job.device)}
    for what, chosen in _CHOSEN.items():
        _pytest(record, what, chosen, env)


def _only(device: str) -> dict[str, str]:
    """What has a process see that device alone; for ``cuda`` those that this one sees."""
    if device.startswith("cuda:"):
        visible, number = os.environ.get("CUDA_VISIBLE_DEVICES", ""), int(device.removeprefix("cuda:"))
        return {"CUDA_VISIBLE_DEVICES": visible.split(",")[number] if visible else str(number)}
    return {} if device == "cuda" else {"CUDA_VISIBLE_DEVICES": device}


def _pytest(record: Record, what: str, chosen: list[str], env: dict[str, str]) -> None:
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen],
            cwd=_ROOT,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=max(1.0, record.job.left_s),
            check=False,
        )
    except subprocess.TimeoutExpired:
        record.leave(f"{what}: they did not end in time.")
        return
    print(done.stdout)
    last = (done.stdout.strip().splitlines() or ["no output"])[-1]
    (record.fail if done.returncode else record.find)(f"{what}: {last}.")
