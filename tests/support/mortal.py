"""Work that ends the process of whoever does it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable


def mortal(_: None) -> Callable[[int], int]:
    """Answers every task but 3, which no process survives."""

    def work(task: int) -> int:
        if task == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return task

    return work
