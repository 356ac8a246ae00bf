"""Hostile input by the hundred thousand: ``python -m benchmarks fuzz --cases 100000 --seed 0``.

Cases go to seven targets: the codecs (``hostile_codec``), readers of files (``hostile_files``), a server (``hostile_server``), both ends of the
control plane (``hostile_control``), the forwarder (``hostile_packets``), and the endpoint of ``testbed
serve``, in this process (``hostile_endpoint``) and as a command (``hostile_serve``). Hypothesis generates
them in batches. For a batch that fails the target, the seed and the smallest failing case are printed; it can
be run alone: ``--target server --seed 12345 --cases 1``.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import resource
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from tests.stress.hostile_codec import CodecTarget
from tests.stress.hostile_control import ControlTarget
from tests.stress.hostile_endpoint import EndpointTarget
from tests.stress.hostile_files import FilesTarget
from tests.stress.hostile_packets import PacketTarget
from tests.stress.hostile_serve import ServeTarget
from tests.stress.hostile_server import ServerTarget

BATCH = 250
SHARES: dict[str, float] = {
    **{"codec": 0.2, "files": 0.15, "server": 0.2, "control": 0.145, "packets": 0.2, "endpoint": 0.1},
    "serve": 0.005,
}


class Target(Protocol):
    """A part of the testbed that receives hostile input."""

    name: str
    cases: st.SearchStrategy[Any]
    counts: Counter[str]

    def check(self, case: Any) -> None:
        """Sends the case to the target. Raises if the target breaks a promise."""
        ...

    def n_left(self) -> int:
        """Returns how many tasks or packets are still pending."""
        ...

    def close(self) -> None: ...


TARGETS: dict[str, Callable[[], Target]] = {
    "codec": CodecTarget,
    "files": FilesTarget,
    "server": ServerTarget,
    "control": ControlTarget,
    "packets": PacketTarget,
    "endpoint": EndpointTarget,
    "serve": ServeTarget,
}


def play(target: Target, n_cases: int, batch_seed: int, shrink: bool = True) -> None:
    """Plays one batch of cases. Raises the exception of the first failing case, made as small as possible."""
    phases = [Phase.generate, Phase.shrink] if shrink else [Phase.generate]

    @seed(batch_seed)
    @settings(
        max_examples=n_cases,
        database=None,
        deadline=None,
        phases=phases,
        suppress_health_check=list(HealthCheck),
    )
    @given(target.cases)
    def batch(case: Any) -> None:
        target.check(case)

    batch()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def memory_bytes() -> int:
    """Returns the resident memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * resource.getpagesize()


def fuzz(name: str, n_cases: int, first_seed: int) -> list[str]:
    """Plays ``n_cases`` against one target and prints the results. Returns the failures."""
    failures = []
    before = descriptors()
    target = TARGETS[name]()
    play(target, 20, first_seed)  # so that everything that is made only once exists before counting
    n_left, n_open, held = target.n_left(), descriptors(), memory_bytes()
    started_at = time.monotonic()
    done = 0
    while done < n_cases:
        size, batch_seed = min(BATCH, n_cases - done), first_seed + done // BATCH
        try:
            play(target, size, batch_seed)
        except Exception:
            failures.append(f"--target {name} --seed {batch_seed} --cases {size}")
            print(f"FAILED: python -m benchmarks fuzz {failures[-1]}", file=sys.stderr)
            traceback.print_exc()
            with contextlib.suppress(AssertionError):  # the target is broken already
                target.close()
            target = TARGETS[name]()
        done += size
    took_s = time.monotonic() - started_at
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000
    print(f"{name}: {done} cases in {took_s:.0f} s, {len(failures)} batches failed")
    print("  " + ", ".join(f"{what} {count}" for what, count in sorted(target.counts.items())))
    print(
        f"  memory {held / 1e6:.0f} MB after the first cases, {memory_bytes() / 1e6:.0f} MB after the last, peak of the "
        f"process {peak_mb:.0f} MB"
    )
    grown = {"descriptors": descriptors() - n_open, "tasks or packets": target.n_left() - n_left}
    target.close()
    print(
        f"  more than before the cases: {grown}; descriptors {before} before the target, {descriptors()} after it"
    )
    return [*failures, *(f"{name} leaks {what}" for what, count in grown.items() if count > 0)]


def run(arguments: list[str]) -> int:
    """Plays all cases. Returns exit code 1 if any case failed or anything leaked, else 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks fuzz")
    parser.add_argument("--cases", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", choices=TARGETS, help="only this target, with all cases")
    options = parser.parse_args(arguments)
    logging.disable(logging.CRITICAL)
    shares = {options.target: 1.0} if options.target else SHARES
    failures = []
    for name, share in shares.items():
        failures += fuzz(name, round(options.cases * share), options.seed)
    for failure in failures:
        print(f"FAILED: {failure}", file=sys.stderr)
    return 1 if failures else 0
