"""Runs of settings in worker processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, contextmanager
from itertools import islice
from types import FrameType
from typing import Any

from netem.syscalls import set_death_signal
from testbed.errors import RunError
from testbed.runtime.signals import handling
from testbed.studies.reproduce.runs import run_setting
from testbed.studies.reproduce.settings import Setting

Task = tuple[Setting, int]
"""A setting and the seed of the run."""

_STOPS = (signal.SIGINT, signal.SIGTERM)
POLL_S = 0.1
"""Ctrl-C is answered within this time, and when the runs that have started are done."""


def results(tasks: list[Task], jobs: int) -> Generator[tuple[Task, dict[str, Any]], None, None]:
    """Every task with its result, as they finish; ``jobs`` at a time.

    Leaving early (Ctrl-C and SIGTERM included) drops what has not started and waits for what has. Raises
    ``RunError`` if a worker dies.
    """
    if jobs == 1 or len(tasks) < 2:
        for task in tasks:
            yield task, run_setting(*task)
        return
    # Not forked: a progress bar has a thread.
    executor = ProcessPoolExecutor(
        min(jobs, len(tasks)), multiprocessing.get_context("spawn"), _start_worker, (os.getpid(),)
    )
    following = iter(tasks)

    def submit(n_tasks: int) -> dict[Future[dict[str, Any]], Task]:
        return {executor.submit(run_setting, *task): task for task in islice(following, n_tasks)}

    with _stop_asked_for() as asked:
        try:
            with _signals_ignored():  # inherited by the workers: the parent alone answers Ctrl-C and SIGTERM
                running = submit(2 * jobs)
            while running:
                done, _ = wait(running, POLL_S, FIRST_COMPLETED)
                for future in done:
                    yield running.pop(future), future.result()
                if asked():
                    raise KeyboardInterrupt
                running |= submit(2 * jobs - len(running))
        except BrokenProcessPool:
            if asked():
                raise KeyboardInterrupt from None
            raise RunError("a worker process died; run the same command again to go on") from None
        finally:
            executor.shutdown(cancel_futures=True)


@contextmanager
def _stop_asked_for() -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C or SIGTERM came while the body ran: raised anywhere, they could leave a lock of the executor's taken."""
    came: list[int] = []
    with handling(lambda number, _: came.append(number), *_STOPS):
        yield lambda: bool(came)


def _signals_ignored() -> AbstractContextManager[None]:
    return handling(signal.SIG_IGN, *_STOPS)


@contextmanager
def sigterm_as_ctrl_c() -> Iterator[None]:
    """SIGTERM raises ``KeyboardInterrupt`` in the body, once: whoever sends it often sends it twice."""

    def stop(number: int, _: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    with handling(stop, signal.SIGTERM):
        yield


def _start_worker(parent: int) -> None:
    set_death_signal(signal.SIGKILL)
    if os.getppid() != parent:  # it died before the death signal was set
        os.kill(os.getpid(), signal.SIGKILL)
