"""What a call tells its caller while it works."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from testbed.errors import UserError


@dataclass(frozen=True)
class Progress:
    """A sentence or a line about what happens; of a sweep also how many of its runs are done."""

    text: str
    n_done: int | None = None
    n_total: int | None = None

    def __str__(self) -> str:
        return self.text


Listener = Callable[[Progress], object]
"""A callback, such as ``print``. It is called in the thread that works."""

_HEARD: ContextVar[logging.Handler | None] = ContextVar("_HEARD", default=None)


class _ToListener(logging.Handler):
    """Passes on warnings of its own call. Handlers of the caller's program get them, too; stderr does not."""

    def __init__(self, listener: Listener | None) -> None:
        super().__init__(logging.WARNING)
        self._listener = listener

    def emit(self, record: logging.LogRecord) -> None:
        if self._listener is not None and _HEARD.get() is self:
            self._listener(Progress(record.getMessage()))


@contextmanager
def heard(listener: Listener | None) -> Iterator[Callable[[str], None]]:
    """Yield a function that tells ``listener`` a text; warnings that the body logs are told, too.

    Raises ``UserError`` if ``listener`` cannot be called.
    """
    if listener is not None and not callable(listener):
        raise UserError(
            f"progress is a function that is called with a Progress, such as print, not {listener!r}"
        )
    handler, logger = _ToListener(listener), logging.getLogger("testbed")

    def tell(text: str) -> None:
        if listener is not None:
            listener(Progress(text))

    token = _HEARD.set(handler)
    logger.addHandler(handler)
    try:
        yield tell
    finally:
        logger.removeHandler(handler)
        _HEARD.reset(token)
