"""Runs of settings in worker processes, with a progress bar; what is done is stored at once."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any

from netem.syscalls import set_death_signal
from testbed.errors import RunError
from testbed.reproduce.runs import run_setting
from testbed.reproduce.settings import Setting

Task = tuple[Setting, int]
"""A setting and the seed of the run."""


def results(tasks: list[Task], jobs: int) -> Generator[tuple[Task, dict[str, Any]], None, None]:
    """Every task with its result, as they finish; ``jobs`` at a time.

    Leaving early (Ctrl-C included) drops what has not started and waits for what has. Raises
    ``RunError`` if a worker dies.
    """
    if jobs == 1 or len(tasks) < 2:
        for task in tasks:
            yield task, run_setting(*task)
        return
    # Not forked: the progress bar has a thread.
    executor = ProcessPoolExecutor(
        min(jobs, len(tasks)), multiprocessing.get_context("spawn"), _start_worker, (os.getpid(),)
    )
    try:
        with _ctrl_c_ignored():  # inherited by the workers: the parent alone answers Ctrl-C
            futures = {executor.submit(run_setting, *task): task for task in tasks}
        for future in as_completed(futures):
            task = futures.pop(future)  # with its result, so that memory does not grow
            yield task, future.result()
    except BrokenProcessPool:
        raise RunError("a worker process died; run the same command again to go on") from None
    finally:
        executor.shutdown(cancel_futures=True)


@contextmanager
def _ctrl_c_ignored() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _start_worker(parent: int) -> None:
    set_death_signal(signal.SIGKILL)
    if os.getppid() != parent:  # it died before the death signal was set
        os.kill(os.getpid(), signal.SIGKILL)


def with_progress(
    items: Iterable[tuple[Task, dict[str, Any]]], n_items: int
) -> Iterator[tuple[Task, dict[str, Any]]]:
    """The same, with a bar and the time left on stderr where that is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = ("runs", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), "left", TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task("runs", total=n_items)
        for item in items:
            yield item
            progress.advance(bar)
