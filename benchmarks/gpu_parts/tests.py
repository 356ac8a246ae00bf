"""The project's tests that need a GPU."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

from benchmarks.gpu_parts.record import Record

_ROOT = Path(__file__).resolve().parents[2]


def run(record: Record) -> None:
    if record.job.device == "cpu":
        record.find("Not here: a GPU, which these tests need.")
        return
    if importlib.util.find_spec("pytest") is None:
        record.find("Not here: pytest (pip install '.[dev]' in the checkout).")
        return
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        "gpu",
        "tests/unit/blocks",
    ]
    try:
        done = subprocess.run(
            command,
            cwd=_ROOT,
            env={**os.environ, "TESTBED_REQUIRE": "gpu"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=max(1.0, record.job.left_s),
            check=False,
        )
    except subprocess.TimeoutExpired:
        record.fail("The tests did not end in time.")
        return
    print(done.stdout)
    last = (done.stdout.strip().splitlines() or ["no output"])[-1]
    (record.fail if done.returncode else record.find)(f"Tests marked gpu: {last}.")
