"""Runs ``testbed up`` and ``testbed serve`` as processes with a time limit; and what is better done one after another."""

from __future__ import annotations

import contextlib
import json
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any, TypeVar

from testbed.errors import RunError

T = TypeVar("T")
_STOP_S = 15.0


class OutOfTime(RunError):
    """A run did not end within the time that its part had left."""


def up(scenario: str | Path, out: Path, options: Sequence[str], allowed_s: float) -> dict[str, Any]:
    """Runs ``testbed up`` into the new folder ``out``. Returns its summary.

    Raises ``RunError`` if it has no summary, and ``OutOfTime`` if it does not end within ``allowed_s`` seconds.
    """
    command = _command("up", scenario, out, ["--json", "--no-report", *options])
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as process:
        try:
            output, _ = process.communicate(timeout=allowed_s)
        except subprocess.TimeoutExpired:
            _stop(process)
            raise OutOfTime(f"the run in {out.name} did not end within {allowed_s:.0f} s") from None
    if not output:
        raise RunError(f"the run in {out.name} ended with exit code {process.returncode}; see its log")
    summary: dict[str, Any] = json.loads(output)
    if summary["startup_s"] is None:
        raise RunError(f"the run in {out.name} did not start; see its log")
    return summary


class Here(Executor):
    """Does what is submitted at once and in this thread: processes that have other threads cannot be forked."""

    def submit(self, work: Callable[..., T], /, *args: Any, **options: Any) -> Future[T]:
        done = Future[T]()
        done.set_result(work(*args, **options))
        return done


@contextlib.contextmanager
def serving(scenario: str | Path, out: Path, options: Sequence[str], allowed_s: float) -> Iterator[str]:
    """Runs ``testbed serve`` on a free port while the body runs. Yields the address of its API.

    Raises ``RunError`` if it does not begin to serve within ``allowed_s`` seconds.
    """
    command = _command("serve", scenario, out, ["--port", "0", "--no-report", *options])
    until_s = time.monotonic() + allowed_s
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield _url(process, until_s)
        finally:
            _stop(process, max(_STOP_S, until_s - time.monotonic()))


def _url(process: subprocess.Popen[str], until_s: float) -> str:
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], max(0.0, until_s - time.monotonic()))
    url = process.stdout.readline().strip() if ready else ""
    if not url.startswith("http"):
        raise RunError("the testbed did not begin to serve; see its log")
    return url


def _command(verb: str, scenario: str | Path, out: Path, options: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "testbed", verb, str(scenario), "--out", str(out), "--no-page", *options]


def _stop(process: subprocess.Popen[Any], allowed_s: float = _STOP_S) -> None:
    """Interrupts the command, which then removes its network, compares its tokens and writes its tables."""
    process.send_signal(signal.SIGINT)
    try:
        process.communicate(timeout=allowed_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
