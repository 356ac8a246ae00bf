"""The live progress view: one line on stderr if it is a terminal, else nothing."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live
from rich.table import Table

from testbed.runtime.progress import Progress

_REFRESHES_PER_S = 4


@contextmanager
def shown(progress: Progress) -> Iterator[None]:
    """Show a run's progress while the body runs, if stderr is a terminal.

    The view is drawn by a thread, since the event loop's time may be virtual.
    """
    if not sys.stderr.isatty():
        yield
        return
    view = _View(progress)
    with Live(
        console=Console(stderr=True),
        get_renderable=view.render,
        refresh_per_second=_REFRESHES_PER_S,
        transient=True,
    ):
        yield


class _View:
    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._rate = 0.0
        self._last = (time.monotonic(), 0)

    def render(self) -> Table:
        progress = self._progress
        now, tokens = time.monotonic(), sum(progress.n_tokens.values())
        if now - self._last[0] >= 1.0:
            self._rate = (tokens - self._last[1]) / (now - self._last[0])
            self._last = (now, tokens)
        done = progress.count("completed")
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
        table.add_row(
            f"[bold]{progress.phase}[/bold]",
            f"{done}/{progress.n_requests} done",
            f"{progress.count('admitted')} active",
            f"{progress.count('arrived', 'routed', 'rejected')} waiting",
            f"{progress.count('failed')} failed",
            f"{self._rate:.0f} tokens/s",
            f"TTFT {progress.ttft_s:.2f} s",
            f"TPOT {progress.gap_s:.3f} s",
            f"t = {progress.scenario_s:.0f} s",
        )
        return table
