"""Progress of the runs on stderr: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable
from typing import TypeVar

from testbed.terminal import say

T = TypeVar("T")

EVERY_RATIO = 0.1
EVERY_S = 30.0
"""A line is printed when this share of the items is done, or this time has passed, since the last line."""


def with_progress(items: Iterable[T], n_items: int) -> Generator[T, None, None]:
    """Yields the same items, and shows the progress on stderr."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield from with_lines(items, n_items)
        return
    columns = ("runs", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), "left", TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("runs", total=n_items)
        for item in items:
            yield item
            progress.advance(bar)


def with_lines(
    items: Iterable[T], n_items: int, clock: Callable[[], float] = time.monotonic
) -> Generator[T, None, None]:
    """Yields the same items, and prints a line on stderr per ``EVERY_RATIO`` of them or per ``EVERY_S`` of
    ``clock``.

    ``clock`` returns seconds.
    """
    began_at_s = printed_at_s = clock()
    n_printed = 0
    for n_done, item in enumerate(items, 1):
        yield item
        now_s = clock()
        is_due = n_done - n_printed >= EVERY_RATIO * n_items or now_s - printed_at_s >= EVERY_S
        if n_done == n_items or is_due:
            n_printed, printed_at_s = n_done, now_s
            left_s = (now_s - began_at_s) / n_done * (n_items - n_done)
            say(
                f"{n_done} of {n_items} runs ({n_done / n_items:.0%}) in {now_s - began_at_s:.0f} s, "
                f"about {left_s:.0f} s left"
            )
