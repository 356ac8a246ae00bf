"""What commands print for people."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence


def say(text: str) -> None:
    """Print a line to stderr at once: stdout is for answers."""
    print(text, file=sys.stderr, flush=True)


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a line per row, with the cells of each column one below the other."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]


class _Once(logging.Filter):
    """Lets each warning about a scenario pass once, though a command may read the scenario many times."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        if not record.name.startswith("testbed.scenario"):
            return True
        text = record.getMessage()
        is_new = text not in self._seen
        self._seen.add(text)
        return is_new


def warn_once() -> None:
    """From now on, print each warning about a scenario only once in this process."""
    if logging.lastResort is not None:
        logging.lastResort.addFilter(_Once())
