"""What commands print for people."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def say(text: str) -> None:
    """Print a line to stderr at once: stdout is for answers."""
    print(text, file=sys.stderr, flush=True)


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a line per row, with the cells of each column one below the other."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
