"""The live progress view: a few lines on a terminal's stderr, nothing anywhere else."""

from __future__ import annotations

import asyncio
import sys
import time

from rich.console import Console
from rich.live import Live
from rich.table import Table

from testbed.progress import Progress

_REFRESH_S = 0.25


class LiveView:
    """Shows a run's progress until cancelled."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._console = Console(stderr=True)
        self._live: Live | None = None
        self._started_at = time.monotonic()
        self._rate = 0.0
        self._last = (self._started_at, 0)

    async def run(self) -> None:
        """Refresh four times a second. Does nothing when stderr is not a terminal."""
        if not sys.stderr.isatty():
            return
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._live.start()
        while True:
            self._live.update(self._render(), refresh=True)
            await asyncio.sleep(_REFRESH_S)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _render(self) -> Table:
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
