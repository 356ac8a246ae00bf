"""What commands print for people."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Console

LONG_S = 3.0
_tells_of_what_takes_long = False
_SAID: set[str] = set()
"""What this process has said once: a command may read the same scenario many times."""


def say(text: str) -> None:
    """Print a line to stderr at once: stdout is for answers."""
    print(text, file=sys.stderr, flush=True)


def tell_of_what_takes_long() -> None:
    """From now on, ``told_if_long`` tells: this is a command, and somebody looks at its terminal."""
    global _tells_of_what_takes_long
    _tells_of_what_takes_long = True


@contextmanager
def told_if_long(text: str) -> Iterator[None]:
    """Say ``text`` once if the body takes longer than ``LONG_S`` seconds."""
    if not _tells_of_what_takes_long:
        yield
        return
    timer = threading.Timer(LONG_S, say, (text,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()  # who forks next, or enters a namespace, may have no other thread


def unsaid(texts: Iterable[str]) -> list[str]:
    """Returns those texts that no call in this process has been passed before."""
    new = [text for text in dict.fromkeys(texts) if text not in _SAID]
    _SAID.update(new)
    return new


def console_to(buffer: TextIO, width: int, *, markup: bool = True) -> Console:
    """Return a console that writes plain text to ``buffer``, also in a notebook, where Rich would show it."""
    from rich.console import Console

    return Console(
        file=buffer, width=width, highlight=False, markup=markup, emoji=markup, force_jupyter=False
    )


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a line per row, with the cells of each column one below the other."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]


def _is_new(record: logging.LogRecord) -> bool:
    return not record.name.startswith("testbed.experiments") or bool(unsaid([record.getMessage()]))


def warn_once() -> None:
    """From now on, print each warning about a scenario only once in this process."""
    if logging.lastResort is not None:
        logging.lastResort.addFilter(_is_new)
